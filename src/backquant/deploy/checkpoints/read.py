"""A checkpoint that somebody wrote, as layers: their integers, bit for bit."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from backquant.deploy.checkpoints.formats import FORMATS, Held, find_format
from backquant.deploy.checkpoints.layer import Layer, Scheme, empty_layer
from backquant.errors import ArtifactError, UsageError, first_line
from backquant.json_text import read_json
from backquant.mapped import WeightFiles

# A folder as ``save_pretrained`` writes it: ``config.json``, safetensors files, and what belongs to a
# tokenizer.

_WEIGHTS = (
    ".safetensors",
    ".safetensors.index.json",
    ".bin",
    ".pt",
    ".pth",
    ".gguf",
    ".h5",
    ".msgpack",
)
#: By the names that safetensors files have for them.
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U32": torch.uint32, "BOOL": torch.bool,
}  # fmt: skip

#: Keys of ``config.json`` under which a format says how weights are quantized.
QUANTIZED = ("quantization_config", "quantization")


class Source(Protocol):
    """What is written anew: names of tensors by shard, a quantized layer as its ``.weight``."""

    @property
    def place(self) -> Path: ...
    @property
    def config(self) -> Mapping[str, Any]: ...
    @property
    def shards(self) -> Mapping[str, list[str]]: ...
    @property
    def sizes(self) -> Mapping[str, Tensor]: ...
    def read(self, name: str) -> Tensor: ...
    def others(self) -> list[Path]: ...


class Files(Source, Protocol):
    """What somebody wrote: tensors as they are stored. ``dtype``: what a server computes in."""

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class HubFolder:
    """``config``: the data of ``config.json``. Tensors are read from ``files`` when they are asked for."""

    place: Path
    config: Mapping[str, Any]
    files: WeightFiles

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> HubFolder:
        """The folder at ``place``.

        Raises ``UsageError`` where it is none, or has no configuration or weights; ``ArtifactError`` for what
        is damaged or missing.

        >>> HubFolder.of("nowhere")
        Traceback (most recent call last):
        backquant.errors.UsageError: there is no folder nowhere
          where  nowhere
          fix    the folder that model.save_pretrained(folder) wrote, or a download of one
        """
        path = Path(place)
        fix = "the folder that model.save_pretrained(folder) wrote, or a download of one"
        if not path.is_dir():
            raise UsageError(f"there is no folder {path}", where=str(path), fix=fix)
        file = path / "config.json"
        if not file.is_file():
            raise UsageError(f"{path} has no config.json", where=str(path), fix=fix)
        try:
            config = read_json(file.read_bytes())
            config["architectures"]
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise ArtifactError(
                f"{file} is no configuration of a model: {first_line(error)}",
                where=str(file),
                fix='{"architectures": ["LlamaForCausalLM"], ...}; copy it again',
            ) from error
        return cls(path, config, WeightFiles.of(path))

    @property
    def quantization(self) -> str:
        """How the weights are quantized already, by the configuration; empty where they are not."""
        for key in QUANTIZED:
            found = self.config.get(key)
            if isinstance(found, Mapping):
                return str(found.get("quant_method") or key)
        return ""

    @property
    def dtype(self) -> torch.dtype:
        """What a server computes in."""
        name = str(self.config.get("dtype") or self.config.get("torch_dtype") or "float32")
        found = getattr(torch, name.removeprefix("torch."), None)
        return found if isinstance(found, torch.dtype) else torch.float32

    @cached_property
    def shards(self) -> dict[str, list[str]]:
        """The names of tensors by the name of their file, in the order of the file."""
        found: dict[str, list[str]] = {}
        for name, file in self.files.files.items():
            found.setdefault(file.name, []).append(name)
        return found

    @cached_property
    def sizes(self) -> dict[str, Tensor]:
        """All tensors on ``meta``: their shapes and dtypes. Raises ``ArtifactError`` for a dtype of
        another world.
        """
        found = {}
        for file, names in self.shards.items():
            with safe_open(str(self.place / file), framework="pt") as stream:
                for name in names:
                    known = stream.get_slice(name)
                    dtype = DTYPES.get(known.get_dtype())
                    if dtype is None:
                        raise ArtifactError(
                            f"{name} is of the dtype {known.get_dtype()}, which is not read",
                            where=str(self.place / file),
                            fix=f"one of {', '.join(DTYPES)}",
                        )
                    found[name] = torch.empty(known.get_shape(), dtype=dtype, device="meta")
        return found

    def read(self, name: str) -> Tensor:
        """One tensor, mapped."""
        with safe_open(str(self.files.files[name]), framework="pt") as stream:
            tensor: Tensor = stream.get_tensor(name)
        return tensor

    def others(self) -> list[Path]:
        """The files that are copied as they are: of the tokenizer, of generation, a licence, a card."""
        kept = (file for file in sorted(self.place.iterdir()) if file.is_file())
        return [f for f in kept if f.name != "config.json" and not f.name.endswith(_WEIGHTS)]


_WEIGHT = ".weight"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """``schemes``: of the quantized layers by path. Layers are read when they are asked for.

    ``floats``: of layers that are handed on in float; ``beside``: the folder whose ``config.json`` and
    tokenizer are handed on.
    """

    source: Files
    form: Held
    schemes: Mapping[str, Scheme]
    floats: Mapping[str, Scheme] = field(default_factory=dict)
    beside: HubFolder | None = None

    def handed_on(
        self, ignore: Sequence[str] = (), folder: str | os.PathLike[str] | None = None
    ) -> QuantizedCheckpoint:
        """The same with layers of these patterns in float, and what ``folder`` says of the model.

        Raises ``UsageError`` for a pattern that no layer has, and as ``HubFolder.of``.
        """
        for pattern in ignore:
            if not any(fnmatch(path, pattern) for path in self.schemes):
                raise UsageError(
                    f"no quantized layer is called {pattern!r}",
                    where=f"options={{'ignore': {list(ignore)}}}",
                    fix=f"patterns of layers, such as {next(iter(self.schemes))!r}",
                )
        floats = {
            path: scheme
            for path, scheme in self.schemes.items()
            if any(fnmatch(path, pattern) for pattern in ignore)
        }
        kept = {path: scheme for path, scheme in self.schemes.items() if path not in floats}
        beside = None if folder is None else HubFolder.of(folder)
        return replace(self, schemes=kept, floats=floats, beside=beside)

    @cached_property
    def _known(self) -> Mapping[str, Scheme]:
        return {**self.schemes, **self.floats}

    def layer(self, path: str) -> Layer:
        """The layer at ``path``. Raises ``ArtifactError`` for tensors that contradict the configuration."""
        scheme = self._known[path]
        try:
            found = self.form.layer(path, scheme, partial(self._read, path))
        except (ValueError, RuntimeError) as error:
            raise self._contradiction(path, first_line(error)) from error
        rows, groups = found.scale.shape
        known = empty_layer(path, scheme, self._shape(path))
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
            f"the tensors of {path} are not {self._known[path]}, as config.json says: {words}",
            where=str(self.source.place),
            fix="copy the files and config.json of the model again",
        )

    @property
    def place(self) -> Path:
        """The folder, or the file."""
        return self.source.place

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """``config.json`` as it is of the float model."""
        told = (self.beside or self.source).config
        return {key: value for key, value in told.items() if key not in QUANTIZED}

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
        weights = {f"{path}{_WEIGHT}": self._weight(path) for path in self._known}
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
        """A tensor that is handed on in float."""
        path = name.removesuffix(_WEIGHT)
        if path in self.floats:
            return self.layer(path).dequantized().to(self.source.dtype)
        return self.source.read(name)

    def others(self) -> list[Path]:
        """The files that are copied as they are."""
        return (self.beside or self.source).others()

    def _slot(self, name: str) -> str:
        path, _, end = name.rpartition(".")
        return f"{path}{_WEIGHT}" if path in self._known and end != "bias" else name

    def _weight(self, path: str) -> Tensor:
        return torch.empty(self._shape(path), dtype=self.source.dtype, device="meta")

    def _shape(self, path: str) -> tuple[int, int]:
        return self.form.shape(path, self._known[path], partial(self._read, path))


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
        paths = form.paths(source.sizes)
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
