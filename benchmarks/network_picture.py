"""The sweep of round-trip times as a picture: ratios as measured and as foretold. It computes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # no window: it writes a file
from matplotlib import pyplot

_COLOURS = ("#5d6776", "#2f6f9f", "#c98a2b", "#7a5195")


def draw(document: dict[str, Any], path: Path) -> None:
    """Writes a PNG: a line for each arm, whole where measured and dashed where foretold."""
    rows = document["rows"]
    delays = sorted({row["added_ms"] for row in rows})
    figure, panel = pyplot.subplots(figsize=(6.4, 4.2))
    for colour, arm in zip(_COLOURS, dict.fromkeys(row["arm"] for row in rows), strict=False):
        own = sorted((row for row in rows if row["arm"] == arm), key=lambda row: row["added_ms"])
        places = [delays.index(row["added_ms"]) for row in own]
        ratios = [row["ratio"] for row in own]
        errors = [
            [row["ratio"] - row["ratio_range"][0] for row in own],
            [row["ratio_range"][1] - row["ratio"] for row in own],
        ]
        panel.errorbar(places, ratios, yerr=errors, marker="o", markersize=4, capsize=2, color=colour, label=arm)
        panel.plot(places, [row["foretold_ratio"] for row in own], linestyle="--", linewidth=1, color=colour)
    panel.set_xticks(range(len(delays)), [f"{delay:g}" for delay in delays])
    panel.set_xlabel("added round trip between draft and verifier, ms")
    panel.set_ylabel("tokens/s, to the target alone")
    panel.plot([], [], linestyle="--", linewidth=1, color="#333333", label="foretold")
    panel.legend(frameon=False, fontsize=8)
    for side in ("top", "right"):
        panel.spines[side].set_visible(False)
    found = document["machine"]
    figure.text(0.5, 0.01, f"{found['cpu']}, {found['cores']} cores", ha="center", fontsize=7, color="#555555")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
