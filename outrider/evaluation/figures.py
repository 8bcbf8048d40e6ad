"""Figures 2 to 4 of [L], with a pair in them, and its speed-up by the round trip. It needs the extra `bench`."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from matplotlib.axes import Axes

from outrider import theory
from outrider.evaluation.pictures import COLOURS, GREY, ORANGE, Destination, level, line, picture
from outrider.evaluation.plan import Pair, Plan

TOKENS_OF = (1, 3, 5, 7, 1000)
"""γ of Figure 2; the last is endless."""

COSTS = (0.01, 0.02, 0.05, 0.1)
"""c of Figure 3."""

SPEED_OF = (3, 5, 7, 10)
"""γ of Figure 4."""

_POINTS = 201
_OWN: Any = {"color": "black", "linewidth": 1.6}
_POINT: Any = {
    "linestyle": "none", "marker": "*", "markersize": 13, "color": ORANGE, "markeredgecolor": "black", "zorder": 5,
}  # fmt: skip


def draw_plan(destination: Destination, plan: Plan) -> None:
    """Draw the figures; the star is the pair with its fastest γ. Curves have the same α at all positions."""
    alpha = plan.pair.alpha
    low, high = max(0.0, min(0.5, alpha - 0.05)), min(1.0, max(0.9, alpha + 0.03))
    alphas = [low + (high - low) * step / (_POINTS - 1) for step in range(_POINTS)]
    positions = " The star has α by position, the curves have one α." if plan.pair.by_position else ""
    note = (
        f"Star: α = {alpha:.3g}, γ = {plan.fastest.gamma}, c = {plan.pair.c:.3g}, R = {plan.pair.round_trip:.3g} "
        f"target steps.{positions}\n"
        "Black: this pair. Coloured: as in the paper, without network; Figure 4 with c = ĉ = 0."
    )
    with picture(destination, 2, 2, size=(5.6, 3.7), note=note) as panels:
        tokens, best, speed, network = panels.flat
        _figure_2(tokens, alphas, plan, alpha)
        _figure_3(best, alphas, plan, alpha)
        _figure_4(speed, alphas, plan, alpha)
        _round_trips(network, plan, alpha)


def _figure_2(panel: Axes, alphas: list[float], plan: Plan, alpha: float) -> None:
    def curve(pair: Pair, gamma: int, label: str, **how: Any) -> None:
        _curve(panel, alphas, partial(pair.tokens, gamma), label, **how)

    for gamma, colour in zip(TOKENS_OF, COLOURS, strict=False):
        curve(Pair(alpha=0.0, c=0.0), gamma, f"γ = {gamma}" if gamma < 1000 else "γ = ∞", color=colour)
    curve(plan.pair, plan.fastest.gamma, "this pair", **_OWN)
    _finish(panel, "Figure 2: tokens of a round", "expected tokens", alphas, max(10, 1.1 * plan.fastest.tokens))
    line(panel, [(alpha, plan.fastest.tokens)], **_POINT)


def _figure_3(panel: Axes, alphas: list[float], plan: Plan, alpha: float) -> None:
    for c, colour in zip(COSTS, COLOURS, strict=False):
        of_paper = Pair(alpha=0.0, c=c, max_gamma=theory.MAX_GAMMA)
        _curve(panel, alphas, of_paper.best_gamma, f"c = {c:g}", color=colour, drawstyle="steps-mid")
    _curve(panel, alphas, plan.pair.best_gamma, "this pair", **_OWN, drawstyle="steps-mid")
    _finish(panel, "Figure 3: best γ", "γ (0: the target alone)", alphas, max(25, 1.1 * plan.gamma))
    line(panel, [(alpha, plan.gamma)], **_POINT)


def _figure_4(panel: Axes, alphas: list[float], plan: Plan, alpha: float) -> None:
    def curves(pair: Pair, gamma: int, label: str, **how: Any) -> None:
        _curve(panel, alphas, partial(pair.improvement, gamma), label, **how)
        _curve(panel, alphas, partial(pair.operations, gamma), "", **how, linestyle="--")

    for gamma, colour in zip(SPEED_OF, COLOURS, strict=False):
        curves(Pair(alpha=0.0, c=0.0), gamma, f"γ = {gamma}", color=colour)
    curves(plan.pair, plan.fastest.gamma, "this pair", **_OWN)
    highest = max(10, 1.1 * plan.fastest.speed_up, 1.1 * plan.fastest.operations)
    _finish(panel, "Figure 4: speed-up, and operations (dashed)", "relative to the target alone", alphas, highest)
    level(panel)
    line(panel, [(alpha, plan.fastest.speed_up), (alpha, plan.fastest.operations)], **_POINT)


def _round_trips(panel: Axes, plan: Plan, alpha: float) -> None:
    """The speed-up of the fastest γ at other round trips, and with α 0.1 less and more."""
    pair = plan.pair
    longest = max(1.5 * plan.most_round_trip, 1.5 * pair.round_trip, 0.5)
    trips = [longest * step / (_POINTS - 1) for step in range(_POINTS)]
    for other, style in ((alpha - 0.1, ":"), (alpha, "-."), (alpha + 0.1, "--")):
        if 0 <= other <= 1 and (other != alpha or pair.by_position):
            moved = replace(pair, alpha=other, by_position=())
            _curve(panel, trips, partial(_fastest, moved), f"α = {other:.3g}", color=GREY, linestyle=style)
    _curve(panel, trips, partial(_fastest, pair), "this pair", **_OWN)
    level(panel)
    panel.set_title("This pair: speed-up by the round trip", fontsize=10)
    panel.set_xlabel("round trip R, in target steps", fontsize=8)
    panel.set_ylabel("speed-up of the fastest γ", fontsize=8)
    panel.set_ylim(bottom=0)
    panel.legend(edgecolor="none", fontsize=7.5)
    line(panel, [(pair.round_trip, plan.fastest.speed_up)], **_POINT)


def _fastest(pair: Pair, round_trip: float) -> float:
    moved = replace(pair, round_trip=round_trip)
    return max(moved.improvement(gamma) for gamma in range(1, pair.max_gamma + 1))


def _curve(panel: Axes, xs: list[float], of: Callable[[float], float], label: str, **how: Any) -> None:
    line(panel, [(x, of(x)) for x in xs], label=label or None, **how)


def _finish(panel: Axes, title: str, measure: str, alphas: list[float], top: float) -> None:
    panel.set_title(title, fontsize=10)
    panel.set_xlabel("α", fontsize=8)
    panel.set_ylabel(measure, fontsize=8)
    panel.set_xlim(alphas[0], alphas[-1])
    panel.set_ylim(0, top)
    panel.legend(edgecolor="none", fontsize=7.5, loc="best")
