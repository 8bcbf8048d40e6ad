"""The writers of texts: Outrider and transformers, one text after another in turns, or many at once.

A closed loop has a number of streams, each of which asks for its next text when one has ended. In an open loop requests
arrive at set times, also while earlier ones are in progress.
"""

import hashlib
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from benchmarks.harness import PHASES, Json, Runs, progress, shuffled
from benchmarks.services import RULE, Services, await_
from outrider.client import AsyncClient
from outrider.evaluation.streams import Request, Served, phase_seconds, serve
from outrider.runtime.loader import cpu_computes_bfloat16

DTYPE = torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
"""Of models that transformers runs: without instructions for bfloat16, float32 is two to four times as fast."""
_TIMEOUT_S = 600.0
# Between texts: threads of OpenMP spin for milliseconds after their last operation, on processors that the next writer
# needs (measured after a text of llama.cpp's server: 15 ms of the next text's 100).
PAUSE_S = 0.03
# Each writer begins with so many tokens of its text, which are not measured: the writer before it has left caches cold,
# as those of a service at work never are.
_UNMEASURED_TOKENS = 8
# A block of the KV cache of continuous batching, and its largest batch. transformers cannot choose them on a CPU, where
# it asks psutil for the free memory.
_BLOCK_TOKENS = 64
_BATCH_TOKENS = 512


class WrongText(RuntimeError):
    """A contender wrote another number of tokens, or another text, than asked for: its speed means nothing."""


class Unavailable(RuntimeError):
    """A contender cannot run here; the text says why."""


@dataclass(frozen=True, slots=True)
class Task:
    """One text to write: exactly `new_tokens` tokens, past any end of sequence."""

    prompt: int
    token_ids: tuple[int, ...]
    new_tokens: int
    temperature: float
    seed: int


def tokenised(target: Path, texts: Sequence[str]) -> list[tuple[int, ...]]:
    tokenizer = AutoTokenizer.from_pretrained(target, local_files_only=True)
    return [tuple(tokenizer(text)["input_ids"]) for text in texts]


Write = Callable[[Task], Json]
"""Writes one text; returns the result of `text_run`."""


def text_run(
    name: str,
    task: Task,
    token_ids: Sequence[int],
    phases: dict[str, float],
    *,
    seconds: float,
    **more: float | None,
) -> Json:
    """One text as a run; raises `WrongText` where it has another length than asked for."""
    if len(token_ids) != task.new_tokens:
        raise WrongText(f"{name} wrote {len(token_ids)} tokens of prompt {task.prompt}, not {task.new_tokens}")
    known = {**dict.fromkeys(PHASES, 0.0), **phases}
    return {
        "seconds": seconds,
        "tokens": len(token_ids),
        "drafted": 0,
        "accepted": 0,
        "alpha": None,
        "digest": text_digest(token_ids),
        "phases": known | {"other": seconds - sum(known.values())},
        **more,
    }


def text_digest(token_ids: Sequence[int]) -> str:
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]


def _whole_length(task: Task) -> Json:
    return {"prompt": list(task.token_ids), "ignore_eos": True}


def outrider_writer(services: Services, ask: Callable[[Task], Json] = _whole_length, **options: Any) -> Write:
    """`Generate` with these options; with `gamma=0` the target writes alone, by `Decode`. `ask` makes the prompt and
    all that depends on the task.

    Under `block`, requests with the policy `adaptive` give no seed: with one they would share no statistics.
    """
    has_seed = options.get("speculation") != "adaptive" or options.get("rule", RULE) != RULE

    def write(task: Task) -> Json:
        request: Any = {
            "max_new_tokens": task.new_tokens, "temperature": task.temperature,
            "seed": task.seed if has_seed else None, "rule": RULE, **ask(task), **options,
        }  # fmt: skip
        begin = time.perf_counter()
        done = services.client.complete(**request)
        seconds = time.perf_counter() - begin
        statistics = done.statistics
        return text_run(
            "Outrider",
            task if request.get("ignore_eos") else replace(task, new_tokens=len(done.token_ids)),
            done.token_ids,
            phase_seconds(done.timings),  # drafting may overlap with the client's work
            seconds=seconds,
            rounds=statistics.num_rounds,
            drafted=statistics.num_draft_tokens,
            accepted=statistics.num_accepted_tokens,
            alpha=statistics.alpha if statistics.num_draft_tokens else None,
            cache_hits=statistics.num_outcome_cache_hits,
            cache_queries=statistics.num_outcome_cache_queries,
        )

    return write


class Passes:
    """Counts and times the forward passes of one model, by hooks that cost about a microsecond each."""

    def __init__(self, model: Any) -> None:
        self.reset()
        self._begin = 0.0
        model.register_forward_pre_hook(self._before, with_kwargs=True)
        model.register_forward_hook(self._after)

    def reset(self) -> None:
        self.count, self.tokens, self.seconds = 0, 0, 0.0

    def _before(self, module: Any, args: Any, options: Json) -> None:
        self.tokens += options["input_ids"].shape[1]
        self._begin = time.perf_counter()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._begin


def _passes_of(model: Any) -> Passes:
    """One for each model, shared by all its writers."""
    if not hasattr(model, "passes"):
        model.passes = Passes(model)
    passes: Passes = model.passes
    return passes


@lru_cache(maxsize=4)
def load_model(folder: Path, dtype: torch.dtype = DTYPE) -> Any:
    """The model of a folder. It writes on past its end-of-sequence ids."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def _generation_config(task: Task) -> GenerationConfig:
    """Nothing is filtered, and no token ends a text."""
    how: Json = {"do_sample": False}
    if task.temperature > 0:
        how = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=task.new_tokens, eos_token_id=-1, pad_token_id=0, use_cache=True, **how)


def transformers_writer(
    target: Any, *, threads: int | None = None, draft: Any = None, tokens: int = 5, lookup: int | None = None
) -> Write:
    """`generate` on a model with a dynamic cache.

    With a draft: assisted generation, `tokens` drafted a round. With `lookup`: prompt lookup, which copies so many
    tokens a round.
    """
    passes, drafts = _passes_of(target), _passes_of(torch.nn.Identity() if draft is None else draft)

    def write(task: Task) -> Json:
        options: Json = {"generation_config": _generation_config(task)}
        if draft is not None:
            draft.generation_config.num_assistant_tokens = tokens
            draft.generation_config.num_assistant_tokens_schedule = "constant"
            draft.generation_config.assistant_confidence_threshold = 0.0
            options["assistant_model"] = draft
        options["generation_config"].prompt_lookup_num_tokens = lookup
        prompt = torch.tensor([task.token_ids], device=target.device)
        if threads is not None:
            torch.set_num_threads(threads)
        torch.manual_seed(task.seed)
        passes.reset()
        drafts.reset()
        begin = time.perf_counter()
        with torch.inference_mode():
            written = target.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[0].tolist()
        seconds = time.perf_counter() - begin
        # A pass runs the drafted tokens and the last one before them; the first runs the prompt.
        drafted = passes.tokens - prompt.shape[1] - (passes.count - 1)
        return text_run(
            "transformers",
            task,
            written[prompt.shape[1] :],
            {"draft": drafts.seconds, "forward": passes.seconds},
            seconds=seconds,
            rounds=passes.count,
            drafted=drafted,
            accepted=task.new_tokens - passes.count if drafted else 0,  # the rest is the target's own
        )

    return write


def texts(
    prompts: Sequence[tuple[int, ...]], new_tokens: int, repetitions: int, temperatures: Sequence[float] = (0.0, 1.0)
) -> Iterator[tuple[Json, Task]]:
    """Every text with its keys, in order: repetitions outermost, and temperatures alternate."""
    for repetition in range(repetitions):
        for nth, prompt in enumerate(prompts):
            for at in temperatures:
                task = Task(nth, prompt, new_tokens, at, 1 + repetition * len(prompts) + nth)
                yield {"temperature": f"{at:g}", "repetition": repetition, "prompt": nth}, task


def warm_up(writers: Mapping[str, Write], tasks: Iterable[Task]) -> None:
    """Each writer writes each text; nothing is measured."""
    for task in tasks:
        for write in writers.values():
            write(task)


def take_turns(
    runs: Runs,
    where: Json,
    texts: Iterable[tuple[Json, Task]],
    writers: Mapping[str, Write],
    *,
    skips: Callable[[str, Json], bool] = lambda name, keys: False,
) -> None:
    """Adds a run for each text and writer: in turns, so that other work on the machine affects all writers alike.

    `where` has keys of all runs, `texts` the keys of each text. A run that is there already is not measured again. A
    writer's name is the key `arm`. Each text has an order of its own, which every second repetition reverses.
    """
    places: dict[Any, int] = {}
    for keys, task in texts:
        text = frozenset((keys | {"repetition": 0}).items())
        place = places.setdefault(text, len(places))
        if runs.has(**where, **keys):
            continue
        order = [name for name in shuffled(writers, keys.get("repetition", 0), place) if not skips(name, keys)]
        own = []
        for name in order:
            time.sleep(PAUSE_S)
            writers[name](replace(task, new_tokens=min(_UNMEASURED_TOKENS, task.new_tokens)))
            own.append({**where, **keys, "arm": name, **writers[name](task)})
        runs.add(*own)
        shown = ", ".join(f"{run['arm']} {run['tokens'] / run['seconds']:.0f}" for run in own)
        progress(f"{', '.join(str(value) for value in (where | keys).values())}: {shown} tokens/s")


Outcome = tuple[list[Served], dict[str, float]]
"""All requests of a run, and the contender's own counters: passes, processor time."""


def checked(name: str, tasks: Sequence[Task], served: list[Served]) -> list[Served]:
    """The same; raises `WrongText` where one is missing or, not refused, has another length."""
    if len(served) != len(tasks):
        raise WrongText(f"{name} served {len(served)} requests of {len(tasks)}")
    for task, each in zip(tasks, served, strict=True):
        if not each.refused and each.tokens != task.new_tokens:
            raise WrongText(f"{name} wrote {each.tokens} tokens of text {task.prompt}, not {task.new_tokens}")
    return served


class OutriderServer:
    """Our services. A text comes in one piece, as from the others; the draft service says when its first token was."""

    def __init__(self, services: Services, **options: Any) -> None:
        self._services = services
        self._options = {"rule": RULE, "ignore_eos": True, "joined_responses": True, **options}

    def settings(self) -> Json:
        return self._services.how | self._options

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        return self.closed(tasks, len(tasks), due)

    def closed(self, tasks: Sequence[Task], streams: int, due: Sequence[float] | None = None) -> Outcome:
        before = self._counters()
        served = await_(self._serve(tasks, streams, due))
        costs = {name: value - before[name] for name, value in self._counters().items()}
        return checked("Outrider", tasks, served), costs

    async def _serve(self, tasks: Sequence[Task], streams: int, due: Sequence[float] | None) -> list[Served]:
        # Without a seed, as most requests come: those with one share no acceptance statistics under `block`.
        requests: list[Request] = [
            (task.token_ids, self._options | {"max_new_tokens": task.new_tokens, "temperature": task.temperature})
            for task in tasks
        ]
        # A refused request is counted, not tried again.
        async with AsyncClient(self._services.draft.address, timeout=_TIMEOUT_S, retry=False) as client:
            await client.get_model()
            return [_with_first(each) for each in await serve(client, requests, streams, due)]

    def _counters(self) -> dict[str, float]:
        services = self._services
        verifier, draft = services.metrics_of(services.verifier), services.metrics_of(services.draft)
        return {
            "passes": verifier.get("outrider_verify_seconds_count", 0.0),
            "verifier_cpu_seconds": verifier.get("process_cpu_seconds_total", 0.0),
            "draft_cpu_seconds": draft.get("process_cpu_seconds_total", 0.0),
        }


def _with_first(served: Served) -> Served:
    """The text with its first token when the service had it: its client waits for all of them."""
    if served.finished is None:
        return served
    (came, count), *later = served.stamps
    first = min(served.due + served.finished.timings.time_to_first_token_us / 1e6, came)
    if count > 1 and not served.finished.statistics.num_drafts:  # one message of a text by the target alone
        return replace(served, stamps=((first, 1), (came, count - 1), *later))
    return replace(served, stamps=((first, count), *later))


class ContinuousBatching:
    """transformers' continuous batching of the target alone, in a closed loop."""

    def __init__(self, target: Path, *, threads: int, longest: int) -> None:
        """`longest`: tokens of a sequence, prompt included. Raises `Unavailable` where this transformers has none."""
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # `closed` reports its errors
        try:
            from transformers.generation import ContinuousBatchingConfig
        except ImportError as error:
            raise Unavailable(f"this transformers has no continuous batching: {error}") from error
        self._how: Json = {"threads": threads, "page_tokens": _BLOCK_TOKENS, "pass_tokens": _BATCH_TOKENS}
        self._config: Any = ContinuousBatchingConfig
        self._model = load_model(target)
        self._blocks = -(-longest // _BLOCK_TOKENS) + 1  # of a sequence

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        torch.set_num_threads(self._how["threads"])
        config = self._config(
            page_size=_BLOCK_TOKENS,
            num_blocks=streams * self._blocks,
            max_batch_tokens=_BATCH_TOKENS,
            max_requests_per_batch=streams,
            allow_block_sharing=False,
            seed=tasks[0].seed,
        )
        try:
            found = self._results(tasks, config)
        except Exception as error:  # the other contenders go on
            raise Unavailable(f"continuous batching failed: {type(error).__name__}: {error}") from error
        errors = [result.error for result in found if result.error is not None]
        if errors or len(found) < len(tasks):  # it logs errors and returns the rest
            raise Unavailable(f"continuous batching answered {len(found)} of {len(tasks)} requests: {errors[:1]}")
        began = min(result.created_time for result in found)
        # All requests are queued at the start. One is due when it leaves the queue: then a stream has ended a text.
        served = [
            Served(each.lifespan[0] - began, tuple((stamp - began, 1) for stamp in each.timestamps)) for each in found
        ]
        return checked("transformers", tasks, served), {}

    def _results(self, tasks: Sequence[Task], config: Any) -> list[Any]:
        """One for each task, in order; fewer if it stopped."""
        results: dict[str, Any] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=_generation_config(tasks[0]), continuous_batching_config=config, timeout=5
        ) as manager:
            asked = [
                manager.add_request(list(task.token_ids), max_new_tokens=task.new_tokens, record_timestamps=True)
                for task in tasks
            ]
            while len(results) < len(tasks):
                result = manager.get_result(timeout=1)
                if result is not None and result.is_finished():
                    results[result.request_id] = result
                elif result is None and not manager.is_running():
                    break
        return [results[each] for each in asked if each in results]

    def settings(self) -> Json:
        return self._how
