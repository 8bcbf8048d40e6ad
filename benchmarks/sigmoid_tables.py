"""The figures of `results/sigmoid.json` as the tables of `docs/sigmoid.md`. It computes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

Json = dict[str, Any]


def tables(document: Json) -> dict[str, str]:
    """The tables by name, in Markdown."""
    return {
        "laws": _laws(document["laws"]),
        "precision": _precision(document["laws"]),
        "rounds": _rounds(document["rounds"]),
        "speed": _speed(document["speed"]),
    }


def bytes_of_a_token(found: Json) -> str:
    """What a drafted token takes on the wire, in words."""
    logits, sparse = f"{found['logits']:,}", f"{found['sparse_mean']:,.0f}"
    return f"{logits} of logits for each drafted token, where a sparse law takes {sparse} in the mean"


def _laws(laws: Json) -> str:
    exact, apart = laws["tokenwise"], laws["target_from_draft"]
    rows = [["`tokenwise`, `block`", _share(exact["acceptance"]), "0", _distance(apart)]]
    for scale, each in laws["sigmoid"]["as served"].items():
        rows.append([
            f"`sigmoid` {_scale(scale)}",
            _share(each["acceptance"]), _distance(each["from_target"]), _distance(each["from_draft"]),
        ])  # fmt: skip
    rows.append(["the draft alone", "", _distance(apart), "0"])
    return _table(["rule", "acceptance", "TV(text, target)", "TV(text, draft)"], rows)


def _precision(laws: Json) -> str:
    by_name: Json = laws["sigmoid"]
    head = ["scales", *(f"{name}: {what}" for name in by_name for what in ("scores", "acceptance", "TV(text, target)"))]
    rows = [
        [
            _scale(scale),
            *(
                cell
                for each in (by_scale[scale] for by_scale in by_name.values())
                for cell in (_count(each["distinct"]), _share(each["acceptance"]), _distance(each["from_target"]))
            ),
        ]
        for scale in next(iter(by_name.values()))
    ]
    return _table(head, rows)


def _rounds(found: Json) -> str:
    rows = [
        [_rule(name), f"{each['tokens']:.2f} ± {each['error']:.2f}", _share(each["drafts_accepted"])]
        for name, each in found["by_rule"].items()
    ]
    return _table(["rule", f"tokens of a round, γ = {found['gamma']}", "drafts accepted"], rows)


def _speed(found: Json) -> str:
    by_vocabulary: Json = found["by_vocabulary"]
    head = ["rule", *(f"V = {int(size):,}" for size in by_vocabulary)]
    rows = [
        [_rule(name), *(f"{by_way[name]['median']:.2f} ({by_way[name]['low']:.2f} to {by_way[name]['high']:.2f})"
        for by_way in by_vocabulary.values())]
        for name in next(iter(by_vocabulary.values()))
    ]  # fmt: skip
    return _table(head, rows)


def _rule(name: str) -> str:
    rule, separator, rest = name.partition(" ±")
    if separator:
        return f"`{rule}` {_scale(rest)}"
    rule, separator, rest = name.partition(",")
    return f"`{rule}`{separator}{rest}"


def _scale(scale: str) -> str:
    return f"±{int(float(scale)):,}"


def _share(value: float | None) -> str:
    if value is None:
        return "no number"
    if value == 1:
        return "100 %"
    return f"{100 * value:.2f} %" if value < 0.9999 else f"{100 * value:.5f} %"


def _distance(value: float | None) -> str:
    return "no number" if value is None else f"{value:.5f}"


def _count(value: float | None) -> str:
    return "no number" if value is None else f"{value:,.0f}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
