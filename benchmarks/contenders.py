"""Who writes one text after another, Outrider and transformers, in turns; and the figures that compare them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks import harness
from benchmarks.harness import Bench, Json, number, tell
from benchmarks.services import RULE, Services
from outrider.client import Completion
from outrider.theory import improvement

PHASES = ("draft", "wire", "queue", "forward", "verify", "other")
"""Where the seconds of a text go. They add up to the wall clock; what does not occur is 0."""

TEMPERATURES = (0.0, 1.0)


class WrongLength(RuntimeError):
    """A contender wrote another number of tokens, or another text, than it was to: its speed means nothing."""


class Unavailable(RuntimeError):
    """A contender cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One text to write: exactly `new_tokens` tokens, whatever they say."""

    prompt: int
    token_ids: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int


Write = Callable[[Task], Json]
"""Writes one text; returns what it took, as `text_run` has it."""


def text_run(
    name: str,
    task: Task,
    token_ids: Sequence[int],
    phases: dict[str, float],
    *,
    seconds: float,
    rounds: int,
    drafted: int = 0,
    accepted: int = 0,
    alpha: float | None = None,
    **more: float,
) -> Json:
    """What one text took, by the clock of the caller.

    Raises:
        WrongLength: it came out shorter or longer than asked for.
    """
    if len(token_ids) != task.new_tokens:
        raise WrongLength(f"{name} wrote {len(token_ids)} tokens of prompt {task.prompt}, not {task.new_tokens}")
    known = {**dict.fromkeys(PHASES, 0.0), **phases}
    return {
        "seconds": seconds,
        "tokens": len(token_ids),
        "rounds": rounds,
        "drafted": drafted,
        "accepted": accepted,
        "alpha": alpha,
        "digest": hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16],
        "phases": known | {"other": seconds - sum(known.values())},
        **more,
    }


# --------------------------------------------------------------------------------------------------- Outrider


def outrider_writer(services: Services, **options: Any) -> Write:
    """`Generate` with these options; with `gamma=0` the target writes alone, by `Decode`.

    Under `block`, requests with the policy `adaptive` give no seed: with one they would share no statistics.
    """
    has_seed = options.get("speculation") != "adaptive" or options.get("rule", RULE) != RULE

    def write(task: Task) -> Json:
        asked: Any = {
            "max_new_tokens": task.new_tokens, "ignore_eos": True, "temperature": task.temperature,
            "seed": task.seed if has_seed else None, "rule": RULE, **options,
        }  # fmt: skip
        begin = time.perf_counter()
        done = services.client.complete(list(task.token_ids), **asked)
        return completion_run(done, time.perf_counter() - begin, task)

    return write


def completion_run(done: Completion, seconds: float, task: Task) -> Json:
    """What one text took, by the caller's clock and by what the services say. Drafting and emitting may overlap."""
    statistics, times = done.statistics, done.timings
    phases = {
        "draft": times.draft_us / 1e6,
        "wire": (times.verdict_us - times.queue_us - times.forward_us - times.verify_us) / 1e6,
        "queue": times.queue_us / 1e6,
        "forward": times.forward_us / 1e6,
        "verify": times.verify_us / 1e6,
    }
    return text_run(
        "Outrider",
        task,
        done.token_ids,
        phases,
        seconds=seconds,
        rounds=statistics.num_rounds,
        drafted=statistics.num_draft_tokens,
        accepted=statistics.num_accepted_tokens,
        alpha=statistics.alpha if statistics.num_draft_tokens else None,
        cache_hits=statistics.num_outcome_cache_hits,
        cache_queries=statistics.num_outcome_cache_queries,
    )


# ----------------------------------------------------------------------------------------------- transformers


class Passes:
    """Counts and times the forward passes of one model, by hooks that cost about a microsecond each."""

    def __init__(self, model: Any) -> None:
        self.reset()
        self._begin = 0.0
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def reset(self) -> None:
        self.count, self.seconds = 0, 0.0

    def _before(self, module: Any, args: Any) -> None:
        self._begin = time.perf_counter()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._begin


_passes_of = lru_cache(maxsize=4)(Passes)


@lru_cache(maxsize=4)
def load_model(folder: Path, dtype: torch.dtype = torch.bfloat16) -> Any:
    """The model of a folder. It writes on past its end-of-sequence ids."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def assist(draft: Any, tokens: int) -> None:
    """Makes the model draft so many tokens in each round of assisted generation, always."""
    draft.generation_config.num_assistant_tokens = tokens
    draft.generation_config.num_assistant_tokens_schedule = "constant"
    draft.generation_config.assistant_confidence_threshold = 0.0


def sampling(task: Task) -> GenerationConfig:
    """Nothing is filtered, and no token ends a text."""
    how: Json = {"do_sample": False}
    if task.temperature > 0:
        how = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=task.new_tokens, eos_token_id=-1, pad_token_id=0, use_cache=True, **how)


def transformers_writer(target: Path, *, threads: int, draft: Path | None = None, tokens: int = 5) -> Write:
    """`generate` on the target with a cache that grows; with an assistant that drafts `tokens` where there is one."""
    model, assistant = load_model(target), None if draft is None else load_model(draft)
    passes = _passes_of(model)
    drafts = Passes(torch.nn.Identity()) if assistant is None else _passes_of(assistant)

    def write(task: Task) -> Json:
        options: Json = {"generation_config": sampling(task)}
        if assistant is not None:
            assist(assistant, tokens)
            options["assistant_model"] = assistant
        prompt = torch.tensor([task.token_ids])
        torch.set_num_threads(threads)
        torch.manual_seed(task.seed)
        passes.reset()
        drafts.reset()
        begin = time.perf_counter()
        with torch.inference_mode():
            written = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        seconds = time.perf_counter() - begin
        return text_run(
            "transformers",
            task,
            written[0, prompt.shape[1] :].tolist(),
            {"draft": drafts.seconds, "forward": passes.seconds},
            seconds=seconds,
            rounds=passes.count,
            drafted=drafts.count,  # one pass, one token
            accepted=task.new_tokens - passes.count if drafts.count else 0,  # the rest is the target's own
        )

    return write


# --------------------------------------------------------------------------------------------------- in turns


def tokenised(target: Path, texts: Sequence[str]) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    return [tuple(tokenizer(text)["input_ids"]) for text in texts]


def texts(
    prompts: Sequence[tuple[int, ...]],
    new_tokens: int,
    repetitions: int,
    temperatures: Sequence[float] = TEMPERATURES,
) -> Iterator[tuple[Json, Task]]:
    """Every text with its keys, in order: repetitions outermost, and temperatures alternate."""
    for repetition in range(repetitions):
        for nth, prompt in enumerate(prompts):
            for at in temperatures:
                task = Task(nth, prompt, new_tokens, at, 1 + repetition * len(prompts) + nth)
                yield {"temperature": f"{at:g}", "repetition": repetition, "prompt": nth}, task


def take_turns(
    bench: Bench,
    where: Json,
    texts: Iterator[tuple[Json, Task]],
    writers: Mapping[str, Write],
    *,
    turn: int = 0,
    skips: Callable[[str, Json], bool] = lambda name, keys: False,
) -> None:
    """Adds what each text takes each writer, whatever else the machine does falling on all of them alike.

    Args:
        bench: where the runs go; what it has already is not measured again.
        where: keys of all runs.
        texts: what is written, with the keys of each.
        writers: by name, the key `arm`; each text begins with another one.
        turn: how many of them the first text passes over.
        skips: whether one writes no such text.
    """
    for keys, task in texts:
        turn += 1
        if bench.has(**where, **keys):
            continue
        order = [name for name in harness.rotated(writers, turn) if not skips(name, keys)]
        runs = [{**where, **keys, "arm": name, **writers[name](task)} for name in order]
        bench.add(*runs)
        shown = ", ".join(f"{run['arm']} {run['tokens'] / run['seconds']:.0f}" for run in runs)
        tell(f"{', '.join(str(value) for value in (where | keys).values())}: {shown} tokens/s")


# ---------------------------------------------------------------------------------------------------- figures


def compared(runs: Sequence[Json], reference: str, names: Sequence[str]) -> dict[str, Json]:
    """The arms of `names`; ratios are to the `reference` in the same repetition.

    `same_text`: the share of texts that are the reference's, token for token.
    """
    by_arm = harness.grouped(runs, "arm")
    rates = {name: harness.rates(own) for name, own in by_arm.items()}
    said = {(run["repetition"], run["prompt"]): run["digest"] for run in by_arm[reference]}
    found = {}
    for name in (name for name in names if name in by_arm):
        own = by_arm[name]
        same = [said.get((run["repetition"], run["prompt"])) == run["digest"] for run in own]
        found[name] = {
            "tokens_per_second": median(rates[name].values()),
            "repetitions": len(rates[name]),
            **harness.ratio(rates[name], rates[reference]),
            **per_round(own),
            "same_text": sum(same) / len(same),
        }
    return found


def per_round(runs: Sequence[Json]) -> Json:
    """Means over all rounds of all texts, those that read the prompt included; times in microseconds."""
    rounds, drafted = harness.total(runs, "rounds"), harness.total(runs, "drafted")
    queries = sum(run.get("cache_queries", 0) for run in runs)
    times = {phase: 1e6 * sum(run["phases"][phase] for run in runs) / rounds for phase in PHASES}
    return {
        "texts": len(runs),
        "rounds": int(rounds),
        "gamma": drafted / rounds,
        "alpha": harness.alpha_of(runs),
        "accepted_share": harness.total(runs, "accepted") / drafted if drafted else None,
        "tokens_per_round": harness.total(runs, "tokens") / rounds,
        "hit_rate": sum(run["cache_hits"] for run in runs) / queries if queries else None,
        "round_us": times,
        "draft_step_us": times["draft"] * rounds / drafted if drafted else None,  # t_q
        "target_pass_us": times["forward"],  # t_p(γ+1)
        "round_trip_us": times["wire"] + times["queue"] + times["verify"],  # R, acceptance included
    }


def predicted_ratio(arm: Json, alpha: float | None, alone: float) -> float | None:
    """The speed-up of [L Thm 3.8] from an arm's measured times, over a target alone of `alone` tokens a second."""
    if not arm["draft_step_us"] or alpha is None:
        return None
    step = 1e6 / alone
    return improvement(
        min(alpha, 1.0),
        round(arm["gamma"]),
        c=arm["draft_step_us"] / step,
        round_trip=arm["round_trip_us"] / step,
        verify_cost=arm["target_pass_us"] / step,
    )


COLUMNS: dict[str, Callable[[Json], str]] = {
    "tokens/s": lambda arm: number(arm["tokens_per_second"], 1),
    "ratio": lambda arm: harness.between(arm),
    "α": lambda arm: number(arm["alpha"], 3),
    "γ": lambda arm: number(arm["gamma"] or None, 1),
    "tokens/round": lambda arm: number(arm["tokens_per_round"]),
    "t_q µs": lambda arm: number(arm["draft_step_us"], 0),
    "t_p(γ+1) µs": lambda arm: number(arm["target_pass_us"], 0),
    "R µs": lambda arm: number(arm["round_trip_us"] or None, 0),
    "hits": lambda arm: "–" if arm["hit_rate"] is None else f"{arm['hit_rate']:.0%}",
}


def arms_table(summary: Json, keys: Sequence[str], **more: Callable[[Json], str]) -> str:
    """A row for each arm of a summary that is nested by `keys`; `more` are columns by their heads."""
    columns = COLUMNS | more
    rows = [
        [*where, *(column(arm) for column in columns.values())] for where, arm in harness.flat(summary, len(keys) + 1)
    ]
    return harness.table([*keys, "", *columns], rows)
