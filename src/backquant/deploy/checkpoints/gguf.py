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
from backquant.deploy.checkpoints.gguf_metadata import (
    Architecture,
    architecture_of,
    in_pairs,
    permuted_rows,
    write_architecture,
    write_tokenizer,
)
from backquant.deploy.checkpoints.layer import Layer
from backquant.deploy.checkpoints.write import Contents, Source, check_bytes
from backquant.errors import ExportError
from backquant.files import replacing

_WEIGHT = ".weight"
_SKIPPED = ("rotary_emb.inv_freq",)
_PLAIN = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True)
class _Entry:
    """A tensor of the file: its name there and in the source, its shape, type and bytes."""

    name: str
    source: str
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
    import gguf

    arches = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    names = gguf.get_tensor_name_map(arches[known.name], int(source.config["num_hidden_layers"]))
    for name, size in source.sizes.items():
        if name.endswith(_SKIPPED):
            continue
        found = names.get_name(name, try_suffixes=(_WEIGHT, ".bias"))
        if found is None:
            raise ExportError(
                f"{name} has no name in GGUF's {known.name}",
                where=str(source.place),
                fix="a model of that architecture, without tensors that it does not have",
            )
        path = name.removesuffix(_WEIGHT)
        shape = tuple(size.shape)
        scheme = contents.schemes.get(path) if name.endswith(_WEIGHT) else None
        if scheme is not None:
            rows, count = block_bytes(scheme, *shape)
            yield _Entry(found, name, shape, TYPES[scheme.dtype][0], rows * count)
            continue
        dtype = torch.float32 if len(shape) < 2 else size.dtype
        if dtype not in _PLAIN:
            raise ExportError(
                f"{name} is {dtype}", where=str(source.place), fix="float32, float16 or bfloat16"
            )
        yield _Entry(found, name, shape, _PLAIN[dtype], size.numel() * dtype.itemsize)


# size: what is written where, of what, and who is told
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
        write_architecture(writer, source.config, source.place.resolve().name, dtype)
        write_tokenizer(writer, source.place, source.config)
        for entry in entries:
            kind = gguf.GGMLQuantizationType[entry.kind]
            writer.add_tensor_info(entry.name, entry.shape, np.dtype("float32"), entry.size, kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for number, entry in enumerate(entries):
            writer.write_tensor_data(_bytes(source, contents, known, entry))
            if progress is not None:
                progress(number + 1, len(entries))
    finally:
        with suppress(OSError):
            writer.close()


def _bytes(source: Source, contents: Contents, known: Architecture, entry: _Entry) -> Any:
    path = entry.source.removesuffix(_WEIGHT)
    parent = entry.source.rpartition(".")[0]
    heads = permuted_rows(known, parent, source.config)
    if path in contents.schemes and entry.source.endswith(_WEIGHT):
        layer = contents.make(path)
        return blocks_of(_rows_in_pairs(layer, heads) if heads else layer).numpy()
    tensor = contents.changed.get(entry.source)
    tensor = source.read(entry.source) if tensor is None else tensor
    tensor = in_pairs(tensor, heads) if heads else tensor
    dtype = torch.float32 if tensor.dim() < 2 else source.sizes[entry.source].dtype
    return tensor.detach().to(dtype).contiguous().view(torch.uint8).numpy()


def _rows_in_pairs(layer: Layer, heads: int) -> Layer:
    def moved(tensor: Tensor) -> Tensor:
        return in_pairs(tensor, heads) if len(tensor) == len(layer.values) else tensor

    zero = None if layer.zero_point is None else moved(layer.zero_point)
    return replace(layer, values=moved(layer.values), scale=moved(layer.scale), zero_point=zero)
