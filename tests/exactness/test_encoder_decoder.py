"""Encoder–decoder pairs through both services: texts of `generate` at temperature 0, the distribution at temperature 1,
and one text under `coupled` whatever drafts, fails or runs beside it. Small models with random weights, in float32.
"""

import asyncio
import json
import shutil
import signal
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from outrider.client import AsyncClient, Chunk, Completion, Event, Unavailable
from outrider.evaluation import chisquare
from outrider.evaluation.chisquare import Array
from tests.cluster import Cluster, Service, wait_healthy
from tests.encoder_decoders import (
    DE,
    EN,
    EOS,
    MODELS,
    NOISE,
    RATE,
    TRANSCRIBE,
    TRANSLATE,
    Pair,
    V,
    all_generated,
    decoder_prompt,
    inputs,
    noise,
    save,
    scores_along,
    serving_all,
)
from tests.exactness import sampling
from tests.exactness.distributions import PARAMS, quantile_fits, quantiles
from tests.kernels.reference import standardise

TOKENS, TEXTS = 50, 24
LEVEL = 0.01
NO_END = np.arange(V) != EOS
DRAFTERS = ("model", "staged", "lookup", "none")


def request(encoder_input: torch.Tensor) -> dict[str, Any]:
    """The prompt: token ids, or features."""
    if encoder_input.dim() == 1:
        return {"prompt": encoder_input.tolist()}
    return {"prompt": None, "features": encoder_input.numpy()}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Pair]]:
    with serving_all(tmp_path_factory.mktemp("pairs"), f"--max-samples {sampling.SAMPLES}") as pairs:
        yield pairs


@pytest.fixture
def pair(request: pytest.FixtureRequest, pairs: Callable[[str], Pair]) -> Pair:
    return pairs(request.param)


text_and_speech = pytest.mark.parametrize("pair", ["t5", "whisper"], indirect=True)


def complete(pair: Pair, requests: Sequence[dict[str, Any]]) -> list[Completion]:
    async def run() -> list[Completion]:
        async with AsyncClient(pair.draft.address, timeout=120.0) as client:
            return await asyncio.gather(*(client.complete(**each) for each in requests))

    return asyncio.run(run())


@pytest.mark.parametrize(
    ("pair", "timestamps"),
    [
        ("t5", False),
        *(pytest.param(name, False, marks=pytest.mark.slow) for name in MODELS if name != "t5"),
        ("whisper", True),
    ],
    indirect=["pair"],
)
def test_text_at_temperature_0_is_that_of_generate(pair: Pair, timestamps: bool) -> None:
    """1,000 tokens by four drafters, with the rules of `generate`: suppressed, forced and repeated tokens, bad words,
    timestamps; speech in two languages.
    """
    own, requests, prompts = inputs(pair.name, TEXTS), [], []
    for i, each in enumerate(own):
        how: dict[str, Any] = {"temperature": 0.0, "max_new_tokens": TOKENS, "keep_special_tokens": True}
        how |= {"gamma": 1 + i // 4, "drafter": DRAFTERS[i % 4]}
        how |= {"timestamps": True} if timestamps else {}
        is_german = pair.name == "whisper" and i // 4 % 2
        how |= {"language": "de", "task": "translate"} if is_german else {}
        requests.append({**request(each), **how})
        language, task = (DE, TRANSLATE) if is_german else (EN, TRANSCRIBE)
        prompts.append(decoder_prompt(pair.name, language=language, task=task, timestamps=timestamps))
    expected = all_generated(pair.name, own, TOKENS, prompts)
    assert sum(map(len, expected)) >= 1000
    done = complete(pair, requests)
    assert [list(each.token_ids) for each in done] == expected
    assert [list(each.started.prompt_token_ids) for each in done] == prompts
    sizes = [len(prompt) + (each.dim() == 1) * len(each) for each, prompt in zip(own, prompts, strict=True)]
    assert [each.usage.prompt_tokens for each in done] == sizes
    for drafter in (0, 1):  # both have a model
        statistics = [each.statistics for each in done[drafter::4]]
        drafted = sum(each.num_draft_tokens for each in statistics)
        assert 0.03 * drafted < sum(each.num_accepted_tokens for each in statistics) < drafted


@pytest.mark.parametrize(
    "rule", ["block", *(pytest.param(rule, marks=pytest.mark.slow) for rule in ("tokenwise", "coupled"))]
)
@text_and_speech
def test_each_two_tokens_are_distributed_as_the_targets(rule: str, pair: Pair) -> None:
    """64 texts of 14 tokens: over the 9 classes of two tokens they detect a total variation of 0.13 at a level of 1 %,
    with 95 % power. Tokens are in the order of q/p, since a fault moves mass along it.
    """
    own = inputs(pair.name, 2)[1]
    asked = request(own)
    run = sampling.sample(
        pair.draft, asked.pop("prompt"), length=14, seed=7, gamma=3, rule=rule, banned_token_ids=[EOS], **asked
    )
    p, q = (distributions_along(pair.name, own, run.tokens, noise) for noise in (0.0, NOISE))
    cells, classes = quantile_fits(quantiles(p, run.tokens, np.divide(q, p, out=np.zeros_like(p), where=p > 0)), 2)
    assert 0.05 * run.drafted < run.accepted < 0.95 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= 0.13
    assert min(cells.p_value, classes.p_value) > LEVEL


def distributions_along(name: str, encoder_input: torch.Tensor, tokens: Array, noise: float) -> Array:
    """Of each of `tokens` `[N, L]` after those before it, but for the end of sequence: `[N, L, V]`."""
    scores = scores_along(name, [encoder_input] * len(tokens), decoder_prompt(name), tokens.tolist(), noise)
    return np.stack([[standardise(np.where(NO_END, row, -np.inf), PARAMS) for row in text] for text in scores])


@text_and_speech
def test_coupled_text_is_the_same_with_every_drafter_gamma_and_company(pair: Pair) -> None:
    own = inputs(pair.name, 2)
    base = {"seed": 5, "rule": "coupled", "max_new_tokens": 40, "ignore_eos": True}
    ways: list[dict[str, Any]] = [
        {"gamma": 0}, {"gamma": 1}, {"gamma": 7}, {"drafter": "lookup"}, {"drafter": "random"}, {"drafter": "none"},
        {"drafter": "staged"}, {"speculation": "adaptive"}, {"outcome_cache": False}, {"n": 3},
        {"frame_bytes": 512, "fixed_size_rounds": True},
    ]  # fmt: skip
    (alone,) = complete(pair, [{**request(own[0]), **base, "gamma": 0}])
    done = complete(pair, [{**request(each), **base, **way} for each in own for way in ways])
    texts = [[each.token_ids for each in done[i : i + len(ways)]] for i in range(0, len(done), len(ways))]
    assert texts[0] == [alone.token_ids] * len(ways)
    assert all(len(set(of_one)) == 1 for of_one in texts)
    assert len({of_one[0] for of_one in texts}) == len(own)
    samples = done[ways.index({"n": 3})].samples
    assert len({each.token_ids for each in samples}) == 3
    (rest,) = complete(pair, [{**request(own[0]), **base, "committed_token_ids": alone.token_ids[:10]}])
    assert rest.token_ids == alone.token_ids[10:], "a resumed text"


class Killing(AsyncClient):
    """Counts the windows of a transcription, and kills a verifier in the middle of one of them.

    Args:
        draft: the draft service.
        window: the number of that window; 0: none.
        victims: the one with a sequence is killed.
    """

    def __init__(self, draft: Service, window: int = 0, victims: Sequence[Service] = ()) -> None:
        super().__init__(draft.address, timeout=120.0, retry=False)
        self._draft, self._window, self._victims, self._count = draft, window, victims, 0

    async def generate(self, *arguments: Any, **options: Any) -> AsyncGenerator[Event, None]:
        self._count += 1
        written = 0
        async with aclosing(super().generate(*arguments, **options)) as events:
            async for event in events:
                yield event
                written += len(event.token_ids) if isinstance(event, Chunk) else 0
                if written > 10 and self._count == self._window:
                    self._window = 0
                    sequences = partial(self._draft.count, "outrider_verifier_sequences")
                    for each in self._victims:  # the window could end while the count is read
                        each.send(signal.SIGSTOP)
                    (victim,) = [each for each in self._victims if sequences(verifier=each.address)]
                    victim.kill()
                    for each in self._victims:
                        each.send(signal.SIGCONT)

    async def windows(self) -> list[Completion]:
        """Those of 3 s of speech, under `coupled`."""
        asked: dict[str, Any] = {"audio": noise(3.0), "sample_rate": RATE, "seed": 3, "rule": "coupled", "gamma": 3}
        asked |= {"max_new_tokens": 40, "ignore_eos": True, "temperature": 1.0}
        async with self:
            return (await self.transcribe(**asked).wait()).completions


def test_a_transcription_goes_on_when_its_verifier_dies(tmp_path: Path) -> None:
    """The next verifier gets the audio again. The texts of all windows are the same as without the death. A verifier
    with the same weights and another generation config writes nothing, also when it is the last one.
    """
    target, draft = save("whisper", tmp_path / "target"), save("whisper", tmp_path / "draft", NOISE)
    other = Path(shutil.copytree(target, tmp_path / "other"))
    config = json.loads((other / "generation_config.json").read_text())
    (other / "generation_config.json").write_text(json.dumps(config | {"suppress_tokens": [30]}))
    with Cluster("--max-sequences 8", fault="unhurried") as cluster:
        verifiers = [cluster.verifier(model=folder) for folder in (target, target, other)]
        wait_healthy(*verifiers)  # the first one that answers decides
        service = cluster.draft(*verifiers, model=draft, flags="--failover-timeout 1")
        wait_healthy(service)
        whole = asyncio.run(Killing(service).windows())
        cut = asyncio.run(Killing(service, 2, verifiers).windows())
        with pytest.raises(Unavailable, match=r"no verifier at [^ ,]+, .* opened the sequence"):
            asyncio.run(Killing(service, 2, verifiers).windows())
        assert [each.statistics.num_failovers for each in whole] == [0] * len(whole)
        assert [each.statistics.num_failovers for each in cut] == [0, 1] + [0] * (len(whole) - 2)
        assert [each.token_ids for each in cut] == [each.token_ids for each in whole]
        assert len(whole) >= 3
        refused = [entry for entry in service.logged("verifier") if entry["status"] == "mismatched"]
        assert [entry["verifier"] for entry in refused] == [verifiers[2].address]
        assert "rules or end-of-sequence tokens of generation_config.json differ" in refused[0]["reason"]
        assert verifiers[2].count("outrider_sequences_total") == 0
