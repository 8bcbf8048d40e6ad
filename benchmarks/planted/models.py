"""Planted models: dense random weights of any shape, made on the device, whose head writes a known text.

All weights are random. Those that a layer adds to the residual stream through are small, so the stream still tells the
last token when it comes to the head; and each row of the head is the embedding of the token that its own is to follow.
So the next token is known, with a margin that no rounding of bfloat16 comes near, while a pass reads and computes as
much as that of a trained model. What such a model writes is no language, and which of its weights matter is no question
to ask of it.

A folder holds configuration, tokenizer and plant, and no weights: whoever loads it makes them anew, from a seed.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer as Words
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from benchmarks.planted.shapes import Shape
from benchmarks.planted.text import Plant
from outrider.runtime.device import find_device
from outrider.runtime.loader import LoadedModel, ModelSource, adopt
from outrider.runtime.tokenizer import Tokenizer, load_tokenizer
from outrider.service.settings import ServiceSettings, SettingsError

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
_SEED = 1
_PLANT = "planted.json"
_QUIET = 0.2  # what all layers together add, beside an embedding whose values have a deviation of 1
_TOP = 32.0  # the logit of the token that follows; that of any other is normal, with a deviation of 32 / √hidden


def build(shape: Shape, plant: Plant, *, drafts: bool, device: torch.device, dtype: torch.dtype) -> Any:
    """A model of transformers, in eval mode; `drafts`: the one that is wrong at times.

    Raises:
        ValueError: shape and plant are of different vocabularies.
    """
    if shape.vocab != plant.vocab:
        raise ValueError(f"{shape.name} has {shape.vocab} tokens, its plant {plant.vocab}")
    torch.manual_seed(_SEED)
    with torch.device(device), torch.inference_mode(False):
        model = AutoModelForCausalLM.from_config(LlamaConfig(**shape.config()), dtype=dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.normal_(0.0, _QUIET / (2 * shape.layers * weight.shape[1]) ** 0.5)
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        embedding.normal_(0.0, 1.0)
        follows = plant.drafted() if drafts else plant.successors()
        head[follows.to(device)] = embedding * (_TOP / shape.hidden)
    return model.eval().requires_grad_(False)


def loaded(shape: Shape, plant: Plant, *, drafts: bool, device: torch.device, dtype: torch.dtype) -> LoadedModel:
    """The same as Outrider runs it.

    Raises:
        CheckpointError: it cannot.
    """
    model = build(shape, plant, drafts=drafts, device=device, dtype=dtype)
    return adopt(model, f"planted {shape.name}", _fingerprint(shape, plant, drafts))


def save(folder: Path, shape: Shape, plant: Plant, *, drafts: bool) -> Path:
    """Writes what `load` makes the model of, and returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    LlamaConfig(**shape.config(), architectures=["LlamaForCausalLM"]).save_pretrained(folder)
    words = Words(WordLevel({f"t{token}": token for token in range(shape.vocab)}, unk_token="t0"))
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="t0").save_pretrained(folder)
    document = {"shape": shape.document(), "plant": plant.document(), "drafts": drafts}
    (folder / _PLANT).write_text(json.dumps(document), encoding="utf-8")
    return folder


def load(settings: ServiceSettings) -> tuple[LoadedModel, Tokenizer]:
    """The model of a folder that `save` wrote, made on the device of the settings, and its tokenizer.

    Raises:
        CheckpointError: it cannot run, or its tokenizer cannot be read.
        OSError: the folder is no such folder.
        SettingsError: the settings name no number format that it can have.
    """
    if settings.dtype not in DTYPES:
        raise SettingsError(f"--dtype {settings.dtype}: a planted model has {' or '.join(DTYPES)}")
    document = json.loads((Path(settings.model) / _PLANT).read_text(encoding="utf-8"))
    device = find_device(settings.device)
    model = loaded(
        Shape(**document["shape"]),
        Plant.of(document["plant"]),
        drafts=document["drafts"],
        device=device,
        dtype=DTYPES[settings.dtype],
    )
    return model, load_tokenizer(ModelSource(settings.model))


def _fingerprint(shape: Shape, plant: Plant, drafts: bool) -> str:
    """Of what the weights are made of: the same text and cost, whatever device drew the random numbers."""
    made_of = json.dumps([shape.document(), plant.document(), drafts, _SEED], sort_keys=True)
    return hashlib.sha256(made_of.encode()).hexdigest()
