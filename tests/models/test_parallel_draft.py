"""Training and measuring a parallel draft: what a mask sees, what a stopped run becomes, what the tables count."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from models import measure_parallel, train_parallel_draft
from models.measure import accepted, model_log_probabilities, write_with_logits
from models.measure_parallel import POSITIONS, accepted_of_proposal, at_prompts, measure, scores_by_position
from models.parallel import parallel_logits, with_mask_token
from models.train_parallel_draft import SIZES, some_groups, train
from models.training import ATTENTION, DTYPE, alone

V, KEPT, STEP_SECONDS = 32, 8, 30.0
DEMO = Path(__file__).parents[2] / "models" / "demo"


def tiny(seed: int = 1, dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=V,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.2,
    )
    return LlamaForCausalLM(config).to(dtype).eval()


def one_pass(draft: LlamaForCausalLM, prefix: Tensor, masks: int) -> Tensor:
    """The logits after the last of `masks` masks behind `prefix`, by the model's own forward."""
    draft.config._attn_implementation = "sdpa"
    ids = torch.cat([prefix, torch.full((masks,), V)])
    with torch.no_grad():
        return draft(ids[None], use_cache=False).logits[0, -1, :V]


def test_the_mask_is_one_more_row_that_changes_no_other_and_is_named_in_the_config(tmp_path: Path) -> None:
    plain, draft = tiny(), with_mask_token(tiny())
    ids = torch.arange(20)[None] % V
    with torch.no_grad():
        assert torch.equal(plain(ids).logits, draft(ids).logits[..., :V])
    draft.save_pretrained(tmp_path)
    saved = LlamaForCausalLM.from_pretrained(tmp_path)
    assert (saved.config.vocab_size, saved.config.pard_token) == (V + 1, V)
    assert saved.lm_head.weight.data_ptr() == saved.model.embed_tokens.weight.data_ptr()
    assert with_mask_token(saved).config.vocab_size == V + 1


def test_log_probabilities_leave_the_mask_out() -> None:
    plain, draft = tiny(), with_mask_token(tiny())
    ids = torch.arange(20)[None] % V
    with torch.no_grad():
        assert torch.equal(model_log_probabilities(draft)(ids), model_log_probabilities(plain)(ids))


def test_masks_that_share_a_call_compute_what_a_pass_for_each_would() -> None:
    draft = with_mask_token(tiny())
    draft.config._attn_implementation = ATTENTION
    ids = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(3))
    groups = some_groups(40, 2, np.random.default_rng(4))
    with torch.no_grad():
        real, masked = parallel_logits(draft, ids, groups, V)
    assert masked.shape == (2, 2 * sum(SIZES), V)
    for row in range(2):
        for place in (0, 17, 39):
            torch.testing.assert_close(real[row, place], one_pass(draft, ids[row, : place + 1], 0))
        for index, (anchor, offset) in enumerate(zip(groups.anchors.tolist(), groups.offsets.tolist(), strict=True)):
            torch.testing.assert_close(masked[row, index], one_pass(draft, ids[row, : anchor + 1], offset))


def test_every_mask_of_training_predicts_a_token_whose_distribution_is_known() -> None:
    for seed in range(20):
        groups = some_groups(60, 6, np.random.default_rng(seed))
        assert int(groups.rows.max()) < 60
        assert len(set(zip(groups.anchors.tolist(), groups.offsets.tolist(), strict=True))) == len(groups.rows)


def make_lessons(folder: Path) -> None:
    """Short texts that count up from a random beginning, and the distributions that say so."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(5)
    for kind, count, length in (("written", 16, 32), ("corpus", 4, 48)):
        ids = (torch.randint(V, (count, 1), generator=generator) + torch.arange(length)) % V
        top_ids = (ids[..., None] + 1 + torch.arange(KEPT)) % V
        top_probabilities = torch.tensor([0.9] + [0.01] * (KEPT - 1)).expand(count, length, KEPT)
        parts = {"ids": ids.to(torch.int16), "top_ids": top_ids.to(torch.int16)}
        torch.save({**parts, "top_probabilities": top_probabilities.half()}, folder / f"{kind}-0-0000.pt")


@pytest.fixture
def few_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """No more than fit into the texts of `make_lessons`; a step sees four of these."""
    monkeypatch.setattr(train_parallel_draft, "REPEATED", {False: 2, True: 4})
    monkeypatch.setattr(train_parallel_draft, "WRITTEN_PER_STEP", 4)


def ticking(stop_after: int | None = None) -> Callable[[], float]:
    """A clock on which each step takes `STEP_SECONDS`; the run is killed at its step `stop_after`."""
    calls = 0

    def clock() -> float:
        nonlocal calls
        calls += 1
        if stop_after is not None and calls > stop_after:
            raise KeyboardInterrupt
        return STEP_SECONDS * calls

    return clock


def weights_after(
    folder: Path, lessons: Path, minutes: float, stops: tuple[int, ...] = (), dtype: torch.dtype = DTYPE
) -> dict[str, Tensor]:
    """The weights after a run of `minutes` that was killed at those steps, each time begun anew in a fresh model."""
    folder.mkdir()
    with alone():
        for stop in stops:
            with pytest.raises(KeyboardInterrupt):
                train(with_mask_token(tiny(dtype=dtype)), lessons, minutes, folder / "run.pt", ticking(stop))
            # One for all processes: a kill between two files would leave them at different steps.
            assert [file.name for file in folder.iterdir()] == ["run.pt"]
        draft = with_mask_token(tiny(dtype=dtype))
        train(draft, lessons, minutes, folder / "run.pt", ticking())
    return draft.state_dict()


@pytest.mark.usefixtures("few_masks")
def test_a_killed_run_goes_on_and_ends_as_one_that_was_not(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_lessons(tmp_path / "lessons")
    whole = weights_after(tmp_path / "whole", tmp_path / "lessons", 6.0)
    stopped = weights_after(tmp_path / "stopped", tmp_path / "lessons", 6.0, (6, 5))  # checkpoints after 4 and 8 steps
    assert "resumed at 4.0 min" in capsys.readouterr().out
    for name, weight in whole.items():
        assert torch.equal(weight, stopped[name]), name
    begun = with_mask_token(tiny(dtype=DTYPE)).state_dict()
    assert not torch.equal(whole["model.embed_tokens.weight"][V], begun["model.embed_tokens.weight"][V])


@pytest.mark.usefixtures("few_masks")
def test_training_teaches_the_masks(tmp_path: Path) -> None:
    make_lessons(tmp_path / "lessons")
    # In float32: bfloat16 takes torch up to fifty times as long where a processor has no instructions for it.
    weights = weights_after(tmp_path / "run", tmp_path / "lessons", 60.0, dtype=torch.float32)
    drafts = {"before": with_mask_token(tiny()), "after": with_mask_token(tiny())}
    drafts["after"].load_state_dict(weights)
    share = {}
    for name, draft in drafts.items():
        guesses = [
            (int(one_pass(draft, (begin + torch.arange(20)) % V, masks).argmax()), (begin + 20 + masks) % V)
            for begin in range(0, V, 2)
            for masks in range(1, 5)
        ]
        share[name] = sum(guess == right for guess, right in guesses) / len(guesses)
    assert share["before"] < 0.2
    assert share["after"] > 0.5


def test_scores_are_those_of_one_pass_from_each_place() -> None:
    target, draft = tiny(1), with_mask_token(tiny(2))
    ids = torch.randint(V, (2, 24), generator=torch.Generator().manual_seed(6))
    with torch.no_grad():
        logits = target(ids).logits[:, 9:-1]  # 14 new tokens
        for temperature in (1.0, 0.3, 0.0):
            draft.config._attn_implementation = ATTENTION
            scores = scores_by_position(draft, V, ids, logits, temperature)
            for place, position in ((0, 0), (0, 7), (6, 7), (3, 2), (13, 0), (12, 1)):
                q_logits = one_pass(draft, ids[1, : 10 + place], position)
                expected = accepted(logits[1, place + position], q_logits, temperature)
                torch.testing.assert_close(scores[1, place, position], expected)
    assert torch.isnan(scores[:, 13, 1:]).all()
    assert torch.isnan(scores[:, 7, 7]).all()


def test_at_the_ends_of_prompts_only_what_follows_them_counts() -> None:
    target, draft = tiny(1), with_mask_token(tiny(2))
    draft.config._attn_implementation = ATTENTION
    prompt = torch.arange(9)
    with torch.no_grad():
        alphas = at_prompts(target, draft, V, 0.0, [prompt])
        _, logits = write_with_logits(target, prompt[None], POSITIONS, 0.0)
    agreed = [float(one_pass(draft, prompt, masks).argmax() == logits[0, masks].argmax()) for masks in range(POSITIONS)]
    assert alphas == agreed
    twin = with_mask_token(tiny(1))
    twin.config._attn_implementation = ATTENTION
    with torch.no_grad():
        assert at_prompts(target, twin, V, 1.0, [prompt])[0] == pytest.approx(1.0, abs=1e-4)


def test_acceptance_follows_the_temperature() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]).log(), torch.tensor([0.2, 0.3, 0.5]).log()
    assert float(accepted(p, q, 1.0)) == pytest.approx(0.7)
    assert float(accepted(p, q, 0.5)) == pytest.approx((0.04 + 0.09 + 0.04) / 0.38)
    assert float(accepted(p, q, 0.0)) == 0
    assert float(accepted(p, 2 * p, 0.0)) == 1


def test_tokens_accepted_in_a_row_take_each_position_from_its_own_pass() -> None:
    scores = torch.zeros(1, 9, POSITIONS)
    scores[..., 0], scores[..., 1], scores[..., 2] = 1.0, 0.5, 0.5
    scores[:, 4, 1] = 0.25
    assert accepted_of_proposal(scores, 1).tolist() == [[8.0, 8.0]]
    assert accepted_of_proposal(scores, 8).tolist() == [[1.75, 1.75]]  # 1 + .5 + .25
    # From place 0, the third pass begins at place 4: 1 + .5 + .5 + .25 + .25 + .0625 + .0625 + .03125. From place 1
    # none does: 1 + .5 + .5 + .25 + .25 + .125 + .125 + .0625.
    assert accepted_of_proposal(scores, 2).tolist() == [[2.65625, 2.8125]]


def test_a_draft_without_a_mask_is_refused_by_name(tmp_path: Path) -> None:
    tiny().save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="plain names no pard_token"):
        measure(DEMO / "target", tmp_path / "plain", rows=1)


def test_the_command_measures_the_parallel_draft_unless_another_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[Path] = []

    def measured(target: Path, draft: Path, rows: int) -> list[dict[str, object]]:
        asked.append(draft)
        return []

    monkeypatch.setattr(measure_parallel, "measure", measured)
    monkeypatch.setattr("sys.argv", ["measure_parallel"])
    measure_parallel.main()
    assert asked == [DEMO / "parallel-draft"]
    monkeypatch.undo()
    monkeypatch.setattr("sys.argv", ["measure_parallel", "--draft", str(DEMO / "draft")])
    with pytest.raises(SystemExit):
        measure_parallel.main()
    assert capsys.readouterr().err.endswith("names no pard_token: it drafts one token a pass\n")
