"""Codecs between the contract's messages and arrays: prefix hashes, token ids, distributions, log-probabilities.

Used by the services only. It knows nothing of streams, models or rules, and checks nothing that takes a model to check.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Sequence

import numpy as np

from kernels.sparse import SparseLaw
from kernels.verify import TokenLogprobs
from protos.outrider.v1 import sampling_pb2, speculation_pb2

HASH_BYTES = 8
_IDS = np.dtype("<u4")
_WEIGHTS = np.dtype("<u2")


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


def encode_distribution(law: SparseLaw | None) -> speculation_pb2.TokenDistribution:
    """The law of one drafted token as a message; None is the point mass."""
    if law is None:
        return speculation_pb2.TokenDistribution(point_mass=speculation_pb2.PointMass())
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
