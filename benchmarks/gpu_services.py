"""The two services on chosen devices, for `benchmarks.gpu`; and what one text of theirs took, by the caller's clock."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.contenders import WrongLength
from benchmarks.services import Processes, RunningPair
from outrider.client import Chunk, Client, Finished, Options

PLANTED = "benchmarks.planted"
_TIMEOUT_S = 60.0  # of one text


class PairOn(RunningPair):
    """A running pair whose services lie on devices of their own.

    Args:
        target: folder of the target.
        draft: folder of the draft.
        how: number formats and threads.
        devices: of `verifier_service` and of `draft_service`, as `--device` takes them.
        planted: whether the folders hold planted models, which have no weights on disk.
        max_sequences: sequences at once.
        flags: further flags of each service.
    """

    start_timeout = 240.0  # a first start compiles some ten kernels, and captures some twenty passes

    def __init__(
        self,
        target: Path,
        draft: Path,
        how: Processes,
        *,
        devices: Mapping[str, str],
        planted: bool,
        max_sequences: int,
        flags: Mapping[str, Sequence[str]],
    ) -> None:
        super().__init__(target, draft, how, max_sequences)
        self._devices = devices
        self._planted = planted
        self._flags = flags

    def _command(self, module: str, flags: dict[str, str], alone: Sequence[str]) -> list[str]:
        placed = flags | {"--device": self._devices[module]}
        command = super()._command(module, placed, [*alone, *self._flags.get(module, ())])
        return [PLANTED, *command] if self._planted else command


@dataclass(frozen=True, slots=True)
class Text:
    """What one text took, in seconds.

    Attributes:
        tokens: that came.
        rate: tokens a second, the pass over the prompt included.
        rounds: verdicts.
        drafted: tokens proposed.
        alpha: the mean chance of acceptance over judged positions; None where nothing was drafted.
        draft: the draft service's time for proposals.
        verdict: from sending to having the verdict, summed over rounds.
        judging: forward and verify of those, by the verifier's clock.
    """

    tokens: tuple[int, ...]
    rate: float
    rounds: int
    drafted: int
    alpha: float | None
    draft: float
    verdict: float
    judging: float


def write(client: Client, prompt: Sequence[int] | str, count: int, **options: Any) -> Text:
    """Asks for `count` tokens, and takes the time until the last of them is there.

    Raises:
        WrongLength: other than `count` came.
    """
    asked: Options = {"max_new_tokens": count, "ignore_eos": True, **options}  # type: ignore[typeddict-item]
    tokens: list[int] = []
    finished: Finished | None = None
    begin = last = time.perf_counter()
    for event in client.generate(prompt, timeout=_TIMEOUT_S, **asked):
        if isinstance(event, Chunk) and event.token_ids:
            tokens += event.token_ids
            last = time.perf_counter()
        elif isinstance(event, Finished):
            finished = event
    if finished is None or len(tokens) != count:
        raise WrongLength(f"Outrider wrote {len(tokens)} tokens, not {count}")
    told, times = finished.statistics, finished.timings
    return Text(
        tokens=tuple(tokens),
        rate=count / (last - begin),
        rounds=told.num_rounds,
        drafted=told.num_draft_tokens,
        alpha=told.alpha if told.num_draft_tokens else None,
        draft=times.draft_us / 1e6,
        verdict=times.verdict_us / 1e6,
        judging=(times.forward_us + times.verify_us) / 1e6,
    )
