"""Responses of one size, at one pace: what is to be said is cut and joined into frames, and padded."""

import asyncio
from collections import defaultdict, deque
from collections.abc import AsyncGenerator

from draft_service.privacy import Emission
from draft_service.responses import Responses
from outrider.service.wire import can_pad, pad
from protos.outrider.v1.draft_service_pb2 import GenerateChunk, GenerateResponse

# A token's chunk takes up to so many times the bytes that it adds to one it joins.
_FULL = 4


async def framed(responses: Responses, emission: Emission, *, held: int = 0) -> AsyncGenerator[GenerateResponse, None]:
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
