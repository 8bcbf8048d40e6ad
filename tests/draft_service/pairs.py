"""Variants of the demo draft, as checkpoints on disk; and pairs without models.

The awkward draft has a short context, a chat template, and one token with a NaN embedding: the draft fails on
every prompt that has it.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draft_service.drafters.base import DrafterKind
from draft_service.pair import Pair
from outrider.runtime.tokenizer import Tokenizer
from protos.outrider.v1 import model_pb2
from tests.project.tree import ROOT

DEMO = ROOT / "models" / "demo"
DRAFT_CONTEXT = 160
BREAKING_TOKEN = 1999
TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role == 'tool' %}{{ raise_exception('tools are not allowed') }}{% endif %}"
    "{{ message.role }}: {{ message.content }}\n"
    "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
)


def write_awkward_draft(folder: Path) -> Path:
    """The draft; returns its folder."""
    shutil.copytree(DEMO / "draft", folder)
    config = _read(folder / "config.json")
    _write(folder / "config.json", config | {"max_position_embeddings": DRAFT_CONTEXT, "tie_word_embeddings": False})
    _write(folder / "tokenizer_config.json", _read(folder / "tokenizer_config.json") | {"chat_template": TEMPLATE})
    weights = load_file(folder / "model.safetensors")
    embedding = weights["model.embed_tokens.weight"]
    weights.setdefault("lm_head.weight", embedding.clone())
    embedding[BREAKING_TOKEN] = torch.nan
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def write_foreign_draft(folder: Path) -> Path:
    """A draft whose vocabulary is not the target's: two tokens are swapped. Returns its folder."""
    shutil.copytree(DEMO / "draft", folder)
    tokenizer = _read(folder / "tokenizer.json")
    vocabulary = tokenizer["model"]["vocab"]
    first, second = (next(token for token, number in vocabulary.items() if number == wanted) for wanted in (1, 2))
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    _write(folder / "tokenizer.json", tokenizer)
    return folder


def unserved_pair(tokenizer: Tokenizer, draft: model_pb2.ModelInfo, target: model_pb2.ModelInfo, **fields: Any) -> Pair:
    """A pair for checks of requests, which open no sequence."""
    none: Any = None
    drafters = dict.fromkeys((DrafterKind.MODEL, DrafterKind.LOOKUP, DrafterKind.NONE), none)
    served = {"drafters": drafters, "default": DrafterKind.MODEL, "gamma_controller": none, "verifiers": none}
    return Pair(**served | fields, tokenizer=tokenizer, draft=draft, target=target)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
