"""A checkpoint that somebody wrote, as layers: their integers, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from backquant.deploy.checkpoints.formats import FORMATS, Format, find_format
from backquant.deploy.checkpoints.hub_folder import QUANTIZED, HubFolder
from backquant.deploy.checkpoints.layer import Layer, Scheme, empty_layer
from backquant.errors import ArtifactError, UsageError, first_line

_WEIGHT = ".weight"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """``schemes``: of the quantized layers by path. Layers are read when they are asked for."""

    source: HubFolder
    form: Format
    schemes: Mapping[str, Scheme]

    def layer(self, path: str) -> Layer:
        """The layer at ``path``. Raises ``ArtifactError`` for tensors that contradict the configuration."""
        try:
            found = self.form.layer(path, self.schemes[path], partial(self._read, path))
        except (ValueError, RuntimeError) as error:
            raise self._contradiction(path, first_line(error)) from error
        rows, groups = found.scale.shape
        known = empty_layer(path, self.schemes[path], self._shape(path))
        if found.scale.shape != known.scale.shape or found.values.shape != known.values.shape:
            raise self._contradiction(
                path, f"{list(found.values.shape)} with {rows}×{groups} scales"
            )
        return found

    def _read(self, path: str, end: str) -> Tensor:
        name = f"{path}.{end}"
        if name not in self.source.sizes:
            raise ArtifactError(
                f"the files lack {name}, which config.json says is there",
                where=str(self.source.place),
                fix="copy all files of the model again, with their config.json",
            )
        return self.source.read(name)

    def _contradiction(self, path: str, words: str) -> ArtifactError:
        return ArtifactError(
            f"the tensors of {path} are not {self.schemes[path]}, as config.json says: {words}",
            where=str(self.source.place),
            fix="copy the files and config.json of the model again",
        )

    @property
    def place(self) -> Path:
        """The folder."""
        return self.source.place

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.json`` as it is of the float model."""
        return {key: value for key, value in self.source.config.items() if key not in QUANTIZED}

    @cached_property
    def shards(self) -> Mapping[str, list[str]]:
        """Names of tensors by file; a quantized layer is its ``.weight``, where its first tensor lies."""
        return {
            file: list(dict.fromkeys(map(self._slot, names)))
            for file, names in self.source.shards.items()
        }

    @cached_property
    def sizes(self) -> Mapping[str, Tensor]:
        """Tensors on ``meta``, of quantized layers their float weights."""
        kept = {name: s for name, s in self.source.sizes.items() if self._slot(name) == name}
        weights = {f"{path}{_WEIGHT}": self._weight(path) for path in self.schemes}
        return kept | weights

    @property
    def scale_dtype(self) -> torch.dtype:
        """Of the scales."""
        return self.layer(next(iter(self.schemes))).scale.dtype

    @property
    def left(self) -> tuple[str, ...]:
        """Matrices that are not quantized, tables of embeddings aside."""
        names = (n for n, s in self.source.sizes.items() if n.endswith(_WEIGHT) and s.dim() == 2)
        paths = (name.removesuffix(_WEIGHT) for name in names)
        return tuple(p for p in paths if p not in self.schemes and "embed" not in p)

    def read(self, name: str) -> Tensor:
        """A tensor that belongs to no quantized layer."""
        return self.source.read(name)

    def others(self) -> list[Path]:
        """The files that are copied as they are."""
        return self.source.others()

    def _slot(self, name: str) -> str:
        path, _, end = name.rpartition(".")
        return f"{path}{_WEIGHT}" if path in self.schemes and end != "bias" else name

    def _weight(self, path: str) -> Tensor:
        return torch.empty(self._shape(path), dtype=self.source.dtype, device="meta")

    def _shape(self, path: str) -> tuple[int, int]:
        return self.form.shape(self.schemes[path], partial(self._read, path))


def open_checkpoint(place: str | os.PathLike[str]) -> QuantizedCheckpoint:
    """The checkpoint in a folder.

    Raises ``UsageError`` for one that is not quantized, or in a format that is not read;
    ``ArtifactError`` for
    a configuration that the tensors contradict.
    """
    source = HubFolder.of(place)
    form = next((f for f in map(find_format, FORMATS) if f.recognises(source.config)), None)
    if form is None:
        held = source.quantization
        raise UsageError(
            f"{source.place} is quantized as {held!r}, which is not read"
            if held
            else f"{source.place} is not quantized",
            where=str(source.place),
            fix=f"a checkpoint of {', '.join(FORMATS)}",
        )
    try:
        scheme_of = form.scheme_of(source.config)
        paths = form.marks(source.sizes)
        schemes = {path: scheme for path in paths if (scheme := scheme_of(path)) is not None}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"config.json has a {form.key} that is not read: {type(error).__name__} {first_line(error)}",
            where=str(source.place / "config.json"),
            fix="weights by row, by tensor or in groups, activations of 8 bits without zero points",
        ) from error
    lost = [path for path in paths if path not in schemes]
    if lost or not schemes:
        raise ArtifactError(
            f"the tensors of {lost[0]} are quantized, and config.json says that it is float"
            if lost
            else "config.json says that the weights are quantized, and no tensor is",
            where=str(source.place),
            fix="copy the files and config.json of the model again",
        )
    return QuantizedCheckpoint(source, form, schemes)
