"""Converts between messages of the contract and arrays (prefix hashes, ids, distributions, log-probabilities), computes
the largest size of a message, and pads messages to an exact size. Used by the services only.
"""

import hashlib
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from google.protobuf.descriptor import FieldDescriptor

from kernels.sigmoid import EXCLUDED, DraftLogits
from kernels.sparse import SparseDistribution
from kernels.verify import TokenLogprobs
from protos.outrider.v1 import sampling_pb2, speculation_pb2

HASH_BYTES = 8
_IDS = np.dtype("<u4")
_WEIGHTS = np.dtype("<u2")
_LOGITS = np.dtype("<f2")
LOGIT_BYTES = _LOGITS.itemsize
PROMPT_POSITIONS = 64
"""The most positions of a `PromptLogprobs`; the contract names it."""
_BYTES_OF_TOKEN = 32  # its id, and the tags and lengths around its logits
_BYTES_OF_PROPOSAL = 1024  # without its tokens; a sequence_id of 128 characters has at most 512 bytes


class PrefixHash:
    """The running hash of a sequence's tokens, as `Proposal.prefix_hash` defines it; O(1) per token added."""

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._state = hashlib.blake2b(digest_size=HASH_BYTES)
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        ids = array("I", tokens)
        if sys.byteorder == "big":
            ids.byteswap()
        self._state.update(ids.tobytes())

    def digest(self) -> bytes:
        """The hash so far, 8 bytes."""
        return self._state.digest()


def micros(seconds: float) -> int:
    """Whole microseconds, as messages have times."""
    return max(0, round(seconds * 1e6))


def round_micros(seconds: float) -> int:
    """The same for a part of one round: at most 71 minutes, the most that its 32 bits hold."""
    return min(micros(seconds), 2**32 - 1)


def encode_proposal(
    message: speculation_pb2.Proposal,
    token_ids: Sequence[int],
    distributions: Iterable[SparseDistribution | DraftLogits | None],
) -> None:
    """Adds the drafted tokens to a message, and the draft probabilities of each, or its logits; None is the point mass.

    In place: a message that is built on its own is copied into the one around it.
    """
    message.token_ids.extend(token_ids)
    add = message.distributions.add
    for q in distributions:
        if q is None:
            add().point_mass.SetInParent()
        elif isinstance(q, DraftLogits):
            add().logits.values = q.values.cpu().numpy().astype(_LOGITS, copy=False).tobytes()
        else:
            sparse = add().sparse
            sparse.token_ids = q.ids.astype(_IDS, copy=False).tobytes()
            sparse.weights = q.weights.astype(_WEIGHTS, copy=False).tobytes()


def decode_sparse(message: speculation_pb2.SparseDistribution) -> tuple[np.ndarray, np.ndarray]:
    """The ids `[K]` int64 and weights `[K]` uint16 of a message. Checks only the lengths in bytes.

    Raises:
        ValueError: a length is not a whole number of entries.
    """
    if len(message.token_ids) % 4 or len(message.weights) % 2:
        raise ValueError(
            f"token_ids has {len(message.token_ids)} bytes and weights {len(message.weights)}; they must be multiples "
            "of 4 and of 2"
        )
    ids = np.frombuffer(message.token_ids, dtype=_IDS).astype(np.int64)
    return ids, np.frombuffer(message.weights, dtype=_WEIGHTS)


def decode_all_sparse(messages: Sequence[speculation_pb2.SparseDistribution]) -> tuple[bytes, bytes, list[int]] | None:
    """Ids and weights of all messages, one after the other, and the size of each.

    None if a length is wrong, or a message is empty.
    """
    ids, weights = [message.token_ids for message in messages], [message.weights for message in messages]
    sizes = [len(each) // 2 for each in weights]
    for own_ids, own_weights, size in zip(ids, weights, sizes, strict=True):
        if not size or len(own_ids) != 4 * size or len(own_weights) != 2 * size:
            return None
    return b"".join(ids), b"".join(weights), sizes


def divide_sparse(
    ids: bytes, weights: bytes, sizes: Sequence[int], totals: Sequence[int]
) -> Iterator[SparseDistribution]:
    """The distributions of `decode_all_sparse`, whose weights sum to `totals`."""
    every, every_weight, end = np.frombuffer(ids, dtype=_IDS), np.frombuffer(weights, dtype=_WEIGHTS), 0
    for size, total in zip(sizes, totals, strict=True):
        begin, end = end, end + size
        yield SparseDistribution(every[begin:end], every_weight[begin:end], total)


def decode_logits(message: speculation_pb2.DenseLogits, vocab_size: int) -> DraftLogits:
    """The draft's logits `[V]`, float16.

    Raises:
        ValueError: their number is not V, or one is NaN or infinite; names the numbers.
    """
    given, expected = len(message.values), LOGIT_BYTES * vocab_size
    if given != expected:
        raise ValueError(
            f"values has {given} bytes; it must have {expected}, {LOGIT_BYTES} for each of {vocab_size} logits"
        )
    values = np.frombuffer(message.values, dtype=_LOGITS).astype(np.float16)
    finite = np.isfinite(values)
    if not finite.all():
        at = int(finite.argmin())
        raise ValueError(f"the logit of token {at} is {values[at]}; it must be finite ({EXCLUDED:g} excludes a token)")
    return DraftLogits(torch.from_numpy(values))


def most_logits(message_bytes: int, vocab_size: int) -> int:
    """The most tokens of a proposal with logits that fit into a message of this size."""
    return max(0, message_bytes - _BYTES_OF_PROPOSAL) // (LOGIT_BYTES * vocab_size + _BYTES_OF_TOKEN)


def bytes_with_logits(gamma: int, vocab_size: int) -> int:
    """The largest size of a proposal of `gamma` tokens with logits, in bytes."""
    return _BYTES_OF_PROPOSAL + gamma * (LOGIT_BYTES * vocab_size + _BYTES_OF_TOKEN)


def draft_probability(q: SparseDistribution | DraftLogits | None, token: int) -> float:
    """The probability of a drafted token in the distribution that it was drawn from: of logits, their softmax."""
    if q is None:
        return 1.0
    if isinstance(q, DraftLogits):
        values = torch.from_numpy(q.values.cpu().numpy().astype(_LOGITS, copy=False).astype(np.float32))
        return float(torch.softmax(values, 0)[token])
    return q.probability(token)


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


# ------------------------------------------------------------------------------------------------------ sizes, padding

# A message that can be padded has a field `repeated bytes padding`. One entry alone cannot fill every gap, because its
# length takes bytes, too.
_VARINTS = {
    FieldDescriptor.TYPE_UINT32: 5,
    FieldDescriptor.TYPE_UINT64: 10,
    FieldDescriptor.TYPE_INT32: 10,
    FieldDescriptor.TYPE_INT64: 10,
    FieldDescriptor.TYPE_ENUM: 5,
    FieldDescriptor.TYPE_BOOL: 1,
    FieldDescriptor.TYPE_FLOAT: 4,
    FieldDescriptor.TYPE_FIXED32: 4,
    FieldDescriptor.TYPE_DOUBLE: 8,
    FieldDescriptor.TYPE_FIXED64: 8,
}


def pad(message: Any, size: int) -> None:
    """Pads a message to `size` bytes, or a larger one to the smallest multiple of `size` that is possible."""
    tag = _varint_bytes(message.DESCRIPTOR.fields_by_name["padding"].number << 3)
    missing = -message.ByteSize() % size if message.ByteSize() else size
    while 0 < missing <= tag:  # fewer bytes than an empty entry takes
        missing += size
    message.padding.extend(_pieces(missing, tag))


def can_pad(message: Any, size: int) -> bool:
    """Whether a message can be padded to exactly `size` bytes."""
    tag = _varint_bytes(message.DESCRIPTOR.fields_by_name["padding"].number << 3)
    missing = size - int(message.ByteSize())
    return missing == 0 or missing > tag


def largest(kind: Any, *, counts: Mapping[str, int], most: int) -> int:
    """The largest size of a message of this kind, in bytes, without padding.

    Args:
        kind: the message's descriptor.
        counts: by field name, or by `Message.field`: entries of a repeated field, bytes of a text, 0 for a message that
            is not set.
        most: the same for repeated fields and texts that are not in `counts`.
    """
    fields = [field for field in kind.fields if field.name != "padding"]
    alone = sum(_largest_field(field, counts, most) for field in fields if field.containing_oneof is None)
    choices = [
        max(_largest_field(field, counts, most) for field in oneof.fields) for oneof in kind.oneofs if oneof.fields
    ]
    return alone + sum(choices)


def _largest_field(field: Any, counts: Mapping[str, int], most: int) -> int:
    tag = _varint_bytes(field.number << 3)
    count = counts.get(f"{field.containing_type.name}.{field.name}", counts.get(field.name))
    if field.message_type is not None:
        entries = count if count is not None else most if field.is_repeated else 1
        if not entries:  # it may hold messages of its own kind
            return 0
        inner = largest(field.message_type, counts=counts, most=most)
        return entries * (tag + _varint_bytes(inner) + inner)
    if field.type in (FieldDescriptor.TYPE_STRING, FieldDescriptor.TYPE_BYTES):
        length = most if count is None else count
        return tag + _varint_bytes(length) + length
    value = _VARINTS[field.type]
    if not field.is_repeated:
        return tag + value
    packed = (most if count is None else count) * value
    return tag + _varint_bytes(packed) + packed


def _pieces(missing: int, tag: int) -> list[bytes]:
    """Entries of padding that take `missing` bytes in all, with their tags and lengths."""
    if not missing:
        return []
    for width in range(1, 5):
        length = missing - tag - width
        if length >= 0 and _varint_bytes(length) == width:
            return [bytes(length)]
    return [b"", *_pieces(missing - tag - 1, tag)]  # the length of one entry would take a byte too many


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
