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
    """Writes a PNG of two panels, both over s, where the scales are ±s."""
    laws = document["laws"]
    figure, (distances, shares) = pyplot.subplots(1, 2, figsize=(10.4, 4.4))
    _draw_distances(distances, laws)
    _draw_shares(shares, laws)
    for panel in (distances, shares):
        panel.set_xscale("log")
        panel.set_xlabel("s, with the scales α = -s and β = s")
        for side in ("top", "right"):
            panel.spines[side].set_visible(False)
    figure.text(
        0.5, 0.01, f"The demo pair at temperature 1, {laws['places']:,} places; circles: the scales of Wagner et al.",
        ha="center", fontsize=8, color="#555555",
    )  # fmt: skip
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_distances(panel: Axes, laws: Json) -> None:
    apart = laws["target_from_draft"]
    _line(panel, laws, "from_target", _TARGET, "between text and target")
    _line(panel, laws, "from_draft", _DRAFT, "between text and draft")
    panel.axhline(apart, color=_GREY, linewidth=1, linestyle="--", label="between draft and target")
    panel.axhline(0, color="black", linewidth=2, label="between text and target, exact rules")
    panel.set_ylim(-0.02 * apart, 1.6 * apart)
    panel.set_ylabel("total variation")
    panel.set_title("How far the text's law is", fontsize=10)
    panel.legend(frameon=False, fontsize=8, loc="upper right")


def _draw_shares(panel: Axes, laws: Json) -> None:
    exact = laws["tokenwise"]["acceptance"]
    _line(panel, laws, "acceptance", _TARGET, "sigmoid")
    panel.axhline(exact, color="black", linewidth=2, label="tokenwise, exact")
    panel.set_ylim(0, 1.05)
    panel.set_ylabel("acceptance")
    panel.set_title("How many drafted tokens stand", fontsize=10)
    panel.legend(frameon=False, fontsize=8, loc="lower right")


def _line(panel: Axes, laws: Json, field: str, colour: str, label: str) -> None:
    points = [(float(scale), each[field]) for scale, each in laws["sweep"].items()]
    panel.plot([x for x, _ in points], [y for _, y in points], color=colour, label=label)
    papers = [(float(scale), each[field]) for scale, each in laws["sigmoid"]["as served"].items()]
    panel.plot(
        [x for x, _ in papers], [y for _, y in papers], linestyle="none", marker="o", markersize=6,
        markerfacecolor="white", markeredgecolor=colour, markeredgewidth=1.5,
    )  # fmt: skip
