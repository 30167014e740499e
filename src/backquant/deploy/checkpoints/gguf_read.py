"""GGUF read back: its tensors by the names that a Hugging Face folder has, their integers bit for bit.

Of an architecture that is not known tensors keep their names; such a file is read, and not converted without
the folder of its float model.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.formats import Held, Reader
from backquant.deploy.checkpoints.gguf_blocks import BLOCK_TYPES
from backquant.deploy.checkpoints.gguf_file import FLOATS, GgufFile, Stored, damaged
from backquant.deploy.checkpoints.gguf_model import (
    ARCHITECTURES,
    NEEDED,
    Architecture,
    config_of,
    out_of_pairs,
    permuted_rows,
)
from backquant.deploy.checkpoints.layer import Layer, Scheme
from backquant.deploy.checkpoints.read import QuantizedCheckpoint
from backquant.errors import ArtifactError, UsageError

_WEIGHT = ".weight"
_SHARD = "model.safetensors"


@dataclass(frozen=True)
class _Place:
    """Where the tensor of a name is stored; ``expert``: which part of it."""

    stored: Stored
    expert: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the tensor, without experts."""
        return self.stored.shape if self.expert is None else self.stored.shape[1:]


@dataclass(frozen=True)
class GgufSource:
    """See ``backquant.deploy.checkpoints.read.Files``. A quantized weight is its bytes, row by row."""

    file: GgufFile
    config: Mapping[str, Any]

    @property
    def place(self) -> Path:
        """The file."""
        return self.file.place

    @property
    def dtype(self) -> torch.dtype:
        """That of scales; where one is a product, float32."""
        kinds = {t.kind for t in self.file.tensors.values()}
        exact = any(kind in BLOCK_TYPES and BLOCK_TYPES[kind].is_super for kind in kinds)
        return torch.float32 if exact else torch.float16

    @cached_property
    def places(self) -> dict[str, _Place]:
        """By name. Raises ``ArtifactError`` for two of one name."""
        found: dict[str, _Place] = {}
        for stored in self.file.tensors.values():
            for name, place in self._names(stored):
                if name in found:
                    raise self._wrong(f"{name} stands twice")
                found[name] = place
        return found

    def _names(self, stored: Stored) -> Iterator[tuple[str, _Place]]:
        try:
            name = self._architecture.source_name(stored.name) if self._architecture else ""
        except KeyError:
            name = ""
        if "{}" not in name:
            yield name or stored.name, _Place(stored)
            return
        if len(stored.shape) != 3:
            raise self._wrong(f"{stored.name} is of experts, and of the size {list(stored.shape)}")
        for number in range(stored.shape[0]):
            yield name.format(number), _Place(stored, number)

    @property
    def _architecture(self) -> Architecture | None:
        known = self.config["architectures"]
        return ARCHITECTURES[known[0]] if known else None

    @property
    def lost(self) -> str:
        """What ``config.json`` cannot say of this model; empty: all is there."""
        if self._architecture is None:
            return f"the architecture {self.file.values.get('general.architecture')!r} is not known"
        key = "rope.scaling.type"
        scaling = self.file.values.get(f"{self._architecture.name}.{key}", "none")
        if scaling != "none":
            return f"rotary embeddings of the type {scaling!r} have no place in it"
        unknown = [n for n in self.places if not n.startswith(("model.", "lm_head."))]
        return f"{unknown[0]} has no place in it" if unknown else ""

    @cached_property
    def shards(self) -> dict[str, list[str]]:
        """All in one."""
        return {_SHARD: list(self.places)}

    @cached_property
    def sizes(self) -> dict[str, Tensor]:
        """On ``meta``, quantized weights as their bytes."""
        return {name: self._size(place) for name, place in self.places.items()}

    def _size(self, place: _Place) -> Tensor:
        dtype = FLOATS.get(place.stored.kind)
        if dtype is not None:
            return torch.empty(place.shape, dtype=dtype, device="meta")
        return torch.empty((*place.shape[:-1], place.stored.row), dtype=torch.uint8, device="meta")

    def read(self, name: str) -> Tensor:
        """One tensor as the float model has it, or the bytes of a quantized one."""
        place = self.places[name]
        tensor = self.file.read(place.stored)
        tensor = tensor if place.expert is None else tensor[place.expert]
        known = self._architecture
        if known is None:
            return tensor
        heads = permuted_rows(known, name.rpartition(".")[0], self.config)
        if heads:
            if heads < 0 or len(tensor) % (2 * heads):
                raise self._wrong(f"{name} has {len(tensor)} rows, which are not {heads} heads")
            tensor = out_of_pairs(tensor, heads)
        return tensor - 1 if known.is_raised(name) else tensor

    def others(self) -> list[Path]:
        """None: the tokenizer is in the file."""
        return []

    def _wrong(self, words: str) -> ArtifactError:
        return damaged(f"{self.place} contradicts itself: {words}", self.place)


@dataclass(frozen=True)
class GgufLayers(Held):
    """See ``backquant.deploy.checkpoints.formats.Held``."""

    source: GgufSource
    name: str = "gguf"

    def layer(self, path: str, scheme: Scheme, read: Reader) -> Layer:
        del scheme
        kind = BLOCK_TYPES[self.source.places[f"{path}{_WEIGHT}"].stored.kind]
        return kind.layer(path, read("weight"), self.source.dtype)

    def shape(self, path: str, scheme: Scheme, read: Reader) -> tuple[int, int]:
        del scheme, read
        rows, columns = self.source.places[f"{path}{_WEIGHT}"].shape
        return rows, columns


def open_gguf(place: str | os.PathLike[str]) -> QuantizedCheckpoint:
    """The checkpoint in a file.

    Raises ``UsageError`` for one without quantized tensors, or with some of a type that is not read;
    ``ArtifactError`` for a damaged one.
    """
    file = GgufFile.of(Path(place))
    config = config_of(file.values)
    if config["architectures"]:
        config["tie_word_embeddings"] = "output.weight" not in file.tensors
        table = file.tensors.get("token_embd.weight")
        if table is not None:
            config.setdefault("vocab_size", table.shape[0])
        missing = [key for key in NEEDED if int(config.get(key, 0)) <= 0]
        if missing:
            raise damaged(f"{file.place} does not say {', '.join(missing)}", file.place)
    source = GgufSource(file, config)
    schemes = dict(_schemes(source))
    if not schemes:
        raise UsageError(
            f"{file.place} is not quantized", where=str(file.place), fix="a file of Q4_0, Q8_0, …"
        )
    return QuantizedCheckpoint(source, GgufLayers(source), schemes)


def _schemes(source: GgufSource) -> Iterator[tuple[str, Scheme]]:
    for name, place in source.places.items():
        kind = BLOCK_TYPES.get(place.stored.kind)
        if kind is None:
            continue
        if len(place.shape) != 2 or not name.endswith(_WEIGHT):
            raise damaged(f"{name} is {place.stored.kind}, and no matrix", source.place)
        yield name.removesuffix(_WEIGHT), kind.scheme
