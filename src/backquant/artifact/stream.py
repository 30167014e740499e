"""A safetensors file in pieces, so that no tensor is copied and the file is never in memory as a whole.

The bytes are those that ``safetensors`` itself writes: metadata first, tensors by dtype and then by name.
Source: the format's description in the README of safetensors, and ``prepare`` in its ``tensor.rs``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping

import torch

from backquant.errors import ArtifactError

# As they are sorted in a file: larger ones first, so that each begins at a multiple of its size.
_NAMES = {
    torch.uint64: "U64",
    torch.int64: "I64",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float32: "F32",
    torch.uint32: "U32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.uint16: "U16",
    torch.int16: "I16",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_RANKS = {dtype: rank for rank, dtype in enumerate(_NAMES)}


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in the order of its elements; not copied where they lie so.

    >>> bytes(bytes_of(torch.tensor([1, 2], dtype=torch.int16)))
    b'\\x01\\x00\\x02\\x00'
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return flat.numpy().data if flat.numel() else memoryview(b"")


def pieces(tensors: Mapping[str, torch.Tensor], text: Mapping[str, str]) -> Iterator[memoryview]:
    """The file of these tensors with the metadata ``text``, one piece after the other.

    Raises ``ArtifactError`` for a dtype that the format has not.

    >>> b"".join(pieces({}, {"a": "b"}))[8:]
    b'{"__metadata__":{"a":"b"}}      '
    """
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise ArtifactError(
                f"{tensor.dtype} has no place in a safetensors file",
                where=name,
                fix="a buffer of another dtype: complex64 in place of complex128",
            )
    names = sorted(tensors, key=lambda name: (_RANKS[tensors[name].dtype], name))
    table: dict[str, object] = {"__metadata__": dict(text)}
    end = 0
    for name in names:
        tensor = tensors[name]
        begin, end = end, end + tensor.numel() * tensor.element_size()
        table[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [begin, end],
        }
    header = json.dumps(table, ensure_ascii=False, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)
    yield memoryview(len(header).to_bytes(8, "little") + header)
    for name in names:
        yield bytes_of(tensors[name])
