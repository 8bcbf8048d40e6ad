"""A subset of `benchmarks.kernel`, through its own functions: part `kernel` of `benchmarks.gpu`."""

from __future__ import annotations

from dataclasses import asdict

from rich.console import Console

from benchmarks.gpu_bench import Bench, Json
from benchmarks.kernel import contenders_of, measure
from benchmarks.kernel_report import summarise
from benchmarks.record import Record
from kernels.verify import implementation_for


def kernel(bench: Bench) -> Json:
    """That benchmark's document, of as much as there is time for, without torch.compile: it is slow to start."""
    plan, path = bench.plan.kernel, implementation_for(bench.device)
    head = {"settings": asdict(plan) | {"path": path, "device": bench.clock.describe()}}
    record = Record.open(bench.scratch / "kernel.json", head, resume=False)
    record.once("copy", "bytes_per_second", bench.clock.copy_bandwidth)
    contenders = {name: each for name, each in contenders_of(path).items() if name != "compiled"}
    console = Console(stderr=True, highlight=False)
    whole = measure(plan, bench.plan.kernel_parts, contenders, bench.clock, record, bench.deadline.left, console)
    if not whole:
        bench.troubles.append("the time was over before all cases were measured")
    return record.document | {"summary": summarise(record.document)}
