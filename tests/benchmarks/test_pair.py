"""The figures of the pair follow from its runs by arithmetic that can be checked by hand."""

from pathlib import Path
from typing import Any, ClassVar

import pytest

from benchmarks import pair
from benchmarks.contenders import PHASES, Task, Writer
from benchmarks.harness import Json
from outrider.theory import tokens_per_second


def run(contender: str, repetition: int, seconds: float, **changes: Any) -> dict[str, Any]:
    phases = dict.fromkeys(PHASES, 0.0) | {"forward": seconds}
    plain = {"tokens": 100, "rounds": 100, "drafted": 0, "accepted": 0, "alpha": None, "digest": "same"}
    keys = {"repetition": repetition, "prompt": 0, "contender": contender, "settings": {}}
    return keys | plain | {"seconds": seconds, "phases": phases} | changes


def speculative(contender: str, repetition: int, seconds: float, **changes: Any) -> dict[str, Any]:
    phases = {"draft": 0.08, "wire": 0.02, "queue": 0.01, "forward": 0.15, "verify": 0.01, "other": seconds - 0.27}
    known = {"rounds": 40, "drafted": 160, "accepted": 60, "alpha": 0.6, "phases": phases}
    return run(contender, repetition, seconds, **(known | changes))


def test_ratios_are_against_the_faster_target_alone_in_the_same_repetition() -> None:
    runs = [run("transformers", nth, 1.0) for nth in range(3)]
    runs += [run("outrider-alone", nth, seconds) for nth, seconds in enumerate((0.5, 0.4, 0.8))]
    runs += [speculative("outrider-pair", nth, seconds) for nth, seconds in enumerate((0.25, 0.25, 0.3))]
    found = pair.figures(runs)
    assert found["best_alone"] == "outrider-alone"
    ours = found["contenders"]["outrider-pair"]
    assert ours["tokens_per_second"] == pytest.approx(400)
    assert ours["ratio"] == pytest.approx(2.0)  # of 2.0, 1.6 and 2.67
    assert ours["ratio_range"] == pytest.approx([1.6, 8 / 3])
    assert found["contenders"]["outrider-alone"]["ratio"] == 1.0


def test_the_prediction_is_theorem_3_8_with_what_was_measured() -> None:
    runs = [run("outrider-alone", 0, 0.5), speculative("outrider-pair", 0, 0.3)]
    found = pair.figures([*runs, speculative("assisted", 0, 0.3, alpha=None)])["contenders"]
    ours = found["outrider-pair"]
    assert (ours["draft_step_us"], ours["target_pass_us"]) == (pytest.approx(500), pytest.approx(3750))
    assert ours["round_trip_us"] == pytest.approx(1000)
    foretold = tokens_per_second(0.6, 4, draft_step=500e-6, verify_pass=3750e-6, round_trip=1000e-6)
    assert ours["predicted_ratio"] == pytest.approx(foretold / 200)
    assert found["outrider-alone"]["predicted_ratio"] is None
    # A contender that tells no α is foretold with that of the pair.
    assert found["assisted"]["alpha"] is None
    assert found["assisted"]["predicted_ratio"] == pytest.approx(ours["predicted_ratio"])


def test_texts_are_compared_with_those_of_the_target_alone() -> None:
    runs = [run("outrider-alone", nth, 0.5, digest=f"text {nth}") for nth in range(4)]
    runs += [speculative("outrider-pair", nth, 0.3, digest="other" if nth == 3 else f"text {nth}") for nth in range(4)]
    assert pair.figures(runs)["contenders"]["outrider-pair"]["same_text"] == 0.75


class Fake(Writer):
    """Takes as long as its settings say."""

    written: ClassVar[list[Task]] = []

    def __init__(self, *folders: Any, **how: Any) -> None:
        self._how = how

    def write(self, task: Task) -> Json:
        self.written.append(task)
        n = int(self._how.get("gamma", self._how.get("tokens", self._how.get("threads", 1))))
        return {"tokens": task.new_tokens, "seconds": abs(n - (10 if task.temperature else 2)) + 1.0}

    def settings(self) -> Json:
        return self._how


class FakeServices:
    """Are there at once."""

    def __init__(self, *folders: Any, **how: Any) -> None:
        self.how = how

    def __enter__(self) -> "FakeServices":
        return self

    def __exit__(self, *exception: object) -> None:
        pass


def test_each_contender_is_tuned_on_texts_that_are_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(f'{{"text": "x{nth} = "}}\n' for nth in range(8)))
    for name in ("TransformersWriter", "OutriderWriter"):
        monkeypatch.setattr(pair, name, Fake)
    monkeypatch.setattr(pair, "Services", FakeServices)
    monkeypatch.setattr(pair, "_write_all", lambda bench, name, texts, contenders, left: measured.extend(left))
    monkeypatch.setattr(pair, "summarise", lambda bench: {"summary": {}})
    monkeypatch.setattr(pair, "draw", lambda document, path: None)
    measured: list[Any] = []
    output = tmp_path / "out.json"
    asked = ["--only", "demo", "--prompts", "2", "--prompts-file", str(prompts), "--output", str(output)]
    assert pair.main(asked) == 0
    texts = {task.token_ids for _, _, task in measured}
    assert len(texts) == 2
    assert not texts & {task.token_ids for task in Fake.written}
    assert len({(task.seed, task.temperature) for _, _, task in measured}) == 2 * 3 * len(pair.TEMPERATURES)
    assert '"gamma": {"0": 2, "1": 10}' in capsys.readouterr().out.splitlines()[-1]
