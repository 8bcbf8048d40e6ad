"""Small encoder–decoder models with random weights: inputs, checkpoints, services, and transformers' texts."""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    GenerationConfig,
    GenerationMixin,
    MarianConfig,
    MarianMTModel,
    PreTrainedTokenizerFast,
    T5Config,
    T5ForConditionalGeneration,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)
from transformers.generation.logits_process import LogitsProcessor, WhisperTimeStampLogitsProcessor
from transformers.models.whisper.generation_whisper import WhisperGenerationMixin

from outrider.runtime.loader import LoadedModel, adopt
from tests.cluster import Cluster, Service, wait_healthy

LETTERS = "abcdefghijklmnopqrstuvwxyz ,.?!"
PAD, START, EOS, EN, DE, TRANSLATE, TRANSCRIBE = range(7)
SPECIAL = ("<pad>", "<|start|>", "</s>", "<|en|>", "<|de|>", "<|translate|>", "<|transcribe|>")
SILENT = len(SPECIAL) + len(LETTERS)
"""No timestamps. They follow it, as in Whisper's vocabulary."""
MELS, FRAMES, RATE = 20, 100, 16_000
TIMESTAMPS = [f"<|{i * 0.02:.2f}|>" for i in range(FRAMES // 2 + 1)]
FIRST_TIMESTAMP = SILENT + 1
V = FIRST_TIMESTAMP + len(TIMESTAMPS)
POSITIONS, MAX_TOKENS = 96, 80
"""Of a model of text, and of a decoder of speech."""
NOISE = 0.02
"""In the weights of a draft, as a share of their standard deviation."""

_ENDS: dict[str, Any] = {"decoder_start_token_id": START, "pad_token_id": PAD, "eos_token_id": EOS}
RULES: dict[str, dict[str, Any]] = {
    "t5": _ENDS | {"repetition_penalty": 1.3},
    "t5, gated, untied": _ENDS | {"min_new_tokens": 8, "suppress_tokens": [9, 30]},
    "bart": _ENDS | {"no_repeat_ngram_size": 3, "forced_bos_token_id": 9, "forced_eos_token_id": EOS, "min_length": 12},
    "marian": _ENDS | {"bad_words_ids": [[10], [9, 11], [12, 13, 14]], "forced_eos_token_id": EOS},
    "whisper": _ENDS | {
        "bos_token_id": EOS, "is_multilingual": True, "lang_to_id": {"<|en|>": EN, "<|de|>": DE},
        "task_to_id": {"translate": TRANSLATE, "transcribe": TRANSCRIBE}, "no_timestamps_token_id": SILENT,
        "suppress_tokens": [PAD, START, EN, DE, TRANSLATE, TRANSCRIBE, SILENT, 30], "begin_suppress_tokens": [EOS, 9],
        "max_initial_timestamp_index": 10, "return_timestamps": False,
    },
}  # fmt: skip
"""Generation configs, each with other rules."""


def t5(**changes: Any) -> Any:
    sizes = {
        "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
        "n_positions": POSITIONS, "decoder_start_token_id": START,
    }  # fmt: skip
    return T5ForConditionalGeneration(T5Config(vocab_size=V, **(sizes | changes)))


def bart_like(model: Callable[[Any], Any], config: Callable[..., Any], **changes: Any) -> Any:
    sizes = {
        "vocab_size": V, "d_model": 32, "encoder_layers": 2, "decoder_layers": 3, "encoder_attention_heads": 4,
        "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 40,
        "decoder_start_token_id": START, "pad_token_id": PAD,
    }  # fmt: skip
    return model(config(**(sizes | changes)))


MODELS: dict[str, Callable[[], Any]] = {
    "t5": t5,
    "t5, gated, untied": lambda: t5(
        feed_forward_proj="gated-gelu", tie_word_embeddings=False, relative_attention_num_buckets=8, num_heads=2
    ),
    "bart": lambda: bart_like(
        BartForConditionalGeneration, BartConfig, max_position_embeddings=POSITIONS, forced_eos_token_id=None
    ),
    "marian": lambda: bart_like(
        MarianMTModel, MarianConfig, max_position_embeddings=POSITIONS, forced_eos_token_id=None, scale_embedding=True
    ),
    "whisper": lambda: bart_like(
        WhisperForConditionalGeneration, WhisperConfig, decoder_layers=2, num_mel_bins=MELS,
        max_source_positions=FRAMES // 2, max_target_positions=MAX_TOKENS, bos_token_id=EOS, eos_token_id=EOS,
        suppress_tokens=None, begin_suppress_tokens=None,
    ),
}  # fmt: skip


@cache
def build(name: str, noise: float = 0.0) -> Any:
    """A model of transformers with its rules; a draft has `noise` in its weights."""
    torch.manual_seed(16)
    model = MODELS[name]().eval()
    randomise(model, noise)
    model.generation_config = GenerationConfig(**RULES[name])
    return model


def randomise(model: Any, noise: float = 0.0) -> None:
    """Weights so large that attention matters. `noise` is a share of their standard deviation."""
    for parameter in model.parameters():
        if parameter.dim() > 1 and parameter.requires_grad:  # Marian's positions are not saved
            parameter.data.normal_(0, 2 * (parameter.shape[0] / parameter.numel()) ** 0.5)
        parameter.data += noise * parameter.data.std(correction=0) * torch.randn_like(parameter)


def loaded(name: str) -> LoadedModel:
    """The same model, to run packed batches."""
    return adopt(copy.deepcopy(build(name)), name, name)


@cache
def tokenizer() -> Any:
    """A token for each letter; timestamps are not special, as in Whisper's."""
    vocabulary = {token: number for number, token in enumerate((*SPECIAL, *LETTERS, "<|notimestamps|>", *TIMESTAMPS))}
    made = Tokenizer(models.WordLevel(vocabulary, unk_token=SPECIAL[PAD]))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    made.add_special_tokens([*SPECIAL, "<|notimestamps|>"])
    made.add_tokens([AddedToken(time, special=False, normalized=False) for time in TIMESTAMPS])
    return PreTrainedTokenizerFast(tokenizer_object=made, pad_token=SPECIAL[PAD], eos_token=SPECIAL[EOS])


def save(name: str, folder: Path, noise: float = 0.0) -> Path:
    """A checkpoint of the model, for services. Returns the folder."""
    build(name, noise).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    if name == "whisper":
        _extractor().save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Pair:
    """A draft service and its verifier, which run.

    Attributes:
        name: of the model, in `MODELS`.
        target: folder of the target's checkpoint.
    """

    name: str
    target: Path
    draft: Service
    verifier: Service


@contextmanager
def serving(name: str, folder: Path, flags: str = "") -> Iterator[Pair]:
    """A pair whose draft is the target with noise. `flags` are those of the draft service."""
    target, draft = save(name, folder / "target"), save(name, folder / "draft", NOISE)
    with Cluster("--max-sequences 128") as cluster:
        verifier = cluster.verifier(model=target)
        service = cluster.draft(verifier, model=draft, flags=flags)
        wait_healthy(verifier, service)
        yield Pair(name, target, service, verifier)


@contextmanager
def serving_all(folder: Path, flags: str = "") -> Iterator[Callable[[str], Pair]]:
    """Starts the pair of a name when it is first asked for."""
    with ExitStack() as stack:
        yield cache(lambda name: stack.enter_context(serving(name, folder / name, flags)))


def inputs(name: str, count: int) -> list[Tensor]:
    """Inputs of the encoder: token ids of several lengths, or features."""
    generator = torch.Generator().manual_seed(5)
    if name == "whisper":
        return [torch.randn(MELS, FRAMES, generator=generator) for _ in range(count)]
    return [torch.randint(EN, V, (3 + 5 * (i % 6),), generator=generator) for i in range(count)]


def noise(seconds: float, seed: int = 0) -> Any:
    """Samples of 16 bits, 40 times a second with another loudness."""
    coin, count = np.random.default_rng(seed), round(seconds * RATE)
    loudness = np.repeat(coin.uniform(0, 12_000, count // 400 + 1), 400)[:count]
    return (coin.normal(size=count) * loudness).clip(-(2**15), 2**15 - 1).astype("int16")


def features(samples: Any) -> Any:
    """`[MELS, FRAMES]` of samples of 16 bits, by transformers."""
    floats = np.asarray(samples, "float32") / 2**15
    return _extractor()(floats, sampling_rate=RATE, return_tensors="np").input_features[0]


def _extractor() -> Any:
    return WhisperFeatureExtractor(feature_size=MELS, chunk_length=FRAMES // 100)


def logits_of(name: str, encoder_input: Tensor, tokens: list[int]) -> Tensor:
    """`[tokens, V]` by the model's own forward."""
    with torch.inference_mode():
        logits: Tensor = build(name)(**_arguments([encoder_input], [tokens]), use_cache=False).logits[0]
        return logits


def likeliest(name: str, encoder_input: Tensor, text: list[int]) -> list[int]:
    """The token of the highest logit in place of each token of a text, without the rules of `generate`."""
    tokens: list[int] = logits_of(name, encoder_input, [START, *text[:-1]]).argmax(-1).tolist()
    return tokens


def decoder_prompt(name: str, *, language: int = EN, task: int = TRANSCRIBE, timestamps: bool = False) -> list[int]:
    if name != "whisper":
        return [START]
    return [START, language, task] if timestamps else [START, language, task, SILENT]


def generated(
    name: str, encoder_input: Tensor, count: int, prompt: Sequence[int] | None = None, noise: float = 0.0
) -> list[int]:
    """The text of transformers' `generate` at temperature 0, with its rules, up to the end of sequence."""
    return all_generated(name, [encoder_input], count, [decoder_prompt(name) if prompt is None else prompt], noise)[0]


def all_generated(
    name: str, encoder_inputs: Sequence[Tensor], count: int, prompts: Sequence[Sequence[int]], noise: float = 0.0
) -> list[list[int]]:
    """The text of each input after its prompt, in one batch. The prompts have one length."""
    model, processors, length = build(name, noise), [], len(prompts[0])
    if name == "whisper" and SILENT not in prompts[0]:
        processors = [WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=length)]
    arguments = _arguments(encoder_inputs, prompts)
    with torch.inference_mode():  # not Whisper's own `generate`, which cuts windows at timestamps
        written = GenerationMixin.generate(
            model, **arguments, do_sample=False, max_new_tokens=count, logits_processor=processors, use_cache=False
        )
    texts: list[list[int]] = written[:, length:].tolist()
    return [text[: text.index(EOS) + 1] if EOS in text else text for text in texts]  # longer rows pad the others


def scores_along(
    name: str, encoder_inputs: Sequence[Tensor], prompt: Sequence[int], texts: Sequence[Sequence[int]], noise: float
) -> list[np.ndarray]:
    """The logits before each token of these texts, float64 `[len(text), V]`, with the rules of `generate` but for a
    forced end.
    """
    seen = list[Tensor]()

    class Follow(LogitsProcessor):
        """Writes the texts, in one batch."""

        def __call__(self, _: Tensor, scores: Tensor) -> Tensor:
            forced = torch.full_like(scores, -torch.inf)
            for row, text in enumerate(texts):
                forced[row, text[len(seen)] if len(seen) < len(text) else EOS] = 0
            seen.append(scores.clone())
            return forced

    model, processors = build(name, noise), list[LogitsProcessor]()
    if name == "whisper" and SILENT not in prompt:
        processors = [WhisperTimeStampLogitsProcessor(model.generation_config, begin_index=len(prompt))]
    arguments = _arguments(encoder_inputs, [prompt] * len(encoder_inputs))
    with torch.inference_mode():
        GenerationMixin.generate(
            model, **arguments, do_sample=False, max_new_tokens=max(map(len, texts)) + 1,
            logits_processor=[*processors, Follow()], use_cache=False,
        )  # fmt: skip
    return [torch.stack(seen[: len(text)])[:, row].double().numpy() for row, text in enumerate(texts)]


def _arguments(encoder_inputs: Sequence[Tensor], decoder_inputs: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    arguments = {"decoder_input_ids": torch.tensor(decoder_inputs)}
    if encoder_inputs[0].dim() > 1:
        return arguments | {"input_features": torch.stack(list(encoder_inputs))}
    rows = pad_sequence(list(encoder_inputs), batch_first=True, padding_value=PAD)
    return arguments | {"input_ids": rows, "attention_mask": (rows != PAD).long()}


def transcribed(samples: Any, *, timestamps: bool, language: str = "en", count: int) -> list[int]:
    """The text of Whisper's own `generate` for one window at temperature 0, without the end."""
    with torch.inference_mode():
        written = build("whisper").generate(
            torch.from_numpy(features(samples))[None], do_sample=False, max_new_tokens=count, task="transcribe",
            language=language, return_timestamps=timestamps, force_unique_generate_call=True,
        )  # fmt: skip
    prompt = decoder_prompt("whisper", timestamps=timestamps)
    return [token for token in written[0].tolist()[len(prompt) :] if token != EOS]


def segments_of(
    tokens: Sequence[int], seek: int, frames: int, first_timestamp: int = FIRST_TIMESTAMP
) -> tuple[list[tuple[float, float, list[int]]], int]:
    """The segments of a window at the frame `seek`, as begin, end and tokens, and the advance; by transformers."""
    segments, advance = WhisperGenerationMixin._retrieve_segment(
        seek_sequence=torch.tensor(tokens), seek_outputs=[None], timestamp_begin=first_timestamp,
        time_offset=torch.tensor([seek * 0.01], dtype=torch.float64), seek_num_frames=torch.tensor([frames]),
        time_precision=0.02, time_precision_features=0.01, input_stride=2, prev_idx=0, idx=0,
        return_token_timestamps=False, decoder_input_ids=torch.zeros(1, 3),
    )  # fmt: skip
    return [(float(each["start"]), float(each["end"]), each["tokens"].tolist()) for each in segments], int(advance)
