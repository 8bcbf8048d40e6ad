"""The target's own distributions, to compare the tokens of a deployment with.

`LocalTarget` is a copy of the target in this process. `DecodeReference` asks the deployment itself, without a draft,
for the log-probabilities of the most probable tokens: it can show that speculation changes nothing, and nothing about
the target.
"""

import asyncio
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules
from kernels.rng import gumbel
from kernels.sampling import SamplingParams, probabilities
from outrider.client import AsyncClient, Options, PositionLogprobs
from outrider.evaluation.chisquare import Array
from outrider.evaluation.clips import Source, request_of
from outrider.evaluation.local_models import encoder_inputs
from outrider.evaluation.streams import for_each
from outrider.evaluation.target_text import adjusted
from outrider.evaluation.token_fit import Distribution
from outrider.runtime.batch import Chunk
from outrider.runtime.errors import CheckpointError
from outrider.runtime.loader import ModelSource, load_model
from outrider.runtime.torch_runner import TorchRunner
from protos.outrider.v1 import model_pb2

Prefix: TypeAlias = tuple[int, tuple[int, ...], SamplingParams]
"""A prompt by its number, tokens after it, and how logits become a distribution."""

Progress: TypeAlias = Callable[[int], None]
"""Called with the number of steps done since the last call."""

TOP_N = 20
"""Log-probabilities that a service reports at most."""
_KEPT = 64
_LEAST_CHANCE = 1e-5
_AT_ONCE = 16


def distribution(ids: Array, scaled: Array, p: Array, params: SamplingParams, rounding: float) -> Distribution:
    """Return a `Distribution`; tokens that rounding may exchange with the last one that a filter keeps are its rest.

    Args:
        ids: `[K]`, the most probable tokens first.
        scaled: `[K]`, their log-probabilities by temperature alone.
        p: `[K]`, their probabilities; 0 for those that a filter drops.
        params: the filters.
        rounding: difference of two logits that may be due to rounding.
    """
    kept = int(np.count_nonzero(p))
    if kept == len(p) or p.sum() < 1 - _LEAST_CHANCE:  # the filters keep others, too
        return Distribution(ids[:kept], p[:kept])
    near = rounding / max(params.temperature, 1e-6)
    begin = int((scaled > scaled[kept - 1] + near).sum())
    end = int((scaled >= scaled[kept - 1] - near).sum())
    return Distribution(ids[:begin], p[:begin], frozenset(ids[begin:end].tolist()), _is_sure(scaled, params, near))


def _is_sure(scaled: Array, params: SamplingParams, near: float) -> bool:
    mass = np.exp(scaled[: params.top_k or None])
    if params.top_k:
        mass /= mass.sum()
    # If some logits of a distribution move by d against the others, their mass m moves by d · m(1 - m).
    if params.top_p < 1 and np.abs(mass.cumsum() - params.top_p).min() < near * params.top_p * (1 - params.top_p):
        return False
    return params.min_p == 0 or bool(np.abs(scaled - scaled[0] - np.log(params.min_p)).min() > near)


# -------------------------------------------------------------------------------------------------------- local copy


@dataclass(frozen=True, slots=True)
class Copy:
    """A copy of the target to load here: a folder or hub id; `dtype` None is that of the verifier."""

    name: str
    dtype: str | None = None
    device: str = "auto"
    trust_remote_code: bool = False


class LocalTarget:
    """A copy of the target in this process.

    Args:
        copy: of the target.
        target: the deployment's target, which must have the same weights.
        prompts: token ids of each prompt.
        longest: tokens after a prompt, at most.
        rounding: see `distribution`.
        sources: for an encoder–decoder model: what each prompt's encoder reads.
        sampled_tokens: of each sampled text, at whose end such a model may force a token.

    Raises:
        CheckpointError: the copy cannot be loaded, or has other weights.
        EvaluationError: a prompt does not fit it.
    """

    def __init__(
        self,
        copy: Copy,
        target: model_pb2.ModelInfo,
        prompts: Sequence[Sequence[int]],
        longest: int,
        rounding: float,
        sources: Sequence[Source] | None = None,
        sampled_tokens: int = 0,
    ) -> None:
        dtype = copy.dtype or target.dtype
        if not hasattr(torch, dtype):
            raise CheckpointError(
                f"the deployment's target, {target.name}, is a GGUF file ({dtype}), which cannot be loaded here; leave "
                "--target out"
            )
        source = ModelSource(copy.name, dtype=dtype, device=copy.device, trust_remote_code=copy.trust_remote_code)
        loaded = load_model(source)
        if loaded.weights_fingerprint != target.weights_fingerprint:
            raise CheckpointError(
                f"--target {copy.name} has the weights {loaded.weights_fingerprint[:12]}; the deployment's target, "
                f"{target.name}, has {target.weights_fingerprint[:12]}; give the checkpoint that the verifier loads"
            )
        self._inputs = None if sources is None else encoder_inputs(sources, loaded, source)
        self._sampled_tokens = sampled_tokens
        self.dtype = loaded.number_format
        self._vocab_size = target.vocab_size
        self._prompts = prompts
        self._rounding = rounding
        most = max(map(len, prompts)) + longest
        self._runner = TorchRunner.build(loaded, _AT_ONCE + 1, most, fuse=False)

    async def distributions(self, wanted: Iterable[Prefix], progress: Progress) -> dict[Prefix, Distribution]:
        """Return the distribution after each prefix, computed in a thread."""
        return await asyncio.to_thread(self._distributions, set(wanted), progress)

    def _distributions(self, wanted: set[Prefix], progress: Progress) -> dict[Prefix, Distribution]:
        found: dict[Prefix, Distribution] = {}
        every = {params for _, _, params in wanted}
        for prompt in sorted({prompt for prompt, _, _ in wanted}):
            prefixes = {tokens for number, tokens, _ in wanted if number == prompt}
            parents = {tokens[:-1] for tokens in prefixes if tokens}
            # One token more: the logits of a text are those before each of its tokens.
            texts = sorted((*tokens, 0) for tokens in prefixes - parents)
            for text, logits in self.logits(prompt, texts, self._sampled_tokens):
                for params in every:
                    names = [(prompt, text[:at], params) for at in range(len(text))]
                    rows = [at for at, name in enumerate(names) if name in wanted and name not in found]
                    for at, each in zip(rows, self._rows(logits[rows], params), strict=True):
                        found[names[at]] = each
                    progress(len(rows))
        return found

    @torch.inference_mode()
    def logits(
        self, prompt: int, texts: Sequence[Sequence[int]], max_new_tokens: int
    ) -> Iterator[tuple[tuple[int, ...], Tensor]]:
        """Yield each text after a prompt with the logits before each of its tokens, `[len(text), V]`.

        They are those by the rules of the model's generation config, for a request of `max_new_tokens`.
        """
        pool, ids = self._runner.pool, list(self._prompts[prompt])
        rules = LogitRules(generation=self._runner.loaded.generation_rules, max_new_tokens=max_new_tokens)
        begin = pool.allocate()
        if self._inputs is not None:
            self._runner.encode(begin, self._inputs[prompt])
        if len(ids) > 1:
            self._runner.forward([Chunk(begin, ids[:-1], 0, len(ids) - 1)])
        for start in range(0, len(texts), _AT_ONCE):
            batch = texts[start : start + _AT_ONCE]
            slots = [pool.fork(begin) for _ in batch]
            chunks = [
                Chunk(slot, [ids[-1], *text[:-1]], len(ids) - 1, 0) for slot, text in zip(slots, batch, strict=True)
            ]
            rows = self._runner.forward(chunks)[:, : self._vocab_size]
            for text, own in zip(batch, rows.split([len(text) for text in batch]), strict=True):
                yield tuple(text), adjusted(own, Adjuster.after(ids, (), rules, self._vocab_size), text)
            for slot in slots:
                pool.free(slot)
        pool.free(begin)

    def _rows(self, logits: Tensor, params: SamplingParams) -> Iterator[Distribution]:
        p, z = probabilities(logits, params, torch.float64), logits.double()
        scaled = torch.log_softmax(z / params.temperature, -1)
        top, ids = scaled.topk(min(_KEPT, z.shape[1]))
        arrays = (each.cpu().numpy() for each in (ids, top, p.gather(1, ids)))
        for one, own, chance in zip(*arrays, strict=True):
            yield distribution(one, own, chance, params, self._rounding)

    def gaps(self, prompt: int, text: Sequence[int], seed: int | None) -> list[float]:
        """Return how far the score of each token of a text is below the highest one, in nats; 0: it has the highest.

        Scores are logits; with a seed, with the noise of the rule `coupled` added, at temperature 1.
        """
        ((_, logits),) = self.logits(prompt, [text], len(text))
        scores = logits.double().cpu()
        if seed is not None:
            begin = len(self._prompts[prompt])
            scores = scores + gumbel(seed, range(begin, begin + len(text)), scores.shape[1], torch.float64)
        own = scores.gather(1, torch.tensor(text)[:, None])[:, 0]
        # Among equals the lowest id counts.
        is_best = scores.argmax(-1) == torch.tensor(text)
        return [
            0.0 if best else max(gap, 1e-12)
            for best, gap in zip(is_best, (scores.amax(-1) - own).tolist(), strict=True)
        ]


# ------------------------------------------------------------------------------------------------------ the deployment


class DecodeReference:
    """The deployment's target without a draft: one request for each prefix.

    Args:
        client: of the draft service.
        prompts: text or token ids.
        at_once: requests in progress.
        rounding: see `distribution`.
        longest: for an encoder–decoder model: tokens of the texts that are compared, since its rules may depend on it.
    """

    def __init__(
        self, client: AsyncClient, prompts: Sequence[Source], at_once: int, rounding: float, longest: int | None = None
    ) -> None:
        self._longest = longest
        self._client = client
        self._prompts = prompts
        self._at_once = at_once
        self._rounding = rounding

    async def distributions(self, wanted: Iterable[Prefix], progress: Progress) -> dict[Prefix, Distribution]:
        """Return the distribution after each prefix: its `TOP_N` most probable tokens."""
        prefixes = list(wanted)

        async def ask(prefix: Prefix) -> Distribution:
            found = await self._ask(prefix)
            progress(1)
            return found

        return dict(zip(prefixes, await for_each(prefixes, ask, self._at_once), strict=True))

    async def _ask(self, prefix: Prefix) -> Distribution:
        params = prefix[2]
        entry = await self._logprobs(prefix)
        scaled = {each.token_id: each.raw / params.temperature for each in entry.top}
        # Rules of an encoder–decoder model change logits. Top-p cuts by probabilities at this temperature, whose sum
        # over all tokens `raw` does not give.
        if self._longest is not None or (params.top_p < 1 and not params.top_k and params.temperature != 1):
            plain = SamplingParams(temperature=params.temperature)
            shown = entry if params == plain else await self._logprobs((*prefix[:2], plain))
            scaled = {each.token_id: each.adjusted for each in shown.top if each.adjusted > -math.inf}
        chances = {each.token_id: each.adjusted for each in entry.top}
        ids = sorted(scaled.keys() & chances.keys(), key=lambda token: (-scaled[token], token))
        if not ids:  # rules ban all of them
            return Distribution(np.array([entry.token.token_id]), np.exp([entry.token.adjusted]))
        top, p = np.array([scaled[each] for each in ids]), np.exp([chances[each] for each in ids])
        return distribution(np.array(ids), top, p, params, self._rounding)

    async def _logprobs(self, prefix: Prefix) -> PositionLogprobs:
        """Of the next token after a prefix."""
        prompt, tokens, params = prefix
        options = Options(
            committed_token_ids=tokens,
            max_new_tokens=self._longest or len(tokens) + 1,
            ignore_eos=True,
            gamma=0,
            logprobs=TOP_N,
        )
        source, speech = request_of(self._prompts[prompt])
        done = await self._client.complete(source, **(speech | options | sampling_options(params)))
        return done.logprobs[0]


def sampling_options(params: SamplingParams) -> Options:
    """Return these parameters as options of a request."""
    return Options(temperature=params.temperature, top_k=params.top_k, top_p=params.top_p, min_p=params.min_p)


def scores(logprobs: Mapping[int, float], seed: int | None, position: int) -> dict[int, float]:
    """Return log-probabilities; with a seed, with the noise of the rule `coupled` at an absolute position added."""
    if seed is None:
        return dict(logprobs)
    noise = gumbel(seed, [position], max(logprobs) + 1, torch.float64)[0]
    return {token: value + float(noise[token]) for token, value in logprobs.items()}
