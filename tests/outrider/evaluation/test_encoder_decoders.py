"""`alpha`, `bench` and `check` of encoder–decoder pairs with rules for logits, against real services.

The models are those of `tests.encoder_decoders`: random weights, float32.
"""

import asyncio
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import soundfile
from click.testing import CliRunner, Result

from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig
from outrider.cli import main
from outrider.client import AsyncClient, Client, Options
from outrider.evaluation.alpha import measure
from outrider.evaluation.check import check
from outrider.evaluation.check_report import LOCAL_TARGET, Report
from outrider.evaluation.check_requests import Plan
from outrider.evaluation.clips import clips_for, request_of
from outrider.evaluation.drafters import by_model
from outrider.evaluation.local_models import build_runner, encode_speech
from outrider.evaluation.reference import Copy, DecodeReference, LocalTarget
from outrider.evaluation.target_text import Text
from outrider.runtime.loader import ModelSource, load_model
from protos.outrider.v1.draft_service_pb2 import Transcription
from tests import encoder_decoders
from tests.encoder_decoders import Pair

PLAN = Plan(
    load=12, alone=2, resumed=3, tokens=6, equal=1, equal_tokens=12, prompts=("abc", "hello world"), gammas=(1, 4),
    settings=(SamplingParams(),),
)  # fmt: skip


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    with encoder_decoders.serving_all(tmp_path_factory.mktemp("pairs")) as start:
        yield start


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two clips: one window, and two."""
    folder = tmp_path_factory.mktemp("clips")
    for seed, seconds in enumerate((0.6, 1.5)):
        soundfile.write(folder / f"{seed}.wav", encoder_decoders.noise(seconds, seed), encoder_decoders.RATE)
    return folder


def command(name: str, pair: Pair, *arguments: str) -> Result:
    return CliRunner().invoke(main, [name, "--draft", pair.draft.address, *arguments])


# -------------------------------------------------------------------------------------------------------------- alpha


def test_alpha_of_speech_is_what_services_accept(pairs: Callable[[str], Pair], clips: Path) -> None:
    """β of each verified position, with the timestamps' rules and without, by features of the audio itself."""
    pair, params, verified = pairs("whisper"), SamplingParams(temperature=0.9), 0
    sources = [
        ModelSource(str(folder), dtype="float32", device="cpu")
        for folder in (pair.target, pair.target.parent / "draft")
    ]
    target, draft = (load_model(source) for source in sources)
    runners = [build_runner(model, 1, 64) for model in (target, draft)]
    drafter = {"model": partial(by_model, runners[1], encoder_decoders.V, params, SparseConfig())}
    with Client(pair.draft.address) as client:
        info = client.get_model().target
        for timestamps in (False, True):
            prompts = encode_speech((clips,), Transcription(language="de", timestamps=timestamps), target, draft)
            asked = clips_for(info, [clips], language="de", timestamps=timestamps)
            for prompt, (_, speech) in zip(prompts, map(request_of, asked), strict=True):
                options = Options(
                    temperature=0.9, gamma=3, rule="tokenwise", seed=5, max_new_tokens=40, report_rounds=True
                )
                done = client.complete(**(speech | options))
                assert done.started.prompt_token_ids == tuple(prompt.tokens)
                text = Text(0, prompt, [*prompt.tokens, *done.token_ids])
                (own,) = measure(runners[0], drafter, [text], params, (1.0,))["model"]
                for each in done.samples[0].rounds:
                    judged = own[each.output_length : each.output_length + len(each.beta), 0]
                    assert each.beta[: len(judged)] == pytest.approx(judged, abs=1e-4)  # the text ends within it
                    verified += len(judged)
    assert verified > 60


# -------------------------------------------------------------------------------------------------------------- check


def checked(pair: Pair, *, local: bool, speech: dict[str, Any] | None = None) -> Report:
    async def run() -> Report:
        async with AsyncClient(pair.draft.address) as client:
            copy = Copy(str(pair.target), device="cpu") if local else None
            return await check(client, PLAN, copy, lambda stage, done, total: None, speech)

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("name", "local"), [("whisper", True), pytest.param("bart", True, marks=pytest.mark.slow), ("bart", False)]
)
def test_an_exact_deployment_passes(name: str, local: bool, pairs: Callable[[str], Pair], clips: Path) -> None:
    """Speech; and text whose rules force the last token, and forbid repeated n-grams."""
    speech = {"audio": [clips], "language": "de"} if name == "whisper" else None
    report = checked(pairs(name), local=local, speech=speech)
    assert report.verdict[0] == "No bias found."
    assert (LOCAL_TARGET in {each.reference for each in report.equalities}) == local
    assert all(each.tokens > 0 for each in report.equalities)
    assert all(each.tokens > 0 for each in report.tests)
    assert report.num_resumed > 10
    assert all(number > 0 for number in report.accepted.values())


async def test_both_references_leave_out_the_same_prefixes(pairs: Callable[[str], Pair]) -> None:
    """Those where rounding may move the cut of top-p. bart's first token and its last one are forced."""
    pair, wide, tokens = pairs("bart"), 0.2, 8
    settings = [SamplingParams(temperature=2, top_k=10, top_p=top_p) for top_p in (0.7, 0.9)]
    async with AsyncClient(pair.draft.address) as client:
        text = await client.complete("abc", max_new_tokens=tokens, seed=5, ignore_eos=True)
        wanted = [(0, tuple(text.token_ids[:at]), each) for at in range(1, tokens - 1) for each in settings]
        remote = await DecodeReference(client, ["abc"], 4, wide, tokens).distributions(wanted, lambda _: None)
        target, ids = (await client.get_model()).target, [text.started.prompt_token_ids]
        copy = LocalTarget(Copy(str(pair.target), device="cpu"), target, ids, tokens, wide, ["abc"], tokens)
        local = await copy.distributions(wanted, lambda _: None)
    for prefix in wanted:
        assert remote[prefix].is_sure == local[prefix].is_sure
        assert remote[prefix].ids.tolist() == local[prefix].ids.tolist()
        assert remote[prefix].p == pytest.approx(local[prefix].p, rel=1e-3)
    assert 0 < sum(each.is_sure for each in remote.values()) < len(wanted)


def test_speech_and_text_are_not_mixed_up(pairs: Callable[[str], Pair], clips: Path) -> None:
    for name in ("check", "bench"):
        refused = command(name, pairs("whisper"))
        assert refused.exit_code == (2 if name == "check" else 1)
        assert "takes speech: give --audio FILE_OR_FOLDER" in refused.stderr.splitlines()[-1]
        refused = command(name, pairs("bart"), "--audio", str(clips))
        assert "takes no speech: give --prompts-file" in refused.stderr.splitlines()[-1]


# -------------------------------------------------------------------------------------------------------------- bench


def test_transcription_is_measured(pairs: Callable[[str], Pair], clips: Path, tmp_path: Path) -> None:
    small = ["--gammas", "2", "--drafters", "model", "--streams", "1,2", "--temperatures", "0", "--texts", "1"]
    small += ["--max-new-tokens", "16"]
    given = [*small, "--repeats", "1", "--audio", str(clips), "--language", "de", "--output", str(tmp_path)]
    done = command("bench", pairs("whisper"), *given)
    assert done.exit_code == 0, done.output
    document = json.loads((tmp_path / "report.json").read_text())
    assert document["settings"]["audio"] == [clips.name]
    assert document["settings"]["stop_at_eos"] is True
    for cell in document["cells"]:
        speech, tokens = cell["speech_per_second"]["median"], cell["tokens_per_second"]["median"]
        assert 0 < speech < tokens, "a window of less than a second has some tokens"
        assert cell["texts"] == cell["streams"]
        if cell["arm"] == "γ = 2":
            assert 0 < cell["alpha"] <= 1
    assert "speech s/s" in done.stdout
    assert f"speech of <code>{clips.name}</code>" in (tmp_path / "report.html").read_text()
