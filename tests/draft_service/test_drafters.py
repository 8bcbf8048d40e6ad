"""A service without a draft model, the drafters in GetModel, settings of drafters. `tests/exactness` has the tokens."""

import re
import shutil
from pathlib import Path
from typing import Any

import grpc
import pytest

from draft_service.drafters.build import check_settings
from draft_service.settings import DraftSettings
from outrider.client import Client, Drafter
from outrider.service.settings import SettingsError
from protos.outrider.v1 import draft_service_pb2 as pb
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub
from tests.cluster import Cluster, Service, wait_healthy
from tests.draft_service.calls import PROMPT
from tests.draft_service.pairs import DEMO
from tests.project.tree import ROOT


def test_a_service_with_only_a_tokenizer_serves_the_other_drafters(
    target_process: Service, pair_process: Service, tmp_path: Path
) -> None:
    def get_model(process: Service) -> pb.DraftServiceGetModelResponse:
        with grpc.insecure_channel(process.address) as channel:
            return DraftServiceStub(channel).GetModel(pb.DraftServiceGetModelRequest(), timeout=20)

    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "draft" / name, tmp_path / name)
    corpus = ("--ngram-corpus", str(ROOT / "kernels" / "sparse.py"), "--ngram-documents", "line")
    with Cluster((*corpus, "--drafter", "ngram", "--lookup-min-match", "1")) as cluster:
        service = cluster.draft(target_process, model=tmp_path)
        wait_healthy(target_process, service)
        with Client(service.address) as client:
            done = client.complete(PROMPT, max_new_tokens=8, ignore_eos=True, temperature=0.0)
        without, model = get_model(service), get_model(pair_process)
    assert (done.drafter, done.statistics.num_draft_failures) == (Drafter.NGRAM, 0)
    others = [pb.DRAFTER_LOOKUP, pb.DRAFTER_RANDOM, pb.DRAFTER_NONE]
    assert list(without.drafters) == [pb.DRAFTER_NGRAM, *others]
    assert without.default_drafter == pb.DRAFTER_NGRAM
    # Without a corpus `ngram` is not offered.
    assert list(model.drafters) == [pb.DRAFTER_MODEL, *others, pb.DRAFTER_STAGED]
    assert model.default_drafter == pb.DRAFTER_MODEL
    assert without.model.weights_fingerprint == ""
    assert without.model.vocabulary_fingerprint == model.model.vocabulary_fingerprint
    assert not without.model.lossy_rules
    assert model.model.lossy_rules


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"drafter": "ngram"}, "--drafter ngram: there is no text to count"),
        ({"staged_by": "ngram"}, "--staged-by ngram: there is no text to count"),
        ({"ngram_corpus": "no/such.txt"}, "--ngram-corpus is 'no/such.txt'; there is no such file"),
    ],
)
def test_settings_of_a_drafter_without_its_input_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingsError, match=re.escape(words)):
        check_settings(DraftSettings(model="m", **given))
