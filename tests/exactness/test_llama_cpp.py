"""Text by llama.cpp is exact: both services, over gRPC, with GGUF files of float32, and pairs of both runtimes.

The references are transformers' own: distributions, text with the noise of each position, and highest logits.
Skipped where the extra `llama` is missing.
"""

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from kernels.rng import gumbel
from kernels.sampling import SamplingParams
from outrider.client import AsyncClient, Chunk, Client, Finished, Options
from outrider.runtime import batch
from outrider.runtime.llama_cpp import LlamaRunner
from outrider.runtime.llama_loader import load_gguf
from outrider.runtime.loader import ModelSource
from tests.cluster import MODELS, Cluster, Service, wait_healthy
from tests.exactness import pairs, sampling
from tests.exactness.distributions import chain_fits, next_distributions, transitions
from tests.exactness.pairs import VOCABULARY
from tests.exactness.test_greedy import NEW_TOKENS, PROMPT_TOKENS, count_ties, speculate
from tests.gguf_files import write_gguf
from tests.kernels.reference import standardise

pytest.importorskip("llama_cpp", reason="the extra `llama` is not installed: make test-llama")
pytest.importorskip("gguf", reason="the extra `llama` is not installed: make test-llama")

FLAGS = (*sampling.FLAGS, "--max-sequence-tokens", "64")
DRAFT_FLAGS = (*sampling.DRAFT_FLAGS, "--max-sequence-tokens", "64")
LAST = 14
PROMPT = (15, 12, LAST)
SEED = 41
SAMPLING = SamplingParams(0.7, top_p=0.9)
OPTIONS = Options(max_new_tokens=40, ignore_eos=True, seed=SEED, rule="coupled", temperature=0.7, top_p=0.9)


class LlamaPairs:
    """A Markov target and one that attends, each by llama.cpp, with drafts by either runtime."""

    def __init__(self, cluster: Cluster, folder: Path) -> None:
        self._cluster = cluster
        self.targets = {
            "markov": pairs.write_target(folder / "markov", seed=4, markov=True),
            "attentive": pairs.write_target(folder / "attentive", seed=1),
        }
        self._folder = folder
        self._running: dict[tuple[str, str], Service] = {}
        self._drafts: dict[tuple[str, str, str], Service] = {}

    def verifier(self, target: str, runtime: str = "llama.cpp") -> Service:
        """`runtime` is torch, llama.cpp, or the latter with a type of weights, as `llama.cpp q8_0`."""
        if (target, runtime) not in self._running:
            model = _model(self.targets[target], runtime)
            self._running[target, runtime] = self._cluster.verifier(model=model, flags=FLAGS)
        return self._running[target, runtime]

    def replicas(self, target: str) -> tuple[Service, tuple[Service, ...]]:
        """A draft service by llama.cpp and its two slow verifiers."""
        model = write_gguf(self.targets[target])
        verifiers = tuple(self._cluster.verifier(model=model, fault="unhurried", flags=FLAGS) for _ in range(2))
        draft = pairs.write_draft(self._folder / f"{target}-sharpened", self.targets[target], "sharpened")
        service = self._cluster.draft(*verifiers, model=write_gguf(draft), flags=DRAFT_FLAGS)
        wait_healthy(*verifiers, service)
        return service, verifiers

    def draft(self, target: str, runtime: str, verifier: str = "llama.cpp", kind: str = "sharpened") -> Service:
        key = target, f"{runtime} {kind}", verifier
        if key not in self._drafts:
            model = pairs.write_draft(self._folder / f"{target}-{kind}", self.targets[target], kind)
            model = _model(model, runtime)
            self._drafts[key] = self._cluster.draft(self.verifier(target, verifier), model=model, flags=DRAFT_FLAGS)
            wait_healthy(self._drafts[key])
        return self._drafts[key]


def _model(folder: Path, runtime: str) -> Path:
    name, _, kind = runtime.partition(" ")
    return write_gguf(folder, kind or "f32") if name == "llama.cpp" else folder


def own_transitions(file: Path) -> np.ndarray:
    """The distribution after each token of a Markov target, `[V, V]`, by this file's own weights."""
    loaded, _ = load_gguf(ModelSource(str(file), device="cpu"))
    runner = LlamaRunner(loaded, blocks=VOCABULARY, max_length=32, threads=1)
    rows = [runner.logits([batch.Chunk(runner.pool.allocate(), [token], 0, 0)])[0] for token in range(VOCABULARY)]
    return np.stack([standardise(row.double().numpy(), SAMPLING) for row in rows])


@pytest.fixture(scope="module")
def services(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LlamaPairs]:
    with Cluster() as cluster:
        yield LlamaPairs(cluster, tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize(
    ("runtime", "verifier", "rule", "seed"),
    [
        ("llama.cpp", "llama.cpp", "tokenwise", 901),
        ("torch", "llama.cpp", "block", 902),
        ("llama.cpp", "torch", "tokenwise", 903),
        ("llama.cpp q8_0", "llama.cpp q8_0", "block", 904),
    ],
)
def test_each_token_has_the_targets_distribution(
    runtime: str, verifier: str, rule: str, seed: int, services: LlamaPairs
) -> None:
    """5,376 tokens detect a mean total variation of 0.05 with 95 %, at a level of 1 %.

    A quantised target's distribution is that of its own weights.
    """
    draft = services.draft("markov", runtime, verifier)
    with Client(draft.address) as client:
        assert client.get_model().target.dtype == ("q8_0" if "q8_0" in verifier else "float32")
    run = sampling.sample(draft, PROMPT, params=SAMPLING, samples=192, length=28, seed=seed, gamma=3, rule=rule)
    assert 0.1 < run.accepted / run.drafted < 0.98
    target = services.targets["markov"]
    table = own_transitions(_model(target, verifier)) if "q8_0" in verifier else transitions(target, SAMPLING)
    for fit in chain_fits(table, LAST, run.tokens):
        assert fit.p_value > 0.01


def written(service: Service, **changes: object) -> tuple[int, ...]:
    options = OPTIONS.copy()
    options.update(changes)  # type: ignore[typeddict-item]
    with Client(service.address) as client:
        return client.complete(PROMPT, **options).token_ids


def test_a_seed_is_one_text_with_any_draft_of_either_runtime(services: LlamaPairs) -> None:
    target, text = services.targets["attentive"], [*PROMPT]
    for position in range(len(PROMPT), len(PROMPT) + 40):
        p = next_distributions(target, [text], SAMPLING)[0]
        with np.errstate(divide="ignore"):
            scores = np.log(p) + gumbel(SEED, [position], VOCABULARY, torch.float64)[0].numpy()
        text.append(int(scores.argmax()))
    wanted = tuple(text[len(PROMPT) :])
    for runtime, verifier in (("llama.cpp", "llama.cpp"), ("torch", "llama.cpp"), ("llama.cpp", "torch")):
        draft = services.draft("attentive", runtime, verifier)
        for gamma in (0, 1, 4, 8):
            assert written(draft, gamma=gamma) == wanted, (runtime, verifier, gamma)
    assert written(services.draft("attentive", "llama.cpp", kind="reversed"), gamma=4) == wanted


def test_a_killed_verifier_costs_no_token_of_a_seed(services: LlamaPairs) -> None:
    wanted = written(services.draft("attentive", "torch"))
    draft, verifiers = services.replicas("attentive")

    def held_by(verifier: Service) -> float:
        return draft.count("outrider_verifier_sequences", verifier=verifier.address)

    async def write() -> tuple[list[int], int]:
        ids, failovers = list[int](), 0
        async with AsyncClient(draft.address, timeout=90.0, retry=False) as client:
            async for event in client.generate(PROMPT, **(OPTIONS | Options(gamma=2))):
                match event:
                    case Chunk():
                        was, ids = len(ids), [*ids, *event.token_ids]
                        if was < 8 <= len(ids):
                            count = draft.count
                            held = {
                                each: count("outrider_verifier_sequences", verifier=each.address) for each in verifiers
                            }
                            max(verifiers, key=held.__getitem__).send(signal.SIGKILL)
                    case Finished():
                        failovers = event.statistics.num_failovers
        return ids, failovers

    ids, failovers = asyncio.run(write())
    assert tuple(ids) == wanted
    assert failovers == 1


def test_greedy_text_is_that_of_transformers(tmp_path_factory: pytest.TempPathFactory) -> None:
    """1,024 tokens of the demo pair, in float32; differences are ties, within units in the last place."""
    folder = tmp_path_factory.mktemp("demo")
    files = {}
    for name in ("target", "draft"):
        from outrider.runtime.gguf_convert import convert

        files[name] = folder / f"{name}.gguf"
        convert(str(MODELS / name), files[name], "f32")
    model = AutoModelForCausalLM.from_pretrained(MODELS / "target", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(MODELS / "target")
    texts = [json.loads(line)["text"] for line in (MODELS / "prompts.jsonl").read_text().splitlines()][:8]
    prompts = [tokenizer.encode(text)[:PROMPT_TOKENS] for text in texts]
    with Cluster() as cluster:
        draft = cluster.draft(cluster.verifier(model=files["target"]), model=files["draft"])
        wait_healthy(draft)
        found = asyncio.run(speculate(draft.address, prompts))
    ties = sum(count_ties(model, prompt, [*ours.token_ids]) for prompt, ours in zip(prompts, found, strict=True))
    print(f"{len(prompts) * NEW_TOKENS} tokens, {ties} ties")
    assert ties <= 4
    assert sum(each.statistics.num_accepted_tokens for each in found) > 200
