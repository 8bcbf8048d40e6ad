"""α of a tiny pair, against an independent slow computation in float64, and the rule itself.

Power of the statistical tests is in their docstrings. `tests/exactness/test_alpha.py` compares with real services.
"""

import copy
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.stats
import torch
from transformers import AutoModelForCausalLM

from draft_service.drafters import cheap, ngram
from draft_service.drafters.base import DraftSequence
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution, truncate
from kernels.verify import Proposed, Uniforms, verify
from outrider.evaluation import EvaluationError, chisquare, intervals, target_text
from outrider.evaluation.alpha import FEW_PROMPTS, Estimate, Options, acceptance, clusters_of, estimate, measure
from outrider.evaluation.drafters import (
    Drafter,
    at_random,
    by_lookup,
    by_model,
    by_ngrams,
    in_parallel,
)
from outrider.evaluation.local_models import build_runner
from outrider.evaluation.target_text import (
    NO_PENALTIES,
    Prompt,
    Text,
    block_rows,
    text_length,
    write,
)
from outrider.runtime.loader import LoadedModel, ModelSource, adopt, load_model
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.ngram import NGramCounts
from tests import encoder_decoders
from tests.exactness import pairs
from tests.exactness.distributions import transitions
from tests.kernels.reference import standardise

V = pairs.VOCABULARY
LENGTH = 40
GREEDY = SamplingParams(temperature=0.0)
NOISES = (0.0, encoder_decoders.NOISE)  # of a target and its draft


@dataclass(frozen=True)
class Pair:
    """A pair on disk, and its runners."""

    target: Path
    draft: Path
    target_runner: ModelRunner
    draft_runner: ModelRunner


def runner_of(folder: Path, sequences: int = 8) -> ModelRunner:
    return build_runner(loaded(folder), sequences, 128)


def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSource(str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    folder = tmp_path_factory.mktemp("pair")
    target = pairs.write_target(folder / "target", seed=1)
    draft = pairs.write_draft(folder / "draft", target, "flattened")
    model = AutoModelForCausalLM.from_pretrained(draft, dtype=torch.float32)
    torch.manual_seed(3)
    with torch.no_grad():  # so that it has another order of tokens
        model.lm_head.weight.add_(0.1 * torch.randn_like(model.lm_head.weight))
    model.save_pretrained(draft)
    return Pair(target, draft, runner_of(target), runner_of(draft, 1))


def prompts(count: int = 6, length: int = 5) -> list[Prompt]:
    tokens = np.random.default_rng(2).integers(0, V - 1, (count, length))
    return [Prompt(row.tolist()) for row in tokens]


# ------------------------------------------------------------------------------------ an independent slow computation


@cache
def reference_model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="eager").eval()


@torch.inference_mode()
def reference_logits(folder: Path, tokens: Sequence[int]) -> np.ndarray:
    z: np.ndarray = reference_model(folder)(torch.tensor([list(tokens)]), use_cache=False).logits[0].numpy()
    return z


def truncated(q: np.ndarray, config: SparseConfig) -> np.ndarray:
    """q̂ `[V]`: the fewest best tokens with the mass to keep, in whole 65535ths of the largest."""
    kept, mass = np.zeros(len(q)), 0.0
    for token in np.argsort(-q, kind="stable")[: config.max_support]:
        if mass >= config.keep_mass:
            break
        kept[token] = round(65535 * q[token] / q.max())
        mass += q[token]
    result: np.ndarray = kept / kept.sum()
    return result


def chance(z: np.ndarray, p: np.ndarray, q: np.ndarray, lenience: float, *, greedy: bool) -> float:
    """The chance that a token drawn from q̂ is accepted, token by token, as `kernels.verify` defines the rule."""
    total = 0.0
    for token in np.flatnonzero(q):
        if not greedy:
            accepted = min(1.0, p[token] / (lenience * q[token]))
        elif lenience == 1:
            accepted = float(token == z.argmax())
        else:
            accepted = float(math.exp(z[token] - z.max()) >= lenience)
        total += q[token] * accepted
    return total


PENALTIES = LogitRules(repetition_penalty=1.4, presence_penalty=0.3, frequency_penalty=-0.2)


def penalised(z: np.ndarray, text: Text, written: Sequence[int]) -> np.ndarray:
    """Logits `[V]` with the penalties of a text, token by token."""
    given, found = text.prompt.penalties, z.copy()
    for token in {*text.prompt.tokens, *written} - {V}:
        found[token] = z[token] * given.repetition_penalty ** -np.sign(z[token])
    for token in set(written) - {V}:
        found[token] -= given.presence_penalty + given.frequency_penalty * list(written).count(token)
    return found


SETTINGS = {
    "plain": (SamplingParams(), None, SparseConfig()),
    "penalties": (SamplingParams(), None, SparseConfig()),
    "hot draft": (SamplingParams(temperature=0.7), 1.3, SparseConfig()),
    "greedy draft": (SamplingParams(temperature=0.7), 0.0, SparseConfig()),
    "top-k": (SamplingParams(top_k=6), None, SparseConfig()),
    "top-p and min-p": (SamplingParams(temperature=1.2, top_p=0.8, min_p=0.02), None, SparseConfig()),
    "few of q": (SamplingParams(), None, SparseConfig(keep_mass=0.8, max_support=5)),
    "greedy": (GREEDY, 1.0, SparseConfig()),
}
LENIENCES = (1.0, 0.5, 0.1)


@pytest.mark.parametrize("setting", SETTINGS)
def test_alpha_equals_a_slow_computation_in_float64(setting: str, pair: Pair) -> None:
    """Weights of q̂ may round differently in float64: one step in 65535."""
    params, temperature, sparse = SETTINGS[setting]
    options = Options("", "", (), (), temperature=params.temperature, draft_temperature=temperature)
    draft_params = replace(options.draft_params, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)
    given = PENALTIES if setting == "penalties" else NO_PENALTIES
    starts = [replace(each, penalties=given) for each in prompts()]
    texts = write(pair.target_runner, starts, params, tokens=6 * LENGTH, length=LENGTH, seed=5)
    drafters = {"model": partial(by_model, pair.draft_runner, V, draft_params, sparse)}
    betas = measure(pair.target_runner, drafters, texts, params, LENIENCES)["model"]
    for text, own in zip(texts, betas, strict=True):
        z, w = (reference_logits(folder, text.tokens) for folder in (pair.target, pair.draft))
        expected = np.empty((text.written, len(LENIENCES)))
        for row, at in enumerate(range(text.begin - 1, len(text.tokens) - 1)):
            a, b = (penalised(each[at], text, text.tokens[text.begin : at + 1]) for each in (z, w))
            p, q = standardise(a, params), standardise(b, draft_params)
            q_hat = q if draft_params.is_greedy else truncated(q, sparse)
            expected[row] = [chance(a, p, q_hat, each, greedy=params.is_greedy) for each in LENIENCES]
        np.testing.assert_allclose(own, expected, atol=3e-5)
    assert np.concatenate(betas)[:, 0].std() > 0.05, "positions differ"


@pytest.mark.parametrize("penalties", [NO_PENALTIES, PENALTIES], ids=["plain", "penalties"])
def test_alpha_of_parallel_drafting_is_that_of_passes_over_the_text(
    penalties: LogitRules, pair: Pair, tmp_path: Path
) -> None:
    """Position i of a pass has the distribution after i masks, by transformers, and penalties of the draft count these;
    so in blocks of any size.
    """
    folder = pairs.write_parallel_draft(tmp_path / "parallel", pair.target)
    params, s = SamplingParams(), 3
    starts = [replace(each, penalties=penalties) for each in prompts(3)]
    texts = write(pair.target_runner, starts, params, tokens=3 * LENGTH, length=LENGTH, seed=5)
    drafter = partial(in_parallel, runner_of(folder, 1), V, params, SparseConfig(), s)
    betas = measure(pair.target_runner, {"parallel": drafter}, texts, params, (1.0,))["parallel"]
    for text, own in zip(texts, betas, strict=True):
        z, expected = reference_logits(pair.target, text.tokens), []
        for at in range(text.begin - 1, len(text.tokens) - 1):
            masks = (at - text.begin + 1) % s
            known = [*text.tokens[: at - masks + 1], *[V] * masks]
            a = penalised(z[at], text, text.tokens[text.begin : at + 1])
            b = penalised(reference_logits(folder, known)[-1, :V], text, known[text.begin :])
            p, q = standardise(a, params), standardise(b, params)
            expected.append(np.minimum(p, truncated(q, SparseConfig())).sum())
        assert own[:, 0] == pytest.approx(expected, abs=3e-5)


@cache
def encoder_decoder_runners(name: str) -> list[ModelRunner]:
    """Of a target and its draft."""
    models = (encoder_decoders.build(name, noise) for noise in NOISES)
    return [build_runner(adopt(copy.deepcopy(model), name, name), 4, 64) for model in models]


@pytest.mark.parametrize("name", [*encoder_decoders.RULES, "whisper, timestamps"])
def test_alpha_of_models_with_rules_equals_transformers(name: str) -> None:
    """The rules of the generation config hold for p and q: tokens, n-grams, bad words, penalties, timestamps."""
    name, _, timestamps = name.partition(", timestamps") if name.startswith("whisper") else (name, "", "")
    prompt = encoder_decoders.decoder_prompt(name, timestamps=bool(timestamps))
    inputs = encoder_decoders.inputs(name, 3)
    target, draft = encoder_decoder_runners(name)
    assert target.loaded.generation_rules is not None
    own, read, found = list[list[int]](), list[torch.Tensor](), list[tuple[SamplingParams, np.ndarray]]()
    for params in (SamplingParams(temperature=0.8), GREEDY):
        texts = write(target, [Prompt(prompt, each) for each in inputs], params, tokens=42, length=14, seed=4)
        drafter = partial(by_model, draft, encoder_decoders.V, params, SparseConfig())
        betas = measure(target, {"model": drafter}, texts, params, (1.0,))["model"]
        own += [text.tokens[text.begin :] for text in texts]
        read += [inputs[text.index] for text in texts]
        found += [(params, beta[:, 0]) for beta in betas]
    scores = (encoder_decoders.scores_along(name, read, prompt, own, noise) for noise in NOISES)
    for written, (params, beta), z, w in zip(own, found, *scores, strict=True):
        if params.is_greedy:
            assert written == z.argmax(-1).tolist()
            assert beta.tolist() == (z.argmax(-1) == w.argmax(-1)).tolist()
            continue
        rows = [(standardise(a, params), standardise(b, params)) for a, b in zip(z, w, strict=True)]
        assert all(p[token] > 0 for (p, _), token in zip(rows, written, strict=True))
        expected = [np.minimum(p, truncated(q, SparseConfig())).sum() for p, q in rows]
        assert beta == pytest.approx(expected, abs=1e-4)


def test_a_draft_of_other_features_reads_its_own(tmp_path: Path) -> None:
    """Both models read the same speech; one of them by other features."""
    name = "whisper"
    first, second = encoder_decoders.inputs(name, 2)
    target, draft = encoder_decoder_runners(name)
    tokens, params = encoder_decoders.decoder_prompt(name), SamplingParams()
    drafter = {"model": partial(by_model, draft, encoder_decoders.V, params, SparseConfig())}
    (text,) = write(target, [Prompt(tokens, first, second)], params, tokens=12, length=12, seed=4)
    (found,) = measure(target, drafter, [text], params, (1.0,))["model"]
    written = text.tokens[text.begin :]
    (z,) = encoder_decoders.scores_along(name, [first], tokens, [written], 0.0)
    (w,) = encoder_decoders.scores_along(name, [second], tokens, [written], encoder_decoders.NOISE)
    rows = [(standardise(a, params), standardise(b, params)) for a, b in zip(z, w, strict=True)]
    expected = [np.minimum(p, truncated(q, SparseConfig())).sum() for p, q in rows]
    assert found[:, 0] == pytest.approx(expected, abs=1e-4)


def test_the_draft_params_follow_the_targets() -> None:
    given = Options("", "", (), (), temperature=0.5, top_k=3, top_p=0.9, min_p=0.1, draft_temperature=2.0)
    assert given.draft_params == SamplingParams(2.0, 3, 0.9, 0.1)
    assert replace(given, temperature=0.0).draft_params == SamplingParams(0.0, 3, 0.9, 0.1)
    assert replace(given, draft_temperature=None).draft_params == given.params == SamplingParams(0.5, 3, 0.9, 0.1)


def test_blocks_change_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = write(pair.target_runner, prompts(), SamplingParams(), tokens=100, length=20, seed=1)
    counts = NGramCounts(3, V, 1000)
    drafters: dict[str, Drafter] = {
        "model": partial(by_model, pair.draft_runner, V, SamplingParams(), SparseConfig()),
        "ngram": partial(by_ngrams, counts, SamplingParams(), SparseConfig()),
        "lookup": partial(by_lookup, 1),
    }
    whole = measure(pair.target_runner, drafters, texts, SamplingParams(), (1.0,))
    monkeypatch.setattr(target_text, "block_rows", lambda vocab_size: 3)
    parts = measure(pair.target_runner, drafters, texts, SamplingParams(), (1.0,))
    for name in drafters:
        np.testing.assert_allclose(np.concatenate(parts[name]), np.concatenate(whole[name]), atol=1e-5)
    assert pair.target_runner.pool.holders == pair.draft_runner.pool.holders == 0


def test_padding_of_the_draft_is_never_drafted(pair: Pair, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(pair.draft, dtype=torch.float32)
    model.resize_token_embeddings(V + 8, mean_resizing=False)
    with torch.no_grad():  # of two opposite rows, one has a large logit
        model.lm_head.weight[V:] = 9.0 * torch.tensor([1.0, -1.0]).repeat(4)[:, None]
    model.save_pretrained(tmp_path)
    padded, texts = runner_of(tmp_path, 1), write(pair.target_runner, prompts(), GREEDY, tokens=100, length=20, seed=1)
    for params in (SamplingParams(), GREEDY):
        drafters: dict[str, Drafter] = {
            name: partial(by_model, runner, V, params, SparseConfig())
            for name, runner in (("padded", padded), ("plain", pair.draft_runner))
        }
        found = measure(pair.target_runner, drafters, texts, params, (1.0,))
        np.testing.assert_allclose(np.concatenate(found["padded"]), np.concatenate(found["plain"]), atol=1e-5)


def test_rows_of_a_block_fit_memory() -> None:
    assert [block_rows(size) for size in (24, 2_048, 151_936, 2_000_000)] == [512, 512, 110, 16]


# ------------------------------------------------------------------------------------------------ the acceptance rule


@pytest.mark.parametrize("params", [SamplingParams(temperature=0.9, top_k=12), GREEDY], ids=["sampled", "greedy"])
@pytest.mark.parametrize("lenience", [1.0, 0.2])
def test_acceptance_is_how_often_the_rule_accepts(params: SamplingParams, lenience: float) -> None:
    """Each token of q̂ is verified with a uniform from each eighth of [0, 1). Chance decides on one of these eight at
    most, so the share of a token with weight w has a standard deviation of at most w/16. At 4.5 standard errors (level
    7e-6) a β that is off by 0.035 on average is found with more than 99 %, as the standard error is at most 0.005.
    """
    generator = np.random.default_rng(11)
    z, v = (torch.from_numpy(generator.normal(0, spread, (24, V))) for spread in (1.5, 1.0))
    z, q = z.float(), [truncate(row, SparseConfig()) for row in probabilities(v, SamplingParams()).numpy()]
    beta = acceptance(z, q, params, [lenience])[:, 0]
    assert 0.03 < beta.mean() < 0.98
    found, variance = 0.0, 0.0
    for row, each in enumerate(q):
        uniforms = (np.arange(8) + generator.random((len(each.ids), 8))) / 8
        proposals = [
            Proposed((token,), (each,), params, 1, 1, lenience=lenience, uniforms=Uniforms((u,), 0.5))
            for token, u in zip(each.ids.repeat(8).tolist(), uniforms.ravel().tolist(), strict=True)
        ]
        results = verify(z[row].expand(2 * len(proposals), -1).contiguous(), proposals)
        assert results[0].beta == pytest.approx((beta[row],), abs=1e-6)
        weights = each.weights / each.total
        found += float(weights.repeat(8) @ [result.accepted for result in results]) / 8
        variance += float(np.square(weights / 16).sum())
    error = math.sqrt(variance) / len(z)
    assert error <= 0.005
    assert abs(found / len(z) - beta.mean()) <= 4.5 * error


def test_positions_without_a_draft_do_not_count() -> None:
    z = torch.tensor([[2.0, 1.0, 0.0]]).expand(3, -1)
    point = SparseDistribution(np.array([1]), np.ones(1, np.uint16), 1)
    p = math.exp(1) / (math.exp(2) + math.exp(1) + 1)
    beta = acceptance(z, [point, None, point], SamplingParams(), [1.0, 0.1])
    assert beta[0] == pytest.approx([p, 1.0])
    assert np.isnan(beta[1]).all()
    found = estimate("lookup", 1.0, [beta[:, 0], beta[:2, 0]], [0, 1])
    assert (found.positions, found.drafted_share) == (3, 3 / 5)
    assert found.alpha == pytest.approx(p)


# ----------------------------------------------------------------------------------------------------------- the text


def test_greedy_texts_are_those_of_transformers(pair: Pair) -> None:
    texts = write(pair.target_runner, prompts(), GREEDY, tokens=10_000, length=LENGTH, seed=3)
    assert sorted(text.index for text in texts) == list(range(6)), "each prompt once: its text is always the same"
    for text in texts:
        ids = torch.tensor([list(text.prompt.tokens)])
        written = reference_model(pair.target).generate(ids, max_new_tokens=LENGTH, do_sample=False)
        assert text.tokens == written[0].tolist()


def test_sampled_texts_follow_the_target(tmp_path: Path) -> None:
    """Transitions of a Markov target after top-k. 8,000 tokens detect a mean total variation of 0.07 at a level of 1e-4
    with 99 % (`chisquare`: 24 rows of at most 7 cells).
    """
    params = SamplingParams(temperature=0.8, top_k=8)
    target = pairs.write_target(tmp_path, seed=4, markov=True)
    texts = write(runner_of(target, 64), prompts(16), params, tokens=8_000, length=100, seed=9)
    counts = np.zeros((V, V))
    for text in texts:
        np.add.at(counts, (text.tokens[text.begin - 1 : -1], text.tokens[text.begin :]), 1)
    fit = chisquare.table_fit(counts, transitions(target, params))
    assert fit.p_value > 1e-4, fit
    assert chisquare.detectable(24 * 7, 8_000, level=1e-4, power=0.99) < 0.07


def test_texts_end_at_the_end_of_sequence_and_go_on_until_there_are_enough_tokens(pair: Pair) -> None:
    texts = write(pair.target_runner, prompts(), SamplingParams(temperature=2.0), tokens=500, length=30, seed=1)
    ended = [text for text in texts if pairs.END_ID in text.tokens[text.begin :]]
    assert 0 < len(ended) < len(texts)
    assert all(text.tokens.index(pairs.END_ID, text.begin) == len(text.tokens) - 1 for text in ended)
    assert all(text.written == 30 for text in texts if text not in ended)
    assert 500 <= sum(text.written for text in texts) < 530
    assert len({tuple(text.tokens) for text in texts}) == len(texts), "no text twice"
    assert pair.target_runner.pool.holders == 0


def test_a_seed_repeats_the_texts(pair: Pair) -> None:
    def written(seed: int) -> list[list[int]]:
        texts = write(pair.target_runner, prompts(), SamplingParams(), tokens=90, length=30, seed=seed)
        return [text.tokens for text in texts]

    assert written(1) == written(1) != written(2)


def test_lengths_of_texts() -> None:
    some = prompts(64)
    assert text_length(some, 10_000, 900) == 157
    assert text_length(some, 100, 900) == 64
    assert text_length(some[:1], 10_000, 900) == 512
    assert text_length(some[:1], 10_000, 100) == 100


# ----------------------------------------------------------------------------------------------------------- drafters


@pytest.mark.parametrize("penalties", [NO_PENALTIES, PENALTIES], ids=["plain", "penalties"])
@pytest.mark.parametrize("params", [SamplingParams(temperature=0.8, top_k=9), GREEDY], ids=["sampled", "greedy"])
def test_counting_and_copying_drafters_are_those_of_the_draft_service(
    params: SamplingParams, penalties: LogitRules
) -> None:
    generator = np.random.default_rng(5)
    corpus = generator.integers(0, 8, 300).tolist()
    tokens = generator.integers(0, 8, 60).tolist()
    text = Text(0, Prompt(tokens[:5], penalties=penalties), tokens)
    sparse = SparseConfig(keep_mass=0.9, max_support=6)
    counts = NGramCounts(3, V, 10_000)
    counts.add(corpus)
    sequence = DraftSequence(tokens[:5], [], params, penalties, 7)
    served = {
        "ngram": ngram.NGramDrafter([corpus], vocab_size=V, sparse=sparse, order=3, entries=10_000).guesser(sequence),
        "lookup": cheap.LookupDrafter(min_match=2).guesser(sequence),
    }
    own: dict[str, Drafter] = {"ngram": partial(by_ngrams, counts, params, sparse), "lookup": partial(by_lookup, 2)}
    drafted = {name: list(drafter(text)) for name, drafter in own.items()}
    for guesser in served.values():
        guesser.read(tokens[:5])
    copied = 0
    for row, token in enumerate(tokens[5:]):
        for name, guesser in served.items():
            guesses, q = guesser.guess(1), drafted[name][row]
            guesser.read([token])
            if not guesses:
                assert q is None
                continue
            ((guess, sent),) = guesses
            copied += name == "lookup"
            assert q is not None
            if sent is None:  # a point mass
                assert (q.ids.tolist(), q.total) == ([guess], int(q.weights[0]))
            else:
                assert (q.ids.tolist(), q.weights.tolist()) == (sent.ids.tolist(), sent.weights.tolist())
    assert 5 < copied < 55


def test_random_drafts_are_those_of_the_draft_service() -> None:
    """Each support is one that the service draws; at temperature 0 a β of 1/8 in a third of 240 positions: α = 1/V."""
    text = Text(0, Prompt([1]), np.random.default_rng(3).integers(0, V, 241).tolist())
    drafted = list(at_random(V, 8, 0, text))
    served = {tuple(cheap.support(seed, 1, vocab_size=V, size=8).ids.tolist()) for seed in range(300)}
    assert {tuple(q.ids.tolist()) for q in drafted} == served
    assert {(q.total, *q.weights.tolist()) for q in drafted} == {(8, *[1] * 8)}
    z = torch.randn(240, V, generator=torch.Generator().manual_seed(1))
    assert acceptance(z, drafted, GREEDY, [1.0]).mean() == pytest.approx(1 / V, abs=0.015)


# --------------------------------------------------------------------------------------------------------- statistics


def test_intervals_hold_for_correlated_positions() -> None:
    """2,000 measurements of 12 prompts with two texts each, whose β shares an effect of the prompt. The share of 95 %
    intervals that hold the true mean has a standard error of 0.005; an interval over texts holds it in 83 %.
    """
    generator = np.random.default_rng(8)
    clusters = np.repeat(np.arange(12), 2).tolist()
    held = {"prompts": 0, "texts": 0}
    for _ in range(2_000):
        effects = 0.5 + 0.1 * np.repeat(generator.normal(size=12), 2)
        betas = [each + 0.05 * generator.normal(size=size) for each, size in zip(effects, [30, 20] * 12, strict=True)]
        for name, groups in (("prompts", clusters), ("texts", list(range(24)))):
            interval = estimate("model", 1.0, betas, groups).interval
            assert interval is not None
            held[name] += interval[0] <= 0.5 <= interval[1]
    assert 0.925 < held["prompts"] / 2_000 < 0.97
    assert held["texts"] / 2_000 < 0.9


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 7, 20, 63, 1000])
def test_quantiles_are_those_of_students_t(degrees: int) -> None:
    assert intervals.student_quantile(degrees) == pytest.approx(scipy.stats.t.ppf(0.975, degrees), rel=2e-3)


def test_few_prompts_give_an_interval_over_texts_and_one_text_gives_none() -> None:
    many = [Text(index % FEW_PROMPTS, Prompt([1]), [1, 2]) for index in range(20)]
    assert clusters_of(many) == ("prompt", [index % FEW_PROMPTS for index in range(20)])
    assert clusters_of([text for text in many if text.index]) == ("text", list(range(17)))
    alone = estimate("model", 1.0, [np.array([0.2, 0.4])], [0])
    assert alone == Estimate("model", 1.0, (0.2 + 0.4) / 2, None, None, None, 2, 1.0, 1)
    assert math.isnan(estimate("lookup", 1.0, [np.array([math.nan])], [0]).alpha)


def test_bad_logits_are_an_error(pair: Pair, tmp_path: Path) -> None:
    broken = pairs.write_draft(tmp_path, pair.target, "sharpened")
    runner = runner_of(broken, 1)
    texts = write(pair.target_runner, prompts(1), SamplingParams(), tokens=10, length=10, seed=1)
    forward = runner.forward
    runner.forward = lambda chunks: forward(chunks) * math.nan  # type: ignore[method-assign]
    drafters = {"model": partial(by_model, runner, V, SamplingParams(), SparseConfig())}
    with pytest.raises(EvaluationError, match="the draft gives logits that are NaN"):
        measure(pair.target_runner, drafters, texts, SamplingParams(), [1.0])
