"""Checks the prompt of a `GenerateRequest`: text, tokens, a conversation, or speech.

For an encoder–decoder model it is the input of the encoder, and the request has a second prompt, of the decoder.
Each check raises a `RequestError`.
"""

import json
from typing import Any

from draft_service.pair import Pair
from outrider.rpc.errors import RequestError, above_limit, counted, failed_precondition, invalid_field
from outrider.runtime.tokenizer import RESERVED_ARGUMENTS, Tokenizer
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.encoder_input import check_feature_shape, check_kind, check_length, check_size, check_values
from outrider.service.sampling import check_token_ids
from protos.outrider.v1 import draft_service_pb2, input_pb2, model_pb2

MOST_ARGUMENT_CHARS = 16_384
OPENING_BYTES, TOKEN_BYTES = 1 << 15, 5
"""The most bytes of an `OpenSequence` without its tokens and the encoder's input, and of a token."""


def check_prompt(
    message: draft_service_pb2.GenerateRequest, pair: Pair, max_prompt_tokens: int | None
) -> tuple[list[int], input_pb2.EncoderInput | None]:
    """The prompt as tokens, those of the decoder if the target has an encoder; and the encoder's input, or None.

    Tokenises text, which may take seconds.

    Raises:
        RequestError: INVALID_ARGUMENT or FAILED_PRECONDITION.
    """
    longest = pair.draft.limits.max_sequence_tokens
    if not pair.target.HasField("encoder"):
        _check_without_encoder(message)
        check_prompt_size(message, pair.tokenizer, min(max_prompt_tokens or longest - 1, longest - 1))
        prompt = _tokenise(message, pair.tokenizer, pair.target.vocab_size)
        check_prompt_length("prompt", len(prompt), max_prompt_tokens)
        return prompt, None
    encoder_input = _encoder_input(message, pair, max_prompt_tokens)
    _check_message_size(message, encoder_input, pair)
    check_values(encoder_input)
    decoder_prompt = _decoder_prompt(message, pair.target, pair.prompts)
    if len(decoder_prompt) >= longest:
        why = f", so that it and the output have at most {longest} (--max-sequence-tokens): shorten it"
        raise above_limit("decoder_prompt_token_ids", len(decoder_prompt), longest - 1, why, noun="token")
    return decoder_prompt, encoder_input


# --------------------------------------------------------------------------------------------- encoder–decoder models


def _check_without_encoder(message: draft_service_pb2.GenerateRequest) -> None:
    """Refuses fields for encoder–decoder models."""
    prompt = message.WhichOneof("prompt")
    names = [prompt] if prompt in ("audio", "features") else []
    names += ["decoder_prompt_token_ids"] if message.decoder_prompt_token_ids else []
    names += ["transcription"] if message.HasField("transcription") else []
    if names:
        raise invalid_field(
            names[0], f"{names[0]} is set; the model has no encoder: unset it, and set text, token_ids or chat"
        )


def _encoder_input(
    message: draft_service_pb2.GenerateRequest, pair: Pair, max_prompt_tokens: int | None
) -> input_pb2.EncoderInput:
    """The input of the encoder, with the checks of everything but its values."""
    target, encoder, kind = pair.target, pair.target.encoder, message.WhichOneof("prompt")
    if kind == "chat":
        raise refuse_chat()
    if kind in ("text", "token_ids"):
        check_kind(kind, encoder, is_text=True)
        most = encoder.max_positions
        check_prompt_size(message, pair.tokenizer, min(max_prompt_tokens or most, most))
        if kind == "token_ids":
            check_length("token_ids.ids", len(message.token_ids.ids), encoder)
        field = "text" if kind == "text" else "token_ids.ids"
        ids = _tokenise(message, pair.tokenizer, target.vocab_size)
        check_prompt_length("prompt", len(ids), max_prompt_tokens)
        check_length(field, len(ids), encoder)
        return input_pb2.EncoderInput(token_ids=input_pb2.EncoderTokens(ids=ids))
    found = input_pb2.EncoderInput()
    if kind == "audio":
        found.audio.CopyFrom(message.audio)
    elif kind == "features":
        found.features.CopyFrom(message.features)
    check_size(found, target)
    if kind == "features" and pair.draft.HasField("encoder"):
        check_feature_shape("features", message.features, pair.draft.encoder)
    return found


def _check_message_size(
    message: draft_service_pb2.GenerateRequest, encoder_input: input_pb2.EncoderInput, pair: Pair
) -> None:
    """Checks that the message that opens the sequence at a verifier can hold the input."""
    limits, own = pair.target.limits, pair.draft.limits
    rest = OPENING_BYTES + TOKEN_BYTES * own.max_sequence_tokens
    given, most = encoder_input.ByteSize(), limits.max_message_bytes - rest
    if limits.max_message_bytes and given > most:
        field = message.WhichOneof("prompt") or "prompt"
        raise invalid_field(
            field,
            f"{field} has {given} bytes; at most {most}: a message to the verifier has at most "
            f"{limits.max_message_bytes} bytes, and the rest of the request may need {rest} of them; shorten it, or "
            "raise --max-message-bytes of both services",
            given=given,
            maximum=most,
            max_message_bytes=limits.max_message_bytes,
        )


def _decoder_prompt(
    message: draft_service_pb2.GenerateRequest, target: model_pb2.ModelInfo, prompts: DecoderPrompts | None
) -> list[int]:
    given, field = message.decoder_prompt_token_ids, "decoder_prompt_token_ids"
    if not message.HasField("transcription"):
        ids = given or target.encoder.decoder_prompt_token_ids
        return check_token_ids(field, ids, target.vocab_size, target.limits.max_sequence_tokens)
    if target.encoder.kind != model_pb2.ENCODER_KIND_SPEECH:
        raise invalid_field("transcription", "transcription is set; the model's encoder takes text: unset it")
    if given:
        raise invalid_field(field, f"{field} and transcription are both set; unset one of them")
    if prompts is None:
        prompts = DecoderPrompts(target.encoder.decoder_prompt_token_ids[0])
    return check_token_ids("transcription", prompts.transcription(message.transcription), target.vocab_size)


# ------------------------------------------------------------------------------------------------------ tokens of text


def check_prompt_length(field: str, tokens: int, most: int | None) -> None:
    """Checks a prompt against `--max-prompt-tokens`, if that is set."""
    if most is not None and tokens > most:
        advice = ": shorten it, or raise --max-prompt-tokens of the draft service"
        raise above_limit(field, tokens, most, advice, noun="token")


def check_prompt_size(
    message: draft_service_pb2.GenerateRequest | draft_service_pb2.TokenizeRequest, tokenizer: Tokenizer, most: int
) -> None:
    """Refuses a text that must have more than `most` tokens, before it is tokenised, which is slow."""
    match message.WhichOneof("prompt"):
        case "text":
            field, given = "text", len(message.text.encode())
        case "chat":
            turns = message.chat.messages
            if len(turns) > most:
                raise above_limit("chat.messages", len(turns), most, ": shorten it", noun="message")
            texts = (text for each in turns for text in (each.role, each.content, each.name))
            field, given = "chat.messages", sum(len(text.encode()) for text in texts)
        case _:
            return
    longest = tokenizer.longest_token_bytes
    if given > most * longest:
        raise invalid_field(
            field,
            f"{field} has {given} bytes; at most {most * longest}, since a prompt has at most {counted(most, 'token')} "
            f"of at most {longest} bytes: shorten it",
            given=given,
            maximum=most * longest,
            tokens=most,
            token_bytes=longest,
        )


def _tokenise(message: draft_service_pb2.GenerateRequest, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    match message.WhichOneof("prompt"):
        case "token_ids":
            field, ids = "token_ids.ids", check_token_ids("token_ids.ids", message.token_ids.ids, vocab_size)
        case "text":
            field, ids = "text", tokenizer.encode(message.text)
        case "chat":
            field, ids = "chat", apply_template(message.chat, tokenizer)
        case _:
            raise invalid_field("prompt", "prompt is not set; set text, token_ids, chat, audio or features")
    if not ids:
        raise invalid_field(field, f"{field}: the prompt is empty; at least 1 token is needed", given=0)
    return ids


def refuse_chat() -> RequestError:
    """The error of a conversation for a model with an encoder."""
    return invalid_field("chat", "chat is set; a model with an encoder takes no conversation: set another prompt")


def apply_template(chat: draft_service_pb2.ChatPrompt, tokenizer: Tokenizer) -> list[int]:
    """The tokens of a conversation.

    Raises:
        RequestError: INVALID_ARGUMENT: it is empty, has a message without a role or arguments that the template cannot
            have, or the template rejects it; FAILED_PRECONDITION: there is no template.
    """
    arguments = _template_arguments(chat.template_arguments)
    if not chat.messages:
        raise invalid_field("chat.messages", "chat.messages is empty; at least 1 message is needed", given=0)
    for i, each in enumerate(chat.messages):
        if not each.role:
            raise invalid_field(
                f"chat.messages[{i}].role", f"chat.messages[{i}].role is empty; give system, user or assistant"
            )
    if not tokenizer.has_chat_template:
        raise failed_precondition(
            "NO_CHAT_TEMPLATE", "the model has no chat template; send text or token_ids", field="chat"
        )
    try:
        return tokenizer.encode_chat(
            [
                {"role": each.role, "content": each.content} | ({"name": each.name} if each.name else {})
                for each in chat.messages
            ],
            arguments,
        )
    except ValueError as error:  # from the template, for example for roles that do not alternate
        raise invalid_field("chat.messages", f"the model's chat template rejects chat.messages: {error}") from None


def _template_arguments(text: str) -> dict[str, Any]:
    field = "chat.template_arguments"
    if len(text) > MOST_ARGUMENT_CHARS:
        raise above_limit(field, len(text), MOST_ARGUMENT_CHARS, noun="character")
    try:
        found = json.loads(text or "{}", parse_constant=_refuse_constant)
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate fails here, not in the tokenizer
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise invalid_field(field, f"{field} is no JSON object; give names of variables with their values")
    if reserved := sorted(found.keys() & RESERVED_ARGUMENTS):
        raise invalid_field(field, f"{field} has {reserved[0]}, which the service gives itself: leave it out")
    return found


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")
