"""Messages of one size: how large one may become, and padding to a size, to the byte.

A message that can be padded has a field `repeated bytes padding`: one piece alone cannot fill every gap, since its
length takes bytes too.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.descriptor import FieldDescriptor

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
    """Pads a message to `size` bytes, serialized; to the least multiple of it that it can have where it is larger."""
    tag = _varint_bytes(message.DESCRIPTOR.fields_by_name["padding"].number << 3)
    missing = -message.ByteSize() % size if message.ByteSize() else size
    while 0 < missing <= tag:  # less than an empty piece takes
        missing += size
    message.padding.extend(_pieces(missing, tag))


def room(message: Any, size: int) -> bool:
    """Whether a message can be padded to `size` bytes and no more."""
    tag = _varint_bytes(message.DESCRIPTOR.fields_by_name["padding"].number << 3)
    missing = size - int(message.ByteSize())
    return missing == 0 or missing > tag


def largest(kind: Any, *, counts: Mapping[str, int], most: int) -> int:
    """The bytes that a message of this kind takes at most, padding aside.

    Args:
        kind: the message's descriptor.
        counts: by name of the field, or by `Message.field`: entries of a repeated one, bytes of a text, 0 for a message
            that is not there.
        most: the same for repeated fields and texts that `counts` does not name.
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
    """Pieces of padding that come to `missing` bytes with their tags and lengths."""
    if not missing:
        return []
    for width in range(1, 5):
        length = missing - tag - width
        if length >= 0 and _varint_bytes(length) == width:
            return [bytes(length)]
    return [b"", *_pieces(missing - tag - 1, tag)]  # a length of that many bytes would need one byte more


def _varint_bytes(value: int) -> int:
    return max(1, (value.bit_length() + 6) // 7)
