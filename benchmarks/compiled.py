"""The kernels as machine code, compiled for a GPU that this machine need not have: registers, spills, instructions.

Instructions are counted in the code, run or not: a part that few launches need counts as well. `blocks` is how many
programs the registers allow on a multiprocessor at once.
"""

import argparse
import json
import re
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from triton import compile as compile_for
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks import harness
from benchmarks.harness import Json, progress
from kernels import triton_attention, triton_layers, triton_products, triton_truncate, verify_triton
from kernels.verify_pack import GREEDY_NUMBER, RULE_NUMBERS
from kernels.verify_triton import FILTER_OPTIONS, stats_sizes, verify_options

_TYPES = {
    "logits": "*bf16", "row_stride": "i64", "V": "i32", "n_tiles": "i32", "row_sequence": "*i32",
    "ints": "*i64", "floats": "*fp64", "filtered_rows": "*i32",
    "adjusted": "*i32", "tile_starts": "*i32", "change_ids": "*i32", "change_divisors": "*fp32",
    "change_biases": "*fp32", "cuts": "*fp32",
    "peaks": "*fp32", "masses": "*fp32", "bests": "*i32", "leads": "*fp32",
    "draft_ints": "*i32", "draft_q": "*fp32", "support_ids": "*i32", "support_q": "*fp32", "draft_logits": "*fp32",
    "uniforms": "*fp64", "outcomes": "*i32", "beta": "*fp32",
    "targets": "*fp64", "sums": "*fp32", "F": "i32", "step": "i32", "begin": "i32",
    "x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "qkv": "*bf16", "cos_sin": "*fp32",
    "positions": "*i64", "slot_mapping": "*i64", "head_norm": "*fp32",
    "query": "*bf16", "keys": "*bf16", "values": "*bf16", "gate_up": "*bf16",
    "row_starts": "*i32", "lengths": "*i32", "block_tables": "*i32", "sinks": "*bf16", "partial": "*fp32",
    "tokens": "*i64", "embedding": "*bf16", "norm": "*bf16", "scaled": "*bf16", "squares": "*fp32",
    "bias": "*bf16", "stream": "*bf16", "T": "i32", "N": "i32", "K": "i32",
    "best": "*bf16", "best_ids": "*i64", "ids": "*i64", "weights": "*i32", "keep_mass": "fp32",
    "items": "*i32", "row_partials": "*i32", "scaling": "fp32", "softcap": "fp32", "window": "i32", "max_blocks": "i32",
}  # fmt: skip
_OWN_TYPES = {"filter_kernel": {"keys": "*i32"}, "truncate_kernel": {"tokens": "*i64"}}
_MODULES = (verify_triton, triton_layers, triton_attention, triton_products, triton_truncate)
_MULTIPLES = ("row_stride", "V", "N", "K")  # of 16
_ALIGNED = [["tt.divisibility", 16]]  # pointers, as torch allocates, and the stride of rows padded to 16
_REGISTERS, _BLOCKS = 65536, 32  # of a multiprocessor
_INSTRUCTION = 16  # bytes
_RULES = {rule.value: number for rule, number in RULE_NUMBERS.items()} | {"temperature 0": GREEDY_NUMBER}

Variant = tuple[str, str, dict[str, int], dict[str, Any]]
"""A title, the kernel's name, its options, and its constants."""


def common() -> Iterator[Variant]:
    """Yield the kernels as most requests launch them."""
    for tile in (2048, 4096):
        yield _stats(f"{tile:,} logits", "tokenwise", tile=tile)
    yield _stats("temperature 0", "temperature 0")
    yield _stats("coupled", "coupled")
    yield from _filters(4, adjusted=False)
    for rule, number in _RULES.items():
        yield _verify(rule, number, adjusted=False)
    rotation = triton_layers.rotation_sizes(14, 2, 80)  # a tile that no row fills, and heads that fill none
    options = triton_layers.options(rotation["GROUP"] * rotation["BLOCK"])
    yield "rotation", "rotate_and_store_kernel", options, {**rotation, "NORMED": False}
    norm = triton_layers.norm_sizes(896)
    yield "norm", "rms_norm_kernel", triton_layers.options(norm["BLOCK"]), norm
    gate = triton_layers.gate_sizes(4864)
    yield "gate", "gated_kernel", triton_layers.options(gate["TILE"]), gate
    truncated = {"K": 256, "BLOCK_K": 256, "TILES": 64}
    yield "truncation of a draft's row", "truncate_kernel", triton_truncate.OPTIONS, truncated
    yield "embedding", "embed_kernel", {"num_warps": 8}, triton_products.embed_sizes(2048)
    yield from _products(5)
    yield from _attention(4, 128)


def rare() -> Iterator[Variant]:
    """Yield them with penalties, biases and bans, head norms, soft-capping and sinks."""
    yield _stats("changed logits", "tokenwise", adjusted=True)
    yield _stats("coupled, changed logits", "coupled", adjusted=True)
    yield from _filters(8, adjusted=True)
    for rule, number in _RULES.items():
        yield _verify(rule, number, adjusted=True)
    rotation = triton_layers.rotation_sizes(32, 8, 128)
    options = triton_layers.options(rotation["GROUP"] * rotation["BLOCK"])
    yield "rotation with norms", "rotate_and_store_kernel", options, {**rotation, "NORMED": True}
    norm = triton_layers.norm_sizes(8192)
    yield "norm of 8,192", "rms_norm_kernel", triton_layers.options(norm["BLOCK"]), norm
    yield from _products(16)
    for group, head_dim in ((7, 64), (2, 256)):
        yield from _attention(group, head_dim)
    yield from _attention(8, 128, capped=True, sinks=True)


def _stats(what: str, rule: str, *, tile: int = 4096, adjusted: bool = False) -> Variant:
    sizes = stats_sizes((_RULES[rule],))
    options = {"num_warps": sizes["OWN_TILES"]}
    return f"statistics, {what}", "stats_kernel", options, {**sizes, "TILE": tile, "ADJUSTED": adjusted}


def _verify(rule: str, number: int, *, adjusted: bool) -> Variant:
    options = verify_options(adjusted=adjusted)
    sizes = {"RULE": number, "TILE": 4096, "TILES": 64, "ADJUSTED": adjusted}
    return f"verify, {rule}{', changed logits' if adjusted else ''}", "verify_kernel", options, sizes


def _filters(steps: int, *, adjusted: bool) -> Iterator[Variant]:
    sizes = {"TILE": 4096, "TILES": 64, "STEPS": steps, "ADJUSTED": adjusted}
    more = ", changed logits" if adjusted else ""
    for is_last, what in ((False, "filters, a step of the search"), (True, "filters, the cut")):
        yield what + more, "filter_kernel", FILTER_OPTIONS, {**sizes, "IS_LAST": is_last}


def _attention(group: int, head_dim: int, *, capped: bool = False, sinks: bool = False) -> Iterator[Variant]:
    shared = triton_attention.sizes(8 * group, 8, head_dim)
    own = {**triton_attention.attend_sizes(head_dim, 32, torch.bfloat16), "CAPPED": capped, "WITH_SINKS": sinks}
    what = f"{group} heads of {head_dim} a KV head{', capped, with sinks' if capped else ''}"
    yield f"attention, {what}", "attend_kernel", triton_attention.options(shared), {**shared, **own}
    merged = {**triton_attention.merge_sizes(shared), "WITH_SINKS": sinks}
    yield f"merge, {what}", "merge_kernel", triton_attention.MERGE_OPTIONS, {**shared, **merged}


def _products(rows: int) -> Iterator[Variant]:
    """Those of a model of 4,096 with an MLP of 14,336."""
    rotated = {"HEADS": 32, "KV_HEADS": 8, "D": 128, "ROTATED": True}
    for what, N, K, kind in (
        ("queries, keys and values", 6144, 4096, {"NORMED": True, **rotated}),
        ("gate and up", 14336, 4096, {"NORMED": True, "GATED": True}),
        ("residual sum", 4096, 14336, {"ADDED": True}),
    ):
        flags: dict[str, int] = {"NORMED": False, "GATED": False, "ADDED": False, "BIASED": False}
        flags |= triton_products.NOT_ROTATED | kind
        sizes = triton_products.product_sizes(rows, K, normed=bool(flags["NORMED"]))
        options = triton_products.product_options(N, sizes["DEPTH"], gated=bool(flags["GATED"]))
        yield f"product of {rows} rows, {what}", "product_kernel", options, {**sizes, **flags}


def compiled(variant: Variant, architecture: int) -> bytes:
    """Compile one variant to an ELF file."""
    _, name, options, constants = variant
    kernel: Any = next(getattr(module, name) for module in _MODULES if hasattr(module, name))
    types = _TYPES | _OWN_TYPES.get(name, {})
    free = [each.name for each in kernel.params if each.do_not_specialize_on_alignment]
    source = ASTSource(
        fn=kernel,
        signature={each: "constexpr" if each in constants else types[each] for each in kernel.arg_names},
        constexprs=constants,
        attrs={
            (i,): _ALIGNED
            for i, each in enumerate(kernel.arg_names)
            if each not in free
            and each not in constants
            and (each in _MULTIPLES or types.get(each, "").startswith("*"))
        },
    )
    binary: bytes = compile_for(source, target=GPUTarget("cuda", architecture, 32), options=options).asm["cubin"]
    return binary


def machine_code(binaries: Sequence[bytes], architecture: int) -> list[str]:
    """Return the instructions of each ELF file, one a line.

    All in one run of the disassembler: it takes longer to start than a small kernel takes to compile.
    """
    texts = [_text_section(binary) for binary in binaries]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "all.bin"
        path.write_bytes(b"".join(texts))
        command = [knobs.nvidia.nvdisasm.path, "--binary", f"SM{architecture}", str(path)]
        lines = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    instructions = [line for line in lines if re.match(r"\s+/\*[0-9a-f]{4,}\*/", line)]  # its address, in bytes
    ends = list(accumulate(len(text) // _INSTRUCTION for text in texts))
    assert len(instructions) == ends[-1]
    return ["\n".join(instructions[start:end]) for start, end in pairwise((0, *ends))]


def _text_section(binary: bytes) -> bytes:
    (headers,), (size, count, names) = struct.unpack_from("<Q", binary, 0x28), struct.unpack_from("<HHH", binary, 0x3A)
    sections = [struct.unpack_from("<IIQQQQ", binary, headers + i * size) for i in range(count)]
    strings = sections[names][4]
    texts = [each for each in sections if binary.startswith(b".text.", strings + each[0])]
    ((*_, start, length),) = texts  # a kernel calls no function: all are inlined
    return binary[start : start + length]


def _registers(binary: bytes) -> int:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(binary)
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)]
        found = re.search(r"REG:(\d+)", subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    assert found is not None
    return int(found[1])


def describe(variant: Variant, registers: int, code: str) -> Json:
    """Return the figures of one variant's machine code."""
    what, name, options, constants = variant
    threads = 32 * options["num_warps"]
    return {
        "what": what,
        "kernel": name,
        "constants": constants,
        "threads": threads,
        "registers": registers,
        "blocks": min(_BLOCKS, _REGISTERS // (-(-registers // 8) * 8 * threads)),
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "instructions": len(code.splitlines()),
        "barriers": len(re.findall(r"\bBAR\.SYNC", code)),
        "loads": len(re.findall(r"\bLDG\.", code)),
        "wide_loads": len(re.findall(r"\bLDG\.[A-Z.]*128", code)),
        "stores": len(re.findall(r"\bSTG\.", code)),
        "wide_stores": len(re.findall(r"\bSTG\.[A-Z.]*128", code)),
    }


def table(rows: Sequence[Json]) -> str:
    columns = ("threads", "registers", "blocks", "spills", "instructions", "barriers", "loads")
    return harness.table(["", *columns], [[row["what"], *(f"{row[name]:,}" for name in columns)] for row in rows])


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compiled", description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--architecture", type=int, default=90, help="compute capability times ten (default: %(default)s)"
    )
    parser.add_argument("--common", action="store_true", help="without rare variants")
    parser.add_argument("--output", type=Path, default=harness.RESULTS / "compiled.json", help="JSON file")
    parser.add_argument("--before", type=Path, help="result of older kernels, whose rows are kept beside")
    given = harness.parse(parser, arguments, {})
    variants, binaries = [*common(), *(() if given.common else rare())], list[bytes]()
    for variant in variants:
        binaries.append(compiled(variant, given.architecture))
        progress(f"{variant[0]}: {len(binaries[-1]):,} bytes")
    codes = machine_code(binaries, given.architecture)
    rows = [describe(each, _registers(b), code) for each, b, code in zip(variants, binaries, codes, strict=True)]
    document = {
        "benchmark": "compiled",
        "command": given.command,
        "architecture": given.architecture,
        "versions": harness.versions("outrider", "triton"),
        "rows": rows,
    }
    if given.before is not None:
        document["before"] = json.loads(given.before.read_text(encoding="utf-8"))
    harness.write_json(given.output, document)
    print(table(rows))
    print(json.dumps(document, ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
