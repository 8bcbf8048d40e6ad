"""A saturated verifier, watched by torch's profiler: how much of the time the device works. Part `profile`.

The engine is the verifier's own, on its own thread; its sequences decode without end, so that it never waits for
anybody. On a CPU the same code watches the operations of the engine's thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Sequence
from typing import Any

from torch import device as Device
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_bench import CAPTURE, GpuBench, paged_model
from benchmarks.harness import Json
from kernels.verify import implementation_for
from outrider.runtime.cuda_graph import capturer_for
from outrider.service.wire import PrefixHash
from protos.outrider.v1 import model_pb2, sampling_pb2, verifier_service_pb2
from verifier_service.engine import Open, Read, Submit, VerifierEngine
from verifier_service.request import check_decode, check_open
from verifier_service.scheduler import TargetWork
from verifier_service.sequence import Reply, TargetSequence
from verifier_service.target_runner import PassResult

_PASS_TOKENS = 512
_LONGEST = 1024  # tokens of each sequence: more than are written while it is watched
_WARM_UP_PASSES = 5
_LONGEST_WAIT_S = 60.0

Intervals = list[tuple[float, float]]


class Watch:
    """What the profiler saw for so many seconds, from the beginning of a pass to that of another one.

    `look` belongs to the engine's thread; all else is for after `done`.
    """

    def __init__(self, device: Device, seconds: float, sequences: int) -> None:
        self.done = threading.Event()
        self.passes = 0
        self.seconds = 0.0
        self.kind = DeviceType.CUDA if device.type == "cuda" else DeviceType.CPU
        self.activity = ProfilerActivity.CUDA if device.type == "cuda" else ProfilerActivity.CPU
        self._seconds = seconds
        self._sequences = sequences
        self._full = 0
        self._begun = 0.0
        self._profile: Any = None

    def look(self, sequences: int) -> None:
        """Called before each pass: begins after a few that hold all sequences, and ends once the time is over."""
        if self.done.is_set():
            return
        if self._profile is None:
            self._full += sequences == self._sequences
            if self._full > _WARM_UP_PASSES:
                self._profile = profile(activities=[self.activity])
                self._profile.start()
                self._begun = time.perf_counter()
            return
        self.passes += 1
        if time.perf_counter() - self._begun >= self._seconds:
            self.seconds = time.perf_counter() - self._begun
            self._profile.stop()
            self.done.set()

    def busy(self) -> Intervals:
        """When the device worked, in microseconds, as intervals that do not touch."""
        return union(
            (event.time_range.start, event.time_range.end)
            for event in self._profile.events()
            if event.device_type == self.kind and event.time_range.end > event.time_range.start
        )


class WatchedEngine(VerifierEngine):
    """The verifier's engine, with a look before each pass."""

    watch: Watch

    def forward(self, work: Sequence[TargetWork]) -> PassResult:
        self.watch.look(len(work))
        return super().forward(work)


def profiled(bench: GpuBench) -> Json:
    """The share of the time that the device works while so many sequences decode, on the verifier's own engine."""
    plan = bench.plan
    loaded = bench.loaded(plan.target)
    tokens = min(loaded.context_length, _LONGEST)
    model_runner = paged_model(loaded, plan.profile_streams, tokens)
    watch = Watch(bench.device, plan.profile_seconds, plan.profile_streams)
    limits = model_pb2.Limits(max_gamma=4, max_sequences=plan.profile_streams, max_sequence_tokens=tokens)
    model = model_pb2.ModelInfo(vocab_size=loaded.vocab_size, limits=limits)
    path = implementation_for(bench.device)
    engine = WatchedEngine(model_runner, model, pass_tokens=_PASS_TOKENS, prefix_cache=False, verify_path=path)
    if model_runner.attention.can_be_captured(bench.device):
        engine.runner.capture(
            capturer_for(bench.device),
            max_sequences=plan.profile_streams,
            max_gamma=0,
            pass_tokens=_PASS_TOKENS,
            **CAPTURE,  # type: ignore[arg-type]
        )
    engine.watch = watch
    with profile(activities=[watch.activity]):
        pass  # what it sets up at its first use wants this thread, not the engine's
    engine.start()
    try:
        for number in range(plan.profile_streams):
            _decode(engine, model, f"profile-{number}", bench.prompt(plan.target, number, 1), tokens)
        if not watch.done.wait(_LONGEST_WAIT_S):
            raise TimeoutError(f"the engine made {watch.passes} watched passes in {_LONGEST_WAIT_S:g} s")
    finally:
        engine.stop()
    found: Json = {
        "streams": plan.profile_streams,
        "passes": watch.passes,
        "seconds": watch.seconds,
        "tokens_per_second": watch.passes * plan.profile_streams / watch.seconds,
        "busy_share": busy_share(watch.busy()),
    }
    bench.told(f"{plan.profile_streams} streams: the device works {found['busy_share']:.1%} of the time")
    return found


def _decode(engine: VerifierEngine, model: model_pb2.ModelInfo, name: str, prompt: Sequence[int], tokens: int) -> None:
    """Opens a sequence, and asks for all the tokens that it may have."""
    opening = verifier_service_pb2.OpenSequence(
        prompt_token_ids=prompt,
        sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=1, rule=sampling_pb2.ACCEPTANCE_RULE_TOKENWISE),
        max_new_tokens=tokens - len(prompt),
        ignore_eos=True,
    )

    def read(reply: Reply) -> None:
        if isinstance(reply, verifier_service_pb2.VerifyResponse) and reply.WhichOneof("kind") == "verdict":
            engine.post(Read(sequence, 1))

    sequence = TargetSequence(name, check_open(opening, model), model.vocab_size, read)
    engine.post(Open(sequence))
    asked = verifier_service_pb2.Decode(
        round=1,
        base_length=len(prompt),
        prefix_hash=PrefixHash(prompt).digest(),
        num_tokens=opening.max_new_tokens,
    )
    engine.post(Submit(sequence, check_decode(asked)))


def union(intervals: Iterable[tuple[float, float]]) -> Intervals:
    """The same time as intervals that do not touch, in order. An interval is (begin, end)."""
    merged: Intervals = []
    for begin, end in sorted(intervals):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged


def busy_share(busy: Intervals) -> float:
    """The share of the time from the first begin to the last end that lies in one of the intervals.

    Raises:
        ValueError: there is none, or they take no time.
    """
    span = busy[-1][1] - busy[0][0] if busy else 0.0
    if span <= 0:
        raise ValueError("nothing ran on the device while it was watched")
    return sum(end - begin for begin, end in busy) / span
