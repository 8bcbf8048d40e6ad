"""How many drafted tokens each exact rule accepts: through both services, on equal prompts, with equally many rounds.

*Counted* is what the services did; it does not depend on what else the machine does. *Expected* has far less noise: the
drafts of the texts are drawn again with `Propose` (a seed draws the same), the target's distribution at each comes from
a pass in this process, and the uniforms of acceptance are integrated out, so that `tokenwise` and `block` are compared
on the same drafts. A prompt is the unit: rounds of one text are not independent. Intervals are 95 %.

    python -m benchmarks.rules            about five minutes on one core
    python -m benchmarks.rules --quick    does it work at all
"""

from __future__ import annotations

import math
import queue
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, Self, cast

import grpc
import numpy as np
import torch
from transformers import DynamicCache

from benchmarks import harness, plots
from benchmarks.contenders import load_model
from benchmarks.deepen import digest_of
from benchmarks.harness import Bench, Json, tell
from benchmarks.services import ANYWHERE, Services
from kernels.sampling import SamplingParams, probabilities
from outrider.client import AcceptanceRule, Chunk, Client, Round, Started
from outrider.service.wire import decode_sparse
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub

RULES = (AcceptanceRule.TOKENWISE, AcceptanceRule.BLOCK, AcceptanceRule.COUPLED)
_TIMEOUT_S = 120.0
_TWO_SIDED = 1.96  # 95 % of a normal distribution
_POWER = 1.645  # and what a power of 95 % takes beside it


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("rules", __doc__, quick="two prompts, few rounds")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=16, help="of each text")
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.7, 1.0])
    parser.add_argument("--gammas", type=int, nargs="+", default=[2, 4, 8])
    few = {"prompts": 2, "rounds": 3, "temperatures": [1.0], "gammas": [2, 3]}
    return harness.run("rules", harness.parse(parser, arguments, few), measure, summarise, table, draw)


# ----------------------------------------------------------------------------------------------------------- formulas


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafted token x and the distributions at its place.

    Attributes:
        p: p(x).
        q: q̂(x).
        masses: p on the support of q̂, `[K]`.
        weights: q̂ there, `[K]`.
    """

    p: float
    q: float
    masses: np.ndarray
    weights: np.ndarray


def tokenwise(path: Sequence[Drafted]) -> float:
    """Σ_i Π_{j≤i} min(1, p_j/q̂_j): tokens of `path` that [L Alg. 1] accepts in expectation."""
    total, kept = 0.0, 1.0
    for at in path:
        kept *= min(1.0, at.p / at.q)
        total += kept
    return total


def block(path: Sequence[Drafted]) -> float:
    """Σ_i (1 - Π_{k≥i} (1 - h_k)): the same of the rule `block`, which keeps all up to its last success.

    P_i = min(1, P_{i-1} · p_i/q̂_i) and h_i = Z/(Z + 1 - P_i) with Z = Σ max(P_i · p_{i+1} - q̂_{i+1}, 0); h_γ = P_γ
    (Sun et al. 2024, Algorithm 2).
    """
    reaches = []
    P = 1.0
    for i, at in enumerate(path):
        P = min(1.0, P * at.p / at.q)
        if i + 1 == len(path):
            reaches.append(P)
            break
        after = path[i + 1]
        Z = P - float(np.minimum(P * after.masses, after.weights).sum())
        reaches.append(Z / (Z + 1 - P) if Z > 0 else 0.0)
    total, none_from = 0.0, 1.0
    for h in reversed(reaches):
        none_from *= 1 - h
        total += 1 - none_from
    return total


EXPECTED = {"tokenwise": tokenwise, "block": block}
"""The rules whose expectation has a formula; under `coupled` the draft's own noise decides."""


def estimate(values: Sequence[float]) -> Json:
    """Mean of independent values with its 95 % interval, and the mean that so many would have distinguished from 0.

    `detectable` is that of a two-sided test at 5 % with a power of 95 %. One value has no interval.
    """
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "interval": None, "detectable": None}
    error = stdev(values) / math.sqrt(len(values))
    interval = [mean - _TWO_SIDED * error, mean + _TWO_SIDED * error]
    return {"mean": mean, "interval": interval, "detectable": (_TWO_SIDED + _POWER) * error}


# -------------------------------------------------------------------------------------------------------- measurement


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document["models"] = {"target": digest_of(given.target), "draft": digest_of(given.draft)}
    with Services(given.target, given.draft, dtype="float32", place=ANYWHERE) as services:
        write_all(bench, services.client)


def write_all(bench: Bench, client: Client) -> None:
    given = bench.given
    target = Target(given.target, client.get_model().target.vocab_size)
    prompts = harness.spread(bench.prompts, given.prompts)
    with grpc.insecure_channel(client.address) as channel:
        for temperature in given.temperatures:
            for gamma in given.gammas:
                for rule in RULES:
                    keys = {"temperature": f"{temperature:g}", "gamma": gamma, "rule": rule.value}
                    for nth, prompt in enumerate(prompts):
                        if bench.has(**keys, prompt=nth):
                            continue
                        text = write(client, prompt, temperature, gamma, rule, seed=1 + nth, rounds=given.rounds)
                        run = {"rounds": len(text.rounds), "accepted": sum(each.accepted for each in text.rounds)}
                        if rule.value in EXPECTED:
                            run |= _expected(text, gamma, channel, target)
                        bench.add({**keys, "prompt": nth, **run})
                    tell(f"T = {temperature:g}, γ = {gamma}, {rule.value}")


@dataclass(frozen=True, slots=True)
class Text:
    prompt: tuple[int, ...]
    sampling: sampling_pb2.SamplingParams
    output: tuple[int, ...]
    rounds: tuple[Round, ...]


def write(
    client: Client, prompt: str, temperature: float, gamma: int, rule: AcceptanceRule, *, seed: int, rounds: int
) -> Text:
    """A text of `rounds` whole rounds; what comes after them is left."""
    output: list[int] = []
    reports: list[Round] = []
    tokens: tuple[int, ...] = ()
    events = client.generate(
        prompt,
        max_new_tokens=(rounds + 1) * (gamma + 1),  # so that the limit shortens none of them
        ignore_eos=True,
        temperature=temperature,
        seed=seed,
        rule=rule,
        gamma=gamma,
        report_rounds=True,
    )
    for event in events:
        if isinstance(event, Started):
            tokens = event.prompt_token_ids
        elif isinstance(event, Chunk):
            output += event.token_ids
            reports += event.rounds
        if len(reports) >= rounds and len(output) >= reports[rounds - 1].output_length:
            break
    events.close()
    number = cast("sampling_pb2.AcceptanceRule", rule.number)
    sampling = sampling_pb2.SamplingParams(temperature=temperature, seed=seed, rule=number)
    return Text(tokens, sampling, tuple(output), tuple(reports[:rounds]))


def _expected(text: Text, gamma: int, channel: grpc.Channel, target: Target) -> Json:
    """What each rule would accept of the text's drafts in expectation: sums over its rounds."""
    expected = dict.fromkeys(EXPECTED, 0.0)
    redrafted = 0
    target.begin()
    with Redraft(channel, text) as stream:
        for each in text.rounds:
            proposal = stream.propose(each.output_length, gamma)
            tokens = list(proposal.token_ids)
            redrafted += tuple(tokens) == each.drafted_token_ids
            known = [*text.prompt, *text.output[: each.output_length]]
            p = target.after(known, tokens, text.sampling.temperature)
            path = [_drafted(*place) for place in zip(tokens, p, proposal.distributions, strict=True)]
            for rule, formula in EXPECTED.items():
                expected[rule] += formula(path)
    return {"redrafted": redrafted, "expected": expected}


def _drafted(token: int, p: torch.Tensor, q: speculation_pb2.TokenDistribution) -> Drafted:
    ids, weights = decode_sparse(q.sparse)
    masses, shares = p.numpy()[ids].astype(float), weights / weights.sum(dtype=float)
    at = int(ids.searchsorted(token))
    return Drafted(p=float(masses[at]), q=float(shares[at]), masses=masses, weights=shares)


class Target:
    """The target's distribution after the tokens of one text, in float32; the text only grows."""

    def __init__(self, folder: Path, vocab_size: int) -> None:
        self._model: Any = load_model(folder, torch.float32)
        self._vocab_size = vocab_size
        self._cache: Any = None
        self._committed = 0  # tokens of the text in the cache; what comes after them was drafted

    def begin(self) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._committed = 0

    def after(self, tokens: Sequence[int], drafted: Sequence[int], temperature: float) -> torch.Tensor:
        """Distributions after `tokens` and after each of `drafted` but the last, `[γ, V]`."""
        known = min(self._committed, len(tokens) - 1)
        if surplus := self._cache.get_seq_length() - known:  # drafts of the round before
            self._cache.crop(-surplus)
        self._committed = len(tokens)
        new = [*tokens[known:], *drafted[:-1]]
        with torch.inference_mode():
            logits = self._model(torch.tensor([new]), past_key_values=self._cache, use_cache=True).logits
        return probabilities(logits[0, -len(drafted) :, : self._vocab_size], SamplingParams(temperature=temperature))


class Redraft:
    """One call of `Propose`, which follows one text and draws its drafts again."""

    def __init__(self, channel: grpc.Channel, text: Text) -> None:
        self._text = text
        self._told = 0  # output tokens the draft knows
        self._round = 0
        self._outbox: queue.SimpleQueue[draft_service_pb2.ProposeRequest | None] = queue.SimpleQueue()
        self._send(open=draft_service_pb2.OpenDraft(prompt_token_ids=text.prompt, sampling=text.sampling))
        self._call: Iterator[Any] = DraftServiceStub(channel).Propose(iter(self._outbox.get, None), timeout=_TIMEOUT_S)
        next(self._call)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._outbox.put(None)
        for _ in self._call:  # to its end: the next text needs the place
            pass

    def propose(self, base: int, gamma: int) -> speculation_pb2.Proposal:
        """Tells the text up to `base` output tokens, and asks for a proposal there."""
        self._round += 1
        self._send(
            advance=draft_service_pb2.Advance(
                round=self._round,
                base_length=len(self._text.prompt) + self._told,
                committed_token_ids=self._text.output[self._told : base],
                gamma=gamma,
            )
        )
        self._told = base
        proposal: speculation_pb2.Proposal = next(self._call).proposal
        return proposal

    def _send(self, **kind: Any) -> None:
        self._outbox.put(draft_service_pb2.ProposeRequest(sequence_id="redraft", **kind))


# ------------------------------------------------------------------------------------------------------------ figures


def summarise(bench: Bench) -> Json:
    return {"summary": harness.tree(bench.runs, ("temperature", "gamma"), figures)}


def figures(runs: Sequence[Json]) -> Json:
    """Each rule's accepted tokens a round, and what `block` accepts more than `tokenwise`.

    The difference is given twice: of the counts, prompt by prompt, and of the formulas, on the drafts of both rules'
    texts.
    """
    by_rule = {rule: {text["prompt"]: text for text in texts} for rule, texts in harness.grouped(runs, "rule").items()}
    rules = {}
    for rule, texts in by_rule.items():
        counted = estimate([_accepted(text) for text in texts.values()])
        rules[rule] = {
            "rounds": int(harness.total(texts.values(), "rounds")),
            "counted": counted,
            "tokens_per_round": 1 + counted["mean"],  # each verdict adds one of the target's own
        }
        if rule in EXPECTED:
            rules[rule] |= {
                "expected": estimate([text["expected"][rule] / text["rounds"] for text in texts.values()]),
                "redrafted": int(harness.total(texts.values(), "redrafted")),
            }
    pairs = [(text, by_rule["block"][prompt]) for prompt, text in by_rule["tokenwise"].items()]
    return {
        "rules": rules,
        "block_minus_tokenwise": {
            "counted": estimate([_accepted(second) - _accepted(first) for first, second in pairs]),
            "expected": estimate([_gain(*pair) for pair in pairs]),
        },
    }


def _accepted(text: Json) -> float:
    return float(text["accepted"] / text["rounds"])


def _gain(*texts: Json) -> float:
    """What `block` accepts more a round in expectation, over the rounds of all `texts`."""
    gains = [text["expected"]["block"] - text["expected"]["tokenwise"] for text in texts]
    return sum(gains) / harness.total(texts, "rounds")


def table(document: Json) -> str:
    rows = []
    for temperature, by_gamma in document["summary"].items():
        for gamma, cell in by_gamma.items():
            for rule, found in cell["rules"].items():
                compared = cell["block_minus_tokenwise"] if rule == "block" else {}
                detectable = compared.get("expected", {}).get("detectable")
                rows.append(
                    [
                        temperature,
                        gamma,
                        f"`{rule}`",
                        f"{found['rounds']:,}",
                        _told(found["counted"]),
                        _told(found.get("expected")),
                        f"{found['tokens_per_round']:.2f}",
                        _told(compared.get("counted"), "+"),
                        _told(compared.get("expected"), "+"),
                        "" if detectable is None else f"{detectable:.3f}",
                    ]
                )
    head = [
        "T", "γ", "rule", "rounds", "accepted a round, counted", "expected", "tokens a round",
        "`block` - `tokenwise`, counted", "expected, on the same drafts", "told from 0 at",
    ]  # fmt: skip
    return harness.table(head, rows)


def _told(found: Json | None, sign: str = "") -> str:
    if found is None:
        return ""
    interval = found["interval"]
    return f"{found['mean']:{sign}.3f}" + ("" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.3f}")


def draw(document: Json, path: Path) -> None:
    """Above, accepted tokens a round of each rule; below, what `block` gains on the same drafts."""
    summary = document["summary"]
    colours = {"tokenwise": plots.GREY, "block": plots.BLUE, "coupled": plots.ORANGE}
    note = "demo pair; bars: 95 % over prompts; below: expected on the same drafts"

    def point(found: Json) -> plots.Point:
        low, high = found["interval"] or (found["mean"], found["mean"])
        return found["mean"], low, high

    with plots.picture(path, 2, len(summary), size=(4.6, 3.0), note=note, sharey=True) as panels:
        for column, (temperature, by_gamma) in enumerate(summary.items()):
            upper, lower = panels[:, column]
            groups = [f"γ = {gamma}" for gamma in by_gamma]
            rules = next(iter(by_gamma.values()))["rules"]
            series = {rule: [point(cell["rules"][rule]["counted"]) for cell in by_gamma.values()] for rule in rules}
            plots.bars(upper, groups, series, colours=colours, text="{:.2f}")
            gains = [point(cell["block_minus_tokenwise"]["expected"]) for cell in by_gamma.values()]
            plots.bars(lower, groups, {"gain": gains}, colours={"gain": plots.BLUE}, text="{:+.3f}")
            plots.level(lower, 0.0)
            upper.set_title(f"T = {temperature}", fontsize=10)
        panels[0][0].set_ylabel("accepted tokens a round")
        panels[1][0].set_ylabel("block - tokenwise")


if __name__ == "__main__":
    sys.exit(main())
