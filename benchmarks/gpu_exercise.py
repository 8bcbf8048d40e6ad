"""Every kernel of ours once, on sizes that fill no tile: to be watched by compute-sanitizer.

    python -m benchmarks.gpu_exercise cuda:0
    TRITON_INTERPRET=1 python -m benchmarks.gpu_exercise cpu

Results are held to what they should be. Nothing is captured: it must run without torch's cache of memory, too.
"""

from __future__ import annotations

import sys

import torch

from benchmarks.planted import models
from benchmarks.planted.shapes import TINY_TARGET
from benchmarks.planted.text import Plant
from kernels import paths
from kernels.sampling import Draw, SamplingParams
from kernels.sparse import SparseConfig
from kernels.verify import Proposed, Rule
from outrider.runtime.attention import AttentionLayer
from outrider.runtime.cuda_graph import Repeating
from outrider.runtime.decode_loop import DecodeLoop
from outrider.runtime.device import find_device, work_on
from outrider.runtime.fused_decoder import FusedDecoder
from outrider.runtime.layer_ops import check_layer_ops
from outrider.runtime.memory import MIB
from outrider.runtime.model_runner import Chunk, ModelRunner
from outrider.runtime.paged_attention import TRITON, AttentionChoice, check_attention
from verifier_service.target_runner import TargetRunner

_HEADS = (
    AttentionLayer(6, 2, 80, 0.1, None),
    AttentionLayer(8, 8, 64, 0.1, 100, softcap=5.0),
    AttentionLayer(8, 1, 128, 0.1, None, sinks=True),
)
_CONFIG = SparseConfig(keep_mass=0.97, max_support=40)
_LENGTH = 100


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
    loaded = models.loaded(TINY_TARGET, plant, drafts=False, device=device, dtype=dtype)
    model_runner = ModelRunner.build(loaded, 3, _LENGTH, attention=AttentionChoice(TRITON, "exercised"))
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
