"""Shared by all benchmarks: command line, runs on disk, the machine, statistics, tables, and one JSON document.

A benchmark measures *runs*: the result of one arm at one point of the grid, a flat JSON object. Runs go to disk as they
come, into `NAME.runs.jsonl` beside the output, which git ignores; `--resume` continues from them. The result keeps a
summary (medians and ranges) with the settings, the machine and the command.
"""

import argparse
import hashlib
import json
import os
import platform
import random
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any, TypeVar

from outrider.evaluation.deployment import ROUND, predicted_seconds

ROOT = Path(__file__).resolve().parents[1]
DEMO = ROOT / "models" / "demo"
RESULTS = ROOT / "benchmarks" / "results"
CACHE = ROOT / ".models-cache"
WEIGHTS = "model.safetensors"
PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop")
# Extensions that matter to products of small matrices.
_INSTRUCTIONS = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16")
# Options that are paths or choose what to run; all others are settings of a result.
_NO_SETTINGS = (
    "command", "quick", "resume", "output", "target", "draft", "old", "parallel_draft", "prompts_file", "parts",
)  # fmt: skip

Json = dict[str, Any]
Item = TypeVar("Item")


def parser(name: str, doc: str | None, *, quick: str) -> argparse.ArgumentParser:
    """A parser with the options of all benchmarks; `quick` describes the effect of `--quick`."""
    made = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=(doc or "").split("\n")[0])
    made.add_argument("--quick", action="store_true", help=f"does it work at all: {quick}")
    made.add_argument("--resume", action="store_true", help="continue where the same command was interrupted")
    made.add_argument("--output", type=Path, help="JSON file to write; the picture goes beside it")
    made.add_argument("--target", type=Path, default=DEMO / "target", help="folder of the target")
    made.add_argument("--draft", type=Path, default=DEMO / "draft", help="folder of the draft")
    made.add_argument("--prompts-file", type=Path, default=DEMO / "prompts.jsonl", help="one JSON object a line")
    return made


def target_options(made: argparse.ArgumentParser, factor: int) -> None:
    """Options of a benchmark of the demo pair, and of the pair with a deepened or a widened target."""
    made.add_argument("--only", choices=("demo", "deepened", "widened"), help="one pair (default: demo and deepened)")
    made.add_argument("--factor", type=int, default=factor, help="how many times as deep or wide the target is")


def text_options(made: argparse.ArgumentParser, *, prompts: int, new_tokens: int, repetitions: int = 3) -> None:
    made.add_argument("--prompts", type=int, default=prompts, help="how many prompts")
    made.add_argument("--new-tokens", type=int, default=new_tokens, help="tokens of each text")
    made.add_argument("--repetitions", type=int, default=repetitions, help="how often each text is written")


def parse(made: argparse.ArgumentParser, arguments: Sequence[str] | None, quick: Json) -> argparse.Namespace:
    """The options; `quick` are the defaults under `--quick`."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if "--quick" in arguments:
        made.set_defaults(**quick)
    given = made.parse_args(arguments)
    given.command = shlex.join([*made.prog.split(), *map(_without_folders, arguments)])
    return given


def _without_folders(argument: str) -> str:
    path = Path(argument)
    return path.name if path.is_absolute() else argument


def progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


class Runs:
    def __init__(self) -> None:
        self.runs: list[Json] = []

    def select(self, **keys: Any) -> list[Json]:
        return [run for run in self.runs if all(run.get(name) == value for name, value in keys.items())]

    def has(self, **keys: Any) -> bool:
        return bool(self.select(**keys))

    def add(self, *runs: Json) -> None:
        self.runs += json.loads(json.dumps(runs))


def digest_of(folder: Path) -> str:
    """A short name of a model: of its configuration and its weights."""
    digest = hashlib.sha256()
    for name in ("config.json", WEIGHTS):
        digest.update((folder / name).read_bytes())
    return digest.hexdigest()[:12]


def revision(tree: Path) -> str:
    """The name that git gives to the commit of a source tree."""
    command = ["git", "-C", str(tree), "describe", "--always", "--dirty"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _inputs(given: argparse.Namespace) -> Json:
    """The digests of models and prompts, and the revisions of the trees that `revisions` compares."""
    options = vars(given)
    folders = {name: options.get(name) for name in ("target", "draft", "parallel_draft")}
    found = {name: digest_of(folder) for name, folder in folders.items() if folder and (folder / WEIGHTS).is_file()}
    if options.get("prompts_file"):
        found["prompts"] = hashlib.sha256(given.prompts_file.read_bytes()).hexdigest()[:12]
    trees = {"old": Path(given.old), "new": ROOT} if options.get("old") else {}
    return found | {name: revision(tree) for name, tree in trees.items()}


class Bench(Runs):
    """One benchmark in progress; its runs are on disk as soon as they are added.

    `given` are the options, `document` is the rest of the result. Raises ValueError where the runs to
    resume have other settings, models, prompts or revisions.
    """

    def __init__(self, name: str, given: argparse.Namespace) -> None:
        super().__init__()
        self.given = given
        file = name.replace("_", "-")
        self.output: Path = given.output or (CACHE / f"{file}-quick.json" if given.quick else RESULTS / f"{file}.json")
        self.settings = json.loads(
            json.dumps({key: value for key, value in vars(given).items() if key not in _NO_SETTINGS})
        )
        self.document: Json = {
            "benchmark": name,
            "command": given.command,
            "machine": machine(),
            "load_average": [load_average()],
            "settings": self.settings,
        }
        self._known: Json = {}
        self._path = self.output.with_suffix(".runs.jsonl")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        head = {"settings": self.settings, "inputs": _inputs(given)}
        if given.resume and self._path.is_file():
            self._read(head)
        else:
            self._path.write_text(json.dumps(head) + "\n", encoding="utf-8")

    def _read(self, expected: Json) -> None:
        head, *rest = self._path.read_text(encoding="utf-8").splitlines()
        if json.loads(head) != expected:
            raise ValueError(f"{self._path.name} cannot be resumed: it was made with other settings, models or trees")
        for line in rest:
            entry = json.loads(line)
            if "once" in entry:
                self._known[entry["once"]] = entry["value"]
            else:
                self.runs.append(entry)

    def add(self, *runs: Json) -> None:
        super().add(*runs)
        self._append(runs)

    def once(self, key: str, make: Callable[[], Any]) -> Any:
        """A value that is made once, also when the benchmark is resumed."""
        if key not in self._known:
            self._known[key] = make()
            self._append([{"once": key, "value": self._known[key]}])
        return self._known[key]

    def _append(self, entries: Iterable[Json]) -> None:
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(entry, ensure_ascii=False) + "\n" for entry in entries)

    @cached_property
    def prompts(self) -> list[str]:
        return read_prompts(self.given.prompts_file)

    @property
    def some_prompts(self) -> list[str]:
        """`--prompts` of them, or all if there are fewer, at equal distances."""
        count = min(self.given.prompts, len(self.prompts))
        return [self.prompts[i * len(self.prompts) // count] for i in range(count)]

    def write(self, summary: Json) -> Json:
        document = self.document | summary
        document["load_average"] = [*self.document["load_average"], load_average()]
        document = json.loads(json.dumps(rounded(document)))
        write_json(self.output, document)
        return document


def write_json(path: Path, document: Json) -> None:
    """Under its name only when whole."""
    part = path.with_suffix(".part")
    part.write_text(json.dumps(document, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    os.replace(part, path)


def run(
    name: str,
    given: argparse.Namespace,
    measure: Callable[[Bench], None],
    summarise: Callable[[Bench], Json],
    table: Callable[[Json], str],
    draw: Callable[[Json, Path], Any] | None = None,
) -> int:
    """The whole of a benchmark: measure, write, draw, print the tables and the document; returns the exit code."""
    try:
        bench = Bench(name, given)
        measure(bench)
    except (OSError, ValueError) as error:
        progress(f"benchmarks.{name}: {error}")
        return 2
    except KeyboardInterrupt:
        progress(f"benchmarks.{name}: interrupted; --resume goes on from here")
        return 130
    document = bench.write(summarise(bench))
    if draw is not None:
        draw(document, bench.output.with_suffix(".png"))
    print(f"{machine_line(document)}\n{document['command']}\n\n{table(document)}\n")
    print(json.dumps(document, ensure_ascii=False))
    return 0


def summary_of(keys: Sequence[str], figures: Callable[[list[Json]], Json]) -> Callable[[Bench], Json]:
    """A `summarise` for `run`: the `figures` of runs that are alike in all keys, as nested objects by the keys."""
    return lambda bench: {"summary": tree(bench.runs, keys, figures)}


def shuffled(items: Iterable[Item], repetition: int, place: int | str = 0) -> list[Item]:
    """The items in a random order; at each `place` every second repetition has that of the one before reversed.

    A place is a text or a level, so that an order and its reverse count for the same figure. So each item is as often
    before another as behind it, and none always follows the same: some leave threads that wait actively, and cold
    caches.
    """
    listed = list(items)
    order = random.Random(f"{place} {repetition // 2}").sample(listed, len(listed))
    return order[::-1] if repetition % 2 else order


def grouped(runs: Iterable[Json], key: str) -> dict[Any, list[Json]]:
    """The runs by the value of a key, in the order of their first."""
    groups: dict[Any, list[Json]] = {}
    for each in runs:
        groups.setdefault(each[key], []).append(each)
    return groups


def tree(runs: Iterable[Json], keys: Sequence[str], leaf: Callable[[list[Json]], Json]) -> Json:
    """`leaf` of the runs that are alike in all keys, as nested objects by the keys' values."""
    if not keys:
        return leaf(list(runs))
    return {str(value): tree(some, keys[1:], leaf) for value, some in grouped(runs, keys[0]).items()}


def flat(tree: Json, depth: int) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The leaves of nested objects, each with the keys that lead to it."""
    for key, value in tree.items():
        if depth == 1:
            yield (key,), value
        else:
            yield from (((key, *keys), leaf) for keys, leaf in flat(value, depth - 1))


def total(runs: Iterable[Json], key: str) -> float:
    return float(sum(each[key] for each in runs))


def rates(runs: Iterable[Json]) -> dict[Any, float]:
    """Tokens a second of each repetition: all its tokens over all its seconds."""
    return {nth: total(own, "tokens") / total(own, "seconds") for nth, own in grouped(runs, "repetition").items()}


def by_repetition(runs: Iterable[Json], key: str) -> dict[Any, float]:
    return {run["repetition"]: run[key] for run in runs}


def with_range(name: str, values: Sequence[float]) -> Json:
    """Median and range."""
    return {name: median(values), f"{name}_range": [min(values), max(values)]}


def ratio(own: Mapping[Any, float], reference: Mapping[Any, float]) -> Json:
    """Median and range of the ratios of two rates of the same repetition."""
    found = [rate / reference[nth] for nth, rate in own.items() if reference.get(nth)]
    return with_range("ratio", found) if found else {"ratio": None}


def medians(values: Sequence[Any]) -> Any:
    """The median of those that are known; of percentiles, each by itself."""
    known = [value for value in values if value is not None]
    if known and isinstance(known[0], dict):
        return {name: median(each[name] for each in known) for name in known[0]}
    return median(known) if known else None


def alpha_of(runs: Iterable[Json]) -> float | None:
    """Mean α over texts, each with the weight of its drafted tokens."""
    known = [(each["alpha"], each["drafted"]) for each in runs if each["alpha"] is not None]
    weight = sum(drafted for _, drafted in known)
    return sum(alpha * drafted for alpha, drafted in known) / weight if weight else None


def rounded(value: Any) -> Any:
    """The same with eight significant digits in every float."""
    if isinstance(value, float):
        return float(f"{value:.8g}")
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list | tuple) else value


PHASES = ROUND
"""Parts of the seconds of a text. They add up to the wall clock; a part that does not occur is 0."""


def compared(runs: Sequence[Json], reference: str, names: Sequence[str]) -> dict[str, Json]:
    """The arms of `names`; ratios are to the `reference` in the same repetition.

    `same_text`: the share of texts that are the reference's, token for token.
    """
    by_arm = grouped(runs, "arm")
    reference_rates = rates(by_arm[reference])
    texts = {(run["repetition"], run["prompt"]): run["digest"] for run in by_arm[reference]}
    found = {}
    for name in (name for name in names if name in by_arm):
        own = by_arm[name]
        own_rates = rates(own)
        same = [texts.get((run["repetition"], run["prompt"])) == run["digest"] for run in own]
        found[name] = {
            "tokens_per_second": median(own_rates.values()),
            "repetitions": len(own_rates),
            **ratio(own_rates, reference_rates),
            **_per_round(own),
            "same_text": sum(same) / len(same),
        }
    return found


def _per_round(runs: Sequence[Json]) -> Json:
    """Means over all rounds of all texts, those that read the prompt included; times in microseconds."""
    rounds, drafted = total(runs, "rounds"), total(runs, "drafted")
    queries = sum(run.get("cache_queries", 0) for run in runs)
    times = {phase: 1e6 * sum(run["phases"][phase] for run in runs) / rounds for phase in PHASES}
    return {
        "texts": len(runs),
        "rounds": int(rounds),
        "gamma": drafted / rounds,
        "alpha": alpha_of(runs),
        "accepted_share": total(runs, "accepted") / drafted if drafted else None,
        "tokens_per_round": total(runs, "tokens") / rounds,
        "hit_rate": sum(run["cache_hits"] for run in runs) / queries if queries else None,
        "round_us": times,
        "draft_step_us": times["draft"] * rounds / drafted if drafted else None,  # t_q
        "target_pass_us": times["forward"],  # t_p(γ+1)
        # R, with acceptance and all other work of a round.
        "round_trip_us": times["wire"] + times["queue"] + times["verify"] + times["other"],
    }


def predicted_ratio(arm: Json, alpha: float | None, alone: float) -> float | None:
    """The speed-up of [L Thm 3.8] from an arm's measured times, over a target alone of `alone` tokens a second.

    None for an arm that drafts in few of its rounds.
    """
    if not arm["draft_step_us"] or alpha is None or arm["gamma"] < 1:
        return None
    drafting = arm["gamma"] * arm["draft_step_us"]
    whole = drafting + arm["target_pass_us"] + arm["round_trip_us"]
    return 1e6 / alone / predicted_seconds(alpha, arm["gamma"], whole)


Columns = Mapping[str, Callable[[Json], Any]]


def number(value: float | None, digits: int = 2) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def percent(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def between(found: Json, name: str = "ratio", form: str = ".2f") -> str:
    if found[name] is None:
        return "–"
    low, high = found[f"{name}_range"]
    return f"{found[name]:{form}} ({low:{form}} to {high:{form}})"


ARM_COLUMNS: Columns = {
    "tokens/s": lambda arm: number(arm["tokens_per_second"], 1),
    "ratio": between,
    "α": lambda arm: number(arm["alpha"], 3),
    "γ": lambda arm: number(arm["gamma"] or None, 1),
    "tokens/round": lambda arm: number(arm["tokens_per_round"]),
    "t_q µs": lambda arm: number(arm["draft_step_us"], 0),
    "t_p(γ+1) µs": lambda arm: number(arm["target_pass_us"], 0),
    "R µs": lambda arm: number(arm["round_trip_us"] or None, 0),
    "hits": lambda arm: percent(arm["hit_rate"]),
}


def arms_table(summary: Json, keys: Sequence[str], **more: Callable[[Json], Any]) -> str:
    """A row for each arm of a summary that is nested by `keys`."""
    return summary_table(summary, [*keys, ""], {**ARM_COLUMNS, **more})


def summary_table(summary: Json, keys: Sequence[str], columns: Columns, title: str = "") -> str:
    """A row for each leaf of a summary that is nested by `keys`; `columns` make its cells."""
    rows = [[*where, *(cell(leaf) for cell in columns.values())] for where, leaf in flat(summary, len(keys))]
    return table([*keys, *columns], rows, title)


def table(head: Sequence[str], rows: Iterable[Sequence[Any]], title: str = "") -> str:
    """A table in Markdown; nothing where there is no row."""
    lines = [head, ["---"] * len(head), *rows]
    if len(lines) == 2:
        return ""
    text = "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)
    return f"## {title}\n\n{text}\n" if title else text


def read_prompts(path: Path) -> list[str]:
    """The `text` of each line, which is a JSON object; raises OSError, or ValueError where there is none."""
    prompts = []
    for nth, line in enumerate(path.read_text(encoding="utf-8").split("\n"), start=1):
        entry = json.loads(line) if line.strip() else {"text": ""}
        if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
            raise ValueError(f"line {nth} of {path.name} has no text")
        prompts += [entry["text"]] if entry["text"] else []
    if not prompts:
        raise ValueError(f"{path.name} has no prompt to write after")
    return prompts


def machine() -> Json:
    """Processor, cores and versions: no names of hosts, no paths."""
    info = _cpuinfo()
    name = info.get("model name") or platform.processor() or platform.machine()
    if "cpu family" in info:
        name += f" (family {info['cpu family']}, model {info.get('model', '?')})"
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        "instructions": [each for each in _INSTRUCTIONS if each in info.get("flags", "").split()],
        "memory_gib": _memory_gib(),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "versions": versions("outrider", *PACKAGES),
    }


def machine_line(document: Json) -> str:
    found = document["machine"]
    packages = ", ".join(f"{name} {value}" for name, value in found["versions"].items() if value)
    return f"{found['cpu']}, {found['cores']} cores, {found['memory_gib']} GiB, Python {found['python']}, {packages}"


def load_average() -> float | None:
    """Over the last minute; None where the system has no such figure."""
    return round(os.getloadavg()[0], 2) if hasattr(os, "getloadavg") else None


def versions(*packages: str) -> dict[str, str | None]:
    found: dict[str, str | None] = {}
    for name in packages:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = None
    return found


def _cpuinfo() -> dict[str, str]:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return {}
    return {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (AttributeError, ValueError, OSError):
        return None
