"""The target alone, by transformers in float32."""

import logging
from functools import cache

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.draft_service.pairs import DEMO


@cache
def _model() -> torch.nn.Module:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    return AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()


@cache
def _tokenizer():  # type: ignore[no-untyped-def]  # transformers' own class
    return AutoTokenizer.from_pretrained(DEMO / "target")


def encode(text: str) -> list[int]:
    """Tokens of a text."""
    return list(_tokenizer().encode(text))


def decode(ids: list[int], *, skip_special: bool = True) -> str:
    """Text of tokens."""
    return str(_tokenizer().decode(ids, skip_special_tokens=skip_special, clean_up_tokenization_spaces=False))


def byte_token(byte: int) -> int:
    """The token of a byte that is not a character alone. Byte-level BPE names it by the Latin-1 character."""
    token = int(_tokenizer().convert_tokens_to_ids(chr(byte)))
    assert _tokenizer().decode([token]) == "\ufffd"
    return token


def logits(ids: list[int]) -> Tensor:
    """Logits of the target after each token, `[T, V]`."""
    with torch.inference_mode():
        rows: Tensor = _model()(input_ids=torch.tensor([ids])).logits[0]
    return rows


def greedy(prompt: list[int], tokens: int) -> list[int]:
    """The target's greedy tokens; EOS does not end them."""
    return list(_greedy(tuple(prompt), tokens))


@cache
def _greedy(prompt: tuple[int, ...], tokens: int) -> list[int]:
    written: list[int] = []
    step, past = torch.tensor([prompt]), None
    with torch.inference_mode():
        for _ in range(tokens):
            out = _model()(input_ids=step, past_key_values=past, use_cache=True)
            step, past = out.logits[:, -1:].argmax(dim=-1), out.past_key_values
            written.append(int(step))
    return written
