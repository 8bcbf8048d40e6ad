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
from pathlib import Path

import numpy as np
import pytest

from outrider.client import Client, Completion, Drafter, Options
from tests.cluster import Cluster, Service, wait_healthy
from tests.exactness import chisquare, sampling
from tests.exactness.distributions import Filters
from tests.exactness.pairs import LETTERS, VOCABULARY, write_draft
from tests.exactness.worlds import World, sampled_fits, transitions

# Every letter once, so that there is something to copy whatever comes.
PROMPT = (*range(VOCABULARY - 1), 15, 12, 14)
PLAIN = Filters(temperature=1.0, top_k=20)
NARROW = Filters(temperature=1.0, top_k=6, top_p=0.8)
LEVEL = 0.01
REFUTED = 1e-9
FLAGS = (*sampling.DRAFT_FLAGS, "--ngram-order", "2", "--lookup-min-match", "1", "--max-support", "8")
CHEAP = ("ngram", "lookup", "random")
STAGED = {"staged by lookup": "lookup", "staged by ngram": "ngram"}


@pytest.fixture(scope="module")
def corpus(markov: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the Markov target might have written, so that counting it makes a fair draft."""
    generator = np.random.default_rng(3)
    table = transitions(markov.target, Filters())[:, : len(LETTERS)]
    at, text = 0, []
    for _ in range(600):
        at = int(generator.choice(len(LETTERS), p=table[at] / table[at].sum()))
        text.append(LETTERS[at])
    path = tmp_path_factory.mktemp("corpus") / "corpus.txt"
    path.write_text("".join(text))
    return path


@pytest.fixture(scope="module")
def flattened(markov: World, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A good draft model, only not sure enough of itself."""
    return write_draft(tmp_path_factory.mktemp("flattened"), markov.target, "flattened")


def _cheap(cluster: Cluster, world: World, drafter: str, corpus: Path, *more: str, fault: str | None = None) -> Service:
    """A service without a draft model; all drafters that need none."""
    flags = (*FLAGS, "--drafter", drafter, "--ngram-corpus", str(corpus), *more)
    return cluster.draft(world.verifier, model=world.drafts["uniform"], fault=fault, flags=flags)


def _staged(cluster: Cluster, world: World, model: Path, by: str, *more: str, fault: str | None = None) -> Service:
    flags = (*FLAGS, "--drafter", "staged", "--staged-by", by, "--ngram-learn", *more)
    return cluster.draft(world.verifier, model=model, fault=fault, flags=flags)


@pytest.fixture(scope="module")
def service(cluster: Cluster, attentive: World, corpus: Path) -> Iterator[Service]:
    service = _cheap(cluster, attentive, "ngram", corpus)
    wait_healthy(service)
    yield service
    service.end()


@pytest.fixture(scope="module")
def services(cluster: Cluster, markov: World, corpus: Path, flattened: Path) -> Iterator[dict[str, Service]]:
    """By drafter, for the target that looks at the last token alone."""
    cheap = _cheap(cluster, markov, "lookup", corpus)
    staged = {name: _staged(cluster, markov, flattened, by) for name, by in STAGED.items()}
    wait_healthy(cheap, *staged.values())
    yield dict.fromkeys(CHEAP, cheap) | staged
    for service in (cheap, *staged.values()):
        service.end()


@pytest.mark.parametrize(("length", "distance"), [(26, 0.09), pytest.param(256, 0.03, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("drafter", "rule", "options", "seed"),
    [
        ("ngram", "block", {}, 791),
        ("ngram", "tokenwise", {"draft_temperature": 0.5}, 705),
        ("lookup", "tokenwise", {}, 800),
        ("random", "block", {}, 811),
        ("staged by lookup", "block", {}, 821),
        ("staged by ngram", "tokenwise", {}, 830),
    ],
)
def test_each_next_token_is_distributed_as_the_targets(
    drafter: str,
    rule: str,
    options: dict[str, float],
    seed: int,
    length: int,
    distance: float,
    services: dict[str, Service],
    markov: World,
) -> None:
    is_staged = drafter in STAGED
    asked = {"drafter": "staged" if is_staged else drafter, "gamma": 4 if is_staged else 2, "rule": rule, **options}
    run, outcomes, classes = sampled_fits(
        services[drafter], markov.target, PROMPT, filters=PLAIN, length=length, seed=seed, **asked
    )
    least, most = (0.2, 0.95) if is_staged else (0.01, 0.9)
    assert least * run.drafted < run.accepted < most * run.drafted
    assert chisquare.detectable(classes.df, classes.n, level=LEVEL, power=0.95) <= distance
    assert min(outcomes.p_value, classes.p_value) > LEVEL


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "drafter", "filters", "length"),
    [
        ("copies_with_probabilities", "lookup", PLAIN, 40),
        ("untruncated_ngrams", "ngram", NARROW, 80),
        ("random_favours_low_ids", "random", PLAIN, 64),
        ("staged_draws_from_all_of_q", "staged", NARROW, 40),
    ],
)
def test_a_fault_is_noticed(
    fault: str,
    drafter: str,
    filters: Filters,
    length: int,
    cluster: Cluster,
    markov: World,
    corpus: Path,
    flattened: Path,
    tmp_path: Path,
) -> None:
    if drafter == "staged":
        # Guesses of each token's likeliest successor, so that the fault makes that one likelier still.
        likeliest = transitions(markov.target, NARROW)[:, : len(LETTERS)].argmax(axis=1)
        biased = tmp_path / "corpus.txt"
        biased.write_text("".join(letter + LETTERS[likeliest[n]] for n, letter in enumerate(LETTERS)) * 400)
        service = _staged(cluster, markov, flattened, "ngram", "--ngram-corpus", str(biased), fault=fault)
    else:
        service = _cheap(cluster, markov, drafter, corpus, fault=fault)
    wait_healthy(service)
    gamma = 4 if drafter == "staged" else 2
    _, *fits = sampled_fits(
        service, markov.target, PROMPT, filters=filters, length=length, seed=5, drafter=drafter, gamma=gamma
    )
    assert min(fit.p_value for fit in fits) < REFUTED
    service.end()


# --------------------------------------------------------------------------------- the same tokens, sick or healthy


def _write(service: Service, **options: object) -> Completion:
    asked = Options(max_new_tokens=40, ignore_eos=True, seed=41, gamma=4, rule="coupled")
    asked.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **asked)


OPTIONS = pytest.mark.parametrize("options", [{"banned_token_ids": [5, 6]}, {"temperature": 0.0}], ids=str)


@OPTIONS
def test_the_tokens_are_the_same_with_every_drafter(options: dict[str, object], service: Service) -> None:
    alone = _write(service, drafter="none", **options)
    assert (alone.started.drafter, alone.statistics.num_drafts) == (Drafter.NONE, 0)
    texts = {drafter: _write(service, drafter=drafter, **options) for drafter in CHEAP}
    for drafter, text in texts.items():
        assert text.token_ids == alone.token_ids
        assert (text.statistics.drafter, text.statistics.num_draft_failures) == (drafter, 0)
        assert text.statistics.num_drafts > 0
    assert any(text.statistics.num_accepted_tokens for text in texts.values())


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


@pytest.mark.parametrize(("fault", "timeout_ms"), [("lookup_raises", 60_000), ("ngram_stalls", 250)])
def test_a_sick_drafter_costs_time_and_changes_no_token(
    fault: str, timeout_ms: int, cluster: Cluster, attentive: World, service: Service, corpus: Path
) -> None:
    """After a failure the target writes alone, and the drafter is tried anew once it has rested."""
    drafter = fault.partition("_")[0]
    sick = _cheap(cluster, attentive, drafter, corpus, "--draft-timeout", str(timeout_ms), fault=fault)
    wait_healthy(sick)
    length = 900  # much is written while it rests, or stalls
    text = _write(sick, max_new_tokens=length)
    assert text.token_ids == _write(service, drafter="none", max_new_tokens=length).token_ids
    statistics = text.statistics
    assert statistics.num_drafts > 1
    assert statistics.num_draft_failures > 1
    assert statistics.num_draft_recoveries in (statistics.num_draft_failures - 1, statistics.num_draft_failures)
    sick.end()
