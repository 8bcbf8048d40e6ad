"""Drafters through real services on the demo pair: the same text with each, what is told of them, what is refused.

One service runs without a draft model and beside a tokenizer alone; `pair_process` has a model, and the others too.
"""

import re
import shutil
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from draft_service.drafters.build import check_settings
from draft_service.settings import DraftSettings
from outrider.cli.processes import ServiceProcess
from outrider.client import Client, Drafter, InvalidRequest
from outrider.service.settings import SettingsError
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, wait_healthy
from tests.draft_service import oracle
from tests.draft_service.calls import PROMPT
from tests.draft_service.pairs import DEMO
from tests.project.tree import ROOT

CHEAP = ("ngram", "lookup", "random", "none")
CHEAP_WITHOUT_COUNTS = (pb.DRAFTER_LOOKUP, pb.DRAFTER_RANDOM, pb.DRAFTER_NONE)
TOKENS = 24
SIGMOID: dict[str, Any] = {"rule": "sigmoid", "sigmoid_scales": (-10.0, 10.0), "temperature": 1.0}


@pytest.fixture(scope="module")
def cheap(target_process: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServiceProcess]:
    """A draft service that counts a file, in whose model's folder there is a tokenizer and nothing else."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "draft" / name, folder / name)
    corpus = ("--ngram-corpus", str(ROOT / "kernels" / "sparse.py"), "--ngram-documents", "line")
    with Cluster((*corpus, "--drafter", "ngram", "--lookup-min-match", "1")) as cluster:
        service = cluster.draft(target_process, model=folder)
        wait_healthy(target_process, service)
        yield service


@pytest.fixture(scope="module")
def client(cheap: ServiceProcess) -> Iterator[Client]:
    with Client(cheap.address) as client:
        yield client


@pytest.fixture(scope="module")
def with_model(pair_process: ServiceProcess) -> Iterator[Client]:
    """Of the service that has a draft model."""
    with Client(pair_process.address) as client:
        yield client


def test_the_service_says_what_it_has(cheap: ServiceProcess, pair_process: ServiceProcess) -> None:
    def said(process: ServiceProcess) -> pb.DraftServiceGetModelResponse:
        with grpc.insecure_channel(process.address) as channel:
            return DraftServiceStub(channel).GetModel(pb.DraftServiceGetModelRequest(), timeout=20)

    without, model = said(cheap), said(pair_process)
    assert list(without.drafters) == [pb.DRAFTER_NGRAM, *CHEAP_WITHOUT_COUNTS]
    assert without.default_drafter == pb.DRAFTER_NGRAM
    # Nothing to count there, so `ngram` is not offered.
    assert list(model.drafters) == [pb.DRAFTER_MODEL, *CHEAP_WITHOUT_COUNTS, pb.DRAFTER_STAGED]
    assert model.default_drafter == pb.DRAFTER_MODEL
    assert without.model.weights_fingerprint == ""
    assert without.model.vocabulary_fingerprint == model.model.vocabulary_fingerprint
    assert not without.model.lossy_rules
    assert model.model.lossy_rules


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_seed_is_the_same_text_with_every_drafter(client: Client, with_model: Client, temperature: float) -> None:
    asked: dict[str, Any] = {
        "max_new_tokens": TOKENS,
        "temperature": temperature,
        "seed": 12,
        "ignore_eos": True,
        "gamma": 4,
    }
    drafters = {client: CHEAP, with_model: ("model", "staged", "lookup", "random")}
    texts = [of.complete(PROMPT, drafter=each, **asked) for of, some in drafters.items() for each in some]
    assert {text.token_ids for text in texts} == {texts[0].token_ids}
    if temperature == 0:
        assert texts[0].token_ids == tuple(oracle.greedy(oracle.encode(PROMPT), TOKENS))
    for text, drafter in zip(texts, [each for some in drafters.values() for each in some], strict=True):
        assert text.drafter == text.statistics.drafter == drafter
        assert bool(text.statistics.num_drafts) == (drafter != "none")
        assert text.statistics.num_draft_failures == 0


def test_a_drafter_that_cannot_serve_is_refused_by_name(client: Client, with_model: Client) -> None:
    """It is not there, or has no logits where the rule asks for them."""
    for asked, drafter, offered in ((client, "model", "lookup, ngram, none"), (with_model, "ngram", "lookup, model")):
        with pytest.raises(InvalidRequest, match=f"speculation.drafter is {drafter}; this service offers {offered}"):
            asked.complete(PROMPT, drafter=drafter)
    with pytest.raises(InvalidRequest, match=r"sampling.rule is sigmoid.*the drafter \w+ has none") as caught:
        client.complete(PROMPT, max_new_tokens=4, drafter="lookup", **SIGMOID)
    assert caught.value.field == "sampling.rule"
    greedy = {**SIGMOID, "temperature": 0.0}
    assert client.complete(PROMPT, max_new_tokens=4, **greedy).drafter == Drafter.NGRAM


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafter": "ngram"}, "--drafter ngram: there is no text to count"),
        ({"staged_by": "ngram"}, "--staged-by ngram: there is no text to count"),
        ({"ngram_corpus": "no/such.txt"}, "--ngram-corpus: no file 'no/such.txt'"),
    ],
)
def test_a_drafter_without_what_it_takes_is_a_setting_that_cannot_be_met(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        check_settings(DraftSettings(model="m", **given))
