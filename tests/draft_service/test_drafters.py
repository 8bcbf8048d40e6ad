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
from tests.draft_service.calls import COUPLED, PROMPT, TOKENWISE, ProposeStream, sampling
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
    assert list(without.drafters) == [pb.DRAFTER_NGRAM, pb.DRAFTER_LOOKUP, pb.DRAFTER_RANDOM, pb.DRAFTER_NONE]
    assert without.default_drafter == pb.DRAFTER_NGRAM
    # Nothing to count there, so `ngram` is not offered.
    assert list(model.drafters) == [pb.DRAFTER_MODEL, *CHEAP_WITHOUT_COUNTS, pb.DRAFTER_STAGED]
    assert model.default_drafter == pb.DRAFTER_MODEL
    empty = (without.model.weights_fingerprint, without.model.context_length, without.model.dtype, without.model.device)
    assert empty == ("", 0, "", "")
    assert without.model.vocabulary_fingerprint == model.model.vocabulary_fingerprint
    assert without.model.vocab_size == model.model.vocab_size
    assert not without.model.lossy_rules
    assert model.model.lossy_rules
    assert "drafters" in without.model.features


def test_the_greedy_text_is_the_targets_own_with_every_drafter(client: Client, with_model: Client) -> None:
    expected = tuple(oracle.greedy(oracle.encode(PROMPT), TOKENS))
    asked: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "gamma": 4}
    default = client.complete(PROMPT, **asked)
    assert default.drafter == default.statistics.drafter == Drafter.NGRAM
    for drafter in CHEAP:
        done = client.complete(PROMPT, drafter=drafter, **asked)
        assert done.token_ids == expected
        assert done.drafter == done.statistics.drafter == drafter
        assert bool(done.statistics.num_drafts) == (drafter != "none")
        assert done.statistics.num_draft_failures == 0
    for drafter in ("model", "staged", "lookup", "none"):
        done = with_model.complete(PROMPT, drafter=drafter, **asked)
        assert (done.token_ids, done.drafter) == (expected, drafter)


def test_a_seed_is_the_same_text_with_every_drafter(client: Client, with_model: Client) -> None:
    asked: dict[str, Any] = {"max_new_tokens": TOKENS, "temperature": 0.7, "seed": 12, "ignore_eos": True}
    drafters = {client: CHEAP, with_model: ("model", "staged", "lookup", "random")}
    texts = [of.complete(PROMPT, drafter=each, **asked) for of, some in drafters.items() for each in some]
    assert {(text.token_ids, text.rule) for text in texts} == {(texts[0].token_ids, "coupled")}
    assert texts[0].statistics.num_accepted_tokens > 0


def test_a_gamma_of_zero_is_no_drafter(client: Client) -> None:
    done = client.complete(PROMPT, max_new_tokens=4, gamma=0, drafter="lookup")
    assert (done.drafter, done.statistics.num_drafts) == (Drafter.NONE, 0)


def test_a_drafter_that_cannot_serve_is_refused_by_name(client: Client, with_model: Client) -> None:
    """It is not there, or has no logits where the rule asks for them."""
    for asked, drafter, offered in ((client, "model", "lookup, ngram, none"), (with_model, "ngram", "lookup, model")):
        with pytest.raises(InvalidRequest, match=f"speculation.drafter is {drafter}; this service offers {offered}"):
            asked.complete(PROMPT, drafter=drafter)
    for asked, drafter in ((client, "ngram"), (client, "lookup"), (with_model, "random")):
        with pytest.raises(InvalidRequest, match=r"sampling.rule is sigmoid.*the drafter \w+ has none") as caught:
            asked.complete(PROMPT, max_new_tokens=4, drafter=drafter, **SIGMOID)
        assert caught.value.field == "sampling.rule"
    greedy = {**SIGMOID, "temperature": 0.0}
    assert client.complete(PROMPT, max_new_tokens=4, **greedy).drafter == Drafter.NGRAM
    assert client.complete(PROMPT, max_new_tokens=4, drafter="none", **SIGMOID).drafter == Drafter.NONE


@pytest.mark.parametrize(
    ("drafter", "name"), [(pb.DRAFTER_UNSPECIFIED, "ngram"), (pb.DRAFTER_RANDOM, "random"), (pb.DRAFTER_NONE, "none")]
)
def test_propose_drafts_with_what_was_asked_for(drafter: pb.Drafter, name: str, cheap: ServiceProcess) -> None:
    prompt = oracle.encode(PROMPT)
    with grpc.insecure_channel(cheap.address) as channel:
        for rule in (TOKENWISE, COUPLED):
            with ProposeStream(channel) as stream:
                stream.open(prompt, drafter=drafter, sampling=sampling(1.0, seed=4, rule=rule))
                assert pb.Drafter.Name(stream.take().opened.drafter) == f"DRAFTER_{name.upper()}"
                stream.advance(1, len(prompt), [], gamma=3)
                proposal = stream.take().proposal
                assert len(proposal.token_ids) == (0 if name == "none" else 3)
                assert len(proposal.distributions) == (0 if rule == COUPLED else len(proposal.token_ids))


def test_propose_refuses_what_is_not_there(cheap: ServiceProcess) -> None:
    with grpc.insecure_channel(cheap.address) as channel, ProposeStream(channel) as stream:
        stream.open([1, 2], drafter=pb.DRAFTER_MODEL)
        with pytest.raises(grpc.RpcError, match="drafter is model; this service offers lookup, ngram, none, random"):
            stream.take()


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafter": "ngram"}, "--drafter ngram: nothing to count"),
        ({"staged_by": "ngram"}, "--staged-by ngram: nothing to count"),
        ({"ngram_corpus": "no/such.txt"}, "--ngram-corpus: no file 'no/such.txt'"),
    ],
)
def test_a_drafter_without_what_it_takes_is_a_setting_that_cannot_be_met(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        check_settings(DraftSettings(model="m", **given))
