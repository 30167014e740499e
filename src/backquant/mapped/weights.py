"""The tensors of safetensors files by name, mapped; not read before they are used."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from backquant.errors import ArtifactError, UsageError, first_line
from backquant.json_text import read_json
from backquant.mapped.memory import MappedMemory

_INDEX = ".safetensors.index.json"


@dataclass(frozen=True)
class WeightFiles:
    """Where each tensor lies, by its name.

    >>> import tempfile
    >>> from safetensors.torch import save_file
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_file({"a": torch.ones(2)}, f"{folder}/model.safetensors")
    ...     dict(WeightFiles.of(folder).files)["a"].name
    'model.safetensors'
    """

    place: Path
    files: Mapping[str, Path]

    @classmethod
    def of(cls, place: str | os.PathLike[str]) -> WeightFiles:
        """Those of a ``.safetensors`` file, of an index of several, or of a folder of either.

        Raises ``UsageError`` where there are none, and ``ArtifactError`` for a file that is damaged, a name
        that stands in two files, and an index that does not say what is there.
        """
        path = Path(place)
        indices = sorted(path.glob(f"*{_INDEX}")) if path.is_dir() else []
        if path.name.endswith(_INDEX):
            return _indexed(path)
        if len(indices) == 1:
            return _indexed(indices[0])
        files = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
        if not files or not all(file.is_file() for file in files):
            raise UsageError(
                f"there are no weights at {path}",
                where=f"files={str(path)!r}",
                fix="name a .safetensors file, its .safetensors.index.json, or their folder:\n"
                "model.save_pretrained(folder), or safetensors.torch.save_model(model, path)",
            )
        return cls(path, _in_files(files))

    def tensors(self, memory: MappedMemory) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors, mapped, and known to ``memory``."""
        by_file: dict[Path, list[str]] = {}
        for name, file in self.files.items():
            by_file.setdefault(file, []).append(name)
        for file, names in by_file.items():
            with _opened(file) as stream:
                for name in names:
                    tensor = stream.get_tensor(name)
                    memory.note(tensor)
                    yield name, tensor


def _in_files(files: list[Path]) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for file in files:
        with _opened(file) as stream:
            for name in stream.keys():  # noqa: SIM118 - it has no __iter__
                if name in found:
                    raise ArtifactError(
                        f"tensor {name!r} stands in two files",
                        where=f"{found[name]}, {file}",
                        fix="name the file that counts, or an index of those that belong together",
                    )
                found[name] = file
    return found


def _indexed(path: Path) -> WeightFiles:
    try:
        table = read_json(path.read_bytes())["weight_map"]
        files = {str(name): path.parent / Path(str(file)).name for name, file in table.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ArtifactError(
            f"{path} is no index of safetensors files: {first_line(error)}",
            where=str(path),
            fix='{"weight_map": {"name of a tensor": "name of a file beside the index"}}',
        ) from error
    there = _in_files([file for file in dict.fromkeys(files.values()) if file.is_file()])
    for name, file in files.items():
        if there.get(name) != file:
            raise ArtifactError(
                f"{file.name} does not hold the tensor {name!r}, which the index names",
                where=str(path),
                fix="copy all files of the model again, with their index",
            )
    return WeightFiles(path, files)


def _opened(file: Path) -> safe_open:
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError) as error:
        raise ArtifactError(
            f"{file} is no readable safetensors file: {first_line(error)}",
            where=str(file),
            fix="copy or download it again; it may be truncated",
        ) from error
