"""α of `outrider.evaluation.alpha` against what real services accept, on the texts that they write.

Two comparisons. The verifier reports β of every position that it verified: it must be ours, in float32. And it accepts
a token with probability β, given all before it, so the accepted tokens less the sum of our β have mean 0 and variance
Σ β(1 - β), whatever positions are verified. At 4.5 standard errors (level 7e-6) the 1,200 or more verified positions of
a sampled case show a mean error in β of 0.11 with 99.9 %; the first comparison shows one of 1e-4 at a single position.
"""

import math
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kernels.sampling import SamplingParams
from kernels.sparse import SparseConfig
from outrider.client import Client, Round
from outrider.evaluation.alpha import measure
from outrider.evaluation.drafters import Drafter, by_lookup, by_model, by_ngrams
from outrider.evaluation.local_models import build_runner
from outrider.evaluation.target_text import Prompt, Text
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.ngram import NGramCounts
from outrider.runtime.tokenizer import load_tokenizer
from tests.exactness.pairs import VOCABULARY
from tests.exactness.services import PairServices

PROMPT: tuple[int, ...] = (3, 1, 4, 1, 5, 9, 2, 6)
SAMPLED = SamplingParams(temperature=0.9, top_k=12)
GREEDY = SamplingParams(temperature=0.0)


def source_of(folder: Path) -> ModelSource:
    return ModelSource(str(folder), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def target(markov: PairServices) -> ModelRunner:
    return build_runner(load_model(source_of(markov.target)), 1, 256)


def drafter_of(name: str, params: SamplingParams, markov: PairServices, counting_flags: str) -> Drafter:
    flags = counting_flags.split()
    sparse = SparseConfig(max_support=int(flags[flags.index("--max-support") + 1]))
    if name == "model":
        runner = build_runner(load_model(source_of(markov.drafts["flattened"])), 1, 256)
        return partial(by_model, runner, VOCABULARY, params, sparse)
    if name == "lookup":
        return partial(by_lookup, int(flags[flags.index("--lookup-min-match") + 1]))
    counts = NGramCounts(int(flags[flags.index("--ngram-order") + 1]), VOCABULARY, 1 << 20)
    tokenizer = load_tokenizer(source_of(markov.target))
    counts.add(tokenizer.encode(Path(flags[flags.index("--ngram-corpus") + 1]).read_text()))
    return partial(by_ngrams, counts, params, sparse)


CASES: dict[str, tuple[str, SamplingParams, dict[str, Any]]] = {
    "model": ("model", SAMPLED, {"gamma": 4}),
    "lenient": ("model", SAMPLED, {"gamma": 4, "lenience": 0.7}),
    "hot draft": ("model", SAMPLED, {"gamma": 4, "draft_temperature": 2.0}),
    "lenient and greedy": ("ngram", GREEDY, {"gamma": 1, "lenience": 0.3}),
    # The counts of the services are as old as the round, so only its first token is compared.
    "ngram": ("ngram", SAMPLED, {"gamma": 1}),
    "lookup": ("lookup", SAMPLED, {"gamma": 1}),
}


@pytest.mark.parametrize("case", CASES)
def test_alpha_is_what_services_accept(
    case: str, markov: PairServices, counting_flags: str, target: ModelRunner
) -> None:
    name, params, given = CASES[case]
    options = dict(given)
    lenience = options.get("lenience", 1.0)
    draft_params = SamplingParams(options.get("draft_temperature", params.temperature), params.top_k)
    drafter = drafter_of(name, draft_params, markov, counting_flags)
    # 1,200 positions are verified, one a round if γ is 1.
    prompts, options["n"], options["max_new_tokens"] = [PROMPT], 32 if options["gamma"] == 1 else 23, 64
    if params.is_greedy:  # texts soon repeat themselves, and all is accepted
        prompts, options["n"], options["max_new_tokens"] = list(product(range(8), repeat=2)), 1, 3
    options |= {"temperature": params.temperature, "top_k": params.top_k, "drafter": name, "speculation": "fixed"}
    texts, rounds = list[Text](), list[tuple[Round, ...]]()
    with Client(markov.draft("flattened", counting_flags).address) as client:
        for prompt in prompts:
            done = client.complete(prompt, **options, rule="tokenwise", seed=17, ignore_eos=True, report_rounds=True)
            texts += [Text(0, Prompt(prompt), [*prompt, *sample.token_ids]) for sample in done.samples]
            rounds += [sample.rounds for sample in done.samples]
    betas = measure(target, {name: drafter}, texts, params, [lenience])[name]
    excess = variance = 0.0
    verified = 0
    for reports, own in zip(rounds, betas, strict=True):
        for each in reports:
            judged = own[each.output_length : each.output_length + len(each.beta), 0]
            assert each.beta == pytest.approx(judged, abs=2e-5)
            excess += each.accepted - judged.sum()
            variance += float((judged * (1 - judged)).sum())
            verified += len(judged)
    print(f"{verified} positions, excess {excess:.1f}, standard error {math.sqrt(variance):.1f}")
    assert verified >= (60 if params.is_greedy else 1_200)
    assert np.nanstd(np.concatenate(betas)) > 0.03, "positions differ"
    assert abs(excess) <= 4.5 * math.sqrt(variance) + 1e-3
