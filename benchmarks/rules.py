"""The drafted tokens that each exact rule accepts: through both services, on equal prompts, with equally many rounds.

*Counted* are the tokens that the services accepted; other work on the machine does not change them. *Expected* has less
noise: the same drafts are drawn again with `Propose`, the target's distributions at them come from a forward pass in
this process, and the uniforms of acceptance are integrated out, so `tokenwise` and `block` are compared on the same
drafts. A prompt is the unit: rounds of one text are not independent. Intervals are 95 %.
"""

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import Any, cast

import grpc
import numpy as np
import torch
from transformers import DynamicCache

from benchmarks import harness
from benchmarks.contenders import load_model
from benchmarks.harness import Bench, Json, digest_of, progress
from benchmarks.services import ANYWHERE, Services
from kernels.sampling import SamplingParams, probabilities
from outrider.client import AcceptanceRule, Chunk, Client, Round, Started
from outrider.evaluation import pictures
from outrider.evaluation.intervals import student_quantile
from outrider.service.wire import decode_sparse
from protos.outrider.v1 import draft_service_pb2, sampling_pb2, speculation_pb2
from protos.outrider.v1.draft_service_pb2_grpc import DraftServiceStub

RULES = (AcceptanceRule.TOKENWISE, AcceptanceRule.BLOCK, AcceptanceRule.COUPLED)
_TIMEOUT_S = 120.0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = harness.parser("rules", __doc__, quick="two prompts, few rounds")
    parser.set_defaults(prompts=32, rounds=16, temperatures=[0.7, 1.0], gammas=[2, 4, 8])
    few = {"prompts": 2, "rounds": 2, "temperatures": [1.0], "gammas": [2]}
    given = harness.parse(parser, arguments, few)
    summarise = harness.summary_of(("temperature", "gamma"), figures)
    return harness.run("rules", given, measure, summarise, table, draw)


@dataclass(frozen=True, slots=True)
class Drafted:
    """One drafted token x, with the distributions at its position."""

    p: float  # p(x)
    q: float  # q̂(x)
    masses: np.ndarray  # p on the support of q̂, `[K]`
    weights: np.ndarray  # q̂ there, `[K]`


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
    """Mean of independent values with its 95 % interval; one value has none."""
    mean = fmean(values)
    if len(values) < 2:
        return {"mean": mean, "interval": None}
    margin = student_quantile(len(values) - 1) * stdev(values) / len(values) ** 0.5
    return {"mean": mean, "interval": [mean - margin, mean + margin]}


def measure(bench: Bench) -> None:
    given = bench.given
    bench.document["models"] = {"target": digest_of(given.target), "draft": digest_of(given.draft)}
    with Services(given.target, given.draft, dtype="float32", place=ANYWHERE) as services:
        write_all(bench, services.client)


def write_all(bench: Bench, client: Client) -> None:
    given = bench.given
    target = Target(given.target, client.get_model().target.vocab_size)
    with grpc.insecure_channel(client.address) as channel:
        for temperature in given.temperatures:
            for gamma in given.gammas:
                for rule in RULES:
                    keys = {"temperature": f"{temperature:g}", "gamma": gamma, "rule": rule.value}
                    for nth, prompt in enumerate(bench.some_prompts):
                        if bench.has(**keys, prompt=nth):
                            continue
                        text = write(client, prompt, temperature, gamma, rule, seed=1 + nth, rounds=given.rounds)
                        run = {"rounds": len(text.rounds), "accepted": sum(each.accepted for each in text.rounds)}
                        if rule.value in EXPECTED:
                            run |= _expected(text, gamma, channel, target)
                        bench.add({**keys, "prompt": nth, **run})
                    progress(f"T = {temperature:g}, γ = {gamma}, {rule.value}")


@dataclass(frozen=True, slots=True)
class Text:
    prompt: tuple[int, ...]
    sampling: sampling_pb2.SamplingParams
    output: tuple[int, ...]
    rounds: tuple[Round, ...]


def write(
    client: Client, prompt: str, temperature: float, gamma: int, rule: AcceptanceRule, *, seed: int, rounds: int
) -> Text:
    """A text of `rounds` whole rounds."""
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


def _expected(text: Text, gamma: int, channel: grpc.Channel, target: "Target") -> Json:
    """Accepted tokens of the text's drafts that each rule expects, and how many rounds were drafted alike."""
    expected = dict.fromkeys(EXPECTED, 0.0)
    same = 0
    target.begin()
    for each, proposal in zip(text.rounds, redrafted(text, gamma, channel), strict=True):
        tokens = list(proposal.token_ids)
        same += tuple(tokens) == each.drafted_token_ids
        known = [*text.prompt, *text.output[: each.output_length]]
        p = target.after(known, tokens, text.sampling.temperature)
        path = [_drafted(*position) for position in zip(tokens, p, proposal.distributions, strict=True)]
        for rule, formula in EXPECTED.items():
            expected[rule] += formula(path)
    return {"redrafted": same, "expected": expected}


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
        self._committed = 0  # tokens of the text in the cache; those after them were drafted

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


def redrafted(text: Text, gamma: int, channel: grpc.Channel) -> list[speculation_pb2.Proposal]:
    """The proposals of a text, drawn again: the seed is the same."""
    Request = draft_service_pb2.ProposeRequest
    requests = [Request(open=draft_service_pb2.OpenDraft(prompt_token_ids=text.prompt, sampling=text.sampling))]
    done = 0  # output tokens
    for nth, each in enumerate(text.rounds, start=1):
        advance = draft_service_pb2.Advance(
            round=nth,
            base_length=len(text.prompt) + done,
            committed_token_ids=text.output[done : each.output_length],
            gamma=gamma,
        )
        requests.append(Request(advance=advance))
        done = each.output_length
    for request in requests:
        request.sequence_id = "redraft"
    replies: Iterator[Any] = DraftServiceStub(channel).Propose(iter(requests), timeout=_TIMEOUT_S)
    return [reply.proposal for reply in replies if reply.WhichOneof("kind") == "proposal"]


def figures(runs: Sequence[Json]) -> Json:
    """Each rule's accepted tokens a round, and how many more `block` accepts than `tokenwise`.

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
    """The tokens a round that `block` accepts beyond `tokenwise` in expectation, over the rounds of all `texts`."""
    gains = [text["expected"]["block"] - text["expected"]["tokenwise"] for text in texts]
    return sum(gains) / harness.total(texts, "rounds")


def table(document: Json) -> str:
    """A row for each rule; the difference is in that of `block`."""
    summary: Json = {}
    for (temperature, gamma), cell in harness.flat(document["summary"], 2):
        rules = {f"`{rule}`": found for rule, found in cell["rules"].items()}
        rules["`block`"] = rules["`block`"] | {"gain": cell["block_minus_tokenwise"]}
        summary.setdefault(temperature, {})[gamma] = rules
    columns: harness.Columns = {
        "rounds": lambda found: f"{found['rounds']:,}",
        "accepted a round, counted": lambda found: _mean(found["counted"]),
        "expected": lambda found: _mean(found.get("expected")),
        "`block` - `tokenwise`, counted": lambda found: _mean(found.get("gain", {}).get("counted"), "+"),
        "expected, on the same drafts": lambda found: _mean(found.get("gain", {}).get("expected"), "+"),
    }
    return harness.summary_table(summary, ["T", "γ", "rule"], columns)


def _mean(found: Json | None, sign: str = "") -> str:
    if found is None:
        return ""
    interval = found["interval"]
    return f"{found['mean']:{sign}.3f}" + ("" if interval is None else f" ± {(interval[1] - interval[0]) / 2:.3f}")


def draw(document: Json, path: Path) -> None:
    summary = document["summary"]
    colours = {"tokenwise": pictures.GREY, "block": pictures.BLUE, "coupled": pictures.ORANGE}
    note = "demo pair; bars: 95 % over prompts; below: expected on the same drafts"

    def point(found: Json) -> pictures.Point:
        low, high = found["interval"] or (found["mean"], found["mean"])
        return found["mean"], low, high

    with pictures.picture(path, 2, len(summary), size=(4.6, 3.0), note=note, sharey=True) as panels:
        for column, (temperature, by_gamma) in enumerate(summary.items()):
            upper, lower = panels[:, column]
            groups = [f"γ = {gamma}" for gamma in by_gamma]
            rules = next(iter(by_gamma.values()))["rules"]
            series = {rule: [point(cell["rules"][rule]["counted"]) for cell in by_gamma.values()] for rule in rules}
            pictures.bars(upper, groups, series, colours=colours, text="{:.2f}")
            gains = [point(cell["block_minus_tokenwise"]["expected"]) for cell in by_gamma.values()]
            pictures.bars(lower, groups, {"gain": gains}, colours={"gain": pictures.BLUE}, text="{:+.3f}")
            pictures.level(lower, 0.0)
            upper.set_title(f"T = {temperature}", fontsize=10)
        panels[0][0].set_ylabel("accepted tokens a round")
        panels[1][0].set_ylabel("block - tokenwise")


if __name__ == "__main__":
    sys.exit(main())
