"""transformers as a contender, in this process: `generate` alone, with an assistant, in batches, and continuously.

Passes of single texts are counted and timed by hooks on the models, which cost about a microsecond each. It knows
nothing of Outrider.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.contenders import Outcome, Served, Server, Task, Unavailable, Writer, checked, text_run
from benchmarks.harness import Json

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
# A page is what the cache of continuous batching gives out at once; page and pass sizes cannot be found out by
# themselves on a CPU, where transformers asks psutil for the free memory.
_PAGE_TOKENS = 64
_PASS_TOKENS = 512
_POLL_S = 1.0
_STALL_S = 300.0


class Passes:
    """Counts and times the forward passes of one model."""

    def __init__(self, model: Any) -> None:
        self.count = 0
        self.seconds = 0.0
        self._begin = 0.0
        model.register_forward_pre_hook(self._before)
        model.register_forward_hook(self._after)

    def reset(self) -> None:
        """From zero again."""
        self.count, self.seconds = 0, 0.0

    def _before(self, module: Any, args: Any) -> None:
        self._begin = time.perf_counter()

    def _after(self, module: Any, args: Any, output: Any) -> None:
        self.count += 1
        self.seconds += time.perf_counter() - self._begin


@dataclass(frozen=True, slots=True)
class Counted:
    """A model with its passes counted."""

    model: Any
    passes: Passes


@lru_cache(maxsize=8)
def load(folder: Path, dtype: str) -> Counted:
    """The model of a folder, once per number format. It writes on past its end-of-sequence ids."""
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[dtype], local_files_only=True).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return Counted(model, Passes(model))


def _sampling(task: Task) -> GenerationConfig:
    """Nothing is filtered, and no token ends a text."""
    sampling: Json = {"do_sample": False}
    if task.temperature > 0:
        sampling = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=task.new_tokens, eos_token_id=-1, pad_token_id=0, use_cache=True, **sampling)


class TransformersWriter(Writer):
    """`generate` on the target with a cache that grows; with a draft as its assistant where there is one."""

    def __init__(
        self, target: Path, *, dtype: str = "bfloat16", threads: int = 1, draft: Path | None = None, tokens: int = 5
    ) -> None:
        """`tokens` of the assistant are drafted in each round, always."""
        self._how: Json = {"dtype": dtype, "threads": threads}
        if draft is not None:
            self._how["assistant_tokens"] = tokens
        self._target = load(target, dtype)
        self._draft = None if draft is None else load(draft, dtype)

    def write(self, task: Task) -> Json:
        options: Json = {"generation_config": _sampling(task)}
        target, draft = self._target.passes, Passes(torch.nn.Identity()) if self._draft is None else self._draft.passes
        if self._draft is not None:
            options["assistant_model"] = self._draft.model
            configuration = self._draft.model.generation_config
            configuration.num_assistant_tokens = self._how["assistant_tokens"]
            configuration.num_assistant_tokens_schedule = "constant"
            configuration.assistant_confidence_threshold = 0.0
        prompt = torch.tensor([task.token_ids])
        torch.set_num_threads(self._how["threads"])
        torch.manual_seed(task.seed)
        target.reset()
        draft.reset()
        begin = time.perf_counter()
        with torch.inference_mode():
            written = self._target.model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        seconds = time.perf_counter() - begin
        return text_run(
            "transformers",
            task,
            written[0, prompt.shape[1] :].tolist(),
            {"draft": draft.seconds, "forward": target.seconds},
            seconds=seconds,
            rounds=target.count,
            drafted=draft.count,  # one pass, one token
            accepted=task.new_tokens - target.count if draft.count else 0,  # the rest is the target's own
        )

    def settings(self) -> Json:
        return self._how


class ContinuousBatching(Server):
    """`generate_batch` on the target alone in the closed loop, and its manager in the open one."""

    def __init__(self, target: Path, *, dtype: str, threads: int, longest: int, most: int) -> None:
        """`longest`: tokens of a sequence, its text included; `most`: requests in progress in the open loop.

        Raises:
            Unavailable: this transformers has none.
        """
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # what fails is reported here
        try:
            from transformers.generation import ContinuousBatchingConfig
        except ImportError as error:
            raise Unavailable(f"this transformers has no continuous batching: {error}") from error
        self._how: Json = {"dtype": dtype, "threads": threads, "page_tokens": _PAGE_TOKENS, "pass_tokens": _PASS_TOKENS}
        self._config: Any = ContinuousBatchingConfig
        self._model = load(target, dtype).model
        self._longest = longest
        self._most = most

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        def ask() -> list[Any]:
            results = self._model.generate_batch(
                [list(task.token_ids) for task in tasks],
                generation_config=_sampling(tasks[0]),
                continuous_batching_config=self._room(tasks[0].seed, streams),
                record_timestamps=True,
            )
            return list(results.values())  # in the order of the prompts

        found = self._asked(ask, len(tasks))
        began = min(result.created_time for result in found)
        # All are there from the start, as the interface asks. A stream asks for its next text when one of its texts
        # ends, which is when this one leaves the queue.
        return checked("transformers", tasks, [_served(each, began, each.lifespan[0] - began) for each in found]), {}

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        began = 0.0

        def ask() -> list[Any]:
            nonlocal began
            with self._model.continuous_batching_context_manager(
                generation_config=_sampling(tasks[0]),
                continuous_batching_config=self._room(tasks[0].seed, self._most),
            ) as manager:
                began = time.perf_counter()
                return _arriving(manager, tasks, due, began)

        found = self._asked(ask, len(tasks))
        served = [_served(each, began, at) for each, at in zip(found, due, strict=True)]
        return checked("transformers", tasks, served), {}

    def settings(self) -> Json:
        return self._how

    def _room(self, seed: int, requests: int) -> Any:
        pages = -(-self._longest // _PAGE_TOKENS) + 1
        return self._config(
            page_size=_PAGE_TOKENS,
            num_blocks=requests * pages,
            max_batch_tokens=_PASS_TOKENS,
            max_requests_per_batch=requests,
            allow_block_sharing=False,
            seed=seed,
        )

    def _asked(self, ask: Callable[[], list[Any]], count: int) -> list[Any]:
        torch.set_num_threads(self._how["threads"])
        try:
            found = ask()
        except Exception as error:  # whatever it is, the others are still to be measured
            raise Unavailable(f"continuous batching failed: {type(error).__name__}: {error}") from error
        errors = [result.error for result in found if result.error is not None]
        if errors or len(found) < count:  # `generate_batch` logs what goes wrong and returns the rest
            raise Unavailable(
                f"continuous batching answered {len(found) - len(errors)} of {count} requests: {errors[:1]}"
            )
        return found


def _arriving(manager: Any, tasks: Sequence[Task], due: Sequence[float], began: float) -> list[Any]:
    results: dict[str, Any] = {}
    names = []
    for task, at in zip(tasks, due, strict=True):
        time.sleep(max(0.0, began + at - time.perf_counter()))
        names.append(manager.add_request(list(task.token_ids), max_new_tokens=task.new_tokens, record_timestamps=True))
    last = time.monotonic()
    while len(results) < len(tasks):
        result = manager.get_result(timeout=_POLL_S)
        if result is not None and result.is_finished():
            results[result.request_id] = result
            last = time.monotonic()
        elif result is None and (not manager.is_running() or time.monotonic() - last > _STALL_S):
            break
    return [results[name] for name in names if name in results]


def _served(result: Any, began: float, due: float) -> Served:
    return Served(due, tuple((stamp - began, 1) for stamp in result.timestamps), rounds=len(result.timestamps))


class StaticBatches(Server):
    """`generate` on one left-padded batch after the other; none begins before the last one has ended."""

    def __init__(self, target: Path, *, dtype: str, threads: int) -> None:
        self._how: Json = {"dtype": dtype, "threads": threads}
        self._model = load(target, dtype).model

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        torch.set_num_threads(self._how["threads"])
        began = time.perf_counter()
        served: list[Served] = []
        for first in range(0, len(tasks), streams):
            batch = tasks[first : first + streams]
            due = time.perf_counter() - began
            stamps = tuple((stamp - began, 1) for stamp in self._write(batch))
            served += [Served(due, stamps, rounds=len(stamps))] * len(batch)
        return checked("transformers", tasks, served), {}

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        raise Unavailable("a static batch admits no request while it runs")

    def settings(self) -> Json:
        return self._how

    def _write(self, batch: Sequence[Task]) -> list[float]:
        """When each step of the batch ended, on `time.perf_counter()`."""
        length = max(len(task.token_ids) for task in batch)
        padding = [length - len(task.token_ids) for task in batch]
        prompts = torch.tensor([[0] * pad + list(task.token_ids) for pad, task in zip(padding, batch, strict=True)])
        real = torch.tensor([[0] * pad + [1] * (length - pad) for pad in padding])
        steps = _Steps()
        torch.manual_seed(batch[0].seed)
        with torch.inference_mode():
            self._model.generate(
                prompts,
                attention_mask=real,
                generation_config=_sampling(batch[0]),
                stopping_criteria=StoppingCriteriaList([steps]),
            )
        return steps.stamps


class _Steps(StoppingCriteria):
    """Stops nothing; it is called after each step."""

    def __init__(self) -> None:
        self.stamps: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **options: Any) -> torch.Tensor:
        self.stamps.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool)
