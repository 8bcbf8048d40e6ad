"""Checks that a GPU gives right results: parts `choices`, `tests` and `memcheck` of `benchmarks.gpu`.

`memcheck` runs this file as a program: every kernel once, on sizes that fill no tile, under compute-sanitizer. It
captures nothing, because it runs without torch's cache of memory.

    python -m benchmarks.gpu_checks cuda:0
    TRITON_INTERPRET=1 python -m benchmarks.gpu_checks cpu
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import torch

from benchmarks import synthetic_models
from benchmarks.contenders import Unavailable
from benchmarks.harness import ROOT, Json
from benchmarks.synthetic_models import TINY_TARGET, KnownText, Shape
from kernels import verify_path
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule
from outrider.runtime.attention import AttentionLayer
from outrider.runtime.cuda_graph import Capturer, capturer_for
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.device import find_device, work_on
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.layer_ops import check_layer_ops
from outrider.runtime.loader import LoadedModel
from outrider.runtime.memory import MIB, kv_dtype
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import AUTO, EAGER, TRITON, AttentionChoice, check_attention, choose_attention
from outrider.runtime.torch_runner import TorchRunner
from verifier_service.target_runner import MAX_DECODE_TOKENS, TargetRunner

if TYPE_CHECKING:
    from benchmarks.gpu import GpuBench

GROUPS = {
    "tests/kernels": min(12, max(1, (os.cpu_count() or 1) * 3 // 4)),  # they mostly compile
    "tests/outrider": 1,
    "tests/exactness": 1,
    "tests/benchmarks": 1,
}
"""Folders with tests marked gpu, the most basic first; in how many processes each runs."""
# Other files may import packages that such a machine lacks.
_MARKED = re.compile(r"pytest\.mark\.gpu|^from tests\.kernels\.paths import .*(PATHS|TRITON)", re.MULTILINE)

SANITIZER = "compute-sanitizer"

_SEQUENCES, _LENGTH, _WIDEST = 4, 256, 5
_GRAPH_SECONDS, _GRAPH_BYTES = 30.0, 1024 * MIB
_SHOWN_LINES = 40
_MEMORY_ERROR = 9  # exit code


def paged_model(loaded: LoadedModel, max_sequences: int, max_length: int) -> ModelRunner:
    """The model with the attention that a service takes on its device; also on a CPU with blocks."""
    choice = choose_attention(AUTO, loaded.layers, kv_dtype(loaded), loaded.device, paged=loaded.device.type == "cpu")
    return TorchRunner.build(loaded, max_sequences, max_length, attention=choice)


def choices(bench: GpuBench) -> Json:
    """Which attention, layers and graphs a model of each shape gets, and why; of one layer each."""
    plan = bench.plan
    asked = [(shape, plan.dtype) for shape in plan.shapes] + [(plan.shapes[0], "float32")]
    rows = []
    for shape, dtype in asked:
        row = bench.attempt(f"{shape.name} in {dtype}", partial(_chosen, bench, replace(shape, layers=1), dtype))
        rows.append({"shape": shape.name, "dtype": dtype} | row)
    return {"rows": rows}


def _chosen(bench: GpuBench, shape: Shape, dtype: str) -> Json:
    model_runner = paged_model(bench.loaded(shape, dtype), _SEQUENCES, _LENGTH)
    attention, layers = model_runner.attention, model_runner.layer_choice
    graphs = "none: this attention cannot be captured"
    if attention.can_be_captured(bench.device):
        graphs = model_runner.capture(
            capturer_for(bench.device),
            max_sequences=_SEQUENCES,
            widest=_WIDEST,
            seconds=_GRAPH_SECONDS,
            most_bytes=_GRAPH_BYTES,
        )
    if bench.device.type == "cuda" and attention.name == EAGER:
        bench.errors.append(f"{shape.name} in {dtype} attends without our kernel: {attention.reason}")
    bench.progress(f"{shape.name} in {dtype}: attention {attention.name}, graphs {graphs}")
    return {
        "attention": attention.name,
        "attention_why": attention.reason,
        "block_tokens": attention.block_tokens,
        "layers": "transformers" if layers is None else layers.name,
        "layers_why": "" if layers is None else layers.reason,
        "graphs": graphs,
    }


def tests(bench: GpuBench) -> Json:
    """The tests marked gpu, group by group, up to the first in which one fails; a dry run only collects them."""
    rows: list[Json] = []
    for group, processes in GROUPS.items():
        row = bench.attempt(group, partial(_tested, bench, group, processes))
        rows.append({"group": group} | row)
        bench.progress(f"{group}: {row.get('outcome')}")
        if row.get("exit_code", 1):
            bench.errors.append(f"{group}: {row.get('outcome')}; the groups after it did not run")
            break
    return {"collected_only": bench.plan.is_dry, "rows": rows}


def _tested(bench: GpuBench, folder: str, processes: int) -> Json:
    how = ["--collect-only"] if bench.plan.is_dry else ["--tb=short"]
    if processes > 1 and bench.device.type == "cuda" and find_spec("xdist") is not None:
        how += ["-n", str(processes), "--dist", "worksteal"]
    files = [
        str(path) for path in sorted((ROOT / folder).rglob("test_*.py")) if _MARKED.search(path.read_text("utf-8"))
    ]
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider", *how, *files]
    # Without it, the tests find no GPU on a machine that has no /dev/nvidiactl.
    environment = {"TRITON_INTERPRET": "0"} if bench.device.type == "cuda" else {}
    code, lines = run_command(command, bench.left, environment)
    summary = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)|collected", line)), "")
    row: Json = {"exit_code": code, "outcome": summary.strip("= ") or f"exit code {code}"}
    return row | ({"output": lines[-_SHOWN_LINES:]} if code else {})


def run_command(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """The exit code and the lines of a command in the repository's root; raises where it takes longer."""
    done = subprocess.run(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=os.environ | environment,
        timeout=max(1.0, seconds),
        check=False,
    )
    return done.returncode, done.stdout.splitlines()


def memcheck(bench: GpuBench) -> Json:
    """Every kernel once, under compute-sanitizer where it is installed: accesses out of bounds, and misaligned ones."""
    return bench.attempt("memcheck", partial(_memchecked, bench), ours=False)


def _memchecked(bench: GpuBench) -> Json:
    tool = None if bench.plan.is_dry else shutil.which(SANITIZER)
    command = [sys.executable, "-m", "benchmarks.gpu_checks", str(bench.device)]
    environment = {"TRITON_INTERPRET": "1"} if bench.device.type == "cpu" else {}
    if tool is not None:
        command = [tool, "--tool", "memcheck", "--error-exitcode", str(_MEMORY_ERROR), *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor then ends where its memory does
    code, lines = run_command(command, bench.left, environment)
    found = [line for line in lines if line.startswith("=========")]
    if tool is not None and (unsupported := [line for line in found if "not supported" in line]):
        raise Unavailable(f"{SANITIZER}: {unsupported[0]}")
    if code:
        bench.errors.append(f"exit code {code}: {next(iter([*found, *lines[-1:]]), 'no output')}")
    bench.progress(f"every kernel once, {f'under {SANITIZER}' if tool else 'unchecked'}: exit code {code}")
    output = {"output": (found or lines)[:_SHOWN_LINES]} if code else {}
    return {"tool": tool and SANITIZER, "exit_code": code, **output}


_HEADS = (
    AttentionLayer(6, 2, 80, 0.1, None),
    AttentionLayer(8, 8, 64, 0.1, 100, softcap=5.0),
    AttentionLayer(8, 1, 128, 0.1, None, sinks=True),
)


def main() -> int:
    """Every kernel once; returns 0, or 1 where a result is wrong."""
    device = find_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    work_on(device)
    # Triton's interpreter is slow, and its products of bfloat16 are wrong: on a CPU it gets the least.
    on_gpu = device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16] if on_gpu else [torch.float32]
    for dtype in dtypes:
        for V in (300, 5003) if on_gpu else (300,):
            verify_path.warm_up("triton", device, dtype, V, V + 5)
        heads = _HEADS if on_gpu else _HEADS[:1]
        refusal: str | None = check_attention(AttentionChoice(TRITON, "exercised"), heads, dtype, device)
        if refusal:
            print(f"attention in {dtype}: {refusal}")
            return 1
    refusal = _rounds(device, dtypes[-1])
    print(refusal or "every kernel ran")
    return 1 if refusal else 0


@torch.inference_mode()
def _rounds(device: torch.device, dtype: torch.dtype) -> str:
    """Prefill, rounds and drafted tokens of a tiny model; why they are wrong, or nothing."""
    text = KnownText(TINY_TARGET.vocab, (0.5,))
    loaded = synthetic_models.loaded(TINY_TARGET, text, drafts=False, device=device, dtype=dtype)
    model_runner = TorchRunner.build(loaded, 3, 100, attention=AttentionChoice(TRITON, "exercised"))
    assert isinstance(loaded.fused, FusedDecoder)
    refusal = check_layer_ops(loaded.fused._layers, dtype)
    if refusal:
        return f"layers: {refusal}"
    target = TargetRunner(model_runner, vocab_size=TINY_TARGET.vocab, verify_path="triton")
    capture = {"seconds": 1000, "most_bytes": 1024 * MIB}
    target.loop.capture(Capturer(), sequences=1, tokens=MAX_DECODE_TOKENS, with_kernels=True, **capture)
    model_runner.capture(Capturer(), max_sequences=1, widest=2, max_batch_tokens=64, **capture)
    loop = DecodeLoop(model_runner, TINY_TARGET.vocab, SparseConfig(keep_mass=0.97, max_support=40))
    loop.capture(Capturer(), sequences=2, tokens=3, with_kernels=True, **capture)
    slots = [model_runner.pool.allocate() for _ in range(2)]
    model_runner.forward([Chunk(slot, [5 + slot] * 37, 0, 37) for slot in slots])
    for rule, own in ((Rule.TOKENWISE, slots[:1]), (Rule.COUPLED, slots)):  # a captured step, and an eager one
        chunks = [Chunk(slot, [9, 10], model_runner.pool.length(slot), 0) for slot in own]
        q = (None,) if rule is Rule.TOKENWISE else ()
        proposals = [Proposed((10,), q, SamplingParams(), seed=1, base_length=40, rule=rule) for _ in own]
        verdicts = [(each.accepted, each.next_token) for each in target(chunks, proposals).results]
        if verdicts != [(1, 11)] * len(own):
            return f"rounds under {rule}: {verdicts}"
    alone = Proposed((), (), SamplingParams(), seed=1, base_length=42)
    decoded = target.decode([Chunk(slots[0], [9], model_runner.pool.length(slots[0]), 0)], [alone], [3], [()])
    if decoded is None or (decoded.earlier, decoded.results[0].next_token) != ([[10, 11]], 12):
        return f"decoded tokens: {decoded}"
    draws = [[Draw(SamplingParams(), 0.5)] * 3 for _ in slots]
    samples = loop.decode([Chunk(slot, [9], model_runner.pool.length(slot), 0) for slot in slots], draws)
    drafted = [[each.token for each in own] for own in samples]
    return "" if drafted == [[10, 11, 12]] * len(slots) else f"drafted tokens: {drafted}"


if __name__ == "__main__":
    sys.exit(main())
