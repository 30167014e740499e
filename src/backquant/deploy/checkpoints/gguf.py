"""GGUF: the one file that llama.cpp, Ollama and LM Studio open.

Names and numbers are those of llama.cpp; tensors are written one at a time, after a header that is known
before. What is not quantized keeps its dtype; vectors are float32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from backquant.deploy.checkpoints.gguf_blocks import TYPES, block_bytes, blocks_of
from backquant.deploy.checkpoints.gguf_model import (
    Architecture,
    architecture_of,
    in_pairs,
    permuted_rows,
    write_architecture,
    write_tokenizer,
)
from backquant.deploy.checkpoints.layer import Layer
from backquant.deploy.checkpoints.read import Source
from backquant.deploy.checkpoints.write import Contents, check_bytes
from backquant.errors import ExportError
from backquant.files import replacing

_WEIGHT = ".weight"
_SKIPPED = ("rotary_emb.inv_freq",)
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: its name there and in the source (of experts the names of all), its shape,
    type and bytes."""

    name: str
    sources: tuple[str, ...]
    shape: tuple[int, ...]
    kind: str
    size: int


def write_gguf(
    source: Source,
    contents: Contents,
    place: Path,
    progress: Callable[[int, int | None], None] | None = None,
) -> list[Path]:
    """Write the file ``place``.

    Raises ``UsageError`` for an architecture that is not written, ``ExportError`` for tensors without a name
    there, a tokenizer of another kind, or a file that cannot be written.
    """
    known = architecture_of(source.config, source.place)
    entries = list(_entries(source, contents, known))
    check_bytes(place, sum(entry.size for entry in entries))
    try:
        with replacing(place.resolve()) as staging:
            _write(staging, source, contents, known, entries, progress)
    except OSError as error:
        raise ExportError(
            f"{place} cannot be written: {error.strerror or error}",
            where=str(error.filename or place),
            fix="make room, or choose another folder",
        ) from error
    return [place]


def _entries(source: Source, contents: Contents, known: Architecture) -> Iterator[_Entry]:
    together: dict[str, dict[int | None, str]] = {}
    for name in source.sizes:
        if name.endswith(_SKIPPED):
            continue
        try:
            found, expert = known.gguf_name(name)
        except KeyError as error:
            raise ExportError(
                f"{name} has no name in GGUF's {known.name}",
                where=str(source.place),
                fix="a model of that architecture, without tensors that it does not have",
            ) from error
        together.setdefault(found, {})[expert] = name
    for found, names in together.items():
        in_order = tuple(names[number] for number in sorted(names, key=lambda n: n or 0))
        yield _entry(source, contents, found, in_order)


def _entry(source: Source, contents: Contents, found: str, names: tuple[str, ...]) -> _Entry:
    sizes = {_stored(source, contents, name) for name in names}
    if len(sizes) > 1:
        (shape, kind, _), (other, another, _) = sorted(sizes, key=str)[:2]
        raise ExportError(
            f"{found} holds all experts, and {names[0].removesuffix(_WEIGHT)} is not as the others are",
            where=f"{list(shape)} {kind}, {list(other)} {another}",
            fix="the same weights for all experts of a layer",
        )
    [(shape, kind, size)] = sizes
    shape = shape if len(names) == 1 and "_exps" not in found else (len(names), *shape)
    return _Entry(found, names, shape, kind, size * len(names))


def _stored(source: Source, contents: Contents, name: str) -> tuple[tuple[int, ...], str, int]:
    """Shape, type and bytes of a tensor."""
    size, path = source.sizes[name], name.removesuffix(_WEIGHT)
    shape = tuple(size.shape)
    scheme = contents.schemes.get(path) if name.endswith(_WEIGHT) else None
    if scheme is not None:
        rows, count = block_bytes(scheme, *shape)
        return shape, TYPES[scheme.dtype][0], rows * count
    dtype = torch.float32 if len(shape) < 2 else size.dtype
    if dtype not in _PLAIN:
        raise ExportError(
            f"{name} is {dtype}", where=str(source.place), fix="float32, float16 or bfloat16"
        )
    return shape, _PLAIN[dtype], size.numel() * dtype.itemsize


def _write(
    path: Path,
    source: Source,
    contents: Contents,
    known: Architecture,
    entries: list[_Entry],
    progress: Callable[[int, int | None], None] | None,
) -> None:
    import gguf

    writer: Any = gguf.GGUFWriter(str(path), known.name)
    try:
        dtype = next(iter(contents.schemes.values())).dtype
        write_architecture(writer, source.config, source.place.resolve().stem, dtype)
        write_tokenizer(writer, source.others(), source.config)
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.kind]
            writer.add_tensor_info(entry.name, entry.shape, np.dtype("float32"), entry.size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, entry in enumerate(entries):
            parts = [_bytes(source, contents, known, name) for name in entry.sources]
            writer.write_tensor_data(parts[0] if len(parts) == 1 else np.stack(parts))
            if progress is not None:
                progress(number + 1, len(entries))
    finally:
        with suppress(OSError):
            writer.close()


def _bytes(source: Source, contents: Contents, known: Architecture, name: str) -> Any:
    path = name.removesuffix(_WEIGHT)
    heads = permuted_rows(known, name.rpartition(".")[0], source.config)
    if path in contents.schemes and name.endswith(_WEIGHT):
        layer = contents.make(path)
        return blocks_of(_rows_in_pairs(layer, heads) if heads else layer).numpy()
    tensor = contents.changed.get(name)
    tensor = source.read(name) if tensor is None else tensor
    tensor = in_pairs(tensor, heads) if heads else tensor
    dtype = torch.float32 if tensor.dim() < 2 else source.sizes[name].dtype
    tensor = tensor.detach().to(dtype)
    tensor = tensor + 1 if known.is_raised(name) else tensor
    return tensor.contiguous().view(torch.uint8).numpy()


def _rows_in_pairs(layer: Layer, heads: int) -> Layer:
    def moved(tensor: Tensor) -> Tensor:
        return in_pairs(tensor, heads) if len(tensor) == len(layer.values) else tensor

    parts: dict[str, Any] = {
        name: moved(tensor)
        for name in ("values", "scale", "zero_point", "minimum")
        if (tensor := getattr(layer, name)) is not None
    }
    return replace(layer, **parts)
