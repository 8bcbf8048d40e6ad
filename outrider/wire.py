"""Codecs between the contract's messages and arrays: prefix hashes, token ids, distributions, log-probabilities.

Used by the services only.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kernels.dense import EXCLUDED, DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import TokenLogprobs
from protos.outrider.v1 import sampling_pb2, speculation_pb2

HASH_BYTES = 8
_IDS = np.dtype("<u4")
_WEIGHTS = np.dtype("<u2")
_LOGITS = np.dtype("<f2")
LOGIT_BYTES = _LOGITS.itemsize
_BYTES_OF_TOKEN = 32  # its id, and the tags and lengths around its logits
_BYTES_OF_PROPOSAL = 1024  # the rest; a sequence_id of 128 characters is 512 bytes at most


class PrefixHash:
    """The running hash of a sequence's tokens, as `Proposal.prefix_hash` defines it; O(1) per token added."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._state = hashlib.blake2b(digest_size=HASH_BYTES)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Takes in tokens that follow those it holds."""
        ids = array("I", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        self._state.update(ids.tobytes())

    def digest(self) -> bytes:
        """The hash so far, 8 bytes."""
        return self._state.digest()


def encode_distribution(law: SparseDistribution | DraftLogits | None) -> speculation_pb2.TokenDistribution:
    """The law of one drafted token as a message, or its logits; None is the point mass."""
    if law is None:
        return speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
    if isinstance(law, DraftLogits):
        values = law.values.cpu().numpy().astype(_LOGITS, copy=False).tobytes()
        return speculation_pb2.TokenDistribution(logits=speculation_pb2.DenseLogits(values=values))
    return speculation_pb2.TokenDistribution(
        sparse=speculation_pb2.SparseDistribution(
            token_ids=law.ids.astype(_IDS, copy=False).tobytes(),
            weights=law.weights.astype(_WEIGHTS, copy=False).tobytes(),
        )
    )


def decode_sparse(message: speculation_pb2.SparseDistribution) -> tuple[np.ndarray, np.ndarray]:
    """The ids `[K]` int64 and weights `[K]` uint16 of a message, as sent: nothing is checked but the lengths in bytes.

    Raises:
        ValueError: a length is not a whole number of entries.
    """
    if len(message.token_ids) % 4 or len(message.weights) % 2:
        raise ValueError(
            f"token_ids has {len(message.token_ids)} bytes and weights {len(message.weights)}: "
            "not multiples of 4 and 2 bytes"
        )
    ids = np.frombuffer(message.token_ids, dtype=_IDS).astype(np.int64)
    return ids, np.frombuffer(message.weights, dtype=_WEIGHTS)


def decode_logits(message: speculation_pb2.DenseLogits, vocab_size: int) -> DraftLogits:
    """The draft's logits `[V]`, float16.

    Raises:
        ValueError: not V of them, or one is a NaN or an infinity; names the numbers.
    """
    given, expected = len(message.values), LOGIT_BYTES * vocab_size
    if given != expected:
        raise ValueError(f"values has {given} bytes; {vocab_size} logits of {LOGIT_BYTES} bytes are {expected}")
    values = np.frombuffer(message.values, dtype=_LOGITS).astype(np.float16)
    finite = np.isfinite(values)
    if not finite.all():
        at = int(finite.argmin())
        raise ValueError(f"the logit of token {at} is {values[at]}; it must be finite ({EXCLUDED:g} excludes a token)")
    return DraftLogits(torch.from_numpy(values))


def most_logits(message_bytes: int, vocab_size: int) -> int:
    """How many tokens with their logits a proposal of this size can hold."""
    return max(0, message_bytes - _BYTES_OF_PROPOSAL) // _bytes_with_logits(vocab_size)


def bytes_with_logits(gamma: int, vocab_size: int) -> int:
    """What a proposal of `gamma` tokens with their logits comes to at most, in bytes."""
    return _BYTES_OF_PROPOSAL + gamma * _bytes_with_logits(vocab_size)


def _bytes_with_logits(vocab_size: int) -> int:
    return LOGIT_BYTES * vocab_size + _BYTES_OF_TOKEN


def encode_logprobs(positions: Sequence[TokenLogprobs]) -> list[sampling_pb2.PositionLogprobs]:
    """Log-probabilities of emitted tokens as messages."""
    return [
        sampling_pb2.PositionLogprobs(
            token=sampling_pb2.TokenLogprob(token_id=at.token, raw=at.raw, adjusted=at.adjusted),
            top=[
                sampling_pb2.TokenLogprob(token_id=token, raw=raw, adjusted=adjusted)
                for token, raw, adjusted in zip(at.top_ids, at.top_raw, at.top_adjusted, strict=True)
            ],
        )
        for at in positions
    ]
