"""Compiles the kernels for a GPU that this machine need not have, and prints figures of the machine code as JSON.

Arguments: the architecture, and the size of supports. `test_compiled` runs it as a process, since a process that
interprets kernels cannot compile them.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from triton import compile as compile_for
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import triton_attention, triton_layers, verify_triton
from kernels.verify_triton import FILTER_OPTIONS, VERIFY_OPTIONS, stats_options

_TYPES = {
    "logits": "*bf16", "row_stride": "i64", "V": "i32", "n_tiles": "i32", "row_sequence": "*i32",
    "ints": "*i64", "floats": "*fp64", "filtered_rows": "*i32",
    "adjusted": "*i32", "tile_starts": "*i32", "change_ids": "*i32", "change_divisors": "*fp32",
    "change_biases": "*fp32", "cuts": "*fp32",
    "peaks": "*fp32", "masses": "*fp32", "bests": "*i32", "leads": "*fp32",
    "draft_ints": "*i32", "draft_q": "*fp32", "support_ids": "*i32", "support_q": "*fp32", "dense": "*fp32",
    "uniforms": "*fp64", "outcomes": "*i32", "beta": "*fp32",
    "x": "*bf16", "weight": "*bf16", "out": "*bf16", "eps": "fp32", "qkv": "*bf16", "cos_sin": "*fp32",
    "positions": "*i64", "slot_mapping": "*i64", "head_norm": "*fp32",
    "query": "*bf16", "keys": "*bf16", "values": "*bf16", "gate_up": "*bf16",
    "row_starts": "*i32", "lengths": "*i32", "block_tables": "*i32", "sinks": "*bf16", "partial": "*fp32",
    "items": "*i32", "row_slots": "*i32", "scaling": "fp32", "softcap": "fp32", "window": "i32", "max_blocks": "i32",
}  # fmt: skip
_MODULES = (verify_triton, triton_layers, triton_attention)
_ALIGNED = [["tt.divisibility", 16]]  # pointers, as torch allocates, and the stride of rows padded to 16

Variant = tuple[str, dict[str, int], dict[str, Any]]
"""A kernel's name, options, and constants."""


def fullest(support: int) -> Iterator[Variant]:
    """Yield each kernel with every option, as a verifier launches it over 128,000 and 152,000 tokens."""
    sizes = {"TILE": 4096, "ADJUSTED": True}
    yield "stats_kernel", stats_options(4096), {**sizes, "WITH_GUMBEL": True}
    yield "filter_kernel", FILTER_OPTIONS, {**sizes, "TILES": 64}
    yield "verify_kernel", VERIFY_OPTIONS, {**sizes, "TILES": 64, "K": support, "WITH_DENSE": False}
    rotation = triton_layers.rotation_sizes(32, 8, 128)
    yield "rotate_and_store_kernel", triton_layers.rotation_options(rotation), {**rotation, "NORMED": True}
    norm = triton_layers.norm_sizes(8192)
    yield "rms_norm_kernel", triton_layers.norm_options(norm), norm
    yield from _attention(8, 128, capped=True, sinks=True)


def _attention(group: int, head_dim: int, *, capped: bool = False, sinks: bool = False) -> Iterator[Variant]:
    shared = triton_attention.sizes(8 * group, 8, head_dim)
    own = {**triton_attention.attend_sizes(head_dim, 32, torch.bfloat16), "CAPPED": capped, "WITH_SINKS": sinks}
    yield "attend_kernel", triton_attention.options(shared), {**shared, **own}
    merged = {**triton_attention.merge_sizes(shared), "WITH_SINKS": sinks}
    yield "merge_kernel", triton_attention.MERGE_OPTIONS, {**shared, **merged}


def plain() -> Iterator[Variant]:
    """Yield the kernels as most requests launch them."""
    for tile in (2048, 4096):
        yield "stats_kernel", stats_options(tile), {"TILE": tile, "ADJUSTED": False, "WITH_GUMBEL": False}
    yield "stats_kernel", stats_options(4096), {"TILE": 4096, "ADJUSTED": False, "WITH_GUMBEL": True}  # in a graph
    yield "filter_kernel", FILTER_OPTIONS, {"TILE": 4096, "ADJUSTED": False, "TILES": 64}
    rotation = triton_layers.rotation_sizes(14, 2, 80)  # a tile that no row fills, and heads that fill none
    yield "rotate_and_store_kernel", triton_layers.rotation_options(rotation), {**rotation, "NORMED": False}
    norm = triton_layers.norm_sizes(896)
    yield "rms_norm_kernel", triton_layers.norm_options(norm), norm
    for group, head_dim in ((4, 128), (7, 64), (2, 256)):
        yield from _attention(group, head_dim)
    gate = triton_layers.gate_sizes(4864)
    yield "gated_kernel", triton_layers.gate_options(gate), gate


def describe(name: str, options: dict[str, int], constants: dict[str, Any], architecture: int) -> dict[str, Any]:
    kernel = next(getattr(module, name) for module in _MODULES if hasattr(module, name))
    names = kernel.arg_names
    free = [each.name for each in kernel.params if each.do_not_specialize_on_alignment]
    source = ASTSource(
        fn=kernel,
        signature={each: "constexpr" if each in constants else _TYPES[each] for each in names},
        constexprs=constants,
        attrs={
            (i,): _ALIGNED
            for i, each in enumerate(names)
            if each not in free and (each == "row_stride" or _TYPES.get(each, "").startswith("*"))
        },
    )
    compiled = compile_for(source, target=GPUTarget("cuda", architecture, 32), options=options)
    with tempfile.TemporaryDirectory() as folder:
        binary = Path(folder) / "kernel.cubin"
        binary.write_bytes(compiled.asm["cubin"])
        command = [knobs.nvidia.cuobjdump.path, "--dump-sass", str(binary)]
        code = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {
        "kernel": name,
        "constants": constants,
        "spills": len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "instructions": len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", code, re.MULTILINE)),
        "wide_loads": len(re.findall(r"\bLDG\.[A-Z.]*128", code)),
        "stores": len(re.findall(r"\bSTG\.", code)),
        "wide_stores": len(re.findall(r"\bSTG\.[A-Z.]*128", code)),
    }


if __name__ == "__main__":
    architecture, support = map(int, sys.argv[1:3])
    print(json.dumps([describe(*variant, architecture) for variant in (*fullest(support), *plain())]))
