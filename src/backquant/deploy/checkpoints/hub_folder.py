"""A folder as ``save_pretrained`` writes it: ``config.json``, safetensors files, and what belongs to a
tokenizer.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from backquant.errors import ArtifactError, UsageError, first_line
from backquant.json_text import read_json
from backquant.mapped import WeightFiles

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
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "I64": torch.int64, "I32": torch.int32,
    "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "U32": torch.uint32, "BOOL": torch.bool,
}  # fmt: skip
#: Keys of ``config.json`` under which a format says how weights are quantized.
QUANTIZED = ("quantization_config", "quantization")


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
                    dtype = _DTYPES.get(known.get_dtype())
                    if dtype is None:
                        raise ArtifactError(
                            f"{name} is of the dtype {known.get_dtype()}, which is not read",
                            where=str(self.place / file),
                            fix=f"one of {', '.join(_DTYPES)}",
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
