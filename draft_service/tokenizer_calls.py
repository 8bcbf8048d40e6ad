"""`Tokenize`, `Detokenize` and `GetTokenizer`: what the pair's tokenizer does."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from draft_service.pair import Pair
from draft_service.prompt import apply_template, check_prompt_size, refuse_chat
from outrider.rpc.errors import above_limit, counted, invalid_field, overloaded
from outrider.runtime.tokenizer import Tokenizer
from outrider.service.sampling import check_token_ids
from protos.outrider.v1 import draft_service_pb2, model_pb2

Result = TypeVar("Result")

# Calls at once. More would wait for seconds, and keep their texts in memory.
MAX_CALLS = 64
RETRY_SECONDS = 1.0


class TokenizerThread:
    """Runs the calls one by one, on a thread of its own: prompts of `Generate` do not wait for them."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer-calls")
        self._calls = 0

    async def run(self, work: Callable[[], Result]) -> Result:
        """The result of `work`.

        Raises:
            RequestError: RESOURCE_EXHAUSTED: too many calls wait; or that of `work`.
        """
        if self._calls >= MAX_CALLS:
            raise overloaded(
                f"{counted(self._calls, 'call')} of Tokenize and Detokenize are in progress; at most {MAX_CALLS}: try "
                "again later",
                retry_after=RETRY_SECONDS,
                maximum=MAX_CALLS,
            )
        self._calls += 1
        future = asyncio.get_running_loop().run_in_executor(self._thread, work)
        future.add_done_callback(self._end)  # also if the client leaves: the work runs to its end
        return await asyncio.shield(future)

    def _end(self, future: "asyncio.Future[Result]") -> None:
        self._calls -= 1
        if not future.cancelled():
            future.exception()  # retrieved, so that asyncio does not log it


def tokenize(
    message: draft_service_pb2.TokenizeRequest, pair: Pair, max_prompt_tokens: int | None
) -> draft_service_pb2.TokenizeResponse:
    """The tokens of a prompt.

    Raises:
        RequestError: INVALID_ARGUMENT or FAILED_PRECONDITION, as `check_prompt`.
    """
    tokenizer, encoder = pair.tokenizer, pair.target.encoder
    field = message.WhichOneof("prompt")
    if field is None:
        raise invalid_field("prompt", "prompt is not set; set text or chat")
    is_text_encoder = encoder.kind == model_pb2.ENCODER_KIND_TEXT
    most = encoder.max_positions if is_text_encoder else pair.draft.limits.max_sequence_tokens - 1
    check_prompt_size(message, tokenizer, min(max_prompt_tokens or most, most))
    if field == "chat":
        if pair.target.HasField("encoder"):
            raise refuse_chat()
        if message.add_special_tokens:
            raise invalid_field(
                "add_special_tokens",
                "add_special_tokens is true with chat; the chat template adds special tokens: leave it out",
            )
        ids = apply_template(message.chat, tokenizer)
    else:
        adds_special = message.add_special_tokens or not message.HasField("add_special_tokens")
        ids = tokenizer.encode(message.text, add_special=adds_special)
    found = draft_service_pb2.TokenizeResponse(token_ids=ids, token_texts=_texts(ids, tokenizer))
    if (size := found.ByteSize()) > (most_bytes := pair.draft.limits.max_message_bytes):
        raise invalid_field(
            field,
            f"{field} has {counted(len(ids), 'token')}, and the answer {size} bytes; at most {most_bytes} "
            "(--max-message-bytes): send less at once",
            given=size,
            max_message_bytes=most_bytes,
        )
    return found


def detokenize(message: draft_service_pb2.DetokenizeRequest, pair: Pair) -> draft_service_pb2.DetokenizeResponse:
    """The text of tokens."""
    tokenizer, given, longest = pair.tokenizer, len(message.token_ids), pair.draft.limits.max_sequence_tokens
    if given > longest:
        raise above_limit("token_ids", given, longest, " (--max-sequence-tokens): send fewer at once", noun="token")
    ids = check_token_ids("token_ids", message.token_ids, pair.target.vocab_size)
    return draft_service_pb2.DetokenizeResponse(
        text=tokenizer.decode(ids, skip_special=not message.keep_special_tokens), token_texts=_texts(ids, tokenizer)
    )


def describe(tokenizer: Tokenizer) -> draft_service_pb2.GetTokenizerResponse:
    """The answer of `GetTokenizer`."""
    return draft_service_pb2.GetTokenizerResponse(
        tokenizer_class=tokenizer.class_name,
        chat_template=tokenizer.chat_template,
        special_tokens=[
            draft_service_pb2.SpecialToken(name=name, text=text, id=number)
            for name, text, number in tokenizer.special_tokens()
        ],
    )


def _texts(ids: list[int], tokenizer: Tokenizer) -> list[str]:
    texts = {token: tokenizer.decode_token(token, skip_special=False) for token in set(ids)}
    return [texts[token] for token in ids]
