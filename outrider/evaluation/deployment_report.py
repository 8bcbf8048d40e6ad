"""The output of `outrider bench`: a short table, sentences, and a page with pictures.

Pictures need the extra `bench`.
"""

from collections.abc import Iterable
from functools import partial
from itertools import groupby
from typing import Any

from matplotlib.axes import Axes

from outrider.evaluation.deployment import ALONE, POLICY, ROUND, Json
from outrider.evaluation.pictures import COLOURS, GREY, VIOLET, Destination, bars, level, line, picture, stacked, svg
from outrider.evaluation.report import Table, captioned, page, paragraph, points, section
from outrider.rpc.errors import counted

_LABELS = dict(zip(ROUND, ROUND, strict=True)) | {"forward": "pass", "verify": "verification", "other": "rest"}


def table(document: Json) -> Table:
    """Return a row for each cell."""
    has_speech = any(cell["speech_per_second"] is not None for cell in document["cells"])
    head = (
        "T",
        "streams",
        "arm",
        "tokens/s",
        "ratio",
        "TTFT ms",
        "ms a token",
        "predicted",
        "α",
        "γ",
        "tokens a round",
    )
    rows = [
        (
            f"{cell['temperature']:g}",
            str(cell["streams"]),
            cell["arm"],
            _middle(cell["tokens_per_second"], 1),
            _range(cell["ratio"]),
            _middle(cell["ttft_ms"], 1),
            _middle(cell["tpot_ms"], 2),
            _number(cell["predicted_tpot_ms"], 2),
            _number(cell["alpha"], 3),
            _number(cell["gamma"] or None, 1),
            _number(cell["tokens_per_round"], 2),
            *([_middle(cell["speech_per_second"], 1)] if has_speech else []),
        )
        for cell in document["cells"]
    ]
    return Table((*head, *(["speech s/s"] if has_speech else [])), rows, keys=3)


_LEAST_REPEATS = 5
"""With fewer, arms that are alike often differ in all repeats: of five arms and three repeats, in one load of 90."""


def conclusions(document: Json) -> list[str]:
    """Return a sentence for each temperature and number of streams. Overlapping ranges are no difference."""
    found = []
    for (temperature, streams), cells in _groups(document):
        measured = {cell["arm"]: cell for cell in cells if cell["ratio"] is not None}
        where = f"T = {temperature:g}, {counted(streams, 'stream')}"
        if not measured.keys() - {ALONE}:
            refused = sum(cell["refused"] for cell in cells)
            found.append(f"{where}: nothing was measured" + (f"; {refused} texts were refused." if refused else "."))
            continue
        found.append(f"{where}: {_conclusion(measured)}.")
    return found


def _conclusion(measured: dict[str, Json]) -> str:
    repeats = min(cell["repeats"] for cell in measured.values())
    if repeats < 2:
        return "one repeat shows no difference; give more --repeats"
    drafting = {name: cell["ratio"] for name, cell in measured.items() if name != ALONE and cell["gamma"]}
    if not drafting:
        return "nothing was drafted"
    best, ratio = max(drafting.items(), key=lambda each: float(each[1]["median"]))
    others = {name: each for name, each in drafting.items() if name != best}
    alike = [name for name, each in others.items() if each["high"] >= ratio["low"]]
    said = f"{best} has {_range(ratio)} times the tokens/s of the target alone"
    if ratio["low"] <= 1 <= max(each["high"] for each in drafting.values()):
        said = f"no clear difference from the target alone; {said}"
    elif ratio["low"] <= 1:
        said = f"the target alone is fastest in all {repeats} repeats; {said}"
    elif alike:
        said += f", above 1 in all {repeats} repeats; no clear difference from {', '.join(alike)}"
    else:
        said = f"{best} is fastest in all {repeats} repeats, {_range(ratio)} times the target alone"
    if repeats < _LEAST_REPEATS:
        said += f"; {repeats} repeats are no test"
    if POLICY in others:
        said += f"; the default policy ({measured[POLICY]['policy']}) has {_range(others[POLICY])}"
    elif POLICY in measured and best != POLICY:
        said += "; the default policy drafted nothing"
    return said


def prompts_line(document: Json) -> str:
    """Return how many prompts were used."""
    used, given = (document["settings"][name] for name in ("used_prompts", "given_prompts"))
    return f"Prompts: {used} of {given}, the same in all rows."


def html(document: Json) -> str:
    """Return the report: a page that loads nothing."""
    models, settings = document["models"], document["settings"]
    lead = [
        paragraph(
            f"Target `{models['target']['name']}` ({models['target']['dtype']} on {models['target']['device']}), draft "
            f"`{models['draft']['name'] or 'none'}`"
            + (f" ({models['draft']['dtype']} on {models['draft']['device']})" if models["draft"]["name"] else "")
            + f". Draft service at `{document['address']}`, {document['time']}, Outrider {document['version']}."
        ),
        points(conclusions(document)),
        paragraph(f"In brackets: the lowest and the highest of {settings['repeats']} repeats."),
    ]
    if document["missing"]:
        lead[1:1] = [paragraph("The measurement is incomplete:"), points(document["missing"])]
    return page(
        "Benchmark of a deployment",
        *lead,
        section(
            "Speed",
            captioned(
                svg(partial(_draw_speed, document=document)),
                "Top: tokens/s over those of the target alone in the same repeat. Middle: time per token after "
                "the first piece; diamonds: predicted. Bottom: time to the first token. Lines: lowest and "
                "highest repeat.",
            ),
            table(document).html(),
        ),
        section(
            "Where the time of a round goes",
            captioned(
                svg(partial(_draw_rounds, document=document)),
                "Mean round of one stream, without the first of each text, which reads the prompt. A round without "
                "a draft, as of the target alone, is one token.",
            ),
            _table_of_rounds(document).html(),
        ),
        section("How it was measured", points(_method(document))),
    )


def _method(document: Json) -> list[str]:
    settings = document["settings"]
    prompts = "built-in prompts" if settings["prompts"] is None else f"prompts of `{settings['prompts']}`"
    if settings["audio"]:
        prompts = (
            f"the start tokens of a transcription; speech of {', '.join(f'`{name}`' for name in settings['audio'])}"
        )
    return [
        f"Command: `{document['command']}`.",
        f"Each stream asked for its next text when one had ended: {settings['texts']} texts in each repeat, of "
        f"{settings['max_new_tokens']} tokens{' at most' if settings['stop_at_eos'] else ''}, after {prompts}. All "
        "arms took turns in each repeat. A first run of each arm does not count.",
        prompts_line(document),
        "No prompt was in a prefix cache: each request had a `cache_salt` of its own.",
        "Times are by the clock of this client; parts of a round are measured by the services. Their sums are those of "
        "one stream: wire is the way between the services with its serialisation; queue is waiting for the pass; rest "
        "is other work of the draft service.",
        "Predicted, where all rounds have a draft: the mean time of a round over (1 − α^(γ+1)) / (1 − α) tokens "
        "[Leviathan et al., theorem 3.8, with the network]. It takes each token's chance of acceptance to be α. Under "
        "the rule `block` more are accepted, and texts are faster than predicted.",
        "γ is the mean of drafted tokens in a round; the last round of a text is short.",
    ]


def _table_of_rounds(document: Json) -> Table:
    rows = [
        (
            f"{cell['temperature']:g}",
            str(cell["streams"]),
            cell["arm"],
            *(f"{cell['round_us'][part]:.0f}" for part in ROUND),
            f"{sum(cell['round_us'].values()):.0f}",
        )
        for cell in document["cells"]
        if cell["round_us"] is not None
    ]
    return Table(("T", "streams", "arm", *(f"{label} (µs)" for label in _LABELS.values()), "sum (µs)"), rows, keys=3)


# ----------------------------------------------------------------------------------------------------------- pictures


def _draw_speed(to: Destination, document: Json) -> None:
    by_temperature = [(key, list(cells)) for key, cells in groupby(document["cells"], lambda cell: cell["temperature"])]
    names = list(dict.fromkeys(cell["arm"] for cell in document["cells"]))
    colours = dict(zip(names, (GREY, *(each for each in COLOURS if each != GREY), VIOLET), strict=False))
    rows = {"ratio": "tokens/s, over the target alone", "tpot_ms": "ms per token", "ttft_ms": "ms to the first token"}
    width = max(4.6, 0.13 * len(document["cells"]) / len(by_temperature) + 1.2)
    with picture(to, len(rows), len(by_temperature), size=(width, 2.5)) as panels:
        for column, (temperature, cells) in enumerate(by_temperature):
            groups = list(dict.fromkeys(cell["streams"] for cell in cells))
            for panel, (figure, label) in zip(panels[:, column], rows.items(), strict=True):
                _draw_bars(panel, cells, groups, names, figure, colours)
                panel.set_ylabel(label, fontsize=8)
                if figure == "ratio":
                    level(panel)
                    panel.set_title(f"T = {temperature:g}", fontsize=10)


def _draw_bars(
    panel: Axes, cells: list[Json], groups: list[int], names: list[str], figure: str, colours: dict[str, str]
) -> None:
    at = {(cell["streams"], cell["arm"]): cell for cell in cells}
    series = {
        name: [
            None if (found := at[group, name][figure]) is None else (found["median"], found["low"], found["high"])
            for group in groups
        ]
        for name in names
    }
    bars(panel, [counted(group, "stream") for group in groups], series, colours=colours)
    if figure == "tpot_ms":
        width = 0.86 / len(names)
        marks = [
            (group + (nth - (len(names) - 1) / 2) * width, at[streams, name]["predicted_tpot_ms"])
            for group, streams in enumerate(groups)
            for nth, name in enumerate(names)
        ]
        line(panel, marks, linestyle="none", marker="D", markersize=4, color="black", markerfacecolor="white")


def _draw_rounds(to: Destination, document: Json) -> None:
    groups = list(_groups(document))
    temperatures = list(dict.fromkeys(temperature for (temperature, _), _ in groups))
    columns = len(groups) // len(temperatures)
    names = list(dict.fromkeys(cell["arm"] for cell in document["cells"]))
    with picture(to, len(temperatures), columns, size=(4.0, 0.8 + 0.26 * len(names))) as panels:
        for panel, ((temperature, streams), cells) in zip(panels.flat, groups, strict=True):
            known = [cell for cell in cells if cell["round_us"] is not None]
            stacked(panel, [cell["arm"] for cell in known], [cell["round_us"] for cell in known], _LABELS)
            panel.set_title(f"T = {temperature:g}, {counted(streams, 'stream')}", fontsize=9)


# --------------------------------------------------------------------------------------------------------------- text


def _groups(document: Json) -> Iterable[tuple[tuple[float, int], list[Json]]]:
    for where, cells in groupby(document["cells"], lambda cell: (cell["temperature"], cell["streams"])):
        yield where, list(cells)


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _middle(spread: Any, digits: int) -> str:
    return "–" if spread is None else f"{spread['median']:.{digits}f}"


def _range(spread: Any) -> str:
    return "–" if spread is None else f"{spread['median']:.2f} ({spread['low']:.2f}–{spread['high']:.2f})"
