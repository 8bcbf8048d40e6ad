"""The pair's tokenizer: byte-level BPE with 2,048 entries, made from the training documents.

It works on text and ids, without a model. It adds nothing by itself, and gives any text back exactly.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from models.corpus import END_OF_TEXT, Document

VOCABULARY = 2048
CONTEXT = 1024

# Line ends and indentation are pieces of their own, so that a prompt that ends in one of them is cut as in training.
PIECES = r"\n+| {2,}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Fit the tokenizer to `texts`; `<|endoftext|>` is its only special token: end, beginning and padding."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=END_OF_TEXT,
        bos_token=END_OF_TEXT,
        pad_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def load_tokenizer(folder: Path) -> PreTrainedTokenizerFast:
    """Load the tokenizer saved in `folder`."""
    return PreTrainedTokenizerFast.from_pretrained(folder)


def token_stream(tokenizer: PreTrainedTokenizerFast, documents: Iterable[Document]) -> np.ndarray:
    """All documents as one array of ids `[N]` (uint16), each begun by `<|endoftext|>` and the last one ended by it."""
    end = tokenizer.eos_token_id
    rows = tokenizer.backend_tokenizer.encode_batch([document.text for document in documents], add_special_tokens=False)
    ids = [np.array([end, *row.ids], dtype=np.uint16) for row in rows]
    return np.concatenate([*ids, np.array([end], dtype=np.uint16)])
