"""The fused verification kernels: a few launches over the target's logits verify a ragged batch of proposals.

1. *Stats*, a warp for each tile of each row: the largest logit, the sum of exponentials relative to it, and the argmax
   or Gumbel-max token if the rule needs one. This reads all logits once.
2. *Verify*, a launch for each rule, a program for each proposal: combines the tiles of its rows in fixed order, runs
   the acceptance tests (`triton_walk`), and samples the next token from the stopping row (`triton_draw`).

Rows with top-k, top-p or min-p take launches in between: 4 or 8 steps of each search, and the cut (`triton_filters`).
There is no host sync, so a CUDA graph can hold the launches. The order of every sum depends on V only, never on the
batch.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from kernels.adjustments import apply_many_bans
from kernels.sampling import NO_LOGITS
from kernels.triton_draw import Draft, RowDistribution, draw
from kernels.triton_filters import CANDIDATES, Search, filter_tile, load_filters, search_tile, steps_of
from kernels.triton_rows import (
    BLOCK,
    COUPLED,
    GREEDY,
    RESAMPLE,
    Rows,
    TileStats,
    load_terms,
    philox_uniforms,
    store_stats,
    tile_size,
    tile_stats,
)
from kernels.triton_walk import (
    DRAFT_COLUMNS,
    LOGITS_ROW,
    SUPPORT,
    SUPPORT_SIZE,
    Drafts,
    is_distribution,
    row_distributions,
    walk,
    walk_block,
)
from kernels.verify import BAD_LOGITS, Proposed, Rule, Status, VerifyResult, adjustments_of
from kernels.verify_pack import GREEDY_NUMBER, RULE_NUMBERS, STATUSES, Batch, pack

FILTER_OPTIONS = {"num_warps": 1}
"""Compile options: a warp reduces a tile without barriers."""


def stats_sizes(rules: Collection[int]) -> dict[str, int]:
    """Return the constants of `stats_kernel` for the rules of a batch; OWN_TILES is its number of warps, too.

    Two tiles a program are faster on an H200, but for the best tokens of tiles, whose warps would wait for each other.
    """
    with_noise = RULE_NUMBERS[Rule.COUPLED] in rules
    with_best = with_noise or GREEDY_NUMBER in rules
    return {"OWN_TILES": 1 if with_best else 2, "WITH_BEST": with_best, "WITH_NOISE": with_noise}


def verify_options(*, adjusted: bool) -> dict[str, int]:
    """Return the compile options of `verify_kernel`: two programs on a multiprocessor where the registers suffice."""
    return {"num_warps": 8, "maxnreg": 255 if adjusted else 128}


_STATUS_OK, _STATUS_ZERO_RESIDUAL, _STATUS_BAD_LOGITS = (tl.constexpr(i) for i in range(3))
_OUTCOME = tl.constexpr(3)  # status, accepted, next token


# -------------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def stats_kernel(
    logits, row_stride, V, n_tiles, row_sequence, ints, floats,
    adjusted, tile_starts, change_ids, change_divisors, change_biases, cuts,
    peaks, masses, bests, leads,
    OWN_TILES: tl.constexpr, TILE: tl.constexpr, ADJUSTED: tl.constexpr,
    WITH_BEST: tl.constexpr, WITH_NOISE: tl.constexpr,
):  # fmt: skip
    """Write the statistics of each tile, `[R, n_tiles]`, and reset the cuts. Grid: R · programs of a row."""
    programs = (n_tiles + OWN_TILES - 1) // OWN_TILES
    row = tl.program_id(0) // programs
    tile = tl.program_id(0) % programs * OWN_TILES
    rows = Rows(logits, row_stride, V, n_tiles, adjusted, tile_starts, change_ids, change_divisors, change_biases, cuts)
    terms = load_terms(ints, floats, tl.load(row_sequence + row))
    found = tile_stats(rows, row, tile, terms, -float("inf"), OWN_TILES, TILE, ADJUSTED, WITH_BEST, WITH_NOISE)
    there = tile + tl.arange(0, OWN_TILES)
    stats = TileStats(peaks, masses, bests, leads)
    store_stats(stats, row * n_tiles + there, there < n_tiles, found, WITH_BEST)
    if tile == 0:
        tl.store(cuts + row, -float("inf"))


@triton.jit(do_not_specialize=["step", "begin", "F"])
def filter_kernel(
    logits, row_stride, V, n_tiles, row_sequence, ints, floats, filtered_rows,
    adjusted, tile_starts, change_ids, change_divisors, change_biases, cuts,
    peaks, masses, bests, leads,
    keys, targets, sums, F, step, begin,
    TILE: tl.constexpr, TILES: tl.constexpr, STEPS: tl.constexpr, ADJUSTED: tl.constexpr, IS_LAST: tl.constexpr,
):  # fmt: skip
    """Run a step of the search for the cuts of rows with filters; after the last, cut them. Grid: F · n_tiles."""
    n = tl.program_id(0) // n_tiles
    tile = tl.program_id(0) % n_tiles
    row = tl.load(filtered_rows + n)
    rows = Rows(logits, row_stride, V, n_tiles, adjusted, tile_starts, change_ids, change_divisors, change_biases, cuts)
    stats = TileStats(peaks, masses, bests, leads)
    search = Search(keys, targets, sums, F)
    b = tl.load(row_sequence + row)
    terms = load_terms(ints, floats, b)
    # The last step writes statistics while the row's other programs read them: the largest logit stays, and so does
    # whether the row is bad.
    tiles = tl.arange(0, TILES)
    at = row * n_tiles + tiles
    peak = tl.max(tl.load(peaks + at, mask=tiles < n_tiles, other=-float("inf")), 0)
    if is_distribution(tl.sum(tl.load(masses + at, mask=tiles < n_tiles, other=0.0), 0)):
        filters = load_filters(floats, b, V, peak)
        if IS_LAST:
            filter_tile(rows, stats, search, n, row, tile, filters, terms, step, TILE, TILES, STEPS, ADJUSTED)
        else:
            search_tile(
                rows, stats, search, n, row, tile, filters, terms.scale, step, begin, TILE, TILES, STEPS, ADJUSTED
            )


@triton.jit
def verify_kernel(
    logits, row_stride, V, n_tiles, ints, floats,
    adjusted, tile_starts, change_ids, change_divisors, change_biases, cuts,
    peaks, masses, bests, leads,
    draft_ints, draft_q, support_ids, support_q, draft_logits, uniforms,
    outcomes, beta,
    RULE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, ADJUSTED: tl.constexpr,
):  # fmt: skip
    """Verify one proposal, if RULE is its rule; write its outcome `[B, 3]` and β `[N]`. Grid: B."""
    b = tl.program_id(0)
    terms = load_terms(ints, floats, b)
    if terms.rule != RULE:
        return
    rows = Rows(logits, row_stride, V, n_tiles, adjusted, tile_starts, change_ids, change_divisors, change_biases, cuts)
    stats = TileStats(peaks, masses, bests, leads)
    drafts = Drafts(draft_ints, draft_q, support_ids, support_q, draft_logits, uniforms)
    kept = terms.lenience * 0 + 1.0
    bad = b < 0
    if RULE == BLOCK:
        accepted, kept, bad = walk_block(rows, stats, terms, drafts, beta, TILE, TILES, ADJUSTED)
    else:
        accepted = walk(rows, stats, terms, drafts, beta, RULE, TILE, TILES, ADJUSTED)

    row = terms.first_row + accepted
    peak, mass, best = row_distributions(
        rows, stats, row + tl.arange(0, 1), tl.arange(0, 1) == 0, terms.scale, RULE, TILES
    )
    p = RowDistribution(row, tl.max(peak, 0), tl.max(mass, 0), terms.scale, tl.load(cuts + row))
    token = tl.max(best, 0)
    status = tl.zeros_like(accepted) + _STATUS_OK
    if bad | ~is_distribution(p.mass):
        status = tl.zeros_like(accepted) + _STATUS_BAD_LOGITS
    elif (RULE != GREEDY) & (RULE != COUPLED):
        u = tl.max(philox_uniforms(terms.seed, terms.base_length, accepted + tl.arange(0, 1), RESAMPLE), 0)
        if terms.given >= 0:
            u = tl.load(uniforms + terms.given + terms.gamma)
        at = draft_ints + (terms.first_draft + accepted) * DRAFT_COLUMNS
        rejected = accepted < terms.gamma
        support = tl.load(at + SUPPORT, mask=rejected, other=0)
        size = tl.load(at + SUPPORT_SIZE, mask=rejected, other=0)
        logits_row = tl.load(at + LOGITS_ROW, mask=rejected, other=-1)
        draft = Draft(
            support_ids + support, support_q + support, size, draft_logits + logits_row.to(tl.int64) * V,
            terms.lowest, terms.inverse_span,
        )  # fmt: skip
        kept = tl.where(rejected, kept, 1.0)
        token, none = draw(rows, stats, p, draft, rejected, kept, u, RULE, TILE, TILES, ADJUSTED)
        status = tl.where(none, _STATUS_ZERO_RESIDUAL, _STATUS_OK)
    tl.store(outcomes + b * _OUTCOME, status)
    tl.store(outcomes + b * _OUTCOME + 1, accepted)
    tl.store(outcomes + b * _OUTCOME + 2, token)


# --------------------------------------------------------------------------------------------------------------- launch


@dataclass(frozen=True, slots=True)
class Launch:
    """A batch with its buffers on the device, ready to run.

    Attributes:
        logits: `[R, V]`, columns contiguous: a copy where rows ban many ids, else the target's. Each run reads them, so
            they may be overwritten in between.
        proposals: the B proposals.
        batch: the proposals as arrays.
        stats: buffers of the tile statistics: peaks, masses, bests and leads, `[R, n_tiles]` each.
        cuts: buffer of the filters' cuts, float32 `[R]`.
        search: buffers of `triton_filters.Search`: keys, targets and sums.
        out: buffer of the results, int32 `[_beta_words(N) + 3 · B]`: β as bits of float32, then status, accepted count
            and next token of each proposal.
    """

    logits: Tensor
    proposals: Sequence[Proposed]
    batch: Batch
    stats: tuple[Tensor, ...]
    cuts: Tensor
    search: tuple[Tensor, Tensor, Tensor]
    out: Tensor

    def run(self) -> None:
        """Queue the kernels. No host sync, and the same launches each time, so a CUDA graph can hold them."""
        with torch.cuda.device_of(self.logits):  # Triton launches on the current device, not on that of its operands
            self._launch()

    def _launch(self) -> None:
        R, V = self.logits.shape
        batch = self.batch
        tile = tile_size(V)
        n_tiles = -(-V // tile)
        tiles = max(16, triton.next_power_of_2(n_tiles))
        B, N = len(batch.ints), len(batch.draft_q)
        adjusted = len(batch.change_ids) > 0
        where = (self.logits, self.logits.stride(0), V, n_tiles)
        changes = (
            batch.adjusted, batch.tile_starts, batch.change_ids, batch.change_divisors, batch.change_biases
        )  # fmt: skip
        sizes = stats_sizes(batch.rules)
        stats_kernel[(R * -(-n_tiles // sizes["OWN_TILES"]),)](
            *where, batch.row_sequence, batch.ints, batch.floats, *changes, self.cuts, *self.stats,
            **sizes, TILE=tile, ADJUSTED=adjusted, num_warps=sizes["OWN_TILES"],
        )  # fmt: skip
        self._filter(where, changes, tile, tiles)
        for rule in batch.rules:
            verify_kernel[(B,)](
                *where, batch.ints, batch.floats, *changes, self.cuts, *self.stats,
                batch.draft_ints, batch.draft_q, batch.support_ids, batch.support_q, batch.draft_logits, batch.uniforms,
                _outcomes(self.out, N), self.out[:N].view(torch.float32),
                RULE=rule, TILE=tile, TILES=tiles, ADJUSTED=adjusted, **verify_options(adjusted=adjusted),
            )  # fmt: skip

    def _filter(self, where: tuple[Any, ...], changes: tuple[Tensor, ...], tile: int, tiles: int) -> None:
        """Queue the searches that the batch needs, and cut the rows."""
        batch, F = self.batch, len(self.batch.filtered_rows)
        if F == 0:
            return
        adjusted = len(batch.change_ids) > 0
        n_steps = steps_of(self.logits.dtype, adjusted=adjusted)
        begin, end = 0 if batch.with_top_k else n_steps, 2 * n_steps if batch.with_top_p else n_steps
        last = end - 1 if begin < end else -1
        for step, is_last in (*((each, False) for each in range(begin, end)), (last, True)):
            filter_kernel[(F * where[3],)](
                *where, batch.row_sequence, batch.ints, batch.floats, batch.filtered_rows, *changes, self.cuts,
                *self.stats, *self.search, F, step, begin,
                TILE=tile, TILES=tiles, STEPS=n_steps, ADJUSTED=adjusted, IS_LAST=is_last, **FILTER_OPTIONS,
            )  # fmt: skip

    def results(self) -> list[VerifyResult]:
        """Wait for the last run and return its results, by one copy from the device."""
        out, N = self.out.cpu(), len(self.batch.draft_q)
        beta = out[:N].view(torch.float32).numpy()
        outcomes = _outcomes(out, N).tolist()
        results = []
        first_row = 0
        for b, (proposal, (status, accepted, token)) in enumerate(zip(self.proposals, outcomes, strict=True)):
            gamma, is_bad = len(proposal.tokens), STATUSES[status] is Status.BAD_LOGITS
            judged = 0 if proposal.rule in (Rule.COUPLED, Rule.SIGMOID) else min(accepted + 1, gamma)
            own = tuple(beta[first_row - b :][:judged].tolist())
            results.append(BAD_LOGITS if is_bad else VerifyResult(STATUSES[status], accepted, token, own))
            first_row += gamma + 1
        return results


def prepare(logits: Tensor, proposals: Sequence[Proposed]) -> Launch:
    """Pack the proposals, copy them to the logits' device, and allocate the output buffers."""
    if logits.dtype == torch.float64:
        logits = logits.float()
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    logits = apply_many_bans(logits, adjustments_of(proposals))
    R, V = logits.shape
    batch = pack(proposals, V, tile_size(V), logits.device)
    stats = _stats_buffers((R, -(-V // tile_size(V))), logits.device)
    cuts = torch.empty(R, dtype=torch.float32, device=logits.device)
    F, steps = len(batch.filtered_rows), 2 * steps_of(logits.dtype, adjusted=len(batch.change_ids) > 0)
    search = (
        torch.empty((steps, F), dtype=torch.int32, device=logits.device),
        torch.empty(F, dtype=torch.float64, device=logits.device),
        torch.empty((2, F, stats[0].shape[1], CANDIDATES.value), dtype=torch.float32, device=logits.device),
    )
    words = _beta_words(len(batch.draft_q)) + 3 * len(batch.ints)
    out = torch.empty(words, dtype=torch.int32, device=logits.device)
    return Launch(logits, proposals, batch, stats, cuts, search, out)


def _stats_buffers(shape: tuple[int, int], device: torch.device) -> tuple[Tensor, ...]:
    """Return buffers for peaks, masses, bests and leads, each aligned to 16 bytes, as the kernels expect."""
    types = torch.float32, torch.float32, torch.int32, torch.float32
    return tuple(torch.empty(shape, dtype=each, device=device) for each in types)


def _outcomes(out: Tensor, N: int) -> Tensor:
    """Return the part `[B, 3]` of `Launch.out`: index in `STATUSES`, accepted, next token."""
    return out[_beta_words(N) :].view(-1, 3)


def verify(logits: Tensor, proposals: Sequence[Proposed]) -> list[VerifyResult]:
    """See `kernels.verify.verify`."""
    launch = prepare(logits, proposals)
    launch.run()
    return launch.results()


def draw_next(logits: Tensor, ints: Tensor, floats: Tensor, uniforms: Tensor, *, greedily: bool) -> Tensor:
    """Return the next token of each row, int64 `[B]`, as `verify` draws it after no drafts; `NO_LOGITS` of a bad row.

    There is no host sync, so a CUDA graph can hold it; filters and adjustments are not supported.

    Args:
        logits: `[B, V]`, columns contiguous.
        ints: of B proposals without drafts, see `Batch`.
        uniforms: float64 `[U]`, which `ints` refer to.
        greedily: whether all proposals have temperature 0, which takes fewer launches.
    """
    launch = _without_drafts(logits, ints, floats, uniforms, (GREEDY_NUMBER,) if greedily else _DRAWN_RULES)
    launch.run()
    status, _, token = _outcomes(launch.out, 0).unbind(1)
    return token.long().masked_fill(status == STATUSES.index(Status.BAD_LOGITS), NO_LOGITS)


def tile_statistics(logits: Tensor, ints: Tensor, floats: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest logit of each tile, and its mass relative to that (`triton_rows.tile_stats`).

    Args:
        logits: `[B, V]`, columns contiguous.
        ints: see `draw_next`.

    Returns:
        Float32 `[B, tiles]` each.
    """
    launch = _without_drafts(logits, ints, floats, floats, ())
    launch.run()
    peaks, masses, *_ = launch.stats
    return peaks, masses


_DRAWN_RULES = (RULE_NUMBERS[Rule.TOKENWISE], RULE_NUMBERS[Rule.COUPLED], GREEDY_NUMBER)


def _without_drafts(logits: Tensor, ints: Tensor, floats: Tensor, uniforms: Tensor, rules: tuple[int, ...]) -> Launch:
    """Return a launch for B proposals without drafts, for the rules by number."""
    (B, V), device = logits.shape, logits.device
    nothing = torch.empty(0, dtype=torch.int32, device=device)
    reals = nothing.float()
    batch = Batch(
        ints=ints, floats=floats, row_sequence=torch.arange(B, dtype=torch.int32, device=device),
        filtered_rows=nothing, draft_ints=nothing, draft_q=reals, support_ids=nothing, support_q=reals,
        draft_logits=reals.view(0, V), uniforms=uniforms, adjusted=nothing, tile_starts=nothing, change_ids=nothing,
        change_divisors=reals, change_biases=reals,
        with_top_k=False, with_top_p=False, rules=rules,
    )  # fmt: skip
    stats = _stats_buffers((B, -(-V // tile_size(V))), device)
    cuts = torch.empty(B, dtype=torch.float32, device=device)
    out = torch.empty(3 * B, dtype=torch.int32, device=device)
    return Launch(logits, (), batch, stats, cuts, (nothing, reals, reals), out)


def _beta_words(N: int) -> int:
    """Return the words that β takes, padded so that the next array is aligned to 16 bytes, as the kernels expect."""
    return -(-N // 4) * 4
