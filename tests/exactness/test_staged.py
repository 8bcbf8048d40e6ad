"""Staged drafting, through both services over gRPC: the text keeps the target's law, and where noise or argmax decides
its tokens, whichever drafter guesses for the draft model.

Sizes and power are those of `test_drafters`: over the rank classes a total variation of 0.09 is noticed at a level of 1
% with a power of 95 %, and under `-m slow` one of 0.03. What the draft model proposes is tested by itself in
`tests/draft_service/test_staged.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider.client import Client, Completion, Drafter, Options
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, pairs, sampling
from tests.exactness.chisquare import Fit
from tests.exactness.laws import Filters
from tests.exactness.sampling import Run
from tests.exactness.worlds import Chain, World, sampled_fits

PROMPT = (*range(pairs.VOCABULARY - 1), 15, 12, 14)
PLAIN = Filters(temperature=1.0, top_k=20)
NARROW = Filters(temperature=1.0, top_k=6, top_p=0.8)
GAMMA = 4
LEVEL = 0.01
REFUTED = 1e-9
CHEAP = ("lookup", "ngram")
FLAGS = (*sampling.DRAFT_FLAGS, "--drafter", "staged", "--max-support", "8", "--lookup-min-match", "1", "--ngram-learn")


@pytest.fixture(scope="module")
def draft(markov: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good draft, only not sure enough of itself."""
    return pairs.write_draft(tmp_path_factory.mktemp("flattened"), markov.target, "flattened")


@pytest.fixture(scope="module")
def services(cluster: Cluster, markov: World, draft: Path) -> Iterator[dict[str, Service]]:
    """One for each drafter that guesses."""
    services = {
        kind: cluster.draft(markov.verifier, model=draft, flags=(*FLAGS, "--staged-by", kind)) for kind in CHEAP
    }
    wait_healthy(*services.values())
    yield services
    for service in services.values():
        service.end()


def _fits(service: Service, world: World, *, filters: Filters = PLAIN, **asked: Any) -> tuple[Run, Fit, Fit]:
    return sampled_fits(service, world.target, PROMPT, filters=filters, gamma=GAMMA, drafter="staged", **asked)


@pytest.mark.parametrize(("length", "distance"), [(26, 0.09), pytest.param(256, 0.03, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("guesser", "rule"), [("lookup", "block"), ("ngram", "tokenwise")])
def test_the_law_of_each_next_token_is_the_targets(
    guesser: str, rule: str, length: int, distance: float, services: dict[str, Service], markov: World
) -> None:
    run, outcomes, classes = _fits(services[guesser], markov, length=length, seed=900 + (rule == "block"), rule=rule)
    assert 0.2 * run.drafted < run.accepted < 0.95 * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


def _write(service: Service, drafter: str, **options: Any) -> Completion:
    asked = Options(max_new_tokens=60, ignore_eos=True, seed=41, gamma=6, rule="coupled", drafter=drafter)
    asked.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **asked)


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0, "presence_penalty": 0.5}, {"banned_token_ids": [5, 6]}])
@pytest.mark.parametrize("guesser", CHEAP)
def test_drafts_and_text_are_those_of_the_model(
    guesser: str, options: dict[str, object], services: dict[str, Service]
) -> None:
    """Not the text alone: each position of each proposal is accepted as often as the model's own is."""
    staged, model, alone = (_write(services[guesser], drafter, **options) for drafter in ("staged", "model", "none"))
    assert staged.token_ids == model.token_ids == alone.token_ids
    assert staged.started.drafter == staged.statistics.drafter == Drafter.STAGED
    ours, theirs = staged.statistics, model.statistics
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos
    assert ours.num_draft_tokens_per_pos == theirs.num_draft_tokens_per_pos
    assert (ours.num_draft_failures, ours.num_accepted_tokens > 0) == (0, True)


@pytest.mark.slow
def test_a_fault_is_noticed(cluster: Cluster, markov: World, draft: Path, tmp_path: Path) -> None:
    """The guesses come from a text in which each token's likeliest successor follows it, so that the fault makes that
    one likelier still.
    """
    letters = pairs.LETTERS
    likeliest = Chain.of(markov.target, NARROW).transitions[:, : len(letters)].argmax(axis=1)
    text = "".join(letter + letters[likeliest[number]] for number, letter in enumerate(letters))
    (tmp_path / "corpus.txt").write_text(text * 400)
    flags = (*FLAGS, "--staged-by", "ngram", "--ngram-order", "2", "--ngram-corpus", str(tmp_path / "corpus.txt"))
    service = cluster.draft(markov.verifier, model=draft, fault="staged_draws_from_the_whole_law", flags=flags)
    wait_healthy(service)
    _, outcomes, classes = _fits(service, markov, length=40, seed=5, rule="tokenwise", filters=NARROW)
    assert min(outcomes.p_value, classes.p_value) < REFUTED
    service.end()
