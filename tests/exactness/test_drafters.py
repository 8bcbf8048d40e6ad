"""Every drafter, through both services over gRPC: whatever drafts, the text keeps the target's distribution or tokens.

The target is the Markov one, so that each of the 1,664 tokens of 64 texts is a sample: over the rank classes of each
token before (some 47 degrees of freedom) they notice a total variation of 0.09 at a level of 1 % with a power of 95 %
(`chisquare` has the derivation), and the slow ones 0.03 with 16,384 tokens. q̂ is cut to 8 of 24 tokens, so that what is
sampled from differs from what was counted, and so that the drafter `random` has supports to choose from. The mutants
show that a distribution which is not the one sampled from is noticed, for each drafter that draws or says it does; they
are slow. What staged drafting proposes is tested by itself in `tests/draft_service/test_staged.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from outrider.client import Client, Completion, Drafter, Options
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, sampling
from tests.exactness.chisquare import Fit
from tests.exactness.laws import Filters
from tests.exactness.pairs import LETTERS, VOCABULARY, write_draft
from tests.exactness.sampling import Run
from tests.exactness.worlds import Chain, World, sampled_fits

# Every letter once, so that there is something to copy whatever comes.
PROMPT = (*range(VOCABULARY - 1), 15, 12, 14)
LENGTH = 26
PLAIN = Filters(temperature=1.0, top_k=20)
LEVEL = 0.01
LENGTHS = [(LENGTH, 0.09), pytest.param(256, 0.03, marks=pytest.mark.slow)]
"""Tokens of a text, and the total variation that 64 of them notice."""
REFUTED = 1e-9
NARROW = Filters(temperature=1.0, top_k=6, top_p=0.8)
FLAGS = (*sampling.DRAFT_FLAGS, "--ngram-order", "2", "--lookup-min-match", "1", "--max-support", "8")
DRAFTERS = ("ngram", "lookup", "random")
STAGED = {"staged by lookup": "lookup", "staged by ngram": "ngram"}


@pytest.fixture(scope="module")
def corpus(markov: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Markov target might have written, so that counting it makes a fair draft."""
    generator = np.random.default_rng(3)
    transitions = Chain.of(markov.target, Filters()).transitions[:, : len(LETTERS)]
    at, text = 0, []
    for _ in range(600):
        at = int(generator.choice(len(LETTERS), p=transitions[at] / transitions[at].sum()))
        text.append(LETTERS[at])
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(text))
    return path


@pytest.fixture(scope="module")
def flattened(markov: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good draft model, only not sure enough of itself."""
    return write_draft(tmp_path_factory.mktemp("flattened"), markov.target, "flattened")


def _start(cluster: Cluster, world: World, drafter: str, corpus: Path, fault: str | None = None) -> Service:
    """A service without a draft model; all drafters that need none."""
    flags = (*FLAGS, "--drafter", drafter, "--ngram-corpus", str(corpus))
    return cluster.draft(world.verifier, model=world.drafts["uniform"], fault=fault, flags=flags)


def _start_staged(
    cluster: Cluster, world: World, model: Path, by: str, *more: str, fault: str | None = None
) -> Service:
    flags = (*FLAGS, "--drafter", "staged", "--staged-by", by, "--ngram-learn", *more)
    return cluster.draft(world.verifier, model=model, fault=fault, flags=flags)


@pytest.fixture(scope="module")
def service(cluster: Cluster, attentive: World, corpus: Path) -> Iterator[Service]:
    service = _start(cluster, attentive, "ngram", corpus)
    wait_healthy(service)
    yield service
    service.end()


@pytest.fixture(scope="module")
def services(cluster: Cluster, markov: World, corpus: Path, flattened: Path) -> Iterator[dict[str, Service]]:
    """By drafter, for the target that looks at the last token alone."""
    cheap = _start(cluster, markov, "lookup", corpus)
    staged = {name: _start_staged(cluster, markov, flattened, by) for name, by in STAGED.items()}
    wait_healthy(cheap, *staged.values())
    yield dict.fromkeys(DRAFTERS, cheap) | staged
    for service in (cheap, *staged.values()):
        service.end()


def _fits(service: Service, world: World, drafter: str, **asked: Any) -> tuple[Run, Fit, Fit]:
    kind = drafter.split()[0]
    gamma = 4 if kind == "staged" else 2
    return sampled_fits(service, world.target, PROMPT, **{"gamma": gamma, "drafter": kind, "filters": PLAIN, **asked})


@pytest.mark.parametrize(("length", "distance"), LENGTHS)
@pytest.mark.parametrize(
    ("drafter", "rule", "options"),
    [
        pytest.param("ngram", "tokenwise", {}, marks=pytest.mark.slow),  # in each run with a draft temperature
        ("ngram", "block", {}),
        ("lookup", "tokenwise", {}),
        ("random", "block", {}),
        ("ngram", "tokenwise", {"draft_temperature": 0.0}),
        ("ngram", "tokenwise", {"draft_temperature": 0.5}),
        ("staged by lookup", "block", {}),
        ("staged by ngram", "tokenwise", {}),
    ],
)
def test_the_law_of_each_next_token_is_the_targets(
    drafter: str,
    rule: str,
    options: dict[str, float],
    length: int,
    distance: float,
    services: dict[str, Service],
    markov: World,
) -> None:
    seed = 700 + 10 * list(services).index(drafter) + (rule == "block") + int(10 * options.get("draft_temperature", 9))
    run, outcomes, classes = _fits(services[drafter], markov, drafter, length=length, seed=seed, rule=rule, **options)
    least, most = (0.2, 0.95) if drafter in STAGED else (0.01, 0.9)
    assert least * run.drafted < run.accepted < most * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


# ---------------------------------------------------------------------------------------------- would they notice?


@dataclass(frozen=True, slots=True)
class Mutant:
    """A fault, the drafter it is in, and what it takes to see it."""

    fault: str
    drafter: str
    filters: Filters = PLAIN
    length: int = LENGTH


MUTANTS = (
    Mutant("copies_with_a_law", "lookup", length=40),
    Mutant("untruncated_ngrams", "ngram", Filters(temperature=1.0, top_k=6, top_p=0.8), 80),
    Mutant("random_favours_low_ids", "random", length=64),
)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.fault)
def test_a_fault_is_noticed(mutant: Mutant, cluster: Cluster, markov: World, corpus: Path) -> None:
    service = _start(cluster, markov, mutant.drafter, corpus, mutant.fault)
    wait_healthy(service)
    _, outcomes, classes = _fits(
        service, markov, mutant.drafter, filters=mutant.filters, length=mutant.length, seed=5, rule="tokenwise"
    )
    assert min(outcomes.p_value, classes.p_value) < REFUTED
    service.end()


@pytest.mark.slow
def test_a_fault_of_staged_drafting_is_noticed(
    cluster: Cluster, markov: World, flattened: Path, tmp_path: Path
) -> None:
    """The guesses come from a text in which each token's likeliest successor follows it, so that the fault makes that
    one likelier still.
    """
    likeliest = Chain.of(markov.target, NARROW).transitions[:, : len(LETTERS)].argmax(axis=1)
    text = "".join(letter + LETTERS[likeliest[number]] for number, letter in enumerate(LETTERS))
    (tmp_path / "corpus.txt").write_text(text * 400)
    corpus, fault = ("--ngram-corpus", str(tmp_path / "corpus.txt")), "staged_draws_from_the_whole_law"
    service = _start_staged(cluster, markov, flattened, "ngram", *corpus, fault=fault)
    wait_healthy(service)
    _, outcomes, classes = _fits(service, markov, "staged", length=40, seed=5, rule="tokenwise", filters=NARROW)
    assert min(outcomes.p_value, classes.p_value) < REFUTED
    service.end()


# --------------------------------------------------------------------------------- the same tokens, sick or healthy


def _write(service: Service, **options: object) -> Completion:
    asked = Options(max_new_tokens=40, ignore_eos=True, seed=41, gamma=4, rule="coupled")
    asked.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **asked)


OPTIONS = pytest.mark.parametrize(
    "options", [{}, {"temperature": 0.0, "presence_penalty": 0.5}, {"banned_token_ids": [5, 6]}]
)


@OPTIONS
def test_the_tokens_are_the_same_with_every_drafter(options: dict[str, object], service: Service) -> None:
    alone = _write(service, drafter="none", **options)
    assert (alone.started.drafter, alone.statistics.num_drafts) == (Drafter.NONE, 0)
    accepted = 0
    for drafter in DRAFTERS:
        text = _write(service, drafter=drafter, **options)
        assert text.token_ids == alone.token_ids
        assert text.statistics.drafter == drafter
        assert text.statistics.num_drafts > 0
        assert text.statistics.num_draft_failures == 0
        accepted += text.statistics.num_accepted_tokens
    assert accepted > 0


@OPTIONS
@pytest.mark.parametrize("guesser", STAGED)
def test_staged_proposals_are_those_of_the_model(
    guesser: str, options: dict[str, object], services: dict[str, Service]
) -> None:
    """Not the text alone: each position of each proposal is accepted as often as the model's own is."""
    staged, model, alone = (
        _write(services[guesser], drafter=drafter, gamma=6, **options) for drafter in ("staged", "model", "none")
    )
    assert staged.token_ids == model.token_ids == alone.token_ids
    assert staged.started.drafter == staged.statistics.drafter == Drafter.STAGED
    ours, theirs = staged.statistics, model.statistics
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos
    assert ours.num_draft_tokens_per_pos == theirs.num_draft_tokens_per_pos
    assert (ours.num_draft_failures, ours.num_accepted_tokens > 0) == (0, True)


@pytest.mark.parametrize(
    ("fault", "drafter", "options"),
    [
        ("lookup_raises", "lookup", {}),
        ("lookup_answers_nonsense", "lookup", {}),
        ("ngram_stalls", "ngram", {}),
        ("lookup_raises_for_a_while", "lookup", {"temperature": 0.0}),
    ],
)
def test_a_sick_drafter_costs_time_and_changes_no_token(
    fault: str,
    drafter: str,
    options: dict[str, object],
    cluster: Cluster,
    attentive: World,
    service: Service,
    corpus: Path,
) -> None:
    """After a failure the target writes alone, and the drafter is tried anew once it has rested."""
    timeout = ("--draft-timeout", "250" if fault == "ngram_stalls" else "60000")
    flags = (*FLAGS, *timeout, "--drafter", drafter, "--ngram-corpus", str(corpus))
    sick = cluster.draft(attentive.verifier, model=attentive.drafts["uniform"], fault=fault, flags=flags)
    wait_healthy(sick)
    length = 900  # much is written while it rests, or stalls
    text = _write(sick, max_new_tokens=length, **options)
    assert text.token_ids == _write(service, drafter="none", max_new_tokens=length, **options).token_ids
    told = text.statistics
    print(told)
    assert told.num_drafts > 1
    if fault == "lookup_raises_for_a_while":
        assert (told.num_draft_failures, told.num_draft_recoveries) == (3, 1)
    else:
        assert told.num_draft_failures > 1
        assert told.num_draft_recoveries in (told.num_draft_failures - 1, told.num_draft_failures)
    sick.end()


def test_a_drafter_that_never_works_is_asked_by_few(cluster: Cluster, attentive: World, service: Service) -> None:
    """Sixty-four sequences at once: after five failures in a row the others need not find out for themselves."""
    flags = (*FLAGS, "--drafter", "lookup")
    dead = cluster.draft(attentive.verifier, model=attentive.drafts["uniform"], fault="lookup_never_works", flags=flags)
    wait_healthy(dead)
    with Client(dead.address) as client:
        text = client.complete(PROMPT, max_new_tokens=16, ignore_eos=True, seed=41, rule="coupled", n=64)
    alone = _write(service, drafter="none", max_new_tokens=16)
    assert text.samples[0].token_ids == alone.token_ids
    failures = sum(sample.statistics.num_draft_failures for sample in text.samples)
    assert all(sample.statistics.num_drafts == 0 for sample in text.samples)
    # All sixty-four may be under way before the first is known to have failed; whoever asks again is refused.
    assert 5 <= failures <= 64 + 5
    with Client(dead.address) as client:
        later = [client.complete(PROMPT, max_new_tokens=8, seed=seed, rule="coupled") for seed in range(12)]
    assert sum(each.statistics.num_draft_failures for each in later) <= 6, "a probe a second, and then fewer"
    dead.end()
