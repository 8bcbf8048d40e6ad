"""Texts that a target writes after prompts, and the logits of a model at their positions.

Many texts are written at once. Texts are read in blocks, so that few rows of logits exist at any time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, islice

import torch
from torch import Tensor

from kernels.adjustments import Adjuster, LogitRules, apply
from kernels.sampling import SamplingParams, bad_rows, probabilities
from outrider.evaluation import EvaluationError
from outrider.runtime.batch import Chunk
from outrider.runtime.model_runner import ModelRunner

SEQUENCES = 64
"""Texts that are written at once."""

BATCH_TOKENS = 512
"""The most tokens of a forward pass."""

NO_PENALTIES = LogitRules()

_LOGITS = 1 << 24  # the most logits of a block: 64 MiB in float32

Report = Callable[[str, int, int], None]
"""Called with the work, the tokens done, and all tokens; 0 and 0 if these are not known."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What the target continues.

    Attributes:
        tokens: of the decoder, at least one.
        encoder_input: token ids `[S]` or features `[mels, frames]` of an encoder; None without an encoder.
        draft_input: the same for the draft's encoder, if it takes other features.
        penalties: of the request, for target and draft.
    """

    tokens: Sequence[int]
    encoder_input: Tensor | None = None
    draft_input: Tensor | None = None
    penalties: LogitRules = NO_PENALTIES


@dataclass(slots=True)
class Text:
    """A text of the target.

    Attributes:
        index: of its prompt.
        prompt: see `Prompt`.
        tokens: prompt and continuation.
    """

    index: int
    prompt: Prompt
    tokens: list[int]

    @property
    def begin(self) -> int:
        """The first position that the target wrote."""
        return len(self.prompt.tokens)

    @property
    def written(self) -> int:
        return len(self.tokens) - self.begin

    def for_draft(self) -> "Text":
        """Return the text as the draft reads it."""
        if self.prompt.draft_input is None:
            return self
        return Text(self.index, replace(self.prompt, encoder_input=self.prompt.draft_input), self.tokens)


def adjuster_of(runner: ModelRunner, text: Text, vocab_size: int) -> Adjuster | None:
    """The changes to a model's logits `[V]` before the first written token of a text; None if there are none."""
    rules = replace(text.prompt.penalties, generation=runner.loaded.generation_rules)
    return Adjuster.after(text.prompt.tokens, (), rules, vocab_size)


def adjusted(z: Tensor, adjuster: Adjuster | None, tokens: Sequence[int], stand_in: int | None = None) -> Tensor:
    """The logits `[n, V]` with the changes. The adjuster goes on after `tokens`, which follow the rows: n.

    Within these rows `stand_in`, if given, counts in place of each token: a model that gives them all in one pass does
    not know them.
    """
    if adjuster is None or not tokens:
        return z
    counted = tokens if stand_in is None else [stand_in] * len(tokens)
    rows = adjuster.rows(counted[:-1])
    for token in tokens:
        adjuster.push(token)
    return apply(z, rows)


# ------------------------------------------------------------------------------------------------------------ writing


def text_length(prompts: Sequence[Prompt], tokens: int, longest: int) -> int:
    """Tokens of each text: so many that each prompt is used once, but 64 to 512, and at most `longest`."""
    return min(longest, 512, max(64, -(-tokens // len(prompts))))


def write(
    target: ModelRunner,
    prompts: Sequence[Prompt],
    params: SamplingParams,
    *,
    tokens: int,
    length: int,
    seed: int,
    report: Report = lambda *_: None,
) -> list[Text]:
    """Has the target write about `tokens` tokens: texts of `length` tokens, or up to an end-of-sequence token.

    Prompts come in random order, again and again. At temperature 0 each is used once: its text is always the same.

    Raises:
        EvaluationError: the target's logits are NaN or infinite.
    """
    generator = torch.Generator().manual_seed(seed)
    order = torch.randperm(len(prompts), generator=generator).tolist()
    turns = iter(order) if params.is_greedy else cycle(order)
    texts: list[Text] = []
    written = 0
    while written < tokens:
        count = min(SEQUENCES, -(-(tokens - written) // length))
        batch = [Text(i, prompts[i], list(prompts[i].tokens)) for i in islice(turns, count)]
        if not batch:
            break
        for done in _write_batch(target, batch, params, length, generator):
            report("writing", min(tokens, written + done), tokens)
        written += sum(text.written for text in batch)
        texts += batch
    return texts


def _write_batch(
    target: ModelRunner, texts: Sequence[Text], params: SamplingParams, length: int, generator: torch.Generator
) -> Iterator[int]:
    """Writes the texts together. Yields after each step how many tokens are written."""
    pool, ends = target.pool, set(target.loaded.eos_token_ids)
    live = {_slot(target, text.prompt): text for text in texts}
    adjusters = {slot: adjuster_of(target, text, target.loaded.vocab_size) for slot, text in live.items()}
    try:
        while live:
            chunks = list(_next_chunks(target, live))
            z = target.logits(chunks)
            drawing = [chunk.slot for chunk in chunks if chunk.logits_from < len(chunk.tokens)]
            changes = [None if (own := adjusters[slot]) is None else own.row() for slot in drawing]
            for slot, token in zip(drawing, _draw(apply(z, changes), params, generator), strict=True):
                live[slot].tokens.append(token)
                if (adjuster := adjusters[slot]) is not None:
                    adjuster.push(token)
                if token in ends or live[slot].written == length:
                    del live[slot]
                    pool.free(slot)
            yield sum(text.written for text in texts)
    finally:
        for slot in live:
            pool.free(slot)


def _next_chunks(target: ModelRunner, live: Mapping[int, Text]) -> Iterator[Chunk]:
    """The tokens that each text has yet to run, `BATCH_TOKENS` at most together."""
    left = BATCH_TOKENS
    for slot, text in live.items():
        start = target.pool.length(slot)
        piece = text.tokens[start : start + left]
        if not piece:
            return
        is_last = start + len(piece) == len(text.tokens)
        left -= len(piece)
        yield Chunk(slot, piece, start, len(piece) - is_last)


def _slot(runner: ModelRunner, prompt: Prompt) -> int:
    slot = runner.pool.allocate()
    if prompt.encoder_input is not None:
        runner.encode(slot, prompt.encoder_input)
    return slot


def _draw(z: Tensor, params: SamplingParams, generator: torch.Generator) -> list[int]:
    # z: [n, V]
    if not len(z):
        return []
    refuse_bad(z, "the target")
    p = probabilities(z, params).cpu()
    drawn = p.argmax(-1) if params.is_greedy else torch.multinomial(p, 1, generator=generator)[:, 0]
    tokens: list[int] = drawn.tolist()
    return tokens


def refuse_bad(z: Tensor, name: str) -> None:
    """Raises `EvaluationError` if a row of the logits `[n, V]` gives no distribution."""
    if bad_rows(z).any():
        raise EvaluationError(f"{name} gives logits that are NaN or infinite; try --dtype float32")


# ------------------------------------------------------------------------------------------------------------ reading


def block_rows(vocab_size: int) -> int:
    """The rows of a block."""
    return max(16, min(BATCH_TOKENS, _LOGITS // vocab_size))


def read_logits(
    runner: ModelRunner, text: Text, name: str, change: Callable[[Tensor], Tensor] = lambda z: z
) -> Iterator[Tensor]:
    """Yields the logits `[n, V]` of the tokens that the target wrote, in blocks, in float32, by the model's rules.

    Args:
        name: of the model, for the error.
        change: to the logits, before the rules.

    Raises:
        EvaluationError: logits are NaN or infinite.
    """
    slot, adjuster = _slot(runner, text.prompt), None
    rows, last = block_rows(runner.loaded.vocab_size), len(text.tokens) - 1
    try:
        for start in range(0, last, rows):
            end = min(start + rows, last)
            first = min(max(text.begin - 1, start), end)  # after it the first token of the block is predicted
            z = change(runner.logits([Chunk(slot, text.tokens[start:end], start, first - start)]))
            if not start:
                adjuster = adjuster_of(runner, text, z.shape[1])
            z = adjusted(z, adjuster, text.tokens[first + 1 : end + 1])
            refuse_bad(z, name)
            yield z
    finally:
        runner.pool.free(slot)
