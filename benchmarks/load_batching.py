"""transformers under load, in this process, with the target alone: continuous batching, and static batches.

Continuous batching is `generate_batch` in the closed loop, with room for as many requests as there are streams, and its
manager in the open loop, which takes requests as they come. A static batch is `generate` on left-padded prompts, and
stands beside it as what one had before. Neither knows anything of Outrider.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.contenders import Task
from benchmarks.load_contenders import LoadContender, Outcome, Served, Unavailable, check
from benchmarks.local import Local, load

# A page is what its cache gives out at once; pass and page sizes cannot be found out by themselves on a CPU, where
# transformers asks psutil for the free memory.
_PAGE_TOKENS = 64
_PASS_TOKENS = 512
_POLL_S = 1.0
_STALL_S = 300.0


class ContinuousBatching(LoadContender):
    """`generate_batch` on the target alone. `longest` is the most tokens of a sequence, its text included."""

    def __init__(self, target: Path, how: Local, *, longest: int, most: int) -> None:
        """`most`: requests in progress at once in the open loop, where nothing else bounds them.

        Raises:
            Unavailable: this transformers has none.
        """
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)  # what fails is reported here
        try:
            from transformers.generation import ContinuousBatchingConfig
        except ImportError as error:
            raise Unavailable(f"this transformers has no continuous batching: {error}") from error
        self.how = how
        self._config: Any = ContinuousBatchingConfig
        self._model = load(target, how.dtype).model
        self._longest = longest
        self._most = most

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        torch.set_num_threads(self.how.threads)
        results = self._asked(
            lambda: self._model.generate_batch(
                [list(task.token_ids) for task in tasks],
                generation_config=_sampling(tasks[0]),
                continuous_batching_config=self._room(tasks[0].seed, streams),
                record_timestamps=True,
            )
        )
        found = list(results.values())  # in the order of the prompts
        self._none_missing(found, len(tasks))
        began = min(result.created_time for result in found)
        # All are there from the start, as the interface asks. A stream asks for its next text when one of its texts
        # ends, which is when this one leaves the queue.
        served = [self._served(result, began, result.lifespan[0] - began) for result in found]
        return check("transformers", tasks, Outcome(served))

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        torch.set_num_threads(self.how.threads)
        found, began = self._asked(lambda: self._arriving(tasks, due))
        self._none_missing(found, len(tasks))
        served = [self._served(result, began, at) for result, at in zip(found, due, strict=True)]
        return check("transformers", tasks, Outcome(served))

    def settings(self) -> dict[str, Any]:
        return {
            "dtype": self.how.dtype,
            "threads": self.how.threads,
            "page_tokens": _PAGE_TOKENS,
            "pass_tokens": _PASS_TOKENS,
        }

    def _arriving(self, tasks: Sequence[Task], due: Sequence[float]) -> tuple[list[Any], float]:
        results: dict[str, Any] = {}
        with self._model.continuous_batching_context_manager(
            generation_config=_sampling(tasks[0]),
            continuous_batching_config=self._room(tasks[0].seed, self._most),
        ) as manager:
            began = time.perf_counter()
            names = []
            for task, at in zip(tasks, due, strict=True):
                time.sleep(max(0.0, began + at - time.perf_counter()))
                names.append(
                    manager.add_request(list(task.token_ids), max_new_tokens=task.new_tokens, record_timestamps=True)
                )
            last = time.monotonic()
            while len(results) < len(tasks):
                result = manager.get_result(timeout=_POLL_S)
                if result is not None and result.is_finished():
                    results[result.request_id] = result
                    last = time.monotonic()
                elif result is None and (not manager.is_running() or time.monotonic() - last > _STALL_S):
                    break
        return [results[name] for name in names if name in results], began

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

    def _asked(self, ask: Any) -> Any:
        try:
            return ask()
        except Exception as error:  # whatever it is, the others are still to be measured
            raise Unavailable(f"continuous batching failed: {type(error).__name__}: {error}") from error

    def _none_missing(self, found: Sequence[Any], count: int) -> None:
        """`generate_batch` logs what goes wrong and returns the rest."""
        errors = [result.error for result in found if result.error is not None]
        if errors:
            raise Unavailable(f"continuous batching failed {len(errors)} of {count} requests: {errors[0]}")
        if len(found) < count:
            raise Unavailable(f"continuous batching ended with {len(found)} of {count} requests answered")

    def _served(self, result: Any, began: float, due: float) -> Served:
        return Served(due, tuple((stamp - began, 1) for stamp in result.timestamps), rounds=len(result.timestamps))


class StaticBatches(LoadContender):
    """`generate` on one left-padded batch after the other; none begins before the last one has ended."""

    def __init__(self, target: Path, how: Local) -> None:
        self.how = how
        self._model = load(target, how.dtype).model

    def closed(self, tasks: Sequence[Task], streams: int) -> Outcome:
        torch.set_num_threads(self.how.threads)
        began = time.perf_counter()
        served: list[Served] = []
        for first in range(0, len(tasks), streams):
            batch = tasks[first : first + streams]
            due = time.perf_counter() - began
            stamps = tuple((stamp - began, 1) for stamp in self._write(batch))
            served += [Served(due, stamps, rounds=len(stamps))] * len(batch)
        return check("transformers", tasks, Outcome(served))

    def open(self, tasks: Sequence[Task], due: Sequence[float]) -> Outcome:
        raise Unavailable("a static batch takes nobody in while it runs")

    def settings(self) -> dict[str, Any]:
        return {"dtype": self.how.dtype, "threads": self.how.threads}

    def _write(self, batch: Sequence[Task]) -> list[float]:
        """When each step of the batch ended, on `time.perf_counter()`."""
        length = max(len(task.token_ids) for task in batch)
        prompts = torch.tensor([[0] * (length - len(task.token_ids)) + list(task.token_ids) for task in batch])
        real = torch.tensor([[0] * (length - len(task.token_ids)) + [1] * len(task.token_ids) for task in batch])
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


def _sampling(task: Task) -> GenerationConfig:
    """Nothing is filtered, and no token ends a text."""
    law: dict[str, Any] = {"do_sample": False}
    if task.temperature > 0:
        law = {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    return GenerationConfig(max_new_tokens=task.new_tokens, eos_token_id=-1, pad_token_id=0, use_cache=True, **law)
