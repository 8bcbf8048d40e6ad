"""What must hold before anything is timed: parts `choices`, `tests` and `memcheck` of `benchmarks.gpu`.

`memcheck` runs this file as a program: every kernel of ours once, on sizes that fill no tile, under compute-sanitizer.
Results are held to what they should be, and nothing is captured: it must run without torch's cache of memory, too.

    python -m benchmarks.gpu_checks cuda:0
    TRITON_INTERPRET=1 python -m benchmarks.gpu_checks cpu
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from importlib.util import find_spec
from types import MappingProxyType

import torch

from benchmarks import planted
from benchmarks.contenders import Unavailable
from benchmarks.gpu_bench import GpuBench, paged_model
from benchmarks.harness import ROOT, Json
from benchmarks.planted import TINY_TARGET, Plant, Shape
from kernels import paths
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule
from outrider.runtime.attention import AttentionLayer
from outrider.runtime.cuda_graph import Repeating, capturer_for
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.device import find_device, work_on
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.layer_ops import check_layer_ops
from outrider.runtime.memory import MIB
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import EAGER, TRITON, AttentionChoice, check_attention
from verifier_service.target_runner import TargetRunner

GROUPS: Mapping[str, int] = MappingProxyType(
    {
        "tests/kernels": min(6, max(1, (os.cpu_count() or 1) // 2)),
        "tests/outrider": 1,
        "tests/exactness": 1,
        "tests/benchmarks": 1,
    }
)
"""Where the tests marked gpu are, in the order of what everything else stands on; in how many processes each runs. Most
of the kernels' time is the compiler's; the others look at the memory or the time of the whole device."""
# Other files may import what such a machine lacks.
_MARKED = re.compile(r"pytest\.mark\.gpu|^from tests\.kernels\.paths import .*(PATHS|TRITON)", re.MULTILINE)

SANITIZER = "compute-sanitizer"

_SEQUENCES, _LENGTH, _WIDEST = 4, 256, 5
_GRAPH_SECONDS, _GRAPH_BYTES = 30.0, 1024 * MIB
_SHOWN_LINES = 40
_MEMORY_ERROR = 9  # exit code


# -------------------------------------------------------------------------------------------------------------- choices


def choices(bench: GpuBench) -> Json:
    """Which attention, layers and graphs a model of each shape gets here, and why; of one layer each."""
    plan = bench.plan
    asked = [(shape, plan.dtype) for shape in plan.shapes] + [(plan.shapes[0], "float32")]
    rows = []
    for shape, dtype in asked:
        row = bench.tried(f"{shape.name} in {dtype}", partial(_chosen, bench, replace(shape, layers=1), dtype))
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
        bench.troubles.append(f"{shape.name} in {dtype} attends without our kernel: {attention.reason}")
    bench.told(f"{shape.name} in {dtype}: attention {attention.name}, graphs {graphs}")
    return {
        "attention": attention.name,
        "attention_why": attention.reason,
        "block_tokens": attention.block_tokens,
        "layers": "transformers" if layers is None else layers.name,
        "layers_why": "" if layers is None else layers.reason,
        "graphs": graphs,
    }


# ---------------------------------------------------------------------------------------------------------------- tests


def tests(bench: GpuBench) -> Json:
    """The tests marked gpu, group by group, up to the first in which one fails; a dry run only collects them."""
    rows: list[Json] = []
    for group, processes in GROUPS.items():
        try:
            rows.append({"group": group, **_tested(bench, group, processes)})
        except Unavailable as error:  # those before it stand
            bench.troubles.append(f"{group}: {error}")
            break
        bench.told(f"{group}: {rows[-1]['outcome']}")
        if rows[-1]["exit_code"]:
            bench.troubles.append(f"{group}: {rows[-1]['outcome']}; the groups after it did not run")
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
    # The tests take a machine without /dev/nvidiactl for one without a GPU, unless they are told.
    environment = {"TRITON_INTERPRET": "0"} if bench.device.type == "cuda" else {}
    began = time.monotonic()
    code, lines = run_command(command, bench.left, environment)
    summary = next((line for line in reversed(lines) if re.search(r"\d+ (passed|failed|error)|collected", line)), "")
    row: Json = {
        "exit_code": code,
        "outcome": summary.strip("= ") or f"exit code {code}",
        "seconds": round(time.monotonic() - began, 1),
    }
    return row | ({"output": lines[-_SHOWN_LINES:]} if code else {})


# ------------------------------------------------------------------------------------------------------------- memcheck


def memcheck(bench: GpuBench) -> Json:
    """Every kernel once, under compute-sanitizer where it is there: accesses out of bounds, and misaligned ones."""
    return bench.tried("memcheck", partial(_memchecked, bench), ours=False)


def _memchecked(bench: GpuBench) -> Json:
    """Raises `Unavailable` where the tool takes too long, or does not know the device."""
    tool = None if bench.plan.is_dry else shutil.which(SANITIZER)
    command = [sys.executable, "-m", "benchmarks.gpu_checks", str(bench.device)]
    environment = {"TRITON_INTERPRET": "1"} if bench.device.type == "cpu" else {}
    if tool is not None:
        command = [tool, "--tool", "memcheck", "--error-exitcode", str(_MEMORY_ERROR), *command]
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"  # each tensor then ends where its memory does
    code, lines = run_command(command, bench.left, environment)
    said = [line for line in lines if line.startswith("=========")]
    if tool is not None and any("not supported" in line for line in said):
        raise Unavailable(f"{SANITIZER}: {next(line for line in said if 'not supported' in line)}")
    if code:
        bench.troubles.append(f"exit code {code}: {next(iter([*said, *lines[-1:]]), 'no word')}")
    outcome = "it runs" if tool is None else "no error"
    bench.told(f"every kernel once{'' if tool is None else f' under {SANITIZER}'}: {outcome if not code else 'failed'}")
    return {
        "tool": SANITIZER if tool is not None else None,
        "exit_code": code,
        **({"output": (said or lines)[:_SHOWN_LINES]} if code else {}),
    }


def run_command(command: Sequence[str], seconds: float, environment: Mapping[str, str]) -> tuple[int, list[str]]:
    """The exit code and the lines of a command of this repository.

    Raises:
        Unavailable: it takes longer than `seconds`.
    """
    try:
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
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[1:4])} took more than {seconds:.0f} s") from None
    return done.returncode, done.stdout.splitlines()


# ----------------------------------------------------------------------------------------------- every kernel once

_HEADS = (
    AttentionLayer(6, 2, 80, 0.1, None),
    AttentionLayer(8, 8, 64, 0.1, 100, softcap=5.0),
    AttentionLayer(8, 1, 128, 0.1, None, sinks=True),
)
_CONFIG = SparseConfig(keep_mass=0.97, max_support=40)


def main() -> int:
    """The command; returns 0, or 1 where a kernel gives something else than it should."""
    device = find_device(sys.argv[1] if len(sys.argv) > 1 else "auto")
    work_on(device)
    # Triton's interpreter is slow, and its products of bfloat16 are wrong: on a CPU it gets the least.
    on_gpu = device.type == "cuda"
    dtypes = [torch.float32, torch.bfloat16] if on_gpu else [torch.float32]
    for dtype in dtypes:
        for V in (300, 5003) if on_gpu else (300,):
            paths.warm_up("triton", device, dtype, V, V + 5)
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
    """Passes, rounds and drafted tokens of a tiny model; why they are wrong, or nothing."""
    plant = Plant(TINY_TARGET.vocab, (0.5,))
    loaded = planted.loaded(TINY_TARGET, plant, drafts=False, device=device, dtype=dtype)
    model_runner = ModelRunner.build(loaded, 3, 100, attention=AttentionChoice(TRITON, "exercised"))
    assert isinstance(loaded.fused, FusedDecoder)
    refusal = check_layer_ops(loaded.fused._layers, dtype)
    if refusal:
        return f"layers: {refusal}"
    judge = TargetRunner(model_runner, vocab_size=TINY_TARGET.vocab, verify_path="triton")
    capture = {"seconds": 1000, "most_bytes": 1024 * MIB}
    judge.capture(Repeating(), max_sequences=1, max_gamma=1, pass_tokens=64, **capture)
    loop = DecodeLoop(model_runner, TINY_TARGET.vocab, _CONFIG)
    loop.capture(Repeating(), sequences=2, tokens=3, with_noise=True, **capture)
    follows, slots = plant.successors().tolist(), [model_runner.pool.allocate() for _ in range(2)]
    model_runner.forward([Chunk(slot, [5 + slot] * 37, 0, 37) for slot in slots])
    for rule, judged in ((Rule.TOKENWISE, slots[:1]), (Rule.COUPLED, slots)):  # a captured pass, and one as it comes
        last, chunks, proposals = 9, [], []
        for slot in judged:
            right = follows[last]
            chunks.append(Chunk(slot, [last, right], model_runner.pool.length(slot), 0))
            q = (None,) if rule is Rule.TOKENWISE else ()
            proposals.append(Proposed((right,), q, SamplingParams(), seed=1, base_length=40, rule=rule))
        told = [(each.accepted, each.next_token) for each in judge(chunks, proposals).results]
        if told != [(1, follows[follows[last]])] * len(judged):
            return f"rounds under {rule}: {told}"
    draws = [[Draw(SamplingParams(), 0.5)] * 3 for _ in slots]
    samples = loop.decode([Chunk(slot, [9], model_runner.pool.length(slot), 0) for slot in slots], draws)
    drafted = [[each.token for each in own] for own in samples]
    if any(tokens != [follows[9], follows[follows[9]], follows[follows[follows[9]]]] for tokens in drafted):
        return f"drafted tokens: {drafted}"
    return ""


if __name__ == "__main__":
    sys.exit(main())
