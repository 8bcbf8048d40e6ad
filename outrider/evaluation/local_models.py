"""Models in this process, without services: loads them, checks that they are a pair, and encodes prompts for them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from outrider.evaluation.target_text import MeasurementError, Prompt
from outrider.runtime.device import work_on
from outrider.runtime.encoder_decoder import SPEECH
from outrider.runtime.loader import LoadedModel, ModelSource, load_model
from outrider.runtime.memory import explain_out_of_memory, kv_dtype, memory_of
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import AUTO, choose_attention
from outrider.runtime.tokenizer import ChatTemplateError, Tokenizer, load_tokenizer
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.model_info import vocabulary_end


def load_tokenizer_of(target: ModelSource, draft: ModelSource | None) -> Tokenizer:
    """The target's tokenizer. With a draft, checks that both have the same tokens.

    Raises:
        CheckpointError: a tokenizer cannot be loaded.
        MeasurementError: the vocabularies differ.
    """
    own = load_tokenizer(target)
    if draft is not None and (other := load_tokenizer(draft)).fingerprint != own.fingerprint:
        sizes = f"{draft.name} has {vocabulary_end(other)} tokens, and {target.name} has {vocabulary_end(own)}"
        if vocabulary_end(other) == vocabulary_end(own):
            sizes = f"{draft.name} and {target.name} have other tokens for the same ids"
        raise MeasurementError(
            f"--draft and --target differ in their vocabularies: {sizes}; choose a draft model with the target's "
            "tokenizer"
        )
    return own


def load(source: ModelSource, flag: str) -> LoadedModel:
    """Loads a model.

    Raises:
        CheckpointError: it cannot be loaded or run.
        MeasurementError: its input is speech, or its generation config changes the logits.
    """
    loaded = load_model(source)
    if loaded.encoder is not None and loaded.encoder.info.kind == SPEECH:
        raise MeasurementError(f"{flag}: '{source.name}' has an encoder of speech; only models of text are supported")
    if loaded.generation_rules is not None:
        raise MeasurementError(
            f"{flag}: the generation config of '{source.name}' changes the logits, which is not supported here: "
            f"{loaded.generation_rules}"
        )
    return loaded


PromptText = str | Sequence[Mapping[str, str]]
"""A text to continue, or a conversation: messages with `role` and `content`."""


def encode_prompts(texts: Sequence[PromptText], tokenizer: Tokenizer, target: LoadedModel) -> list[Prompt]:
    """Prompts of the target by its tokenizer. The text is the input of the encoder, if there is one.

    Raises:
        MeasurementError: a prompt has no token, or does not fit the model.
    """
    encoder, begin = target.encoder, list[int]()
    longest = target.context_length - 1
    if encoder is not None:
        longest = encoder.info.max_length
        begin = DecoderPrompts.read(target.model.generation_config, encoder.info.start_token).tokens()
    prompts = []
    for number, text in enumerate(texts, start=1):
        ids = _encode(text, tokenizer, number)
        if not 1 <= len(ids) <= longest:
            raise MeasurementError(
                f"--prompts-file: prompt {number} has {len(ids)} tokens; {target.name} takes 1 to {longest}"
            )
        prompts.append(Prompt(ids) if encoder is None else Prompt(begin, torch.tensor(ids)))
    return prompts


def _encode(text: PromptText, tokenizer: Tokenizer, number: int) -> list[int]:
    if isinstance(text, str):
        return tokenizer.encode(text)
    try:
        return tokenizer.encode_chat([(message["role"], message["content"]) for message in text])
    except (KeyError, TypeError) as error:
        raise MeasurementError(f"--prompts-file: a message of prompt {number} has no role or no content") from error
    except ChatTemplateError as error:
        raise MeasurementError(f"--prompts-file: prompt {number}: {error}") from error


def build_runner(loaded: LoadedModel, sequences: int, length: int) -> ModelRunner:
    """A model runner for `sequences` of at most `length` tokens.

    Raises:
        CheckpointError: it does not fit the memory of the device.
    """
    work_on(loaded.device)
    memory = memory_of(loaded.device)
    with explain_out_of_memory(memory, f"the KV cache of {sequences} texts of {length} tokens: lower --text-tokens"):
        attention = choose_attention(
            AUTO, loaded.layers, kv_dtype(loaded), loaded.device, has_encoder=loaded.encoder is not None
        )
        return ModelRunner.build(loaded, sequences, length, attention=attention)
