"""The fused verification with rooms of fixed size, so that a CUDA graph may hold it and be replayed for others.

The kernels are those of `verify_triton`. What they read and write lies at fixed addresses, and their grids are those of
a full batch: rooms that the proposals leave empty belong to a sequence that is nobody's, with nothing drafted and
nothing to draw. Plain batches alone fit; `StaticLaunch.refusal` says why another does not, and `kernels.verify` judges
that one. Knows nothing of models, of what else a graph holds, and of when it is replayed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kernels.checks import refuse_forms, refuse_misfit
from kernels.dense import DenseLaw, DraftLogits
from kernels.distribution import SamplingLaw
from kernels.rooms import Field, Rooms
from kernels.ruling import Proposed, Rule, Ruling, Status
from kernels.sparse import MAX_SUPPORT, SparseLaw
from kernels.triton_rows import tile_size
from kernels.verify_pack import (
    BASE_LENGTH,
    DRAFT_INTS,
    FLOATS,
    INTS,
    Batch,
    arrays_of,
    has_race,
    is_filtered,
)
from kernels.verify_triton import STATUSES, launch_of, outcomes_of, rulings_of

_SLOTS = 2
"""Fillings that may be on their way at once: one is written by the host while the last one's copy is read."""

_NOBODY = Proposed((), (), SamplingLaw(temperature=0), seed=0, base_length=0, rule=Rule.TOKENWISE)
_BAD_LOGITS = STATUSES.index(Status.BAD_LOGITS)


class StaticLaunch:
    """One launch for many batches: `fill` it, run it (or replay the graph that holds `run`), `fetch` what came out.

    All of it belongs to one stream, on which the logits are written, too; only the copy of `fetch` may take another.
    Kernels are compiled at the first `run`, which therefore comes before a capture.

    The outcomes are bit for bit those of `kernels.verify.verify` on the same logits, whatever lies in the empty rooms.
    """

    def __init__(
        self, logits: Tensor, *, sequences: int, drafts: int, support: int = MAX_SUPPORT, races: bool = True
    ) -> None:
        """Set all rooms aside.

        Args:
            logits: `[R, V]`, float32 or of 16 bits, columns side by side; each run reads what stands there then. Rows
                past `drafts + sequences` are not read.
            sequences: proposals that a batch may hold.
            drafts: drafted tokens that it may hold in all; 0 makes a launch that only draws next tokens.
            support: tokens that the q̂ of one of them may hold.
            races: whether `coupled` is judged too. A launch without it has a first kernel of fewer registers.

        Raises:
            ValueError: a number is out of range, or the logits have the wrong form.
        """
        if logits.ndim != 2 or 0 in logits.shape or logits.stride(1) != 1:
            raise ValueError(
                f"logits are {tuple(logits.shape)} of strides {logits.stride()}; [R, V] of columns 1 apart"
            )
        if logits.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise ValueError(f"logits are of {logits.dtype}; float32, bfloat16 and float16 are read")
        if sequences < 1 or drafts < 0:
            raise ValueError(f"sequences is {sequences} and drafts is {drafts}; at least 1 and 0")
        if not 1 <= support <= MAX_SUPPORT:
            raise ValueError(f"support is {support}, outside 1..{MAX_SUPPORT}")
        self.logits = logits[: sequences + drafts]
        self.sequences, self.drafts, self.support, self.races = sequences, drafts, support, races
        self.rows, V = self.logits.shape
        device = logits.device
        rooms = _rooms(self.rows, sequences + 1, drafts, support, -(-V // tile_size(V)))
        self._buffer = rooms.buffer(device)
        batch = Batch(
            **rooms.tensors(self._buffer),
            dense=torch.empty(0, V, device=device),
            has_races=races,
        )
        self._launch = launch_of(self.logits, (), batch)
        self._slots = [_Slot.of(rooms, self._launch.results) for _ in range(_SLOTS)]
        self._filling = 0
        self._nobody = arrays_of([_NOBODY], V)
        self.fill(())

    def refusal(self, proposals: Sequence[Proposed]) -> str | None:
        """Return why these cannot be judged here, with the numbers; None where they can. Soundness is not looked at."""
        drafts = sum(each.gamma for each in proposals)
        for name, count, room in (
            ("sequences", len(proposals), self.sequences),
            ("drafts", drafts, self.drafts),
            ("rows", drafts + len(proposals), self.rows),
        ):
            if count > room:
                return f"{count} {name}, where there is room for {room}"
        reasons = (self._refusal_of(number, each) for number, each in enumerate(proposals))
        return next((reason for reason in reasons if reason is not None), None)

    def _refusal_of(self, number: int, proposal: Proposed) -> str | None:
        if is_filtered(proposal):
            law = proposal.law
            return f"proposal {number} has filters: top_k {law.top_k}, top_p {law.top_p}, min_p {law.min_p}"
        if has_race(proposal) and not self.races:
            return f"proposal {number} is coupled, and the launch was made without races"
        if any(row is not None and len(row.ids) for row in proposal.adjustments):
            return f"proposal {number} has adjustments"
        for i, q in enumerate(proposal.q):
            if isinstance(q, DenseLaw | DraftLogits):
                return f"q[{i}] of proposal {number} goes over the whole vocabulary"
            if isinstance(q, SparseLaw) and len(q.ids) > self.support:
                return f"q[{i}] of proposal {number} has {len(q.ids)} tokens, where there is room for {self.support}"
        return None

    def fill(self, proposals: Sequence[Proposed]) -> None:
        """Put these in place of the last ones: packed on the host, and one copy queued on the current stream.

        Nothing waits for the device, but for the copy of the filling before the last. A side stream's `fetch` is done
        before what is queued from here on.

        Raises:
            ValueError: they do not fit (`refusal`), or are not sound (as `kernels.verify.verify` finds).
        """
        V = self.logits.shape[1]
        reason = self.refusal(proposals)
        if reason is not None:
            raise ValueError(reason)
        for number, each in enumerate(proposals):
            refuse_misfit(number, each)
            refuse_forms(number, each, V)
        arrays = arrays_of(proposals, V)
        last = self._slots[self._filling % _SLOTS]
        self._filling += 1
        slot = self._slots[self._filling % _SLOTS]
        if slot.copied is not None:
            slot.copied.synchronize()
        _write(slot.staged, arrays, self._nobody)
        slot.proposals = tuple(proposals)
        if slot.copied is None:
            self._buffer.copy_(slot.buffer)
            return
        stream = torch.cuda.current_stream(self.logits.device)
        if last.fetched is not None:
            stream.wait_event(last.fetched)
        self._buffer.copy_(slot.buffer, non_blocking=True)
        slot.copied.record(stream)

    def run(self) -> None:
        """Queue the kernels: the same launches at each call, no host sync, nothing allocated."""
        self._launch.run()

    def fetch(self, stream: torch.cuda.Stream | None = None) -> Fetched:
        """Queue the copy of what the last run found, in one piece.

        Args:
            stream: where to; the current one unless told. On another the copy waits for all that is queued here so far,
                and a run is to be preceded by a `fill`, or it may overwrite what is being copied.
        """
        slot = self._slots[self._filling % _SLOTS]
        results = self._launch.results
        if slot.fetched is None:
            slot.results.copy_(results)
        else:
            here = torch.cuda.current_stream(self.logits.device)
            there = here if stream is None else stream
            if there != here:
                there.wait_stream(here)
            with torch.cuda.stream(there):
                slot.results.copy_(results, non_blocking=True)
            slot.fetched.record(there)
        return Fetched(self, self._filling)

    @property
    def outcomes(self) -> Tensor:
        """What the last run found, on the device, int32 `[sequences, 3]`: place in `STATUSES`, accepted, next token."""
        return outcomes_of(self._launch.results, self.drafts)[: self.sequences]

    def next_tokens(self) -> Tensor:
        """Return the next tokens on the device, int64 `[sequences]`; -1 where a row is no law. May be captured.

        Past the proposals stands some token, or -1.
        """
        outcomes = self.outcomes
        return outcomes[:, 2].long().masked_fill(outcomes[:, 0] == _BAD_LOGITS, -1)

    def advance(self) -> None:
        """Add 1 to every base_length on the device, until the next `fill`. May be captured.

        With `drafts` of 0 and proposals under `coupled`, whose noise goes by position, one graph may so draw a token,
        take a step of the model, and draw the next.
        """
        self._launch.batch.ints.select(1, BASE_LENGTH).add_(1)

    def _rulings(self, filling: int) -> list[Ruling]:
        slot = self._slots[filling % _SLOTS]
        if self._filling - filling >= _SLOTS:
            raise RuntimeError(f"filling {filling} is asked for after filling {self._filling}, which took its room")
        if slot.fetched is not None:
            slot.fetched.synchronize()
        return rulings_of(slot.results, self.drafts, self.logits, slot.proposals)


@dataclass(frozen=True, slots=True)
class Fetched:
    """What one run found, on its way to the host; it is kept until the launch has been filled twice more."""

    _launch: StaticLaunch
    _filling: int

    def rulings(self) -> list[Ruling]:
        """Wait for the copy, and return one ruling a proposal, in order.

        Log-probabilities are read from the logits as they stand now, so ask before these are overwritten.

        Raises:
            RuntimeError: the launch has been filled twice since.
        """
        return self._launch._rulings(self._filling)


@dataclass(slots=True)
class _Slot:
    """What one filling takes on the host: pinned, where it is copied to and from a GPU.

    Attributes:
        buffer: all that is copied to the device, as the rooms lie.
        staged: the arrays in it.
        results: what comes back, as `Launch.results`.
        copied: done when `buffer` has been read; None where nothing is asynchronous.
        fetched: done when `results` have been written.
        proposals: of the filling.
    """

    buffer: Tensor
    staged: dict[str, np.ndarray]
    results: Tensor
    copied: torch.cuda.Event | None
    fetched: torch.cuda.Event | None
    proposals: tuple[Proposed, ...] = ()

    @classmethod
    def of(cls, rooms: Rooms, results: Tensor) -> _Slot:
        on_gpu = results.device.type == "cuda"
        buffer = rooms.buffer(torch.device("cpu"), pinned=on_gpu)
        buffer.zero_()
        events = (torch.cuda.Event(), torch.cuda.Event()) if on_gpu else (None, None)
        return cls(buffer, rooms.arrays(buffer), torch.empty_like(results, device="cpu", pin_memory=on_gpu), *events)


def _rooms(R: int, B: int, N: int, K: int, n_tiles: int) -> Rooms:
    """Return where the arrays of `Batch` lie, with room for so many rows, sequences, drafts, and tokens of each q̂."""
    changes = {name: Field(np.float32, (0,)) for name in ("change_divisors", "change_biases")}
    return Rooms(
        {
            "ints": Field(np.int64, (B, INTS)),
            "floats": Field(np.float64, (B, FLOATS)),
            "uniforms": Field(np.float64, (R,)),
            "row_sequence": Field(np.int32, (R,)),
            "draft_ints": Field(np.int32, (N, DRAFT_INTS)),
            "draft_q": Field(np.float32, (N,)),
            "support_ids": Field(np.int32, (N * K,)),
            "support_q": Field(np.float32, (N * K,)),
            "filtered_rows": Field(np.int32, (0,)),
            "adjusted": Field(np.int32, (0,)),
            "tile_starts": Field(np.int32, (0, n_tiles + 1)),
            "change_ids": Field(np.int32, (0,)),
            **changes,
        }
    )


def _write(staged: dict[str, np.ndarray], arrays: dict[str, np.ndarray], nobody: dict[str, np.ndarray]) -> None:
    """Put the arrays at the beginning of their rooms, and nobody where a kernel goes by the size of a room.

    What else is left of an earlier filling stays: no number points there.
    """
    for name, array in arrays.items():
        staged[name][: len(array)] = array
    for name in ("ints", "floats"):
        staged[name][len(arrays[name]) :] = nobody[name]
    staged["row_sequence"][len(arrays["row_sequence"]) :] = len(staged["ints"]) - 1
