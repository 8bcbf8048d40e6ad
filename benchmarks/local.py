"""transformers as a contender, in this process: `generate` on the target, alone and with the draft as its assistant.

Its passes are counted and timed by hooks on the two models, which cost about a microsecond each.
"""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from benchmarks.contenders import Contender, Run, Task, check_length, digest

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class Local:
    """How transformers runs; threads are those of this process while it does."""

    dtype: str = "bfloat16"
    threads: int = 1


@dataclass(frozen=True, slots=True)
class Assistance:
    """How the assistant speculates; names and meanings are those of transformers' generation configuration."""

    num_assistant_tokens: int = 4
    num_assistant_tokens_schedule: str = "constant"
    assistant_confidence_threshold: float = 0.0


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


def unload() -> None:
    """Lets all loaded models go."""
    load.cache_clear()


class TransformersAlone(Contender):
    """`generate` on the target, with a cache that grows."""

    def __init__(self, target: Path, how: Local) -> None:
        self.how = how
        self._target = load(target, how.dtype)

    def write(self, task: Task) -> Run:
        seconds, token_ids = _generate(self._target, task, self.how.threads)
        check_length("transformers", len(token_ids), task)
        passes = self._target.passes
        return Run(
            seconds=seconds,
            tokens=len(token_ids),
            rounds=passes.count,
            drafted=0,
            accepted=0,
            alpha=None,
            digest=digest(token_ids),
            phases=_phases(seconds, forward=passes.seconds),
        )

    def settings(self) -> dict[str, Any]:
        return asdict(self.how)


class TransformersAssisted(Contender):
    """`generate` on the target with the draft as `assistant_model`."""

    def __init__(self, target: Path, draft: Path, how: Local, assistance: Assistance) -> None:
        self.how = how
        self.assistance = assistance
        self._target = load(target, how.dtype)
        self._draft = load(draft, how.dtype)

    def write(self, task: Task) -> Run:
        for name, value in asdict(self.assistance).items():
            setattr(self._draft.model.generation_config, name, value)
        self._draft.passes.reset()
        seconds, token_ids = _generate(self._target, task, self.how.threads, assistant_model=self._draft.model)
        check_length("assisted generation", len(token_ids), task)
        target, draft = self._target.passes, self._draft.passes
        return Run(
            seconds=seconds,
            tokens=len(token_ids),
            rounds=target.count,
            drafted=draft.count,  # one pass, one token
            accepted=len(token_ids) - target.count,  # the rest of each round is the target's own token
            alpha=None,
            digest=digest(token_ids),
            phases=_phases(seconds, draft=draft.seconds, forward=target.seconds),
        )

    def settings(self) -> dict[str, Any]:
        return asdict(self.how) | asdict(self.assistance)

    def tuned(self, **changes: Any) -> Assistance:
        """Its assistance with changes."""
        return replace(self.assistance, **changes)


def _generate(target: Counted, task: Task, threads: int, **options: Any) -> tuple[float, list[int]]:
    prompt = torch.tensor([task.token_ids])
    if task.temperature > 0:
        options |= {"do_sample": True, "temperature": task.temperature, "top_k": 0, "top_p": 1.0}
    else:
        options["do_sample"] = False
    torch.set_num_threads(threads)
    torch.manual_seed(task.seed)
    target.passes.reset()
    begin = time.perf_counter()
    with torch.inference_mode():
        written = target.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=task.new_tokens, use_cache=True, **options
        )
    seconds = time.perf_counter() - begin
    return seconds, written[0, prompt.shape[1] :].tolist()


def _phases(seconds: float, *, forward: float, draft: float = 0.0) -> dict[str, float]:
    return {"draft": draft, "wire": 0.0, "queue": 0.0, "forward": forward, "verify": 0.0} | {
        "other": seconds - draft - forward
    }
