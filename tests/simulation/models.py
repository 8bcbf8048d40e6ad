"""The models of a simulated cluster, in plain Python: a target whose texts are known, and a drafter that mostly agrees.

The reference receives every verification and checks it.
"""

import asyncio
import random
import zlib
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from draft_service.drafters.base import UNBOUNDED, Draft, Drafter, Drafting, DraftSequence
from kernels.adjustments import Adjuster
from kernels.verify import Proposed, Rule, Status, VerifyResult
from outrider.runtime.batch import Chunk
from outrider.runtime.decode_loop import Interrupt
from outrider.runtime.kv_cache import KVPool
from verifier_service.target_runner import StepResult

VOCABULARY = 24
EOS = 0


VIOLATIONS: list[str] = []
"""In the current cluster. Product code may catch the exceptions."""


def require(holds: bool, error: str) -> None:
    """Record and raise a violation of an invariant."""
    if not holds:
        VIOLATIONS.append(error)
        raise AssertionError(error)


def draw(*key: int) -> int:
    """A hash of the key, in [0, 2^32)."""
    number = zlib.crc32(repr(key).encode())
    return (number * 0x9E3779B1 ^ number >> 7) & 0xFFFFFFFF


def target_token(salt: int, prefix: Sequence[int]) -> int:
    """The target's token after a prefix: one of about 40 is the end."""
    number = (zlib.crc32(bytes(prefix), salt & 0xFFFFFFFF) * 0x9E3779B1 & 0xFFFFFFFF) >> 8
    return EOS if number % 40 == 0 else 1 + number % (VOCABULARY - 1)


@dataclass
class Text:
    """The committed tokens of one seed.

    Attributes:
        draws: whether the text depends on the draws of each round, and so is not known before.
        rounds: the proposed tokens and the result, by base length. A repeated round has the same result.
    """

    prompt: list[int]
    salt: int
    draws: bool
    stops: frozenset[int]
    limit: int
    tokens: list[int] = field(init=False)
    rounds: dict[int, tuple[tuple[int, ...], VerifyResult]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt)

    @property
    def output(self) -> list[int]:
        """The verified output, up to its end."""
        output = self.tokens[len(self.prompt) :][: self.limit]
        return next((output[: i + 1] for i, token in enumerate(output) if token in self.stops), output)

    @property
    def is_whole(self) -> bool:
        output = self.output
        return len(output) == self.limit or (bool(output) and output[-1] in self.stops)


class Reference:
    """The texts of all seeds."""

    def __init__(self) -> None:
        self.texts: dict[int, Text] = {}

    def verify(self, seed: int, context: list[int], proposed: Proposed) -> VerifyResult:
        """Verify a proposal after `context`, the tokens in the KV cache, and check that it may be verified.

        Raises:
            AssertionError: invariant 2 (one round for each base length), 5 or 6 is violated.
        """
        text, base = self.texts[seed], proposed.base_length
        require(len(context) == base, f"seed {seed}: a round of base {base} is verified after {len(context)} tokens")
        require(
            context == text.tokens[:base], f"seed {seed}: the cache before {base} differs from the committed tokens"
        )
        result = _rule(text, seed, list(context), proposed)
        known = text.rounds.setdefault(base, (proposed.tokens, result))
        require(
            known[0] == proposed.tokens,
            f"seed {seed}: draws of base {base} are used again: for {proposed.tokens}, and before for {known[0]}",
        )
        if base == len(text.tokens):
            text.tokens += [*proposed.tokens[: result.accepted], result.next_token]
        else:
            require(known[1] == result, f"seed {seed}: two results at base {base}")
        return result

    def check_received(self, seed: int, tokens: Sequence[int], receiver: str) -> None:
        """Check that tokens are a verified prefix of the text (invariant 3)."""
        output, received = self.texts[seed].output, list(tokens)
        is_prefix = received == output[: len(received)]
        require(is_prefix, f"{receiver} received {received}; verified are {output} (seed {seed})")


def _rule(text: Text, seed: int, context: list[int], proposed: Proposed) -> VerifyResult:
    base, accepted = proposed.base_length, 0
    for i, token in enumerate(proposed.tokens):
        if text.draws:
            stands = draw(seed, base, i, 1, token) % 10 < 7
        else:
            stands = token == target_token(text.salt, context)
        if not stands:
            break
        accepted += 1
        context.append(token)
    following = draw(seed, base, accepted, 2, *context) % VOCABULARY if text.draws else target_token(text.salt, context)
    is_known = proposed.rule in (Rule.TOKENWISE, Rule.BLOCK)
    beta = (0.5,) * min(accepted + 1, len(proposed.tokens)) if is_known else ()
    return VerifyResult(Status.OK, accepted, following, beta=beta)


class TokenMemory:
    """Blocks of tokens in place of keys and values. The target's next token depends on them."""

    bytes = 0

    def __init__(self, block_tokens: int) -> None:
        self.block_tokens = block_tokens
        self.blocks: dict[int, list[int]] = {}

    def block(self, number: int) -> list[int]:
        return self.blocks.setdefault(number, [VOCABULARY] * self.block_tokens)

    def clear(self, block: int) -> None:
        self.blocks.pop(block, None)

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        for one, other in zip(source, target, strict=True):
            self.blocks[other] = list(self.block(one))


class TokenPool(KVPool):
    """The real pool with such blocks."""

    def __init__(self, *, blocks: int, max_length: int, block_tokens: int) -> None:
        super().__init__(
            1, 1, 1, blocks=1, max_length=max_length, block_tokens=block_tokens, dtype=torch.int8, device="cpu"
        )
        self.blocks = type(self.blocks)(blocks)
        self.memory = TokenMemory(block_tokens)
        self.by_head: Any = self.memory

    def held(self, slot: int) -> list[int]:
        """The tokens of a sequence in the KV cache."""
        found: list[int] = []
        for block in self.block_table(slot):
            found += self.memory.block(block)
        return found[: self.length(slot)]

    def write(self, slot: int, start: int, tokens: Sequence[int]) -> None:
        table = self.block_table(slot)
        for position, token in enumerate(tokens, start):
            index, offset = divmod(position, self.block_tokens)
            self.memory.block(table[index])[offset] = token


class TokenRunner:
    """In place of `verifier_service.target_runner.TargetRunner`."""

    def __init__(self, pool: TokenPool, reference: Reference, chance: random.Random) -> None:
        self.broken = 0.0  # share of passes that fail
        self.poisoned: frozenset[int] = frozenset()  # seeds whose rounds break every pass
        self._pool = pool
        self._oracle = reference
        self._chance = chance
        self.interrupt = Interrupt()

    def __call__(
        self,
        chunks: Sequence[Chunk],
        proposals: Sequence[Proposed],
        encoder_inputs: Sequence[object] = (),
        scored: Sequence[object] = (),
        meanwhile: Callable[[], None] = lambda: None,
    ) -> StepResult:
        require(not encoder_inputs, "the model has no encoder")
        require(not scored, "no prompt is scored")
        if self._fails(proposals):
            raise RuntimeError("the device fails")
        for chunk in chunks:
            require(chunk.start == self._pool.length(chunk.slot), "a chunk begins elsewhere than its sequence ends")
            self._pool.grow(chunk.slot, chunk.start + len(chunk.tokens))
        meanwhile()
        results, left = [], list(proposals)
        for chunk in chunks:
            self._pool.write(chunk.slot, chunk.start, chunk.tokens)
            self._pool.extend(chunk.slot, chunk.start + len(chunk.tokens))
            if left and chunk.logits_from < len(chunk.tokens):
                context = self._pool.held(chunk.slot)[: chunk.start + chunk.logits_from + 1]
                proposed = left.pop(0)
                results.append(self._oracle.verify(proposed.seed, context, proposed))
        seconds = 1e-3 + 1e-4 * sum(len(chunk.tokens) for chunk in chunks)
        return StepResult(results, [], seconds, 1e-4)

    def max_decode_tokens(self, pass_seconds: float, seconds: float) -> int:
        return 8

    def decode(
        self,
        chunks: Sequence[Chunk],
        proposals: Sequence[Proposed],
        counts: Sequence[int],
        stops: Sequence[Collection[int]],
        adjusters: Sequence[Adjuster | None],
    ) -> StepResult | None:
        assert not any(adjusters)
        if self._fails(proposals):
            return None
        if self._chance.random() < 0.3:  # a message arrives
            ended = self._chance.randint(1, max(counts))
            counts = [min(count, ended) for count in counts]
        results, earlier = [], []
        for chunk, proposed, count, stop in zip(chunks, proposals, counts, stops, strict=True):
            require(chunk.start == self._pool.length(chunk.slot), "a chunk begins elsewhere than its sequence ends")
            self._pool.grow(chunk.slot, chunk.start + len(chunk.tokens) + count - 1)
            self._pool.write(chunk.slot, chunk.start, chunk.tokens)
            self._pool.extend(chunk.slot, chunk.start + len(chunk.tokens))
            drawn: list[int] = []
            while True:
                context = self._pool.held(chunk.slot)
                one = replace(proposed, base_length=proposed.base_length + len(drawn))
                result = self._oracle.verify(proposed.seed, context, one)
                if len(drawn) + 1 == count or result.next_token in stop:
                    break
                drawn.append(result.next_token)
                self._pool.write(chunk.slot, len(context), drawn[-1:])
                self._pool.extend(chunk.slot, len(context) + 1)
            results.append(result)
            earlier.append(drawn)
        return StepResult(results, [], 1e-3, 0.0, earlier, max(map(len, earlier)) + 1)

    def _fails(self, proposals: Sequence[Proposed]) -> bool:
        return self._chance.random() < self.broken or any(each.seed in self.poisoned for each in proposals)


@dataclass
class DraftHabits:
    """Behaviour of a drafter: shares of its proposals, and seconds a token."""

    right: float = 0.8
    seconds: float = 2e-3
    short: float = 0.05
    raises: float = 0.0
    nonsense: float = 0.0
    late: float = 0.0
    hangs: float = 0.0


@dataclass
class TokenDrafter(Drafter):
    """Drafts the target's tokens, with some errors."""

    reference: Reference
    habits: DraftHabits
    chance: random.Random
    num_open: int = 0

    def open(self, sequence: DraftSequence) -> Drafting:
        return _TokenDrafting(self, sequence)


class _TokenDrafting(Drafting):
    def __init__(self, drafter: TokenDrafter, sequence: DraftSequence) -> None:
        self._drafter = drafter
        self._sequence = sequence
        self._tokens = [*sequence.prompt, *sequence.committed]
        self._is_open = True
        self._pending: asyncio.Future[Draft] | None = None
        drafter.num_open += 1

    def capacity(self) -> int:
        return UNBOUNDED

    def advance(self, tokens: Sequence[int]) -> None:
        self._tokens += tokens
        text = self._drafter.reference.texts[self._sequence.seed]
        self._drafter.reference.check_received(self._sequence.seed, self._tokens[len(text.prompt) :], "the drafter")

    def propose(self, gamma: int) -> Awaitable[Draft]:
        self._pending = asyncio.ensure_future(self._draft(gamma))
        return self._pending

    def close(self) -> None:
        if self._pending is not None:
            self._pending.cancel()
        self._drafter.num_open -= self._is_open
        self._is_open = False

    async def _draft(self, gamma: int) -> Draft:
        habits, chance, seed = self._drafter.habits, self._drafter.chance, self._sequence.seed
        text, tokens, base = self._drafter.reference.texts[seed], list(self._tokens), len(self._tokens)
        await asyncio.sleep(habits.seconds * gamma * chance.uniform(0.5, 1.5))
        chance_left = chance.random()
        for share, seconds in ((habits.hangs, 200.0), (habits.late, 3.0)):
            if chance_left < share:
                await asyncio.sleep(seconds)
            chance_left -= share
        if 0 <= chance_left < habits.raises:
            raise RuntimeError("the drafter fails")
        if 0 <= chance_left - habits.raises < habits.nonsense:
            return Draft([VOCABULARY + 5] * gamma, [], 0.0)
        count = chance.randrange(gamma + 1) if chance.random() < habits.short else gamma
        for i in range(count):
            is_right = draw(seed, base, i, 3) % 100 < 100 * habits.right
            token = target_token(text.salt, tokens)
            tokens.append(token if is_right else (token + 1) % VOCABULARY)
        drafted = tokens[base:]
        distributions: list[Any] = [] if self._sequence.rule is Rule.COUPLED else [None] * count
        return Draft(drafted, distributions, habits.seconds * gamma)
