"""Models in this process, without services: loads them, checks that they are a pair, and encodes prompts for them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from outrider.client.audio import Samples
from outrider.evaluation import EvaluationError
from outrider.evaluation.clips import Clip, Source, read_clips
from outrider.evaluation.target_text import Prompt
from outrider.rpc.errors import RequestError
from outrider.runtime.checkpoint import resolve_folder
from outrider.runtime.device import work_on
from outrider.runtime.encoder_decoder import SPEECH, EncoderInfo
from outrider.runtime.loader import LoadedModel, ModelSource
from outrider.runtime.memory import explain_out_of_memory, kv_dtype, memory_of
from outrider.runtime.model_runner import ModelRunner
from outrider.runtime.paged_attention import AUTO, choose_attention
from outrider.runtime.tokenizer import ChatTemplateError, Tokenizer, load_tokenizer
from outrider.runtime.torch_runner import TorchRunner
from outrider.service.decoder_prompt import DecoderPrompts
from outrider.service.encoder_input import SAMPLE_RATE, EncoderInputs
from outrider.service.model_info import vocabulary_end
from protos.outrider.v1.draft_service_pb2 import Transcription
from protos.outrider.v1.input_pb2 import EncoderInput


def load_tokenizer_of(target: ModelSource, draft: ModelSource | None) -> Tokenizer:
    """The target's tokenizer. With a draft, checks that both have the same tokens.

    Raises:
        CheckpointError: a tokenizer cannot be loaded.
        EvaluationError: the vocabularies differ.
    """
    own = load_tokenizer(target)
    if draft is not None and (other := load_tokenizer(draft)).fingerprint != own.fingerprint:
        sizes = f"{draft.name} has {vocabulary_end(other)} tokens, and {target.name} has {vocabulary_end(own)}"
        if vocabulary_end(other) == vocabulary_end(own):
            sizes = f"{draft.name} and {target.name} have other tokens for the same ids"
        raise EvaluationError(
            f"--draft and --target differ in their vocabularies: {sizes}; choose a draft model with the target's "
            "tokenizer"
        )
    return own


PromptText = str | Sequence[Mapping[str, str]]
"""A text to continue, or a conversation: messages with `role` and `content`."""


def encode_prompts(texts: Sequence[PromptText], tokenizer: Tokenizer, target: LoadedModel) -> list[Prompt]:
    """Prompts of the target by its tokenizer. The text is the input of the encoder, if there is one.

    Raises:
        EvaluationError: a prompt has no token, or does not fit the model; or the target takes speech.
    """
    encoder, begin = target.encoder, list[int]()
    longest = target.context_length - 1
    if encoder is not None:
        if encoder.info.kind == SPEECH:
            raise EvaluationError(f"{target.name} takes speech: give --audio FILE_OR_FOLDER")
        longest = encoder.info.max_length
        begin = DecoderPrompts.read(target.model.generation_config, encoder.info.start_token).tokens()
    prompts = []
    for number, text in enumerate(texts, start=1):
        ids = _encode(text, tokenizer, number)
        if not 1 <= len(ids) <= longest:
            raise EvaluationError(
                f"--prompts-file: prompt {number} has {len(ids)} tokens; {target.name} takes 1 to {longest}"
            )
        prompts.append(Prompt(ids) if encoder is None else Prompt(begin, torch.tensor(ids)))
    return prompts


def encode_speech(
    paths: Sequence[Path], wanted: Transcription, target: LoadedModel, draft: LoadedModel | None
) -> list[Prompt]:
    """Prompts of a target that takes speech, from files and folders: a window of audio each.

    Raises:
        CheckpointError: a feature extractor cannot be read.
        EvaluationError: the target or the draft takes no speech or lacks the language, or a clip cannot be used.
    """
    encoder = _speech_encoder(target)
    try:
        prompts = DecoderPrompts.read(target.model.generation_config, encoder.start_token)
        tokens = prompts.transcription(wanted)
        clips = read_clips(paths, SAMPLE_RATE, encoder.frames)
    except RequestError as error:
        raise EvaluationError(f"--{error.message.removeprefix('transcription.')}") from error
    if draft is None:
        return [Prompt(tokens, features) for features in _features(target, clips)]
    if (frames := _speech_encoder(draft).frames) < encoder.frames:
        raise EvaluationError(f"{draft.name} takes {frames} frames of speech, and the target {encoder.frames}")
    both = zip(_features(target, clips), _features(draft, clips), strict=True)
    return [Prompt(tokens, own, other) for own, other in both]


def encoder_inputs(sources: Sequence[Source], model: LoadedModel, source: ModelSource) -> list[Tensor]:
    """What the encoder of a model reads, of texts, conversations or clips.

    Raises:
        CheckpointError: its tokenizer or feature extractor cannot be read.
        EvaluationError: a source does not fit the model.
    """
    clips = [each.samples for each in sources if isinstance(each, Clip)]
    if clips:
        return _features(model, clips)
    texts = cast("Sequence[PromptText]", sources)
    return [cast("Tensor", prompt.encoder_input) for prompt in encode_prompts(texts, load_tokenizer(source), model)]


def _features(model: LoadedModel, clips: Sequence[Samples]) -> list[Tensor]:
    inputs = EncoderInputs(_speech_encoder(model), resolve_folder(model.name, weights=False))
    return [inputs.tensor(EncoderInput(audio=clip.to_message())) for clip in clips]


def _speech_encoder(model: LoadedModel) -> EncoderInfo:
    if model.encoder is None or model.encoder.info.kind != SPEECH:
        raise EvaluationError(f"--audio is given, and {model.name} takes no speech: give --prompts-file")
    return model.encoder.info


def _encode(text: PromptText, tokenizer: Tokenizer, number: int) -> list[int]:
    if isinstance(text, str):
        return tokenizer.encode(text)
    try:
        return tokenizer.encode_chat([{key: each[key] for key in ("role", "content")} for each in text])
    except (KeyError, TypeError) as error:
        raise EvaluationError(f"--prompts-file: a message of prompt {number} has no role or no content") from error
    except ChatTemplateError as error:
        raise EvaluationError(f"--prompts-file: prompt {number}: {error}") from error


def build_runner(loaded: LoadedModel, sequences: int, length: int, *, fuse: bool = True) -> ModelRunner:
    """A model runner for `sequences` of at most `length` tokens; with `fuse` the weights move into it.

    Raises:
        CheckpointError: it does not fit the memory of the device.
    """
    work_on(loaded.device)
    memory = memory_of(loaded.device)
    with explain_out_of_memory(memory, f"the KV cache of {sequences} texts of {length} tokens: lower --text-tokens"):
        attention = choose_attention(
            AUTO, loaded.layers, kv_dtype(loaded), loaded.device, has_encoder=loaded.encoder is not None
        )
        return TorchRunner.build(loaded, sequences, length, fuse=fuse, attention=attention)
