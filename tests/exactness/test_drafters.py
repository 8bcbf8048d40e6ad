"""Every drafter, policy and cache writes the same tokens under `coupled` and at temperature 0, through both services.

`test_next_tokens` tests the distribution under the other rules.
"""

from typing import Any

import pytest

from outrider.client import Client, Completion, Drafter, Options, SpeculationPolicy
from tests.cluster import Service
from tests.exactness.pairs import VOCABULARY
from tests.exactness.services import PairServices

PROMPT = (*range(VOCABULARY - 1), 15, 12, 14)  # every letter once, so that there is something to copy
COUNTING = ("ngram", "lookup", "random")
POLICIES = [policy for policy in SpeculationPolicy if policy is not SpeculationPolicy.UNSPECIFIED]
OPTIONS = pytest.mark.parametrize(
    "options", [{"banned_token_ids": [5, 6]}, {"temperature": 0.0, "presence_penalty": 0.5}], ids=str
)


def write(service: Service, **options: Any) -> Completion:
    every = Options(max_new_tokens=64, ignore_eos=True, seed=41, gamma=4, rule="coupled", report_rounds=True)
    every.update(options)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **every)


@pytest.fixture(scope="module")
def counting(attentive: PairServices, counting_flags: str) -> Service:
    return attentive.draft("uniform", f"--drafter ngram {counting_flags}")


@OPTIONS
def test_tokens_are_the_same_with_every_drafter(options: dict[str, Any], counting: Service) -> None:
    alone = write(counting, drafter="none", **options)
    assert (alone.started.drafter, alone.statistics.num_drafts) == (Drafter.NONE, 0)
    texts = {drafter: write(counting, drafter=drafter, **options) for drafter in COUNTING}
    for drafter, text in texts.items():
        assert text.token_ids == alone.token_ids
        assert (text.statistics.drafter, text.statistics.num_draft_failures) == (drafter, 0)
        assert text.statistics.num_drafts > 0
    assert any(text.statistics.num_accepted_tokens for text in texts.values())


@OPTIONS
def test_tokens_are_the_same_with_every_policy(options: dict[str, Any], attentive: PairServices) -> None:
    service = attentive.draft("flattened", fault="restless_gamma")
    alone = write(service, gamma=0, **options)
    assert alone.statistics.num_drafts == 0
    accepted, gammas = 0, set[int]()
    for policy in POLICIES:
        for bound in (None, 1.5):
            text = write(service, gamma=6, speculation=policy, max_entropy=bound, **options)
            assert text.token_ids == alone.token_ids
            assert text.statistics.policy == policy
            assert text.statistics.num_drafts > 0
            accepted += text.statistics.num_accepted_tokens
            gammas |= {len(each.drafted_token_ids) for each in text.samples[0].rounds}
    assert accepted > 0
    assert len(gammas) >= 4


@OPTIONS
@pytest.mark.parametrize("guesser", ["lookup", "ngram"])
def test_staged_proposals_are_those_of_the_model(
    guesser: str, options: dict[str, Any], attentive: PairServices, counting_flags: str
) -> None:
    """Each position of each proposal is accepted as often as the model's own."""
    service = attentive.draft("flattened", f"--drafter staged --ngram-learn --staged-by {guesser} {counting_flags}")
    staged, model, alone = (
        write(service, drafter=drafter, gamma=6, **options) for drafter in ("staged", "model", "none")
    )
    assert staged.token_ids == model.token_ids == alone.token_ids
    assert staged.started.drafter == staged.statistics.drafter == Drafter.STAGED
    ours, theirs = staged.statistics, model.statistics
    assert ours.num_accepted_tokens_per_pos == theirs.num_accepted_tokens_per_pos
    assert ours.num_draft_tokens_per_pos == theirs.num_draft_tokens_per_pos
    assert (ours.num_draft_failures, ours.num_accepted_tokens > 0) == (0, True)


@pytest.mark.parametrize(
    ("options", "gamma"),
    [
        ({"seed": 5}, 1),
        ({"temperature": 0.0}, 3),
        ({"seed": 6, "presence_penalty": 0.5}, 8),
        *(({"rule": rule, "seed": 9}, 2) for rule in ("tokenwise", "block")),
    ],
    ids=str,
)
def test_tokens_are_the_same_with_and_without_the_outcome_cache(
    options: dict[str, Any], gamma: int, attentive: PairServices
) -> None:
    """Under every rule: in float32 a branch draws the same numbers, from the same q̂."""
    service = attentive.draft("flattened", fault="eager_outcome_cache")
    plain = write(service, gamma=gamma, outcome_cache=False, **options)
    for _ in range(8):  # on a busy machine all verdicts of a text may come before their branches
        cached = write(service, gamma=gamma, outcome_cache=True, **options)
        assert cached.token_ids == plain.token_ids
        if cached.statistics.num_outcome_cache_hits:
            break
    assert cached.statistics.num_outcome_cache_hits > 0
    assert cached.timings.saved_us > 0
    assert plain.statistics.num_outcome_cache_queries == plain.statistics.num_predrafted_tokens == 0


@pytest.mark.parametrize(("fault", "timeout_ms"), [("lookup_raises", 60_000), ("ngram_stalls", 50)])
def test_a_failing_drafter_changes_no_token(
    fault: str, timeout_ms: int, attentive: PairServices, counting: Service, counting_flags: str
) -> None:
    """After a failure the target writes alone, and the drafter is tried again after its backoff."""
    length = 1400  # many tokens during a backoff, or a stall
    flags = f"--drafter {fault.partition('_')[0]} {counting_flags} --draft-timeout {timeout_ms}"
    with attentive.with_fault(fault, "uniform", flags) as failing:
        # Rounds of a fixed size: else a fast target writes the text in less than a backoff.
        text = write(failing, max_new_tokens=length, fixed_size_rounds=True)
    assert text.token_ids == write(counting, drafter="none", max_new_tokens=length).token_ids
    assert text.statistics.num_drafts > 1
    failures = text.statistics.num_draft_failures
    assert failures > 1
    # On a busy machine a proposal that follows a stall may be late too.
    least = failures - 1 if fault == "lookup_raises" else 2
    assert least <= text.statistics.num_draft_recoveries <= failures
