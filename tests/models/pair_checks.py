"""Checks of both encoder–decoder pairs: weights, sizes, one token map."""

from pathlib import Path

import torch
from safetensors import safe_open
from transformers import AutoTokenizer


def check_weights(folder: Path) -> None:
    with safe_open(folder / "model.safetensors", framework="pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - the file is no dict
            tensor = weights.get_tensor(name)
            assert tensor.dtype == torch.bfloat16, name
            assert torch.isfinite(tensor).all(), name


def check_token_maps(pair: Path) -> None:
    target, draft = (AutoTokenizer.from_pretrained(pair / member) for member in ("target", "draft"))
    assert target.get_vocab() == draft.get_vocab()
    for text in ("The fish.", " öffne tür", "\n\t{}", "日本 🙂"):
        ids = target.encode(text, add_special_tokens=False)
        assert target.decode(ids).strip() == text.strip()


def megabytes(pair: Path) -> float:
    members = [pair / "target", pair / "draft"]
    return sum(path.stat().st_size for member in members for path in member.rglob("*") if path.is_file()) / 1e6
