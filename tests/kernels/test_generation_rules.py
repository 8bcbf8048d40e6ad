"""The rules of `generate`: row by row against transformers' logits processors, then in verification on each path."""

import math
import random
from collections import defaultdict
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation import logits_process as processors

from kernels.adjustments import Adjuster, LogitRules, RowAdjustment, apply, apply_many_bans
from kernels.generation_rules import GenerationRules, TimestampRules
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import DraftDistribution, Proposed, Rule
from tests.kernels.cases import coupled, gaussian, n_differing, random_batch, sparsify
from tests.kernels.paths import TRITON, verify
from tests.kernels.reference import verify as reference

V, EOS, NO_TIMESTAMPS, FIRST = 24, 9, 13, 14
MAX_NEW = 9
BASE = 7  # length of the sequences in verification
WORDS = ((3,), (EOS,), (1, 2), (2, 2, 4), (4, 5), (5, 5), (0, 1, 6), (0, 1, 2, 6), (V + 5, 2), (7, V + 5))
OPENINGS = (*range(NO_TIMESTAMPS), *range(FIRST, V))  # tokens of prompts: timestamps of earlier windows, too
TIMESTAMPS = TimestampRules(FIRST, EOS, 4)

Processors = Callable[[int], list[processors.LogitsProcessor]]  # of the prompt's length


def whisper(max_initial: int | None) -> Processors:
    config = GenerationConfig(
        eos_token_id=EOS, no_timestamps_token_id=NO_TIMESTAMPS, max_initial_timestamp_index=max_initial
    )
    return lambda prompt: [processors.WhisperTimeStampLogitsProcessor(config, begin_index=prompt)]


def ngrams(n: int) -> Processors:
    return lambda _: [processors.NoRepeatNGramLogitsProcessor(n)]


RULES: dict[str, tuple[GenerationRules, Processors]] = {
    "suppressed": (
        GenerationRules(suppressed=(-1, 2, 5, V + 1)),
        lambda _: [processors.SuppressTokensLogitsProcessor([-1, 2, 5, V + 1])],
    ),
    "begin suppressed": (
        GenerationRules(begin_suppressed=(2, EOS)),
        lambda prompt: [processors.SuppressTokensAtBeginLogitsProcessor([2, EOS], prompt)],
    ),
    "forced BOS": (
        GenerationRules(forced_bos=4, begin_suppressed=(2, EOS)),
        lambda prompt: [
            processors.ForcedBOSTokenLogitsProcessor(4),
            processors.SuppressTokensAtBeginLogitsProcessor([2, EOS], prompt + (prompt == 1)),
        ],
    ),
    "forced EOS": (
        GenerationRules(forced_eos=EOS, min_length=99, eos_tokens=(EOS,)),
        lambda prompt: [
            processors.MinLengthLogitsProcessor(99, EOS),
            processors.ForcedEOSTokenLogitsProcessor(prompt + MAX_NEW, EOS),
        ],
    ),
    "bad words": (
        GenerationRules(bad_words=tuple(word for word in WORDS if max(word) < V), eos_tokens=(EOS,)),
        lambda _: [processors.NoBadWordsLogitsProcessor([list(word) for word in WORDS if max(word) < V], EOS)],
    ),
    "min length": (
        GenerationRules(min_length=5, eos_tokens=(EOS, 2, V + 3)),
        lambda _: [processors.MinLengthLogitsProcessor(5, [EOS, 2, V + 3])],
    ),
    "min new tokens": (  # which replace the least length
        GenerationRules(min_length=9, min_new_tokens=3, eos_tokens=(EOS,)),
        lambda prompt: [processors.MinNewTokensLengthLogitsProcessor(prompt, 3, EOS)],
    ),
    "repetition": (
        GenerationRules(repetition_penalty=1.7),
        lambda _: [processors.RepetitionPenaltyLogitsProcessor(1.7)],
    ),
    "timestamps": (GenerationRules(timestamps=TIMESTAMPS), whisper(4)),
    "timestamps, any first": (GenerationRules(timestamps=TimestampRules(FIRST, EOS)), whisper(None)),
    **{f"{n}-grams": (GenerationRules(no_repeat_ngram_size=n), ngrams(n)) for n in (1, 2, 3, 5)},
    "everything": (
        GenerationRules(
            repetition_penalty=1.3,
            suppressed=(6,),
            begin_suppressed=(7, EOS),
            bad_words=((3,), (1, 2)),
            no_repeat_ngram_size=3,
            min_length=4,
            eos_tokens=(EOS,),
            timestamps=TIMESTAMPS,
        ),
        lambda prompt: [
            processors.RepetitionPenaltyLogitsProcessor(1.3),
            processors.NoRepeatNGramLogitsProcessor(3),
            processors.NoBadWordsLogitsProcessor([[3], [1, 2]], EOS),
            processors.MinLengthLogitsProcessor(4, EOS),
            processors.SuppressTokensAtBeginLogitsProcessor([7, EOS], prompt),
            processors.SuppressTokensLogitsProcessor([6]),
            *whisper(4)(prompt),
        ],
    ),
}
BY_NAME = pytest.mark.parametrize("name", RULES)


def random_token(source: random.Random) -> int:
    return source.choice((source.randrange(6), source.randrange(V), source.randrange(FIRST, V)))


def assert_same_distributions(z: Tensor, rows: Sequence[RowAdjustment | None], expected: Tensor) -> None:
    """By the probabilities: a forced token has any logit here, and 0 in transformers."""
    adjusted = apply(z, rows)
    assert torch.equal(adjusted.isneginf(), expected.isneginf())
    assert torch.allclose(adjusted.softmax(-1), expected.softmax(-1), rtol=1e-5, atol=1e-7)


@BY_NAME
def test_rows_are_those_of_transformers(name: str) -> None:
    """Tokens are pushed, popped and cut off; copies go on apart, and so do others that begin after the same tokens."""
    rules, make = RULES[name]
    logit_rules = LogitRules(generation=rules, max_new_tokens=MAX_NEW)
    alike = defaultdict[tuple[int, int], list[tuple[list[int], Tensor, RowAdjustment | None]]](list)
    for seed in range(40):
        source = random.Random(seed)
        prompt = [source.choice(OPENINGS) for _ in range(source.choice((1, 1, 2, 5)))]
        adjuster = Adjuster(logit_rules, prompt, V)
        generated = list[int]()
        for z in gaussian(seed, 40, V, scale=3):
            choice = source.random()
            if choice < 0.7:
                again = len(generated) >= 3 and source.random() < 0.4
                generated.append(generated[-3] if again else random_token(source))
                adjuster.push(generated[-1])
            elif choice < 0.85 and generated:
                adjuster.pop()
                generated.pop()
            else:
                size = source.randrange(len(generated) // 2, len(generated) + 1)
                adjuster.truncate(size)
                del generated[size:]
            if choice < 0.2:
                same = adjuster.copy() if choice < 0.1 else Adjuster(logit_rules, prompt, V, generated)
                other, adjuster = adjuster, same
                for _ in range(3):
                    other.push(random_token(source))
                other.truncate(min(1, other.n_generated))
            alike[len(prompt), len(generated)].append((prompt + generated, z, adjuster.row()))
    seen = set()
    for (begin, _), found in alike.items():  # those of one length in one batch
        tokens, z_rows, rows = zip(*found, strict=True)
        logits = torch.stack(z_rows)
        expected = processors.LogitsProcessorList(make(begin))(torch.tensor(tokens), logits.clone())
        assert_same_distributions(logits, rows, expected)
        seen |= set(map(tuple, expected.isneginf().tolist()))
    assert len(seen) > 1 or name in ("repetition", "suppressed")


def test_the_prompt_decides_on_timestamps() -> None:
    rules = LogitRules(generation=GenerationRules(timestamps=TIMESTAMPS))
    for prompt in ([0, NO_TIMESTAMPS], [NO_TIMESTAMPS]):
        adjuster = Adjuster(rules, prompt, V)
        for token in (FIRST, 3, FIRST + 2):
            assert adjuster.row() is None
            adjuster.push(token)
    for prompt in ([0], [FIRST, 2]):
        assert Adjuster(rules, prompt, V).row() is not None


def test_rules_of_the_request_hold_beside_those_of_the_model() -> None:
    """Its penalty replaces the model's; its bans and bias are added; a forced token is allowed in spite of them."""
    model = GenerationRules(repetition_penalty=3.0, suppressed=(5,), forced_bos=2)
    rules = LogitRules(2.0, logit_bias=((4, 1.5),), banned_tokens=(2,), generation=model)
    adjuster, z = Adjuster(rules, [1], V), torch.ones(1, V)
    (forced,) = apply(z, [adjuster.row()])
    assert forced.softmax(-1)[2] == 1
    adjuster.push(0)
    (row,) = apply(z, [adjuster.row()])
    assert row[:6].tolist() == [0.5, 0.5, -math.inf, 1.0, 2.5, -math.inf]


def test_rules_without_effect_leave_rows_alone() -> None:
    adjuster = Adjuster(LogitRules(generation=GenerationRules(eos_tokens=(1,), forced_eos=1)), [0, 0], V)
    assert adjuster.row() is None
    adjuster.push(3)
    assert adjuster.row() is None


@pytest.mark.parametrize(
    ("rules", "named"),
    [
        (GenerationRules(forced_bos=V), f"forced_bos has the token {V}; ids must be below {V}"),
        (GenerationRules(forced_eos=-1), "forced_eos has the token -1"),
        (GenerationRules(timestamps=TimestampRules(V, EOS)), f"timestamps has the token {V}"),
    ],
)
def test_tokens_outside_the_vocabulary_are_refused(rules: GenerationRules, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Adjuster(LogitRules(generation=rules), [0], V)


def test_a_negative_limit_is_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens is -1"):
        LogitRules(max_new_tokens=-1)


# -------------------------------------------------------------------------------------------------------- verification


def proposed_by(
    rules: GenerationRules, rule: Rule, params: SamplingParams, seed: int, size: int
) -> tuple[Tensor, Proposed]:
    """Return logits `[γ+1, size]` and a proposal of a draft near the target, most of it drafted by the same rules."""
    source, gamma = random.Random(seed), 5
    z, noise = gaussian(seed, gamma + 1, size, scale=4), gaussian(seed + 1, gamma, size, scale=0.4)
    prompt = [source.randrange(NO_TIMESTAMPS) for _ in range(source.choice((1, 3)))]
    adjuster = Adjuster(LogitRules(generation=rules, max_new_tokens=8), prompt, size)
    for _ in range(source.choice((0, 0, 3))):
        adjuster.push(random_token(source))
    adjustments, tokens, distributions = [adjuster.row()], list[int](), list[DraftDistribution]()
    for i in range(gamma):
        by_rules = source.random() < 0.9
        row = apply(z[i : i + 1] + noise[i], [adjustments[-1] if by_rules else None])
        (q,) = sparsify(row.softmax(-1), SparseConfig(1.0, 16))
        if params.is_greedy or rule is Rule.COUPLED:
            tokens.append(reference(row, [coupled((), seed, BASE + i, params)])[0].next_token)
        else:
            tokens.append(q.token_at(source.random()))
        distributions.append(q)
        adjuster.push(tokens[-1])
        adjustments.append(adjuster.row())
    drafted = () if rule is Rule.COUPLED else tuple(distributions)
    logprobs = source.choice((-1, 3))
    return z, Proposed(
        tuple(tokens), drafted, params, seed, BASE, rule, adjustments=tuple(adjustments), top_logprobs=logprobs
    )


@pytest.mark.parametrize(
    ("rule", "temperature"),  # at temperature 0 all rules are one
    [(Rule.TOKENWISE, 0.0), (Rule.TOKENWISE, 1.0), (Rule.BLOCK, 1.0), (Rule.COUPLED, 1.0)],
)
@pytest.mark.parametrize(("path", "count"), [("torch", 3), pytest.param("triton", 1, marks=TRITON.marks)])
def test_verification_agrees_with_the_reference(path: str, count: int, rule: Rule, temperature: float) -> None:
    """Each set of rules, and plain proposals in the same batch. Torch adjusts rows as the reference does."""
    made = [
        proposed_by(rules, rule, SamplingParams(temperature=temperature), 1000 * number + seed, V)
        for number, (rules, _) in enumerate(RULES.values())
        for seed in range(count)
    ]
    plain, others = random_batch(3, V, 2)
    logits = torch.cat([*(z for z, _ in made), plain])
    proposals = [*(each for _, each in made), *others]
    results = verify(logits, proposals, path)
    assert n_differing(lambda *_: results, reference, logits, proposals) == 0
    accepted = [each.accepted for each in results]
    assert min(accepted) < 5 <= max(accepted)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("path", ["torch", TRITON])
def test_bans_of_padded_rows_in_several_tiles(path: str, dtype: torch.dtype) -> None:
    """Rows of 1,500 of 1,536 columns; the input is left as it was."""
    size, first = 1500, 1200
    rules = GenerationRules(suppressed=(1100,), timestamps=TimestampRules(first, 900, 50))
    made = [proposed_by(rules, Rule.BLOCK, SamplingParams(), seed, size) for seed in (7, 8, 9)]
    padded = torch.full((18, 1536), math.nan, dtype=dtype)
    padded[:, :size] = torch.cat([z for z, _ in made])
    before = padded.clone()
    results = verify(padded[:, :size], [each for _, each in made], path)
    assert torch.equal(padded.nan_to_num(), before.nan_to_num())
    proposals = [each for _, each in made]
    assert n_differing(lambda *_: results, reference, padded[:, :size], proposals) == 0
    assert max(each.accepted for each in results) > 1


def test_bans_for_kernels_keep_type_and_stride() -> None:
    rules = GenerationRules(repetition_penalty=2.0, suppressed=(3,), timestamps=TIMESTAMPS)
    row = Adjuster(LogitRules(generation=rules), [1], V).row()
    padded = gaussian(2, 2, 32).bfloat16()
    logits = padded[:, :V]
    banned = apply_many_bans(logits, [None, row])
    assert (banned.dtype, banned.stride()) == (logits.dtype, logits.stride())
    assert torch.equal(banned[0], logits[0])
    adjusted = apply(logits, [None, row])[1]
    assert torch.equal(banned[1].isneginf(), adjusted.isneginf())
    assert torch.equal(banned[1][FIRST : FIRST + 5], logits[1][FIRST : FIRST + 5])
    assert apply_many_bans(logits, [None, None]) is logits is apply_many_bans(logits, [])
