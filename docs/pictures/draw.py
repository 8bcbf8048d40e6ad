"""Draws the pictures of the documentation as SVG, by the standard library alone.

    python docs/pictures/draw.py      writes architecture.svg, round.svg and failover.svg beside this file

The sequence diagrams come from `round.mmd` and `failover.mmd`, in the part of Mermaid's language that `_parse` reads:
participants, messages (`->>`, `-->>`, `--x`) and notes over one participant or two. The architecture is drawn here.
Colours follow the reader's light or dark mode; each picture has a background of its own.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import pairwise
from pathlib import Path

HERE = Path(__file__).parent

_STYLE = """
  text { font: 13px system-ui, -apple-system, "Segoe UI", "DejaVu Sans", sans-serif; fill: #1f2328 }
  .title { font-size: 15px; font-weight: 600 } .small { font-size: 12px; fill: #59636e }
  .page { fill: #ffffff } .line { stroke: #59636e; stroke-width: 1.4; fill: none } .head { fill: #59636e }
  .life { stroke: #b6bec7; stroke-width: 1.2; stroke-dasharray: 4 4 }
  .client { fill: #f1f3f5; stroke: #6e7781 } .draft { fill: #e3effc; stroke: #2f74c8 }
  .verifier { fill: #fdeedd; stroke: #bf6a12 } .part { fill: #ffffff; stroke: #b6bec7 }
  .note { fill: #fff8c5; stroke: #c9b458 }
  @media (prefers-color-scheme: dark) {
    text { fill: #e6edf3 } .small { fill: #a5afba }
    .page { fill: #0d1117 } .line { stroke: #a5afba } .head { fill: #a5afba } .life { stroke: #4b535d }
    .client { fill: #1c2128; stroke: #8b949e } .draft { fill: #10233d; stroke: #5a9bf0 }
    .verifier { fill: #33220f; stroke: #e0963f } .part { fill: #0d1117; stroke: #4b535d }
    .note { fill: #2e2a12; stroke: #8a7a2f }
  }
"""
_LINE, _CHARACTER = 17, 7.2  # of text, in pixels


@dataclass
class Picture:
    """Shapes, in the order in which they are drawn."""

    width: float
    height: float
    shapes: list[str] = field(default_factory=list)

    def box(self, kind: str, x: float, y: float, width: float, height: float, radius: int = 6) -> None:
        self.shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{radius}"/>'
        )

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        """One line of text in the middle of `x`; `y` is its base line."""
        style = f' class="{kind}"' if kind else ""
        self.shapes.append(f'<text{style} x="{x:g}" y="{y:g}" text-anchor="middle">{escape(text)}</text>')

    def lines(self, x: float, top: float, lines: Sequence[str], kind: str = "") -> None:
        for number, line in enumerate(lines):
            self.text(x, top + _LINE * number, line, kind)

    def path(self, kind: str, *points: tuple[float, float]) -> None:
        drawn = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(f'<polyline class="{kind}" points="{drawn}"/>')

    def arrow(self, x: float, y: float, to: float, *, dashed: bool = False, lost: bool = False) -> None:
        """A horizontal arrow from `x` to `to`; a `lost` one ends in a cross."""
        back = 8 if to > x else -8
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        self.shapes.append(f'<line class="line" x1="{x:g}" y1="{y:g}" x2="{to - back / 2:g}" y2="{y:g}"{dash}/>')
        if lost:
            self.path("line", (to - back - 4, y - 5), (to - back + 4, y + 5))
            self.path("line", (to - back - 4, y + 5), (to - back + 4, y - 5))
        else:
            self.shapes.append(
                f'<polygon class="head" points="{to:g},{y:g} {to - back:g},{y - 4:g} {to - back:g},{y + 4:g}"/>'
            )

    def svg(self, title: str) -> str:
        size = f'width="{self.width:g}" height="{self.height:g}" viewBox="0 0 {self.width:g} {self.height:g}"'
        page = f'<rect class="page" width="{self.width:g}" height="{self.height:g}" rx="8"/>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img"><title>{escape(title)}</title>'
        return "\n".join([head, f"<style>{_STYLE}</style>", page, *self.shapes, "</svg>", ""])


# ----------------------------------------------------------------------------------------------------- architecture


def architecture() -> Picture:
    """The two services, their parts, and the messages between them."""
    picture = Picture(1000, 396)
    _stack(picture, "client", 20, 104, 130, 118)
    picture.text(85, 132, "clients", "title")
    picture.lines(85, 160, ["outrider generate", "Python client", "any gRPC client"], "small")

    _stack(picture, "draft", 290, 40, 250, 290)
    picture.text(415, 68, "draft service", "title")
    picture.text(415, 87, "small model, q", "small")
    _parts(
        picture, 290, 250, 100,
        ["tokenizer, text, stop strings", "drafters and their KV cache", "outcome cache (drafts ahead)",
         "γ controller", "choice of verifier, failover"],
    )  # fmt: skip

    _stack(picture, "verifier", 720, 40, 250, 290)
    picture.text(845, 68, "verifier service", "title")
    picture.text(845, 87, "target model, p", "small")
    _parts(
        picture, 720, 250, 100,
        ["checks of every proposal", "scheduler: one batch of all", "target model, KV cache blocks",
         "verification kernel", "prefix cache"],
    )  # fmt: skip

    picture.text(222, 128, "Generate", "")
    picture.arrow(160, 138, 286)
    picture.arrow(286, 176, 160, dashed=True)
    picture.text(222, 194, "tokens, text", "")
    picture.text(222, 232, "one stream:", "small")
    picture.text(222, 248, "one request", "small")

    picture.text(634, 128, "proposal", "")
    picture.arrow(554, 138, 716)
    picture.lines(634, 156, ["γ tokens, and q̂ of each"], "small")
    picture.text(634, 196, "verdict", "")
    picture.arrow(716, 206, 554, dashed=True)
    picture.lines(634, 224, ["accepted tokens,", "and the next one"], "small")
    picture.text(634, 272, "one stream:", "small")
    picture.text(634, 288, "one sequence", "small")

    picture.text(415, 374, "many replicas, small GPUs or CPUs", "small")
    picture.text(845, 374, "few replicas, large GPUs", "small")
    return picture


def _stack(picture: Picture, kind: str, x: float, y: float, width: float, height: float) -> None:
    """A box with replicas behind it."""
    for behind in (12, 6, 0):
        picture.box(kind, x + behind, y + behind, width, height, 8)


def _parts(picture: Picture, x: float, width: float, top: float, names: Sequence[str]) -> None:
    for number, name in enumerate(names):
        picture.box("part", x + 16, top + 44 * number, width - 32, 36)
        picture.text(x + width / 2, top + 44 * number + 23, name)


# ------------------------------------------------------------------------------------------------ sequence diagrams


@dataclass(frozen=True)
class Message:
    """An arrow from one participant to another."""

    source: str
    target: str
    text: str
    dashed: bool
    lost: bool


@dataclass(frozen=True)
class Note:
    """A box over one participant, or from one to another."""

    over: tuple[str, ...]
    lines: tuple[str, ...]

    @property
    def width(self) -> float:
        return max(map(len, self.lines)) * _CHARACTER + 24


@dataclass(frozen=True)
class Diagram:
    """Participants by their short names, and steps from top to bottom."""

    participants: Mapping[str, str]
    steps: Sequence[Message | Note]


_PARTICIPANT = re.compile(r"participant (\w+) as (.+)")
_MESSAGE = re.compile(r"(\w+?)(-->>|->>|--x)(\w+): (.+)")
_NOTE = re.compile(r"Note over ([\w,]+): (.+)")


def _parse(text: str) -> Diagram:
    """Reads a sequence diagram.

    Raises:
        ValueError: a line is of another kind.
    """
    participants: dict[str, str] = {}
    steps: list[Message | Note] = []
    for line in map(str.strip, text.splitlines()):
        if not line or line.startswith("%%") or line == "sequenceDiagram":
            continue
        if found := _PARTICIPANT.fullmatch(line):
            participants[found[1]] = found[2]
        elif found := _MESSAGE.fullmatch(line):
            steps.append(Message(found[1], found[3], found[4], found[2] != "->>", found[2] == "--x"))
        elif found := _NOTE.fullmatch(line):
            steps.append(Note(tuple(found[1].split(",")), tuple(found[2].split("<br/>"))))
        else:
            raise ValueError(f"unknown line: {line}")
    return Diagram(participants, steps)


def _kind(name: str) -> str:
    return next(kind for kind in ("client", "draft", "verifier") if kind in name)


def sequence(text: str) -> Picture:
    """Draws a sequence diagram: steps from top to bottom, notes that follow each other side by side where they may."""
    diagram = _parse(text)
    at = _columns(diagram)
    rows: list[tuple[float, list[Message | Note]]] = []
    y = 84.0
    for step in diagram.steps:
        beside = rows[-1][1] if rows else []
        if isinstance(step, Note) and beside and _fits_beside(step, beside):
            beside.append(step)
            continue
        y = y if not rows else rows[-1][0] + max(map(_height, beside))
        rows.append((y, [step]))
    bottom = rows[-1][0] + max(map(_height, rows[-1][1]))
    notes = [max(at[name] for name in each.over) + each.width / 2 for each in diagram.steps if isinstance(each, Note)]
    widest = max([max(at.values()) + 95, *notes]) + 20
    picture = Picture(widest, bottom + 20)
    for each in at.values():
        picture.path("life", (each, 56), (each, bottom + 6))
    for name, shown in diagram.participants.items():
        picture.box(_kind(shown), at[name] - 75, 20, 150, 36)
        picture.text(at[name], 43, shown, "title")
    for top, steps in rows:
        for step in steps:
            _draw(picture, step, at, top)
    return picture


def _columns(diagram: Diagram) -> dict[str, float]:
    """Where each participant stands: as far from its neighbour as texts and notes between them take."""
    names = list(diagram.participants)
    at = {names[0]: 130.0}
    for left, right in pairwise(names):
        gap = 190.0
        for step in diagram.steps:
            if isinstance(step, Message) and {step.source, step.target} == {left, right}:
                gap = max(gap, len(step.text) * _CHARACTER + 36)
            if isinstance(step, Note) and len(step.over) == 1 and step.over[0] in (left, right):
                gap = max(gap, step.width / 2 + 95)
        at[right] = at[left] + gap
    return at


def _fits_beside(note: Note, others: Sequence[Message | Note]) -> bool:
    return len(note.over) == 1 and all(
        isinstance(each, Note) and len(each.over) == 1 and each.over != note.over for each in others
    )


def _height(step: Message | Note) -> float:
    return 42.0 if isinstance(step, Message) else len(step.lines) * _LINE + 28.0


def _draw(picture: Picture, step: Message | Note, at: Mapping[str, float], top: float) -> None:
    if isinstance(step, Message):
        x, to = at[step.source], at[step.target]
        width = len(step.text) * _CHARACTER + 8
        picture.box("page", (x + to) / 2 - width / 2, top + 4, width, 18, 0)  # so that no life line crosses the text
        picture.text((x + to) / 2, top + 17, step.text)
        picture.arrow(x, top + 26, to, dashed=step.dashed, lost=step.lost)
        return
    places = [at[name] for name in step.over]
    width = max(step.width, max(places) - min(places) + 60)
    centre = (min(places) + max(places)) / 2
    picture.box("note", centre - width / 2, top + 2, width, _height(step) - 12, 4)
    picture.lines(centre, top + 21, step.lines)


# -------------------------------------------------------------------------------------------------------- all of it


def pictures() -> dict[str, str]:
    """The SVG of each picture, by file name."""
    drawn = {"architecture.svg": architecture().svg("Outrider: clients, draft services and verifier services")}
    for name, title in (("round", "One round of speculative decoding"), ("failover", "A verifier dies in a round")):
        drawn[f"{name}.svg"] = sequence((HERE / f"{name}.mmd").read_text(encoding="utf-8")).svg(title)
    return drawn


def main() -> None:
    """Writes each picture beside this file."""
    for name, svg in pictures().items():
        (HERE / name).write_text(svg, encoding="utf-8")


if __name__ == "__main__":
    main()
