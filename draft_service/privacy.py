"""What a request hides from observers of the wire: sizes of messages, and their pace.

The leak: the tokens that a round commits show in the sizes and the times of packets (Wei et al., 2411.01076).
"""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.verify import Rule
from outrider.rpc.errors import invalid_field
from outrider.service.sampling import Sampling
from outrider.service.wire import HASH_BYTES, bytes_with_logits, can_pad, largest, pad
from protos.outrider.v1 import draft_service_pb2, model_pb2, verifier_service_pb2
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse

if TYPE_CHECKING:
    from draft_service.output import Responses

MAX_FRAME_BYTES = 65_536
MIN_PACE_S, MAX_PACE_S = 0.001, 10.0

_SLACK = 16  # so that padding to the size is always possible
_CHARACTER = 4  # bytes of UTF-8


@dataclass(frozen=True, slots=True)
class Emission:
    """How responses leave.

    Attributes:
        frame_bytes: the size of each; 0 where it does not matter.
        token_bytes: what the largest that brings one token and no text takes, padding that fills a gap included.
        pace: seconds from one to the next; None where they leave at once.
    """

    frame_bytes: int
    token_bytes: int
    pace: float | None


@dataclass(frozen=True, slots=True)
class RoundSizes:
    """Bytes of every message to the verifier, the opening aside, and from it; 0 and 0 where they do not matter."""

    request: int = 0
    response: int = 0


def check_emission(
    message: draft_service_pb2.GenerateRequest, *, max_gamma: int, top_logprobs: int | None
) -> Emission | None:
    """What a request says of its responses; None where it says nothing.

    Raises:
        RequestError: INVALID_ARGUMENT naming the field and the numbers.
    """
    if not message.HasField("emission"):
        return None
    asked = message.emission
    if not asked.frame_bytes and not asked.HasField("pace"):
        raise invalid_field("emission", "emission is empty; set frame_bytes, pace or both")
    if message.speculation.report_rounds:
        raise invalid_field(
            "speculation.report_rounds",
            "speculation.report_rounds and emission exclude each other: the reports show what emission hides",
        )
    least = least_frame_bytes(message, max_gamma=max_gamma, top_logprobs=top_logprobs)
    if asked.frame_bytes and not least <= asked.frame_bytes <= MAX_FRAME_BYTES:
        raise invalid_field(
            "emission.frame_bytes",
            f"emission.frame_bytes is {asked.frame_bytes}; {least} to {MAX_FRAME_BYTES}, where {least} is the size of "
            "the largest response to this request",
            given=asked.frame_bytes,
            minimum=least,
            maximum=MAX_FRAME_BYTES,
        )
    pace = asked.pace.seconds + asked.pace.nanos / 1e9 if asked.HasField("pace") else None
    if pace is not None and not MIN_PACE_S <= pace <= MAX_PACE_S:
        raise invalid_field(
            "emission.pace",
            f"emission.pace is {pace:g} s; {MIN_PACE_S:g} to {MAX_PACE_S:g} s",
            given=pace,
            minimum=MIN_PACE_S,
            maximum=MAX_PACE_S,
        )
    return Emission(asked.frame_bytes, _token_bytes(top_logprobs) + _SLACK, pace)


def least_frame_bytes(message: draft_service_pb2.GenerateRequest, *, max_gamma: int, top_logprobs: int | None) -> int:
    """What a frame holds at least: the end of a sample, or a token by itself with a character of its text."""
    stop = max((len(each.encode()) for each in message.stop), default=0)
    counts = {**_counts(top_logprobs), "started": 0, "text": _CHARACTER, "stop": stop}
    return largest(draft_service_pb2.GenerateResponse.DESCRIPTOR, counts=counts, most=max_gamma) + _SLACK


def _token_bytes(top_logprobs: int | None) -> int:
    counts = {**_counts(top_logprobs), "started": 0, "finished": 0, "text": 0}
    return largest(draft_service_pb2.GenerateResponse.DESCRIPTOR, counts=counts, most=0)


def _counts(top_logprobs: int | None) -> dict[str, int]:
    """What a chunk with one token repeats."""
    return {
        "token_ids": 1,
        "origins": 1,
        "token_texts": 0,
        "rounds": 0,
        "logprobs": 0 if top_logprobs is None else 1,
        "top": top_logprobs or 0,
    }


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
    """The sizes of the messages about a request's rounds. `name_bytes` is the length of the sequence's name."""
    if not message.speculation.fixed_size:
        return RoundSizes()
    if sampling.needs_logits:
        request = bytes_with_logits(gamma, target.vocab_size)
    else:
        # Greedy proposals carry point masses, and coupled ones nothing.
        support = 0 if sampling.law.is_greedy or sampling.rule is Rule.COUPLED else max_support
        asked = {
            "open": 0,
            "sequence_id": name_bytes,
            "prefix_hash": HASH_BYTES,
            "token_ids": gamma,
            "distributions": gamma,
            "SparseDistribution.token_ids": 4 * support,
            "weights": 2 * support,
            "values": 0,
        }
        request = largest(verifier_service_pb2.VerifyRequest.DESCRIPTOR, counts=asked, most=16)
    counts = {
        "opened": 1,
        "sequence_id": name_bytes,
        "token_ids": gamma + 1,
        "beta": gamma,
        "logprobs": 0 if top_logprobs is None else gamma + 1,
        "top": top_logprobs or 0,
        "rules": len(target.rules),
        "weights_fingerprint": len(target.weights_fingerprint.encode()),
        "message": 64,
    }
    response = largest(verifier_service_pb2.VerifyResponse.DESCRIPTOR, counts=counts, most=16)
    return RoundSizes(request + _SLACK, max(response + _SLACK, 256))


# A token's chunk takes up to so many times the bytes that it adds to one it joins.
_FULL = 4


async def framed(
    responses: "Responses", emission: Emission, *, held: int = 0
) -> AsyncGenerator[GenerateResponse, None]:
    """The responses as `emission` has them, from `started` on.

    Chunks must come with one token each, or with the text of one. Before them `held` tokens were told without text.

    Raises:
        BaseException: what `responses` raise, after what came before it.
    """
    frames = Frames(emission.frame_bytes, token_bytes=emission.token_bytes, held=held)
    stream = aiter(responses)
    if emission.pace is None:
        async for response in stream:
            frames.put(response)
            while (more := responses.take_now()) is not None:  # what a round brings comes all at once
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
        # A tick that passed while the client did not read is left out: frames never make up for lost time.
        due += emission.pace * max(1, -(-(loop.time() - due) // emission.pace))
        await asyncio.sleep(due - loop.time())
        while not frames.are_full and (late := responses.take_now()) is not None:
            if late.WhichOneof("event") is not None:  # that the service is alive the frames tell
                frames.put(late)
        if frames.are_empty and responses.are_over:
            async for _ in stream:  # raises the error, if that is how it ends
                pass
            return
        yield frames.take()


class Frames:
    """What is to be said and has not been, on its way into frames of `size` bytes; 0 is any size.

    A token joins others where the largest would: whether it was read before a death must not depend on what it is.
    """

    def __init__(self, size: int, *, token_bytes: int, held: int = 0) -> None:
        """`token_bytes` is the size of the largest chunk of a token without text; `held` tokens were told without text
        before.
        """
        self._size = size
        self._token_bytes = token_bytes
        self._held: defaultdict[int, int] = defaultdict(lambda: held)  # by sample, as of the last frame
        self._waiting: deque[GenerateResponse] = deque()
        self._bytes = 0

    @property
    def are_empty(self) -> bool:
        """Whether nothing waits."""
        return not self._waiting

    @property
    def are_full(self) -> bool:
        """Whether what waits fills the next frame for certain."""
        return bool(self._size) and self._bytes >= _FULL * self._size

    def put(self, response: GenerateResponse) -> None:
        """Takes in a response; a chunk must hold one token, or text, a token's or a part of one's."""
        self._waiting.append(response)
        self._bytes += response.ByteSize()

    def take(self) -> GenerateResponse:
        """The next frame. Empty but for its padding where nothing waits."""
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
        self._bytes -= response.ByteSize()
        return response

    def _fill(self, frame: GenerateResponse) -> None:
        """Joins chunks of one sample, as many as fit; of a text that comes first it goes as far as it fits."""
        first = self._pop()
        if not self._fits(first):
            part, first = self._split(first)
            self._waiting.appendleft(first)
            self._bytes += first.ByteSize()
            frame.CopyFrom(part)
            return
        frame.CopyFrom(first)
        while self._waiting and self._may_join(frame, self._waiting[0]):
            joined = GenerateResponse()
            joined.CopyFrom(frame)
            _join(joined.chunk, self._waiting[0].chunk)
            if not self._fits(joined):
                return
            frame.CopyFrom(joined)
            self._pop()

    def _split(self, response: GenerateResponse) -> tuple[GenerateResponse, GenerateResponse]:
        """As much of the text as fits, whose token is held still, and the rest."""
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
        """Whether a response goes on where a frame ends.

        A part of a token's text has a frame of its own, so that what is read with it is not read twice.
        """
        chunk, more = frame.chunk, response.chunk
        if response.WhichOneof("event") != "chunk" or more.index != chunk.index:
            return False
        if more.token_ids:
            return not self._size or frame.ByteSize() + self._token_bytes <= self._size
        return more.held_tokens < chunk.held_tokens

    def _fits(self, response: GenerateResponse) -> bool:
        return not self._size or can_pad(response, self._size)


def _join(chunk: GenerateChunk, more: GenerateChunk) -> None:
    chunk.text += more.text
    chunk.token_ids.extend(more.token_ids)
    chunk.origins.extend(more.origins)
    chunk.logprobs.extend(more.logprobs)
    chunk.held_tokens = more.held_tokens
