"""The draft's engine alone, and sequences of it driven by hand."""

import queue
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, TypeVar

from draft_service.drafters.base import CheapDrafter, Draft, DraftError, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.model import ModelDrafter
from draft_service.drafters.sequence import Close, Propose
from draft_service.drafters.staged import Staging
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig
from outrider.runtime.loader import LoadedModel
from outrider.runtime.torch_runner import TorchRunner

VOCABULARY = 2000  # less than the logits have columns: the rest is padding
CONFIG = SparseConfig(keep_mass=0.98, max_support=40)
PROMPT = [5, 17, 300, 42, 7, 7, 1999]
PLAIN = LogitRules()
TIMEOUT_S = 60.0

Kind = TypeVar("Kind", bound=DraftEngine)


def engine_of(
    loaded: LoadedModel,
    kind: type[DraftEngine] = DraftEngine,
    *,
    vocab_size: int = VOCABULARY,
    config: SparseConfig = CONFIG,
    prefill_tokens: int = 16,
    guesses: int = 0,
    max_sequences: int = 4,
    max_length: int = 96,
    prefix_cache: bool = True,
    **pool: Any,
) -> Any:
    """An engine that is not started; `guesses` tokens at once, in staged drafting."""
    runner = TorchRunner.build(loaded, max_sequences=max_sequences, max_length=max_length, **pool)
    return kind(
        runner,
        vocab_size=vocab_size,
        config=config,
        prefill_tokens=prefill_tokens,
        staging=Staging(guesses, loaded.vocab_size),
        threads=1,
        prefix_cache=prefix_cache,
    )


@contextmanager
def running(engine: Kind) -> Iterator[Kind]:
    engine.start()
    try:
        yield engine
    finally:
        engine.stop()


class Driver:
    """One sequence of an engine, driven by hand; `cheap` guesses for it, where there is one."""

    def __init__(
        self,
        engine: DraftEngine,
        opening: DraftSequence,
        cheap: CheapDrafter | None = None,
        *,
        parallel: bool = False,
    ) -> None:
        self.engine = engine
        self.sequence = ModelDrafter(engine, cheap=cheap, parallel=parallel).begin(opening)
        self._results: queue.SimpleQueue[Draft | DraftError] = queue.SimpleQueue()

    def request(self, gamma: int, committed: Sequence[int] = ()) -> None:
        self.engine.post(Propose(self.sequence, list(committed), gamma, self._results.put, time.perf_counter()))

    @property
    def is_done(self) -> bool:
        """Whether `result` would return at once."""
        return not self._results.empty()

    def result(self) -> Draft:
        result = self._results.get(timeout=TIMEOUT_S)
        if isinstance(result, DraftError):
            raise result
        return result

    def propose(self, gamma: int, committed: Sequence[int] = ()) -> Draft:
        self.request(gamma, committed)
        return self.result()

    def close(self) -> None:
        self.engine.post(Close(self.sequence))


def sequence(temperature: float = 1.0, **changes: Any) -> DraftSequence:
    opening = DraftSequence(PROMPT, [], SamplingParams(temperature=temperature, top_p=0.95), PLAIN, 3)
    return replace(opening, **changes)
