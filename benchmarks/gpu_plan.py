"""How much `benchmarks.gpu` measures, on a GPU and in a dry run."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

from benchmarks.kernel import Plan as KernelPlan
from benchmarks.planted.shapes import LLAMA_1B, LLAMA_8B, LLAMA_13B, TINY_DRAFT, TINY_TARGET, Shape
from benchmarks.planted.text import Plant

PARTS = MappingProxyType(
    {
        "choices": "attention, layers and graphs",
        "tests": "the tests marked gpu",
        "memcheck": "memory accesses",
        "device": "the device itself",
        "kernel": "the kernel",
        "alone": "the target alone",
        "share": "verification's share of a pass",
        "profile": "a saturated verifier",
        "pair": "the pair over gRPC",
        "streams": "many streams",
        "cache": "the outcome cache",
    }
)
"""In the order they are measured, with what they are called."""

RUNS = MappingProxyType(
    {
        1: ("choices", "tests", "memcheck"),
        2: ("device", "kernel", "alone", "share", "profile"),
        3: ("pair", "streams", "cache"),
    }
)
"""The parts of each run, which takes nine minutes at most: does it work, one stream, the pair."""

RUN_SECONDS = 500.0
"""After so much of a run no part begins; the rest is for imports and pictures."""

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class GpuPlan:
    """What is measured.

    Attributes:
        is_dry: whether it only shows that everything runs.
        dtype: of all models.
        shapes: of the part `alone`.
        compiled: those of them that transformers also runs compiled, and seconds that each may take for it.
        draft: of the pair.
        target: of the pair, and of the parts `share` and `profile`.
        alphas: rates of acceptance that the pair is planted with.
        gamma: drafted tokens of a round.
        prompt_tokens: of each text on planted models.
        alone_tokens: tokens that a rate of the target alone is taken on.
        repeats: how often each contender of a part takes its turn, unless the part's time is over before.
        pair_tokens: of each text of the part `pair`.
        streams: of the part `streams`.
        stream_alpha: of its texts; one of `alphas`.
        stream_tokens: of each of them.
        stream_repeats: how often each of its runs is made.
        texts_per_stream: texts of a run, over its streams.
        depth: how many times as deep as the demo target that of the part `cache` is.
        draft_depth: the same of its draft.
        cache_gammas: γ of the part `cache`.
        cache_ways: of `benchmarks.outcome_cache.WAYS`.
        cache_prompts: of the demo corpus, once each.
        cache_tokens: of each text.
        batches: sequences of a pass in the part `share`.
        context: tokens that each of them holds.
        matrix: n of the n³ product.
        kernel: the subset of `benchmarks.kernel`.
        kernel_parts: of that.
        profile_streams: sequences of the part `profile`.
        profile_seconds: how long it is watched.
        window_ms: of it, how much is drawn.
        kv_mb: keys and values of each service on a planted model, MiB.
        clock_repeats: runs of a single measurement at the most.
        budgets: seconds of each part.
    """

    is_dry: bool
    dtype: str
    shapes: tuple[Shape, ...]
    compiled: dict[str, float]
    draft: Shape
    target: Shape
    alphas: tuple[float, ...]
    gamma: int
    prompt_tokens: int
    alone_tokens: int
    repeats: int
    pair_tokens: int
    streams: tuple[int, ...]
    stream_alpha: float
    stream_tokens: int
    stream_repeats: int
    texts_per_stream: int
    depth: int
    draft_depth: int
    cache_gammas: tuple[int, ...]
    cache_ways: tuple[str, ...]
    cache_prompts: int
    cache_tokens: int
    batches: tuple[int, ...]
    context: int
    matrix: int
    kernel: KernelPlan
    kernel_parts: tuple[str, ...]
    profile_streams: int
    profile_seconds: float
    window_ms: float
    kv_mb: int
    clock_repeats: int
    budgets: dict[str, float]

    def plant(self, shape: Shape) -> Plant:
        """What models of this vocabulary are planted with."""
        return Plant(shape.vocab, self.alphas)

    def document(self) -> Json:
        """As JSON; equal where it was read back."""
        found: Json = json.loads(json.dumps(asdict(self)))
        return found


FULL = GpuPlan(
    is_dry=False,
    dtype="bfloat16",
    shapes=(LLAMA_1B, LLAMA_8B, LLAMA_13B),
    compiled={LLAMA_1B.name: 45.0, LLAMA_8B.name: 60.0},
    draft=LLAMA_1B,
    target=LLAMA_8B,
    alphas=(0.6, 0.7, 0.8, 0.9),
    gamma=4,
    prompt_tokens=32,
    alone_tokens=64,
    repeats=5,
    pair_tokens=128,
    streams=(1, 4, 16, 64),
    stream_alpha=0.8,
    stream_tokens=96,
    stream_repeats=2,
    texts_per_stream=2,
    depth=16,
    draft_depth=4,
    cache_gammas=(4, 8),
    cache_ways=("greedy", "coupled"),
    cache_prompts=6,
    cache_tokens=96,
    batches=(1, 16, 64),
    context=256,
    matrix=8192,
    kernel=KernelPlan(
        vocabularies=(128_256,),
        gammas=(1, 5, 20),
        batches=(1, 16, 64, 256),
        gamma=5,
        rules_batches=(64,),
        repeats=30,
    ),
    kernel_parts=("gamma", "batch", "rules"),
    profile_streams=64,
    profile_seconds=1.0,
    window_ms=100.0,
    kv_mb=6144,
    clock_repeats=30,
    budgets={
        "choices": 60.0, "tests": 320.0, "memcheck": 120.0,
        "device": 10.0, "kernel": 60.0, "alone": 250.0, "share": 60.0, "profile": 60.0,
        "pair": 250.0, "streams": 120.0, "cache": 130.0,
    },
)  # fmt: skip

DRY = GpuPlan(
    is_dry=True,
    dtype="bfloat16",
    shapes=(TINY_DRAFT, TINY_TARGET),
    compiled={TINY_DRAFT.name: 60.0},
    draft=TINY_DRAFT,
    target=TINY_TARGET,
    alphas=(0.6, 0.8),
    gamma=2,
    prompt_tokens=4,
    alone_tokens=6,
    repeats=1,
    pair_tokens=16,
    streams=(1, 2),
    stream_alpha=0.8,
    stream_tokens=6,
    stream_repeats=1,
    texts_per_stream=1,
    depth=2,
    draft_depth=1,
    cache_gammas=(2,),
    cache_ways=("greedy",),
    cache_prompts=1,
    cache_tokens=12,
    batches=(1, 2),
    context=8,
    matrix=64,
    kernel=KernelPlan(vocabularies=(512,), gammas=(2,), batches=(2,), gamma=2, rules_batches=(1,), repeats=5),
    kernel_parts=("gamma", "batch", "rules"),
    profile_streams=2,
    profile_seconds=0.05,
    window_ms=20.0,
    kv_mb=16,
    clock_repeats=5,
    budgets=dict.fromkeys(PARTS, 120.0),
)
