"""What is written is the same for every contender, and settings are tuned on other texts than are measured."""

from pathlib import Path

import pytest

from benchmarks.plan import FULL, TEMPERATURES, Plan, Texts, read_prompts, spread

PLAN = Plan(prompts=2, new_tokens=7, repetitions=3, calibration_tokens=5, factor=1)
PROMPTS = ["a", "bb", "ccc", "dddd", "eeeee"]


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_each_prompt_is_written_at_each_temperature_in_each_repetition_with_a_seed_of_its_own() -> None:
    parts = list(Texts(PROMPTS, PLAN, encode).parts())
    assert len({(part.repetition, part.task.prompt, part.task.temperature) for part in parts}) == len(parts)
    assert len(parts) == 2 * 3 * len(TEMPERATURES)
    sampled = [part.task.seed for part in parts if part.task.temperature == 1]
    assert len(set(sampled)) == len(sampled)
    assert {part.task.new_tokens for part in parts} == {7}


def test_settings_are_tuned_on_other_prompts() -> None:
    texts = Texts(PROMPTS, PLAN, encode)
    measured = {part.task.token_ids for part in texts.parts()}
    tuned = {task.token_ids for tasks in texts.calibration().values() for task in tasks}
    assert tuned
    assert not tuned & measured
    assert texts.warm_up(0.0).token_ids not in measured


def test_few_prompts_are_measured_all_the_same() -> None:
    texts = Texts(["only"], PLAN, encode)
    assert {part.task.token_ids for part in texts.parts()} == {tuple(encode("only"))}
    assert texts.calibration()[0.0]
    with pytest.raises(ValueError, match="no prompt"):
        Texts([], PLAN, encode)


@pytest.mark.parametrize(("count", "expected"), [(1, "a"), (2, "ac"), (5, "abcde"), (9, "abcde")])
def test_chosen_items_are_spread_over_all(count: int, expected: str) -> None:
    assert spread("abcde", count) == list(expected)


def test_a_line_without_a_prompt_is_named(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"text": "x = "}\n\n{"prompt": "y"}\n')
    with pytest.raises(ValueError, match=r"line 3 of prompts\.jsonl has no text"):
        read_prompts(path)


def test_the_default_is_several_repetitions_of_several_prompts() -> None:
    assert FULL.prompts >= 3
    assert FULL.repetitions >= 3
    assert FULL.factor == 12
