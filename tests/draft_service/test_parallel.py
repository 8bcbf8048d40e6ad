"""Parallel drafting: a pass of the draft model gives several tokens, one for each mask token after the text."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from draft_service.drafters.base import DrafterKind, DraftError, DraftSequence
from draft_service.drafters.build import default_kind
from draft_service.drafters.engine import DraftEngine
from draft_service.drafters.sequence import DraftWork, Drawn
from draft_service.settings import DraftSettings
from draft_service.validation import check_tokens_per_pass
from kernels.adjustments import LogitRules
from kernels.cpu_decoder import KEYS_TOGETHER, library
from kernels.rng import Domain, uniform
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseDistribution
from kernels.verify import Rule
from outrider.rpc.errors import RequestError
from outrider.runtime.errors import CheckpointError
from outrider.runtime.kv_cache import KVPool
from outrider.runtime.loader import LoadedModel, ModelSource, adopt, load_model
from outrider.service.settings import SettingsError
from protos.outrider.v1.draft_service_pb2 import SpeculationParams
from tests.draft_service.engines import CONFIG, PLAIN, Driver, engine_of, running
from tests.exactness.pairs import VOCABULARY, write_parallel_draft, write_target
from tests.kernels.cases import sparsify

PROMPT = [15, 12, 14]
MASK = VOCABULARY


class CountingEngine(DraftEngine):
    """Counts its passes."""

    passes = 0

    def draw(self, work: Sequence[DraftWork]) -> Sequence[Drawn]:
        self.passes += 1
        return super().draw(work)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = write_target(tmp_path_factory.mktemp("parallel") / "target", seed=1)
    return write_parallel_draft(target.parent / "draft", target)


@pytest.fixture(scope="module")
def loaded(folder: Path) -> LoadedModel:
    return load_model(ModelSource(str(folder), dtype="float32", device="cpu"))


@pytest.fixture(scope="module")
def reference(folder: Path) -> LlamaForCausalLM:
    return LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


@pytest.fixture
def engine(loaded: LoadedModel) -> Iterator[CountingEngine]:
    with running(engine_of(loaded, CountingEngine, vocab_size=VOCABULARY)) as engine:
        yield engine


def sequence(s: int, temperature: float = 1.0, **changes: object) -> DraftSequence:
    params = SamplingParams(temperature=temperature, top_p=0.95)
    opening = DraftSequence(PROMPT, [], params, PLAIN, 3, uses_outcome_cache=False, tokens_per_pass=s)
    return replace(opening, **changes)  # type: ignore[arg-type]


def drive(engine: DraftEngine, opening: DraftSequence) -> Driver:
    return Driver(engine, opening, parallel=True)


@torch.no_grad()
def rows(model: LlamaForCausalLM, tokens: Sequence[int], masks: int) -> torch.Tensor:
    """The logits after the last of `tokens` and after each mask, by transformers, `[1 + masks, V]`."""
    logits = model(torch.tensor([[*tokens, *[MASK] * masks]]), use_cache=False).logits[0]
    return logits[len(tokens) - 1 :, :VOCABULARY]


def cached(pool: KVPool, slot: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the first positions of a slot, `[layers, kv_heads, length, head_dim]` each."""
    whole = -(-length // KEYS_TOGETHER) * KEYS_TOGETHER
    assert pool.by_head is not None
    keys, values = pool.by_head.stores[0][:, :, :, pool.slot_mapping(slot, 0, whole)].unbind(1)
    if library() is not None:  # the decoder in C: a key lies element by element
        layers, heads, _, size = keys.shape
        keys = keys.reshape(layers, heads, -1, size, KEYS_TOGETHER).transpose(-1, -2).reshape(values.shape)
    return keys[:, :, :length], values[:, :, :length]


@pytest.mark.parametrize(("s", "passes"), [(2, 3), (3, 2), (4, 2), (5, 1), (9, 1)])
def test_each_token_is_drawn_from_the_models_distribution_at_its_own_mask(
    s: int, passes: int, engine: CountingEngine, reference: LlamaForCausalLM
) -> None:
    """⌈γ/s⌉ passes, after verdicts that accept all, some and none. The KV cache then holds what that of s = 1 holds."""
    opening, gamma = sequence(s), 5
    driver, single = drive(engine, opening), drive(engine, sequence(1))
    tokens, committed = list(PROMPT), list[int]()
    for accepted in (5, 0, 2, 5, 1):
        before = engine.passes
        draft = driver.propose(gamma, committed)
        assert engine.passes - before == passes
        base = len(tokens)
        for first in range(0, gamma, s):
            count = min(s, gamma - first)
            logits = rows(reference, [*tokens, *draft.token_ids[:first]], count - 1)
            for index, q in enumerate(sparsify(probabilities(logits, opening.params), CONFIG), first):
                sent = draft.distributions[index]
                assert isinstance(sent, SparseDistribution)
                assert sent.ids.tolist() == q.ids.tolist()
                assert (sent.weights / sent.total).tolist() == pytest.approx((q.weights / q.total).tolist(), abs=1e-3)
                assert draft.token_ids[index] == sent.token_at(uniform(opening.seed, base, index, Domain.DRAFT))
        single.propose(gamma, committed)
        pool, slots = engine.model_runner.pool, (driver.sequence.slot, single.sequence.slot)
        assert None not in slots
        assert pool.length(slots[0]) == base + (passes - 1) * s  # type: ignore[arg-type]
        for mine, other in zip(*(cached(pool, slot, base) for slot in slots), strict=True):  # type: ignore[arg-type]
            torch.testing.assert_close(mine, other, atol=1e-5, rtol=0)
        pool.check_integrity()
        committed = [*draft.token_ids[:accepted], 5 + accepted]
        tokens += committed


def test_masks_count_against_the_context_and_the_kv_cache(loaded: LoadedModel) -> None:
    """One pass may fill the context, or all blocks, to the last position. The last drafted token never runs."""
    most = 6
    length = len(PROMPT) + most - 1
    with running(engine_of(loaded, vocab_size=VOCABULARY, max_length=length, blocks=1)) as engine:
        drafted = drive(engine, sequence(8)).propose(most).token_ids
        assert drafted == drive(engine, sequence(most)).propose(most).token_ids
        with pytest.raises(DraftError, match=rf"\b{length}\b"):
            drive(engine, sequence(8)).propose(most + 1)
        assert drive(engine, sequence(8)).propose(most).token_ids == drafted
        engine.model_runner.pool.check_integrity()


@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED, Rule.SIGMOID])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_token_a_pass_drafts_as_model(engine: DraftEngine, temperature: float, rule: Rule) -> None:
    opening = sequence(1, temperature, rule=rule)
    model = Driver(engine, replace(opening, tokens_per_pass=4))  # which `model` ignores
    parallel = drive(engine, opening)
    for committed in ([], [3, 4], [5]):
        assert parallel.propose(6, committed).token_ids == model.propose(6, committed).token_ids


@pytest.mark.parametrize("rules", [PLAIN, LogitRules(presence_penalty=1.0)], ids=["plain", "adjusted"])
@pytest.mark.parametrize("rule", [Rule.TOKENWISE, Rule.COUPLED])
def test_a_proposal_depends_neither_on_the_batch_nor_on_where_the_sequence_was_opened(
    engine: DraftEngine, rule: Rule, rules: LogitRules
) -> None:
    """Sequences of different s in one batch. A resumed sequence drafts what the first one would have drafted."""
    openings = [sequence(s, seed=s, rule=rule, logit_rules=rules) for s in (1, 2, 3, 5)]
    alone = [drive(engine, each).propose(5).token_ids for each in openings]
    together = [drive(engine, each) for each in openings]
    for each in together:
        each.request(5)
    assert [each.result().token_ids for each in together] == alone
    for driver, opening, drafted in zip(together, openings, alone, strict=True):
        committed = [*drafted[:3], 7]
        resumed = drive(engine, opening.after(committed))
        assert resumed.propose(5).token_ids == driver.propose(5, committed).token_ids


def test_the_mask_token_is_never_drafted(folder: Path) -> None:
    """Neither by `parallel` nor by `model`, though the target knows the token and it is the draft's likeliest."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        best = int(model(torch.tensor([PROMPT])).logits[0, -1].argmax())
    model.config.pard_token = best
    loaded = adopt(model, "draft", "fingerprint")
    with running(engine_of(loaded, vocab_size=VOCABULARY)) as engine:
        for temperature, s in ((0.0, 1), (0.0, 3), (1.0, 3)):
            draft = drive(engine, sequence(s, temperature)).propose(6)
            assert best not in draft.token_ids
            for q in draft.distributions:
                assert q is None or (isinstance(q, SparseDistribution) and best not in q.ids)


def test_an_entropy_bound_ends_a_proposal_and_leaves_no_trace(engine: DraftEngine) -> None:
    drafted = drive(engine, sequence(4)).propose(6).token_ids
    driver = drive(engine, sequence(4, max_entropy=0.0))
    assert driver.propose(6).token_ids == drafted[:1]
    assert driver.propose(6, [7, 8]).token_ids == drive(engine, sequence(4, committed=[7, 8])).propose(6).token_ids[:1]


def changed(folder: Path, to: Path, **entries: object) -> Path:
    """A copy of the draft, with other entries in its configuration; None removes one."""
    to.mkdir()
    for file in folder.iterdir():
        (to / file.name).write_bytes(file.read_bytes())
    config = json.loads((to / "config.json").read_text()) | entries
    (to / "config.json").write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return to


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ({"pard_token": VOCABULARY + 1}, ("pard_token", "25", "0 to 24")),
        ({"pard_token": -1}, ("pard_token", "-1")),
        ({"pard_token": None, "ptd_token_id": "24"}, ("ptd_token_id", "'24'")),
        ({"architectures": ["LlamaForCausalLMEagle3"]}, ("pard_token", "LlamaForCausalLMEagle3", "hidden states")),
    ],
)
def test_a_checkpoint_that_cannot_draft_in_parallel_is_refused_by_name(
    folder: Path, tmp_path: Path, entries: dict[str, object], words: tuple[str, ...]
) -> None:
    path = changed(folder, tmp_path / "draft", **entries)
    with pytest.raises(CheckpointError) as error:
        load_model(ModelSource(str(path), dtype="float32", device="cpu"))
    for word in (*words, str(path)):
        assert word in str(error.value)


def test_a_draft_with_a_mask_token_drafts_in_parallel_unless_told_otherwise(
    folder: Path, tmp_path: Path, loaded: LoadedModel
) -> None:
    def settings(**given: Any) -> DraftSettings:
        return DraftSettings(**{"model": str(folder), **given})

    plain = load_model(
        ModelSource(str(changed(folder, tmp_path / "plain", pard_token=None)), dtype="float32", device="cpu")
    )
    other = load_model(
        ModelSource(
            str(changed(folder, tmp_path / "other", pard_token=None, ptd_token_id=MASK)), dtype="float32", device="cpu"
        )
    )
    assert (loaded.mask_token, plain.mask_token, other.mask_token) == (MASK, None, MASK)
    assert default_kind(settings(), loaded) is DrafterKind.PARALLEL
    assert default_kind(settings(drafter="model"), loaded) is DrafterKind.MODEL
    assert default_kind(settings(drafter="parallel"), other) is DrafterKind.PARALLEL
    assert default_kind(settings(), plain) is DrafterKind.MODEL
    for without in (plain, None):
        with pytest.raises(SettingsError, match=rf"--drafter parallel: '{folder}' has no mask token.*pard_token"):
            default_kind(settings(drafter="parallel"), without)
    with pytest.raises(SettingsError, match=r"'d.gguf' has no mask token: a GGUF file keeps none"):
        default_kind(settings(model="d.gguf", drafter="parallel"), plain)


@pytest.mark.parametrize("requested", [0, 257])
def test_tokens_of_a_pass_are_checked(requested: int) -> None:
    wrong, eight, none = (SpeculationParams(tokens_per_pass=number) for number in (requested, 8, None))
    with pytest.raises(RequestError, match=f"speculation.tokens_per_pass is {requested}; it must be 1 to 256"):
        check_tokens_per_pass("speculation.tokens_per_pass", wrong, DrafterKind.PARALLEL, default=2)
    assert check_tokens_per_pass("", eight, DrafterKind.PARALLEL, default=2) == 8
    assert check_tokens_per_pass("", none, DrafterKind.PARALLEL, default=2) == 2
    assert check_tokens_per_pass("", eight, DrafterKind.MODEL, default=2) == 1
