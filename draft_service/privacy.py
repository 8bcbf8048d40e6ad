"""Hides token counts from observers of the network: fixed sizes of messages, and a fixed pace.

Without it, sizes and times of packets show how many tokens each round commits (Wei et al., 2411.01076).
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass

from draft_service.responses import Responses
from kernels.verify import Rule
from outrider.rpc.errors import invalid_field, outside
from outrider.service.sampling import Sampling
from outrider.service.wire import HASH_BYTES, bytes_with_logits, can_pad, largest, pad
from protos.outrider.v1 import draft_service_pb2, model_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse

MAX_FRAME_BYTES = 65_536
MIN_PACE_S, MAX_PACE_S = 0.001, 10.0

_SLACK = 16  # so that padding to the size is always possible
_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, slots=True)
class Emission:
    """Sizes and pace of responses.

    Attributes:
        frame_bytes: size of each response; 0 is any size.
        token_bytes: size of the largest response with one token and no text, with padding.
        pace: seconds from one response to the next; None sends them at once.
    """

    frame_bytes: int
    token_bytes: int
    pace: float | None


@dataclass(frozen=True, slots=True)
class RoundSizes:
    """Bytes of each message to the verifier (except the opening), and from it; 0 is any size."""

    request: int = 0
    response: int = 0


def check_emission(
    message: draft_service_pb2.GenerateRequest, *, max_gamma: int, top_logprobs: int | None
) -> Emission | None:
    """Checks `emission` of a request; None if it is not set."""
    if not message.HasField("emission"):
        return None
    emission = message.emission
    if not emission.frame_bytes and not emission.HasField("pace"):
        raise invalid_field("emission", "emission is empty; set frame_bytes, pace or both")
    for field in ("report_rounds", "report_probabilities"):
        if getattr(message.speculation, field):
            raise invalid_field(
                f"speculation.{field}",
                f"speculation.{field} and emission are both set; unset one of them: the reports show the token counts "
                "that emission hides",
            )
    if message.HasField("prompt_logprobs"):
        raise invalid_field(
            "prompt_logprobs",
            "prompt_logprobs and emission are both set; unset one of them: messages about the prompt have no fixed "
            "size",
        )
    # A frame holds the end of a sample, or one token with one character of text.
    stop = max((len(each.encode()) for each in message.stop), default=0)
    least = _largest_response(top_logprobs, max_gamma, text=_CHARACTER, stop=stop)
    if emission.frame_bytes and not least <= emission.frame_bytes <= MAX_FRAME_BYTES:
        why = f": the largest response to this request has {least} bytes"
        raise outside("emission.frame_bytes", emission.frame_bytes, least, MAX_FRAME_BYTES, why)
    pace = emission.pace.seconds + emission.pace.nanos / 1e9 if emission.HasField("pace") else None
    if pace is not None and not MIN_PACE_S <= pace <= MAX_PACE_S:
        raise invalid_field(
            "emission.pace",
            f"emission.pace is {pace:g} s; it must lie in [{MIN_PACE_S:g}, {MAX_PACE_S:g}] s",
            given=pace,
            minimum=MIN_PACE_S,
            maximum=MAX_PACE_S,
        )
    return Emission(emission.frame_bytes, _largest_response(top_logprobs, 0, finished=0, text=0), pace)


def _largest_response(top_logprobs: int | None, most: int, **counts: int) -> int:
    """The size of the largest response with at most one token, with padding. `most` and `counts` are those of `largest`
    for other fields.
    """
    counts |= {
        "started": 0,
        "token_ids": 1,
        "origins": 1,
        "token_texts": 0,
        "rounds": 0,
        "prompt_logprobs": 0,
        "joined": 0,
        "logprobs": 0 if top_logprobs is None else 1,
        "top": top_logprobs or 0,
    }
    return largest(draft_service_pb2.GenerateResponse.DESCRIPTOR, counts=counts, most=most) + _SLACK


def round_sizes(
    message: draft_service_pb2.GenerateRequest,
    sampling: Sampling,
    *,
    gamma: int,
    name_bytes: int,
    max_support: int,
    target: model_pb2.ModelInfo,
    top_logprobs: int | None,
) -> RoundSizes:
    """Sizes of the messages of a request's rounds. `name_bytes` is the size of the sequence's id."""
    if not message.speculation.fixed_size:
        return RoundSizes()
    if sampling.needs_logits:
        request = bytes_with_logits(gamma, target.vocab_size)
    else:
        # Greedy proposals carry point masses, and coupled ones nothing.
        support = 0 if sampling.params.is_greedy or sampling.rule is Rule.COUPLED else max_support
        counts = {
            "open": 0,
            "sequence_id": name_bytes,
            "prefix_hash": HASH_BYTES,
            "token_ids": gamma,
            "distributions": gamma,
            "SparseDistribution.token_ids": 4 * support,
            "weights": 2 * support,
            "values": 0,
        }
        request = largest(verifier_service_pb2.VerifyRequest.DESCRIPTOR, counts=counts, most=16)
    counts = {
        "opened": 1,
        "sequence_id": name_bytes,
        "token_ids": gamma + 1,
        "beta": gamma,
        "target_probabilities": gamma if message.speculation.report_probabilities else 0,
        "prompt_logprobs": 0,
        "logprobs": 0 if top_logprobs is None else gamma + 1,
        "top": top_logprobs or 0,
        "rules": len(target.rules),
        "weights_fingerprint": len(target.weights_fingerprint.encode()),
        "message": 64,
    }
    response = largest(verifier_service_pb2.VerifyResponse.DESCRIPTOR, counts=counts, most=16)
    return RoundSizes(request + _SLACK, max(response + _SLACK, 256))


# A chunk of one token has at most so many times the bytes that it adds to another chunk.
_FULL = 4


async def framed(responses: Responses, emission: Emission, *, held: int = 0) -> AsyncGenerator[GenerateResponse, None]:
    """Yields the responses in frames as `emission` says, from `started` on.

    Each chunk must have one token, or a text whose tokens end together. An earlier call sent `held` tokens without
    text.

    Raises:
        BaseException: the error of `responses`, after all earlier responses.
    """
    frames = Frames(emission.frame_bytes, token_bytes=emission.token_bytes, held=held)
    stream = aiter(responses)
    if emission.pace is None:
        async for response in stream:
            frames.put(response)
            while (more := responses.take_now()) is not None:  # all tokens of a round are here now
                frames.put(more)
            while not frames.are_empty:
                yield frames.take()
        return
    async for response in stream:
        frames.put(response)
        yield frames.take()
        if response.HasField("started"):
            break
    loop = asyncio.get_running_loop()
    due = loop.time()
    while True:
        # Skip ticks that passed while the client did not read: the pace never catches up.
        due += emission.pace * max(1, -(-(loop.time() - due) // emission.pace))
        await asyncio.sleep(due - loop.time())
        while not frames.are_full and (late := responses.take_now()) is not None:
            frames.put(late)
        if frames.are_empty and responses.are_over:
            async for _ in stream:  # raises the error, if there is one
                pass
            return
        yield frames.take()


class Frames:
    """Packs responses into frames of `size` bytes; 0 is any size.

    A token joins a frame if the largest token would fit. So whether it was sent before the service died does not depend
    on the token.
    """

    def __init__(self, size: int, *, token_bytes: int, held: int = 0) -> None:
        """`token_bytes` is the size of the largest chunk with one token and no text. An earlier call sent `held` tokens
        without text.
        """
        self._size = size
        self._token_bytes = token_bytes
        self._held: defaultdict[int, int] = defaultdict(lambda: held)  # by sample, as of the last frame
        self._waiting: deque[GenerateResponse] = deque()
        self._bytes: defaultdict[int | None, int] = defaultdict(int)  # that wait, by sample

    @property
    def are_empty(self) -> bool:
        return not self._waiting

    @property
    def are_full(self) -> bool:
        """Whether the waiting responses certainly fill the next frame, which is of one sample."""
        return bool(self._size and self._waiting) and self._bytes[_sample_of(self._waiting[0])] >= _FULL * self._size

    def put(self, response: GenerateResponse) -> None:
        """Adds a response. A chunk must hold one token, or a text whose tokens end together, or a part of one."""
        self._waiting.append(response)
        self._bytes[_sample_of(response)] += response.ByteSize()

    def take(self) -> GenerateResponse:
        """The next frame. Only padding if no response waits."""
        frame = GenerateResponse()
        if self._waiting and self._waiting[0].WhichOneof("event") != "chunk":
            frame = self._pop()
        elif self._waiting:
            self._fill(frame)
            self._held[frame.chunk.index] = frame.chunk.held_tokens
        if self._size:
            pad(frame, self._size)
        return frame

    def _pop(self) -> GenerateResponse:
        response = self._waiting.popleft()
        self._bytes[_sample_of(response)] -= response.ByteSize()
        return response

    def _fill(self, frame: GenerateResponse) -> None:
        """Joins waiting chunks of one sample, as many as fit. If the first one does not fit, takes a part of its text.

        Chunks of other samples stay in their order: samples that write by turns have no frame for each token.
        """
        first = self._pop()
        if not self._fits(first):
            part, first = self._split(first)
            self._waiting.appendleft(first)
            self._bytes[_sample_of(first)] += first.ByteSize()
            frame.CopyFrom(part)
            return
        frame.CopyFrom(first)
        others = list[GenerateResponse]()
        while self._waiting:
            if _sample_of(self._waiting[0]) != frame.chunk.index:
                others.append(self._waiting.popleft())
                continue
            if not self._may_join(frame, self._waiting[0]):
                break
            joined = GenerateResponse()
            joined.CopyFrom(frame)
            _join(joined.chunk, self._waiting[0].chunk)
            if not self._fits(joined):
                break
            frame.CopyFrom(joined)
            self._pop()
        self._waiting.extendleft(reversed(others))

    def _split(self, response: GenerateResponse) -> tuple[GenerateResponse, GenerateResponse]:
        """Splits a text: the part that fits, whose token stays held, and the rest."""
        text, index = response.chunk.text, response.chunk.index
        part = GenerateResponse(chunk=GenerateChunk(index=index, held_tokens=self._held[index]))
        length = min(len(text) - 1, self._size)
        part.chunk.text = text[:length]
        while not self._fits(part):
            length -= 1
            part.chunk.text = text[:length]
        rest = GenerateResponse()
        rest.CopyFrom(response)
        rest.chunk.text = text[length:]
        return part, rest

    def _may_join(self, frame: GenerateResponse, response: GenerateResponse) -> bool:
        """Whether a response may be added to a frame.

        A part of a token's text has a frame of its own, so that a resumed request repeats nothing else.
        """
        chunk, more = frame.chunk, response.chunk
        if response.WhichOneof("event") != "chunk":
            return False
        if more.token_ids:
            return not self._size or frame.ByteSize() + self._token_bytes <= self._size
        return more.held_tokens < chunk.held_tokens

    def _fits(self, response: GenerateResponse) -> bool:
        return not self._size or can_pad(response, self._size)


def _sample_of(response: GenerateResponse) -> int | None:
    """The index of the sample that a response belongs to; None if it is of all."""
    event = response.WhichOneof("event")
    return getattr(response, event).index if event in ("chunk", "finished") else None


def _join(chunk: GenerateChunk, more: GenerateChunk) -> None:
    chunk.text += more.text
    chunk.token_ids.extend(more.token_ids)
    chunk.origins.extend(more.origins)
    chunk.logprobs.extend(more.logprobs)
    chunk.held_tokens = more.held_tokens
