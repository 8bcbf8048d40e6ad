"""α, the chance that a drafted token is accepted: the mean of Σ min(p, q̂) over text of the target [L Cor. 3.6].

The target continues prompts, or transcribes speech. Then it reads its texts again, and so does each drafter: p and q̂
at every position are computed as the services compute them: with the rules of each model's generation config, and q̂
truncated and rounded (`kernels.sparse`). Drafters without a model have no such rules.

With lenience l the services accept a drafted token x if u · l · q̂(x) < p(x), that is with probability
min(1, p(x) / (l · q̂(x))). Over x from q̂ this is Σ min(p/l, q̂) [L A.5]. At temperature 0 they accept the most probable
token, and with l < 1 each x with p(x) ≥ l · max p, where p is the softmax of the logits.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import LogitRules
from kernels.sampling import SamplingParams, probabilities
from kernels.sparse import SparseConfig, SparseDistribution
from outrider.evaluation import DRAFT_MODELS, EvaluationError
from outrider.evaluation.drafters import Drafter, at_random, by_lookup, by_model, by_ngrams, in_parallel, point_mass
from outrider.evaluation.intervals import interval_of_share, ratio_error, student_quantile
from outrider.evaluation.local_models import (
    PromptText,
    build_runner,
    encode_prompts,
    encode_speech,
    load_tokenizer_of,
)
from outrider.evaluation.target_text import SEQUENCES, Prompt, Report, Text, read_logits, text_length, write
from outrider.runtime.device import check_environment
from outrider.runtime.loader import LoadedModel, ModelSource, adopt, load_model
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.ngram import NGramCounts, read_documents
from outrider.runtime.skip_layers import DecoderLayers, write_layers
from outrider.runtime.tokenizer import Tokenizer
from outrider.service.model_info import vocabulary_end
from protos.outrider.v1.draft_service_pb2 import Transcription

FEW_PROMPTS = 8
"""With fewer prompts an interval treats each text as one observation, and holds for these prompts only."""

COUNTING = frozenset({"unigram", "bigram", "ngram"})
"""Drafters that count n-grams."""


# ------------------------------------------------------------------------------------------------------------------ β


def acceptance(
    z: Tensor,
    drafted: Sequence[SparseDistribution | None],
    params: SamplingParams,
    leniences: Sequence[float],
    p: np.ndarray | None = None,
) -> np.ndarray:
    """Return β: the chance that a token of q̂ is accepted, float64 `[n, len(leniences)]`; NaN where nothing is drafted.

    Σ min(p/l, q̂) [L 3.5, A.5]. At temperature 0: Σ of q̂ over the acceptable tokens, which are the most probable one,
    or with l < 1 all x with p(x) ≥ l · max p [L A.5].

    Args:
        z: logits of the target, `[n, V]`.
        drafted: q̂ of each row.
        params: how the target's logits become p.
        leniences: each in (0, 1].
        p: `probabilities(z, params)`, if known.
    """
    known = [point_mass(0) if q is None else q for q in drafted]
    rows = np.repeat(np.arange(len(known)), [len(q.ids) for q in known])
    ids = np.concatenate([q.ids for q in known]).astype(np.int64)
    q_hat = np.concatenate([q.weights / q.total for q in known])
    beta = np.empty((len(known), len(leniences)))
    if params.is_greedy:
        logits = z.float().cpu().numpy()
        best = logits.argmax(-1)
        top = logits[np.arange(len(known)), best].astype(np.float64)
        ratio = np.exp(logits[rows, ids] - top[rows])  # p(x) / max p
    else:
        mass = (probabilities(z, params).cpu().numpy() if p is None else p)[rows, ids].astype(np.float64)
    for column, lenience in enumerate(leniences):
        if not params.is_greedy:
            each = np.minimum(mass / lenience, q_hat)
        else:
            each = q_hat * (ids == best[rows] if lenience == 1 else ratio >= lenience)
        beta[:, column] = np.bincount(rows, each, minlength=len(known))
    beta[[q is None for q in drafted]] = math.nan
    return beta


def measure(
    target: ModelRunner,
    drafters: Mapping[str, Drafter],
    texts: Sequence[Text],
    params: SamplingParams,
    leniences: Sequence[float],
    *,
    report: Report = lambda *_: None,
) -> dict[str, list[np.ndarray]]:
    """Return β of each drafter at the positions that the target wrote: for each text `[written, len(leniences)]`.

    `params` are the target's.

    Raises:
        EvaluationError: logits of a model are NaN or infinite.
    """
    total, done = sum(text.written for text in texts), 0
    found: dict[str, list[np.ndarray]] = {name: [] for name in drafters}
    for text in texts:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in drafters}
        drafted = {name: list(drafter(text)) for name, drafter in drafters.items()}
        begin = 0
        for z in read_logits(target, text, "the target"):
            if not len(z):
                continue
            p = None if params.is_greedy else probabilities(z, params).cpu().numpy()
            for name, q in drafted.items():
                parts[name].append(acceptance(z, q[begin : begin + len(z)], params, leniences, p))
            begin += len(z)
        for name, betas in parts.items():
            found[name].append(np.concatenate(betas))
        done += text.written
        report("measuring", done, total)
    return found


# ------------------------------------------------------------------------------------------------------------------ α


@dataclass(frozen=True, slots=True)
class Estimate:
    """α of a drafter at a lenience.

    Attributes:
        drafter: its name.
        lenience: l; 1 is exact.
        alpha: the mean of β over positions with a drafted token; NaN if there is none.
        standard_error: of it; None for one observation.
        margin: half of the 95 % interval; None for one observation.
        interval: of 95 %, within 0 and 1; None for one observation.
        positions: with a drafted token.
        drafted_share: the share of all positions that these are.
        observations: independent ones with a drafted token.
    """

    drafter: str
    lenience: float
    alpha: float
    standard_error: float | None
    margin: float | None
    interval: tuple[float, float] | None
    positions: int
    drafted_share: float
    observations: int


def clusters_of(texts: Sequence[Text]) -> tuple[str, list[int]]:
    """What counts as one observation, "prompt" or "text", and the number of each text's observation."""
    prompts = [text.index for text in texts]
    return ("text", list(range(len(texts)))) if len(set(prompts)) < FEW_PROMPTS else ("prompt", prompts)


def estimate(drafter: str, lenience: float, betas: Sequence[np.ndarray], clusters: Sequence[int]) -> Estimate:
    """Return α with its interval from β of each text, `[n]`, and the cluster of each text. See `ratio_error`."""
    drafted = [each[~np.isnan(each)] for each in betas]
    sums = np.bincount(clusters, [each.sum() for each in drafted])
    counts = np.bincount(clusters, [len(each) for each in drafted])
    sums, counts = sums[counts > 0], counts[counts > 0]
    N, G = int(counts.sum()), len(counts)
    alpha = float(sums.sum() / N) if N else math.nan
    share = N / max(1, sum(map(len, betas)))
    error = ratio_error(sums.tolist(), counts.tolist())
    if error is None:
        return Estimate(drafter, lenience, alpha, None, None, None, N, share, G)
    margin, interval = student_quantile(G - 1) * error, interval_of_share(alpha, error, G)
    return Estimate(drafter, lenience, alpha, error, margin, interval, N, share, G)


# ---------------------------------------------------------------------------------------------------------- the whole


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure: the options of `outrider alpha`, which describes them.

    `drafters` are of `ALPHA_DRAFTERS`, and not used with `find_skip_layers`; `prompts` are for a target of text,
    `audio` for one of speech. An empty `language` or `task` is the model's default.
    """

    target: str
    draft: str | None
    drafters: tuple[str, ...]
    prompts: tuple[PromptText, ...]
    audio: tuple[Path, ...] = ()
    language: str = ""
    task: str = ""
    timestamps: bool = False
    tokens: int = 10_000
    text_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    draft_temperature: float | None = None
    leniences: tuple[float, ...] = (1.0,)
    keep_mass: float = 0.99
    max_support: int = 256
    ngram_corpus: Path | None = None
    ngram_by_line: bool = False
    ngram_order: int = 4
    ngram_entries: int = 1 << 20
    tokens_per_pass: int = 8
    skip_layers: str | None = None
    find_skip_layers: int = 0
    lookup_min_match: int = 2
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    trust_remote_code: bool = False
    threads: int | None = None

    @property
    def params(self) -> SamplingParams:
        """How the target's logits become p."""
        return SamplingParams(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def draft_params(self) -> SamplingParams:
        """How the draft's logits become q: like the target's, but above temperature 0 with the draft's temperature."""
        if self.draft_temperature is None or self.params.is_greedy:
            return self.params
        return replace(self.params, temperature=self.draft_temperature)

    def source(self, name: str, skip_layers: str | None = None) -> ModelSource:
        """Where a model comes from, and how it runs."""
        return ModelSource(
            name,
            dtype=self.dtype,
            device=self.device,
            trust_remote_code=self.trust_remote_code,
            skip_layers=skip_layers,
        )

    @property
    def draft_source(self) -> ModelSource | None:
        """The same of the draft model; None if there is none."""
        if self.find_skip_layers:
            return None
        if self.skip_layers is not None:
            return self.source(self.target, self.skip_layers)
        return self.source(self.draft) if self.draft else None


@dataclass(frozen=True, slots=True)
class Step:
    """One more layer is left out.

    Attributes:
        layer: its number.
        skip_layers: all that are left out now, as the flag names them.
        alpha: α of the rest as a draft.
    """

    layer: int
    skip_layers: str
    alpha: float


@dataclass(frozen=True, slots=True)
class Measurement:
    """α of each drafter at each lenience.

    Attributes:
        tokens: that the target wrote.
        texts: how many.
        prompts: how many different ones they continue; windows of speech.
        text_tokens: the most tokens of one text.
        observation: what intervals treat as one observation: "prompt" or "text".
        dtype: of the target.
        device: of both models.
        estimates: by drafter, then by lenience.
        steps: of the search for layers, the last one with all of them.
    """

    tokens: int
    texts: int
    prompts: int
    text_tokens: int
    observation: str
    dtype: str
    device: str
    estimates: list[Estimate]
    steps: list[Step]


def run(options: Options, report: Report = lambda *_: None) -> Measurement:
    """Loads the models, lets the target write, and measures α.

    Raises:
        CheckpointError: a model cannot be loaded or run.
        EvaluationError: the models are no pair, or a prompt or the corpus cannot be used.
    """
    check_environment()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    draft_source = options.draft_source if DRAFT_MODELS.intersection(options.drafters) else None
    report("loading", 0, 0)
    source = options.source(options.target)
    tokenizer = load_tokenizer_of(source, draft_source)
    loaded = load_model(source)
    if options.find_skip_layers and options.find_skip_layers >= (
        layers := DecoderLayers(loaded.model, loaded.name).count
    ):
        raise EvaluationError(
            f"--find-skip-layers is {options.find_skip_layers}, and '{loaded.name}' has {layers} layers; keep at least "
            "one"
        )
    draft_model = None if draft_source is None else load_model(draft_source)
    if options.audio:
        wanted = Transcription(language=options.language, task=options.task, timestamps=options.timestamps)
        prompts = encode_speech(options.audio, wanted, loaded, draft_model)
    else:
        prompts = encode_prompts(options.prompts, tokenizer, loaded)
    penalties = LogitRules(options.repetition_penalty, options.presence_penalty, options.frequency_penalty)
    prompts = [replace(prompt, penalties=penalties) for prompt in prompts]
    length = _text_tokens(options, prompts, loaded, draft_model)
    longest = length + max(len(prompt.tokens) for prompt in prompts)
    target = build_runner(loaded, min(SEQUENCES, -(-options.tokens // length)), longest)
    vocab_size = min(vocabulary_end(tokenizer), loaded.vocab_size)
    draft = None if draft_model is None else build_runner(draft_model, 1, longest)
    if COUNTING.intersection(options.drafters):
        report("counting", 0, 0)
    documents = _documents(options, tokenizer)
    names = () if options.find_skip_layers else options.drafters
    drafters = {name: _drafter(name, options, draft, documents, vocab_size) for name in names}
    texts = write(
        target, prompts, options.params, tokens=options.tokens, length=length, seed=options.seed, report=report
    )
    steps: list[Step] = []
    betas: dict[str, list[np.ndarray]] = {}
    if options.find_skip_layers:
        steps = _find_layers(options, source, target, texts, vocab_size, longest, report)
    else:
        betas = measure(target, drafters, texts, options.params, options.leniences, report=report)
    observation, clusters = clusters_of(texts)
    return Measurement(
        tokens=sum(text.written for text in texts),
        texts=len(texts),
        prompts=len({text.index for text in texts}),
        text_tokens=length,
        observation=observation,
        dtype=loaded.number_format,
        device=str(loaded.device),
        estimates=[
            estimate(name, lenience, [each[:, column] for each in betas[name]], clusters)
            for name in betas
            for column, lenience in enumerate(options.leniences)
        ],
        steps=steps,
    )


def _find_layers(
    options: Options,
    source: ModelSource,
    target: ModelRunner,
    texts: Sequence[Text],
    vocab_size: int,
    length: int,
    report: Report,
) -> list[Step]:
    """Leaves out layers of the target, one after another: each time the one without which α is highest [W A.7].

    A layer without which α is no lower than before is left out at once, and the rest is not tried. Layers are tried
    from the last one found on.
    """
    count, loaded = options.find_skip_layers, load_model(source)  # its model is changed
    layers = DecoderLayers(loaded.model, loaded.name)
    tokens, tried = sum(text.written for text in texts), 0
    most = 1 + sum(layers.count - done for done in range(count))

    def alpha_without(skipped: Sequence[int]) -> float:
        nonlocal tried
        layers.skip(skipped)
        draft = build_runner(adopt(loaded.model, loaded.name, ""), 1, length, fuse=False)
        drafter = _drafter("model", options, draft, [], vocab_size)
        (betas,) = measure(target, {"model": drafter}, texts, options.params, (1.0,)).values()
        tried += 1
        report("searching", tried * tokens, most * tokens)
        return float(np.concatenate(betas).mean())

    steps: list[Step] = []
    skipped: list[int] = []
    before = alpha_without([])
    while len(skipped) < count:
        alphas: dict[int, float] = {}
        first = skipped[-1] if skipped else 0
        for layer in [*range(first, layers.count), *range(first)]:
            if layer not in skipped:
                alphas[layer] = alpha_without([*skipped, layer])
                if alphas[layer] >= before:
                    break
        best = max(alphas, key=lambda layer: alphas[layer])
        before = alphas[best]
        skipped.append(best)
        steps.append(Step(best, write_layers(skipped), before))
    return steps


def _text_tokens(options: Options, prompts: Sequence[Prompt], target: LoadedModel, draft: LoadedModel | None) -> int:
    if draft is not None and (draft.encoder is None) != (target.encoder is None):
        raise EvaluationError("--draft and --target differ: one has an encoder, and the other has none")
    models = [target] if draft is None else [target, draft]
    smallest = min(models, key=lambda each: each.context_length)
    prompt = max(len(prompt.tokens) for prompt in prompts)
    longest = smallest.context_length - prompt
    given = options.text_tokens
    if longest < 1 or (given or 1) > longest:
        raise EvaluationError(
            f"--text-tokens is {given or 1}, and the longest prompt has {prompt} tokens; {smallest.name} has "
            f"{smallest.context_length} positions: use shorter prompts or shorter texts"
        )
    return given or text_length(prompts, options.tokens, longest)


def _documents(options: Options, tokenizer: Tokenizer) -> list[list[int]]:
    """The tokens of the corpus, if a drafter counts it."""
    if options.ngram_corpus is None or not COUNTING.intersection(options.drafters):
        return []
    try:
        return [tokenizer.encode(text) for text in read_documents(options.ngram_corpus, by_line=options.ngram_by_line)]
    except (OSError, ValueError) as error:
        raise EvaluationError(f"--ngram-corpus: cannot read '{options.ngram_corpus}' as UTF-8: {error}") from error


def _drafter(
    name: str, options: Options, draft: ModelRunner | None, documents: Sequence[Sequence[int]], vocab_size: int
) -> Drafter:
    params, sparse = options.draft_params, SparseConfig(options.keep_mass, options.max_support)
    match name:
        case "model":
            if draft is None:
                raise EvaluationError("--drafter model needs --draft")
            return partial(by_model, draft, vocab_size, params, sparse)
        case "parallel":
            if draft is None or draft.loaded.mask_token is None:
                raise EvaluationError(f"--drafter parallel: '{options.draft}' has no mask token")
            return partial(in_parallel, draft, vocab_size, params, sparse, options.tokens_per_pass)
        case "lookup":
            return partial(by_lookup, options.lookup_min_match)
        case "random":
            return partial(at_random, vocab_size, min(vocab_size, options.max_support), options.seed)
        case _:
            order = {"unigram": 1, "bigram": 2}.get(name, options.ngram_order)
            counts = NGramCounts(order, vocab_size, options.ngram_entries)
            for document in documents:
                counts.add(document)
            return partial(by_ngrams, counts, params, sparse)
