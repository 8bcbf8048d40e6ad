"""The benchmark of the rule `sigmoid`: its formulas are the kernels' rule, and its page shows its results."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import sigmoid
from benchmarks.sigmoid import (
    Precision,
    by_sigmoid,
    draw,
    rounds,
    tables,
    write,
)
from kernels.sigmoid import DraftLogits, SigmoidScales
from kernels.verify import Rule
from models.measure import load
from tests.kernels import reference
from tests.kernels.enumeration import ROUGH, joint_distribution, random_pair, total_variation
from tests.project.tree import ROOT

DEMO = ROOT / "models" / "demo"
EXACT = Precision("exact", torch.float64, torch.float64, torch.float64)


@pytest.mark.parametrize("scales", [SigmoidScales(-1.0, 1.0), SigmoidScales(4.0, 5.0)])
def test_the_formulas_are_the_rule_of_the_kernels(scales: SigmoidScales) -> None:
    """The first of two drafted tokens, by bisection of the reference and by formula."""
    world = random_pair(12, rule=Rule.SIGMOID)
    v = torch.randn(5, 4, generator=torch.Generator().manual_seed(4)).half()
    draft_logits = DraftLogits(v[0]), [DraftLogits(row) for row in v[1:]]
    joint = joint_distribution(reference.verify, replace(world, draft_logits=draft_logits, sigmoid=scales), 2 * ROUGH)
    first = joint[0, :, 0, 0] + joint[1].sum(axis=(1, 2)) + joint[2].sum(axis=(1, 2))
    p, drafted = torch.softmax(world.logits[0], -1).numpy(), [world.q[0].probability(x) for x in range(4)]
    (acceptance,), (far,), (near,) = (
        by_sigmoid(world.logits[0][None], v[:1], torch.tensor([drafted]), scales, EXACT)[name].tolist()
        for name in ("acceptance", "from_target", "from_draft")
    )
    assert acceptance == pytest.approx(joint[1:].sum(), abs=1e-7)
    assert far == pytest.approx(total_variation(first, p), abs=1e-7)
    assert near == pytest.approx(total_variation(first, torch.tensor(drafted).numpy()), abs=1e-7)


def test_a_small_run_measures_and_draws_all_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sigmoid, "SWEEP", [1.0, 100.0])
    monkeypatch.setattr(sigmoid, "ONE_APART", [0, 10])
    target, draft = load(DEMO / "target"), load(DEMO / "draft")
    prompts = torch.tensor([[5, 17, 300, 42], [7, 7, 9, 1999]])
    texts = write(target, draft, prompts, 16, end=0)
    z, v = texts.places
    with torch.no_grad():  # the logits at each position are those of a fresh pass over the text
        for model, logits in ((target, z), (draft, v)):
            fresh = model(input_ids=texts.ids).logits[:, 3:-1][texts.alive]
            assert torch.allclose(logits, fresh, atol=1e-3)
    cases = rounds(target, draft, texts, sigmoid.GAMMA, every=4)
    case = cases[-1]
    tokens = torch.tensor([[*texts.ids[case.seed, : case.base_length].tolist(), *case.tokens]])
    with torch.no_grad():
        for model, logits in ((target, case.target), (draft, case.draft)):
            fresh = model(input_ids=tokens).logits[0, case.base_length - 1 :][: len(logits)]
            assert torch.allclose(logits, fresh, atol=1e-3)
    found = sigmoid.figures(texts, cases)
    distances = found["distributions"]
    assert distances["tokenwise"]["from_target"] < 1e-9
    assert distances["sigmoid"]["as served"]["10000"]["acceptance"] > 0.999
    assert (
        1 <= found["rounds"]["by_rule"]["tokenwise"]["tokens"] <= found["rounds"]["by_rule"]["sigmoid ±10000"]["tokens"]
    )
    margins = [each["error"] for each in found["rounds"]["by_rule"].values()]
    assert all(0 <= each <= 100 for each in margins), "of two texts"
    assert all(table.count("\n") >= 4 for table in tables(found).values())
    draw(found, tmp_path / "sigmoid.png")
    assert (tmp_path / "sigmoid.png").stat().st_size > 10_000


def test_the_page_shows_the_results() -> None:
    document = json.loads((ROOT / "benchmarks" / "results" / "sigmoid.json").read_text(encoding="utf-8"))
    page = (ROOT / "docs" / "explanation" / "lossy-rules.md").read_text(encoding="utf-8").replace("---:", "---")
    for name, table in tables(document).items():
        assert table in page, f"the table {name} of docs/explanation/lossy-rules.md is not that of results/sigmoid.json"
    logits, sparse = f"{document['bytes']['logits']:,}", f"{document['bytes']['sparse_mean']:,.0f}"
    words = f"{logits} bytes of logits for each drafted token, where a sparse distribution takes {sparse} on average"
    assert words in " ".join(page.split())
