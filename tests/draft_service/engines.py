"""The draft's engine by itself, and sequences of it that are driven by hand."""

import queue
from collections.abc import Iterator
from contextlib import contextmanager

from draft_service.drafters.base import Draft, DraftError, DraftSequence
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import Ask, Close, ModelSequence
from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import Rule
from outrider.runtime.loader import LoadedModel
from outrider.runtime.model_runner import ModelRunner

VOCABULARY = 2000  # less than the logits have columns: the rest is padding
CONFIG = SparseConfig(keep_mass=0.98, max_support=40)
PROMPT = [5, 17, 300, 42, 7, 7, 1999]
PLAIN = LogitRules()


@contextmanager
def running(loaded: LoadedModel) -> Iterator[DraftEngine]:
    """An engine with room for four sequences."""
    packed = ModelRunner.build(loaded, max_sequences=4, max_length=96)
    engine = DraftEngine(packed, vocab_size=VOCABULARY, config=CONFIG, prefill_tokens=16, threads=1)
    engine.start()
    yield engine
    engine.stop()


class Driver:
    """One sequence of an engine, driven by hand."""

    def __init__(self, engine: DraftEngine, sequence: DraftSequence, *, vocab_size: int = VOCABULARY) -> None:
        self._engine = engine
        self.sequence = ModelSequence.begin(sequence, vocab_size)
        self._results: queue.SimpleQueue[Draft | DraftError] = queue.SimpleQueue()

    def ask(self, gamma: int, committed: list[int] | None = None) -> None:
        self._engine.post(Ask(self.sequence, committed or [], gamma, self._results.put))

    def answer(self) -> Draft:
        result = self._results.get(timeout=60)
        if isinstance(result, DraftError):
            raise result
        return result

    def propose(self, gamma: int, committed: list[int] | None = None) -> Draft:
        self.ask(gamma, committed)
        return self.answer()

    def close(self) -> None:
        self._engine.post(Close(self.sequence))


def sequence(
    temperature: float = 1.0,
    *,
    prompt: list[int] | None = None,
    rules: LogitRules = PLAIN,
    seed: int = 3,
    rule: Rule = Rule.TOKENWISE,
) -> DraftSequence:
    return DraftSequence(prompt or PROMPT, [], SamplingParams(temperature=temperature, top_p=0.95), rules, seed, rule)
