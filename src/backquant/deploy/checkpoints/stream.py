"""A safetensors file written one tensor at a time: its header is known before the first of them is made."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from backquant.errors import ExportError
from backquant.files import replace_file

_NAMES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.uint32: "U32", torch.bool: "BOOL",
}  # fmt: skip
_ALIGNMENT = 8


def size_of(tensor: Tensor) -> int:
    """Bytes of its values.

    >>> size_of(torch.zeros(3, dtype=torch.int16))
    6
    """
    return tensor.numel() * tensor.element_size()


def write_stream(
    path: Path, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]
) -> None:
    """Write ``tensors``, whose names, sizes and dtypes, in this order, are those of ``layout``.

    Raises ``OSError``, and ``ExportError`` for a tensor that is not as ``layout`` says.

    >>> from tempfile import TemporaryDirectory
    >>> from safetensors.torch import load_file
    >>> with TemporaryDirectory() as folder:
    ...     write_stream(Path(folder) / "a.safetensors", {"x": torch.zeros(2)}, [("x", torch.ones(2))])
    ...     load_file(f"{folder}/a.safetensors")
    {'x': tensor([1., 1.])}
    """
    replace_file(path, _pieces(layout, iter(tensors)))


def _pieces(
    layout: Mapping[str, Tensor], tensors: Iterator[tuple[str, Tensor]]
) -> Iterator[bytes | memoryview]:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begin = 0
    for name, tensor in layout.items():
        end = begin + size_of(tensor)
        shape = list(tensor.shape)
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    yield len(text).to_bytes(8, "little")
    yield text
    for name, planned in layout.items():
        found, tensor = next(tensors)
        if (found, tensor.dtype, tensor.shape) != (name, planned.dtype, planned.shape):
            raise ExportError(
                f"{found} is {tensor.dtype}{list(tensor.shape)}, and was to be {name}, "
                f"{planned.dtype}{list(planned.shape)}",
                where="a checkpoint's layout",
                fix="what shares a scale, or whether there are zero points, has changed on the way",
            )
        yield tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data
