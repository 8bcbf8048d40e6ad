"""Real places and real rounds of the demo pair, and their verification under each rule, counted and timed."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sigmoid import draft_logits
from kernels.sparse import SparseConfig, SparseDistribution, sparsify
from kernels.verify import DenseDistribution, Proposed, Rule, SigmoidScales, verify
from models.generation import Writer, steps

LAW = SamplingParams()
KEPT = SparseConfig()  # what the draft service keeps of its law where it is not told otherwise


@dataclass(frozen=True, slots=True)
class Texts:
    """What the target wrote at temperature 1, and what both models say at each place of it.

    Attributes:
        ids: prompts and what was written, `[B, L]`.
        begin: where the prompts end.
        target: the target's logits for each written place, `[B, L - begin, V]` float32.
        draft: the draft's.
        alive: the places up to the text's end, bool `[B, L - begin]`.
    """

    ids: Tensor
    begin: int
    target: Tensor
    draft: Tensor
    alive: Tensor

    @property
    def places(self) -> tuple[Tensor, Tensor]:
        """Both models' logits of all places, `[N, V]` each."""
        return self.target[self.alive], self.draft[self.alive]


@torch.no_grad()
def write(target: LlamaForCausalLM, draft: LlamaForCausalLM, prompts: Tensor, tokens: int, end: int) -> Texts:
    """Let the target continue `prompts` `[B, n]` by `tokens` each, drawn at temperature 1."""
    generator = torch.Generator().manual_seed(20)
    written, logits = zip(*steps(target, prompts, tokens, torch.ones(len(prompts)), generator), strict=True)
    ids = torch.cat(written[:-1], dim=1)
    begin = prompts.shape[1]
    new = ids[:, begin:]
    return Texts(
        ids=ids,
        begin=begin,
        target=torch.cat([logits[0][:, -1:], *logits[1:-2]], dim=1),
        draft=Writer(draft, *ids.shape).extend(ids)[:, begin - 1 : -1],
        alive=(torch.cumsum(new == end, dim=1) - (new == end).long()) == 0,
    )


def drawn_from(draft: Tensor) -> Tensor:
    """Return the law that drafts of these logits `[N, V]` are sampled from, float64: truncated and in integers."""
    q = torch.zeros(draft.shape, dtype=torch.float64)
    for row, law in zip(q, sparsify(probabilities(draft, LAW), KEPT), strict=True):
        row[torch.from_numpy(law.ids)] = torch.from_numpy(law.weights.astype("float64")) / law.total
    return q


@dataclass(frozen=True, slots=True)
class Case:
    """One proposal of γ tokens: the target's rows `[γ+1, V]`, the draft's `[γ, V]`, and what was drawn from them."""

    target: Tensor
    draft: Tensor
    tokens: tuple[int, ...]
    laws: tuple[SparseDistribution, ...]
    seed: int
    base_length: int

    def proposed(self, rule: Rule, scales: SigmoidScales | None = None, *, dense: bool = False) -> Proposed:
        """As one rule takes it; with `dense`, an exact rule takes the draft's whole law."""
        plain = Proposed(self.tokens, self.laws, LAW, self.seed, self.base_length, rule=rule)
        if rule is Rule.SIGMOID:
            return replace(plain, q=tuple(draft_logits(self.draft, LAW)), sigmoid=scales)
        if dense:
            return replace(plain, q=tuple(DenseDistribution(row) for row in probabilities(self.draft, LAW)))
        return plain


@torch.no_grad()
def rounds(target: LlamaForCausalLM, draft: LlamaForCausalLM, texts: Texts, gamma: int, every: int) -> list[Case]:
    """Draft `gamma` tokens at every `every`-th place of each text, and run the target on them."""
    cases = []
    for base in range(texts.begin, texts.ids.shape[1], every):
        prefix = texts.ids[:, :base]
        writer, drafted, said = Writer(draft, len(prefix), base + gamma), prefix, []
        laws: list[list[SparseDistribution]] = []
        logits = writer.extend(prefix)[:, -1]
        for place in range(gamma):
            said.append(logits)
            laws.append(sparsify(probabilities(logits, LAW), KEPT))
            drawn = [law.token_at(uniform(row, base, place, Domain.DRAFT)) for row, law in enumerate(laws[-1])]
            drafted = torch.cat((drafted, torch.tensor(drawn)[:, None]), dim=1)
            if place < gamma - 1:
                logits = writer.extend(drafted[:, -1:])[:, -1]
        rows = Writer(target, *drafted.shape).extend(drafted)[:, base - 1 :]
        for b in range(len(prefix)):
            if bool(texts.alive[b, base - texts.begin]):
                tokens = tuple(drafted[b, base:].tolist())
                q = torch.stack([each[b] for each in said])
                cases.append(Case(rows[b], q, tokens, tuple(each[b] for each in laws), b, base))
    return cases


def synthetic(vocab_size: int, gamma: int, count: int) -> list[Case]:
    """Rounds over a large vocabulary: random logits, and a draft that is the target with noise."""
    generator = torch.Generator().manual_seed(3)
    cases = []
    for number in range(count):
        z = torch.randn(gamma + 1, vocab_size, generator=generator) * 3
        v = z[:gamma] + torch.randn(gamma, vocab_size, generator=generator)
        laws = tuple(sparsify(probabilities(v, LAW), KEPT))
        tokens = tuple(law.token_at(uniform(number, 1, i, Domain.DRAFT)) for i, law in enumerate(laws))
        cases.append(Case(z, v, tokens, laws, number, 1))
    return cases


def accepted(cases: Sequence[Case], rule: Rule, scales: SigmoidScales | None = None) -> list[int]:
    """How many drafts of each round stand."""
    rows = torch.cat([case.target for case in cases])
    return [result.accepted for result in verify(rows, [case.proposed(rule, scales) for case in cases])]


@dataclass(frozen=True, slots=True)
class Way:
    """A rule as it is timed."""

    name: str
    rule: Rule
    scales: SigmoidScales | None = None
    dense: bool = False


def timed(cases: Sequence[Case], ways: Sequence[Way], repeats: int) -> dict[str, dict[str, float]]:
    """Time one round a call under each way, in turns of an order that chance gives.

    Returns:
        For each way its time over that of the first way on the same round in the same turn: median and quartiles.
    """
    asked = [[case.proposed(way.rule, way.scales, dense=way.dense) for way in ways] for case in cases]
    ratios: list[list[float]] = [[] for _ in ways]
    order = random.Random(7)
    for turn in range(-1, repeats):  # the first one warms up
        for number, case in enumerate(cases):
            seconds = [0.0] * len(ways)
            for at in order.sample(range(len(ways)), len(ways)):
                began = time.perf_counter()
                verify(case.target, [asked[number][at]])
                seconds[at] = time.perf_counter() - began
            if turn >= 0:
                for way, each in zip(ratios, seconds, strict=True):
                    way.append(each / seconds[0])
    found = {}
    for timed_way, of_way in zip(ways, ratios, strict=True):
        low, middle, high = statistics.quantiles(of_way, n=4)
        found[timed_way.name] = {"median": round(middle, 3), "low": round(low, 3), "high": round(high, 3)}
    return found
