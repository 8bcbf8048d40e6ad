"""`results/sigmoid.json` as a picture: distance and acceptance over the scales of the rule. It computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot
from matplotlib.axes import Axes

_TARGET, _DRAFT, _GREY = "#2f6f9f", "#c98a2b", "#5d6776"

Json = dict[str, Any]


def draw(document: Json, path: Path) -> None:
    """Writes a PNG of four panels: distances above acceptance, for both families of scales."""
    laws = document["laws"]
    figure, panels = pyplot.subplots(2, 2, figsize=(10.4, 7.2), sharex="col", sharey="row")
    for (upper, lower), sweep in zip(panels.T, ("around_zero", "one_apart"), strict=True):
        _draw_distances(upper, laws, sweep)
        _draw_shares(lower, laws, sweep)
        for panel in (upper, lower):
            for side in ("top", "right"):
                panel.spines[side].set_visible(False)
    panels[0][0].set_title("α = -s, β = s, as Wagner et al. have it", fontsize=10)
    panels[0][1].set_title("β = α + 1", fontsize=10)
    panels[0][0].set_ylabel("total variation")
    panels[1][0].set_ylabel("acceptance")
    panels[1][0].set_xscale("log")
    panels[1][0].set_xlabel("s")
    panels[1][1].set_xlabel("α")
    panels[0][0].legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(0.0, 0.5))
    panels[1][0].legend(frameon=False, fontsize=8, loc="lower left")
    figure.text(
        0.5, 0.01, f"The demo pair at temperature 1, {laws['places']:,} places. Circles: the scales of Wagner et al.",
        ha="center", fontsize=8, color="#555555",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_distances(panel: Axes, laws: Json, sweep: str) -> None:
    apart = laws["target_from_draft"]
    panel.axhline(0, color="black", linewidth=3, alpha=0.35, label="exact rules: text from target")
    panel.axhline(apart, color=_GREY, linewidth=1, linestyle="--", label="draft from target")
    _line(panel, laws, sweep, "from_target", _TARGET, "sigmoid: text from target")
    _line(panel, laws, sweep, "from_draft", _DRAFT, "sigmoid: text from draft")
    panel.set_ylim(-0.05 * apart, 1.2 * apart)


def _draw_shares(panel: Axes, laws: Json, sweep: str) -> None:
    exact = laws["tokenwise"]["acceptance"]
    panel.axhline(exact, color="black", linewidth=3, alpha=0.35, label="tokenwise")
    _line(panel, laws, sweep, "acceptance", _TARGET, "sigmoid")
    panel.set_ylim(0.5, 1.02)


def _line(panel: Axes, laws: Json, sweep: str, field: str, colour: str, label: str) -> None:
    points = [(float(scale), each[field]) for scale, each in laws[sweep].items()]
    panel.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label)
    if sweep != "around_zero":
        return
    papers = [(float(scale), each[field]) for scale, each in laws["sigmoid"]["as served"].items()]
    panel.plot(
        [x for x, _ in papers], [y for _, y in papers], linestyle="none", marker="o", markersize=6,
        markerfacecolor="white", markeredgecolor=colour, markeredgewidth=1.5, clip_on=False,
    )  # fmt: skip
