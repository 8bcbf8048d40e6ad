"""Shared by both training runs: windows of tokens, optimisers, the schedule over wall time, checkpoints, progress.

A run gives it a model and a loss. The optimisers work on float32 copies of the weights.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, distributed, multiprocessing, nn
from transformers import AttentionInterface, GenerationConfig, LlamaForCausalLM, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from outrider.runtime.loader import cpu_computes_bfloat16

DTYPE = torch.bfloat16 if cpu_computes_bfloat16() else torch.float32
"""Of weights and activations. On a CPU with AVX512-BF16 bfloat16 is 1.6 times as fast as float32; without the
instructions torch takes up to 50 times as long."""
ATTENTION = "demo_training"
_masks: dict[tuple[int, int, torch.dtype], Tensor] = {}


def causal_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Plain causal attention as three batched products: at these sizes 3 times as fast on CPU as the fused kernel.

    `query` `[B, H, L, D]`, `key` and `value` `[B, K, L, D]`; returns `[B, L, H, D]`. `attention_mask` `[1, 1, L, L]`
    is added to the scores in the causal mask's place.
    """
    batch, heads, length, width = query.shape
    groups = batch * key.shape[1]
    rows = query.reshape(groups, -1, width)
    if attention_mask is None:
        mask = _causal_mask(rows.shape[1], length, query.dtype)
    else:
        mask = attention_mask[0].repeat(1, rows.shape[1] // length, 1)
    scores = torch.baddbmm(mask, rows, key.reshape(groups, length, width).mT, alpha=scaling)
    mixed = torch.bmm(scores.softmax(dim=-1), value.reshape(groups, length, width))
    return mixed.view(batch, heads, length, width).transpose(1, 2), None


def _causal_mask(rows: int, length: int, dtype: torch.dtype) -> Tensor:
    """`[1, rows, length]`: the `[length, length]` causal mask once per query head that shares a key head."""
    if (rows, length, dtype) not in _masks:
        mask = torch.full((length, length), float("-inf"), dtype=dtype).triu(1)
        _masks[rows, length, dtype] = mask.repeat(rows // length, 1).unsqueeze(0)
    return _masks[rows, length, dtype]


AttentionInterface.register(ATTENTION, causal_attention)
AttentionMaskInterface.register(ATTENTION, lambda *_, **__: None)


def windows(stream: np.ndarray, length: int, generator: np.random.Generator) -> Iterator[Tensor]:
    """Windows `[length]` of `stream`, for ever: each epoch cuts it at a new phase and takes the cuts in a new order."""
    while True:
        phase = int(generator.integers(length))
        starts = np.arange(phase, len(stream) - length, length)
        for start in generator.permutation(starts):
            yield torch.from_numpy(stream[start : start + length].astype(np.int64))


def batch_of(source: Iterator[Tensor], count: int) -> Tensor:
    """The next `count` windows as one tensor `[count, length]`."""
    return torch.stack([next(source) for _ in range(count)])


@dataclass(frozen=True)
class Schedule:
    """Learning rate over the share of the time budget that is spent: warm-up, plateau, then a straight line down."""

    warmup: float = 0.02
    decay_from: float = 0.4
    peak: float = 1.0
    last: float = 0.0

    def factor(self, progress: float) -> float:
        """The factor on the optimiser's learning rates at `progress` in `[0, 1]`."""
        rise = min(1.0, (progress + 1e-3) / self.warmup)
        fallen = max(0.0, (progress - self.decay_from) / (1.0 - self.decay_from))
        return rise * (self.peak + (self.last - self.peak) * fallen)


# A target is trained with few layers first, as steps are cheaper then.
SHALLOW = Schedule(warmup=0.03, decay_from=0.5, last=0.5)
DEEP = Schedule(warmup=0.03, decay_from=0.0, peak=0.5)
# A layer adds to the residual stream through these.
OUTPUTS = (
    "o_proj.weight", "down_proj.weight", ".o.weight", ".wo.weight", "out_proj.weight", "out_proj.bias", "fc2.weight",
    "fc2.bias",
)  # fmt: skip


def begin_small(model: nn.Module, factor: float) -> None:
    """Scale down the additions to the residual stream."""
    for name, weight in model.named_parameters():
        if name.endswith(OUTPUTS):
            weight.data.mul_(factor)


def deepen(shallow: PreTrainedModel, deep: PreTrainedModel) -> None:
    """Let `deep` compute the same as `shallow`: behind each decoder layer, copies of it that write nothing yet."""
    few, many = (_decoder_layers(model) for model in (shallow, deep))
    inside = {id(weight) for weight in few.parameters()}
    rest = {name: weight for name, weight in shallow.named_parameters() if id(weight) not in inside}
    deep.load_state_dict(rest, strict=False)
    copies = len(many) // len(few)
    for index, layer in enumerate(many):
        # Not strict: T5's first layer alone embeds distances.
        layer.load_state_dict(few[index // copies].state_dict(), strict=False)
        if index % copies:
            begin_small(layer, 0.0)


def _decoder_layers(model: PreTrainedModel) -> nn.ModuleList:
    decoder = model.get_decoder()
    layers: nn.ModuleList = decoder.block if hasattr(decoder, "block") else decoder.layers
    return layers


class Optimizer:
    """Muon for the hidden matrices, AdamW for embeddings and norms, on float32 copies of the weights.

    Gradients are averaged over the processes of the run; each process then works out its own part of the update.
    """

    def __init__(self, model: nn.Module, matrix_rate: float, vector_rate: float) -> None:
        named = [(name, weight) for name, weight in model.named_parameters() if weight.requires_grad]
        self.weights = [weight for _, weight in named]
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        rank, processes = distributed.get_rank(), distributed.get_world_size()
        self.owned = [index % processes == rank for index in range(len(named))]
        mine = [(name, master) for (name, _), master, own in zip(named, self.masters, self.owned, strict=True) if own]
        matrices = [master for name, master in mine if _is_hidden_matrix(name, master)]
        others = [master for name, master in mine if not _is_hidden_matrix(name, master)]
        self.optimizers: list[tuple[torch.optim.Optimizer, float]] = [
            (torch.optim.Muon(matrices, lr=matrix_rate, momentum=0.95, weight_decay=0.05, ns_steps=4), matrix_rate),
            (torch.optim.AdamW(others, lr=vector_rate, betas=(0.9, 0.97), weight_decay=0.0), vector_rate),
        ]

    def step(self, factor: float, figures: list[float]) -> tuple[float, list[float]]:
        """One step at `factor` times the peak rates.

        Returns the norm of the gradient before clipping, and the means of `figures` over the processes.
        """
        gradients = [weight.grad.float().flatten() for weight in self.weights if weight.grad is not None]
        flat = torch.cat([*gradients, torch.tensor(figures)])
        distributed.all_reduce(flat)
        flat /= distributed.get_world_size()
        gradient, means = flat.split([len(flat) - len(figures), len(figures)])
        norm = float(gradient.norm())
        gradient *= min(1.0, 1 / (norm + 1e-6))  # clipped to a norm of 1
        sizes = [master.numel() for master in self.masters]
        for master, weight, part in zip(self.masters, self.weights, gradient.split(sizes), strict=True):
            master.grad, weight.grad = part.view_as(master), None
        for optimizer, rate in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
        self._exchange()
        return norm, [float(mean) for mean in means]

    def _exchange(self) -> None:
        """Give every process all parts of the update: parts that are another's enter the sum as zeros."""
        pairs = zip(self.masters, self.owned, strict=True)
        flat = torch.cat([(master.data if own else torch.zeros_like(master)).flatten() for master, own in pairs])
        distributed.all_reduce(flat)
        for master, weight, part in zip(
            self.masters, self.weights, flat.split([master.numel() for master in self.masters]), strict=True
        ):
            master.data.copy_(part.view_as(master))
            weight.data.copy_(part.view_as(master))

    def state(self) -> dict[str, Any]:
        """Everything that a resumed run needs; complete in the first process."""
        parts = [None] * distributed.get_world_size() if distributed.get_rank() == 0 else None
        distributed.gather_object([optimizer.state_dict() for optimizer, _ in self.optimizers], parts)
        return {"masters": [master.data for master in self.masters], "optimizers": parts}

    def restore(self, state: dict[str, Any]) -> None:
        """Take up where `state` was taken, and put its weights into the model."""
        for master, saved in zip(self.masters, state["masters"], strict=True):
            master.data.copy_(saved)
        for (optimizer, _), saved in zip(self.optimizers, state["optimizers"][distributed.get_rank()], strict=True):
            optimizer.load_state_dict(saved)
        self._exchange()


def _is_hidden_matrix(name: str, weight: Tensor) -> bool:
    layer = ".layers." in name or ".block." in name  # T5 calls its layers blocks, and one embeds distances
    return layer and weight.ndim == 2 and "relative_attention_bias" not in name


@dataclass
class Run:
    """A training run that ends with its time budget, however busy the machine is, and survives being killed.

    `clock` tells the time that counts, in seconds: wall time, or for one process alone its own CPU time.
    """

    optimizer: Optimizer
    schedule: Schedule
    minutes: float
    checkpoint: Path
    clock: Callable[[], float] = time.monotonic
    spent: float = 0.0
    tokens: int = 0
    steps: int = 0

    @property
    def progress(self) -> float:
        """The share of the time budget that is spent."""
        return min(1.0, self.spent / (60.0 * self.minutes))

    def resume(self) -> None:
        """Go on from the checkpoint, where there is one."""
        if self.checkpoint.exists():
            saved = torch.load(self.checkpoint, weights_only=True)
            self.spent, self.tokens, self.steps = saved["spent"], saved["tokens"], saved["steps"]
            self.optimizer.restore(saved["optimizer"])
            self._say(f"resumed at {self.spent / 60:.1f} min, {self.tokens:,} tokens")

    def save(self) -> None:
        """Write the checkpoint of all processes, in one file; a kill during the write leaves the one before."""
        state = {"spent": self.spent, "tokens": self.tokens, "steps": self.steps, "optimizer": self.optimizer.state()}
        if distributed.get_rank() == 0:
            fresh = self.checkpoint.with_suffix(".new")
            torch.save(state, fresh)
            fresh.replace(self.checkpoint)

    def train(
        self, step: Callable[[float], tuple[float, int]], evaluate: Callable[[], str], every: float = 180.0
    ) -> None:
        """Call `step(progress)` (forward and backward; returns loss and tokens) until the time is spent.

        Every `every` seconds a checkpoint is written and `evaluate()` printed. Raises FloatingPointError on a loss
        that is not finite.
        """
        begun, before, due = self.clock(), self.spent, self.spent + every
        smooth = math.nan
        while self.progress < 1.0:
            loss, tokens = step(self.progress)
            clock = before + self.clock() - begun
            norm, (loss, self.spent) = self.optimizer.step(self.schedule.factor(self.progress), [loss, clock])
            if not math.isfinite(loss):
                raise FloatingPointError(f"loss is {loss} at step {self.steps}")
            self.steps, self.tokens = self.steps + 1, self.tokens + tokens * distributed.get_world_size()
            smooth = loss if math.isnan(smooth) else 0.9 * smooth + 0.1 * loss
            if self.steps % 20 == 0:
                line = f"{self.spent / 60:5.1f} of {self.minutes:g} min  step {self.steps:5d}"
                line += f"  {self.tokens / 1e6:6.2f}M tokens"
                self._say(f"{line}  {self.tokens / self.spent:6.0f}/s  loss {smooth:.4f}  gradient {norm:.2f}")
            if self.spent >= due:
                due = self.spent + every
                self.save()
                if distributed.get_rank() == 0:
                    self._say(f"{self.spent / 60:5.1f} min  {evaluate()}")
        self.save()

    @staticmethod
    def _say(line: str) -> None:
        if distributed.get_rank() == 0:
            print(line, flush=True)


def is_made(member: str, work: Path, out: Path) -> bool:
    """Whether a run in `work` has ended that wrote `member`, and `out` has it: an earlier one may have had another."""
    return (work / f"{member}.json").exists() and (out / member).exists()


def in_processes(work: Callable[..., None], processes: int, *arguments: Any) -> None:
    """Call `work(*arguments)` in that many processes of one thread each, joined by `torch.distributed`.

    On a busy machine they keep going where the threads of one process would wait for each other at every product.
    """
    with tempfile.TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        multiprocessing.spawn(_joined, (processes, meeting, work, arguments), nprocs=processes)


@contextmanager
def alone() -> Iterator[None]:
    """Let this process, with one thread, be a run of its own."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        distributed.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=0, world_size=1)
        try:
            yield
        finally:
            distributed.destroy_process_group()
            torch.set_num_threads(threads)


def _joined(rank: int, processes: int, meeting: str, work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=meeting, rank=rank, world_size=processes)
    work(*arguments)
    distributed.destroy_process_group()


def save_model(model: LlamaForCausalLM, tokenizer: Any, folder: Path) -> None:
    """Write weights (bfloat16 safetensors), config, generation config (token ids only) and tokenizer to `folder`."""
    model.config._attn_implementation = "sdpa"
    model.config.use_cache = True
    end = tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=end, eos_token_id=end, pad_token_id=end)
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    model.config._attn_implementation = ATTENTION
