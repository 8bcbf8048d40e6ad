"""The pictures of all benchmarks, drawn from a result's JSON document.

python -m benchmarks.plots benchmarks/results/pair.json    draw its picture again, beside it
"""

import importlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from outrider.evaluation.pictures import COLOURS, bars, foot, level, line, picture


def caption(document: dict[str, Any]) -> str:
    return f"{document['machine']['cpu']}, {document['machine']['cores']} cores"


def comparison(
    path: Path,
    document: dict[str, Any],
    measured: Iterable[tuple[str, str, Mapping[str, Any]]],
    *,
    label: str,
    note: str = "",
    text: Callable[[Any], str] | None = None,
    predicted: Callable[[Any], float | None] | None = None,
) -> None:
    """A panel a title, a group of bars a key, a bar an arm: its ratio with its range, around a level at 1.

    `measured` are arms with the title of their panel and the key of their group. `text` stands at the foot of a bar;
    `predicted` is a mark at its height.
    """
    panels: dict[str, dict[str, dict[str, Any]]] = {}
    for title, key, some in measured:
        panels.setdefault(title, {}).setdefault(key, {}).update(some)
    names = list(dict.fromkeys(name for groups in panels.values() for arms in groups.values() for name in arms))
    colours = dict(zip(names, COLOURS * 2, strict=False))
    columns = min(2, len(panels))
    note = f"{caption(document)}{note}"
    size = (max(4.6, 0.16 * len(names) * max(map(len, panels.values())) + 1.5), 3.7)
    with picture(path, -(-len(panels) // columns), columns, size=size, note=note) as grid:
        for panel, (title, groups) in zip(grid.flat, panels.items(), strict=False):
            series = {
                name: [(arms[name]["ratio"], *arms[name]["ratio_range"]) if name in arms else None
                       for arms in groups.values()]
                for name in names
            }  # fmt: skip
            bars(panel, list(groups), series, colours=colours)
            for nth, arms in enumerate(groups.values()):
                at = {name: nth + (names.index(name) - (len(names) - 1) / 2) * 0.86 / len(names) for name in arms}
                for name, arm in arms.items():
                    if text is not None:
                        foot(panel, at[name], text(arm))
                if predicted is not None:
                    line(
                        panel, [(at[name], predicted(arm)) for name, arm in arms.items()], linestyle="none", marker="D",
                        markersize=5, color="black", markerfacecolor="white", label="predicted" if not nth else None,
                    )  # fmt: skip
            level(panel)
            panel.set_title(title, fontsize=10)
            panel.set_ylabel(label)


def main() -> int:
    for name in sys.argv[1:]:
        path = Path(name)
        document = json.loads(path.read_text(encoding="utf-8"))
        importlib.import_module(f"benchmarks.{document['benchmark']}").draw(document, path.with_suffix(".png"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
