"""Arrays in one buffer: each on an edge of 16 bytes, none over another, the same from the host and as tensors."""

from __future__ import annotations

import numpy as np
import torch

from kernels.packed_arrays import Field, PackedArrays

FIELDS = {
    "odd": Field(np.int32, (3,)),
    "none": Field(np.float32, (0, 5)),
    "table": Field(np.int64, (2, 3)),
    "one": Field(np.float32, (1,)),
    "fine": Field(np.float64, (5,)),
}


def test_arrays_are_aligned_and_do_not_overlap() -> None:
    packed = PackedArrays(FIELDS)
    buffer = packed.buffer(torch.device("cpu")).zero_()
    arrays, tensors = packed.arrays(buffer), packed.tensors(buffer)
    for number, array in enumerate(arrays.values()):
        array[...] = number + 1
    for number, (name, field) in enumerate(FIELDS.items()):
        tensor = tensors[name]
        assert (tuple(tensor.shape), arrays[name].dtype.type) == (field.shape, field.type)
        assert tensor.tolist() == np.full(field.shape, number + 1).tolist()
        assert tensor.storage_offset() * tensor.element_size() % 16 == 0
    assert packed.nbytes == buffer.numel() == 16 + 48 + 16 + 48


def test_no_arrays_still_take_16_bytes() -> None:
    assert PackedArrays({}).nbytes == PackedArrays({"none": Field(np.int32, (0,))}).nbytes == 16
