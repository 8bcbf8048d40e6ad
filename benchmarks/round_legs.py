"""Parts of the time of a round between drafting and the target's pass, for `benchmarks.network_tax`.

    python -m benchmarks.round_legs FOLDER draft_service --model DRAFT ...

runs a service that notes when a round passes some of its functions, and writes the times to the folder at the end. Both
services use the same clock, so their times can be compared.
"""

import functools
import gc
import importlib
import inspect
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

Times = list[tuple[str, float]]
"""Of one round: the points that it passed, and when, in order."""

_BEGIN, _END = "begin", "end"
# The functions that a round passes, in order: module, name, whether its begin or its end counts.
_POINTS = {
    "drafted": ("draft_service.drafters.sequence", "ModelSequence.finish", _BEGIN),
    "proposal is on the event loop": ("draft_service.drafters.model", "_settle", _BEGIN),
    "proposal is checked": ("draft_service.sequence", "Sequence.propose", _BEGIN),
    "proposal is encoded": ("draft_service.verify_stream", "VerifyStream._write", _BEGIN),
    "proposal has arrived": ("verifier_service.stream", "VerifyStream._next", _END),
    "round is checked": ("verifier_service.engine", "VerifierEngine.post", _BEGIN),
    "verified": ("verifier_service.target_runner", "TargetRunner.__call__", _END),
    "committed": ("verifier_service.stream", "Outbox.flush", _BEGIN),
    "verdict is on the event loop": ("verifier_service.stream", "write", _BEGIN),
    "verdict has arrived": ("draft_service.verify_stream", "VerifyStream._read", _END),
    "next proposal is requested": ("draft_service.drafters.engine", "DraftEngine.post", _BEGIN),
}
LEGS = {
    "to the draft's event loop": ("drafted", "proposal is on the event loop"),
    "check of the proposal": ("proposal is on the event loop", "proposal is checked"),
    "encoding": ("proposal is checked", "proposal is encoded"),
    "gRPC, proposal": ("proposal is encoded", "proposal has arrived"),
    "check at the verifier": ("proposal has arrived", "round is checked"),
    "commit": ("verified", "committed"),
    "to the verifier's event loop": ("committed", "verdict is on the event loop"),
    "gRPC, verdict": ("verdict is on the event loop", "verdict has arrived"),
    "from verdict to request": ("verdict has arrived", "next proposal is requested"),
}
"""Parts of the time outside draft, queue, pass and verification, each with the points where it begins and ends."""


def noted_rounds(folder: Path) -> list[Times]:
    """The rounds that both services noted."""
    noted: Times = []
    for file in folder.iterdir():
        noted += [(point, at) for point, at in json.loads(file.read_text(encoding="utf-8"))]
    noted.sort(key=lambda each: each[1])
    rounds, order = list[Times](), list(_POINTS)
    for each in noted:
        if each[0] == order[0]:
            rounds.append([])
        # An idle function, or one that is called for other messages too, is out of order.
        if rounds and len(rounds[-1]) < len(order) and each[0] == order[len(rounds[-1])]:
            rounds[-1].append(each)
    return [each for each in rounds if len(each) == len(order)]


def median_legs(rounds: Sequence[Times]) -> dict[str, float]:
    """Microseconds of each leg, medians over the rounds."""
    spans: dict[str, list[float]] = {leg: [] for leg in LEGS}
    for each in map(dict, rounds):
        for leg, (begin, end) in LEGS.items():
            spans[leg].append(1e6 * (each[end] - each[begin]))
    return {leg: median(found) for leg, found in spans.items()}


def _note(noted: Times, point: str, owner: Any, name: str, at: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    @functools.wraps(function)
    async def noting_coroutine(*given: Any, **named: Any) -> Any:
        if at == _BEGIN:
            noted.append((point, perf_counter()))
        result = await function(*given, **named)
        if at == _END:
            noted.append((point, perf_counter()))
        return result

    @functools.wraps(function)
    def noting(*given: Any, **named: Any) -> Any:
        if at == _BEGIN:
            noted.append((point, perf_counter()))
        result = function(*given, **named)
        if at == _END:
            noted.append((point, perf_counter()))
        return result

    setattr(owner, name, noting_coroutine if inspect.iscoroutinefunction(function) else noting)


def main() -> int:
    folder, service = sys.argv[1:3]
    del sys.argv[1:3]
    run = importlib.import_module(f"{service}.__main__").main
    noted: Times = []
    for point, (module, path, at) in _POINTS.items():
        if module.startswith(service):
            owner: Any = importlib.import_module(module)
            *classes, name = path.split(".")
            for each in classes:
                owner = getattr(owner, each)
            _note(noted, point, owner, name, at)
    try:
        return int(run())
    finally:
        Path(folder, f"{service}.json").write_text(json.dumps(noted), encoding="utf-8")


if __name__ == "__main__":
    gc.disable()  # as the services do while they import
    sys.exit(main())
