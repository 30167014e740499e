"""``--data`` on the command line: arrays in files, batches in files, or ``module:iterable``.

1. In .npz, .npy, .safetensors and a folder of .npy files, axis 0 counts samples, and an array's name is the
   argument of ``forward`` that it is for; so it is in a .pt file of one tensor, or of a dict of tensors.
2. Arrays named ``arr_0``, ``arr_1``, … (``numpy.savez`` without names) are positional arguments, and a
   single array may call itself anything.
3. ``module:iterable`` is an iterable of batches (a list, a ``DataLoader``), or a function that returns
   one; its batches are taken as they are.
4. A .pt file of a list holds batches, and each .pt file of a folder one. They are read as plain tensors.
5. float64 arrays (numpy's default) are read as float32 for a model that has no float64 parameters.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from backquant.cli.console import note
from backquant.cli.models import call, import_object
from backquant.errors import UsageError

Array = Any  # numpy.ndarray or torch.Tensor
_FIX = (
    "give a file (.npz, .npy, .pt, .safetensors), a folder of .npy or .pt files, or module:iterable"
)
_OF_FILES = (OSError, EOFError, BadZipFile, SafetensorError, pickle.UnpicklingError)
_OF_VALUES = (ValueError, TypeError, AttributeError, RuntimeError)
_POSITIONAL = re.compile(r"arr_(\d+)")


class Batches:
    """Slices of arrays along axis 0, in order; the last batch may be smaller.

    A batch is a dict of keyword arguments, or with ``positional`` a tuple. Arrays may be mapped files:
    only the slices are read. ``float32``: whether float64 arrays are read as float32.

    >>> [len(batch["x"]) for batch in Batches({"x": torch.zeros(5, 2)}, 2)]
    [2, 2, 1]
    """

    def __init__(
        self,
        arrays: Mapping[str, Array],
        batch_size: int,
        *,
        positional: bool = False,
        float32: bool = False,
    ) -> None:
        self._arrays = dict(arrays)
        self._batch_size = batch_size
        self._positional = positional
        self._float32 = float32
        self._ranks, self._rank = 1, 0
        self.samples = len(next(iter(arrays.values())))

    def __len__(self) -> int:
        return len(self._starts())

    def __iter__(self) -> Iterator[Any]:
        for start in self._starts():
            rows = slice(start, start + self._batch_size)
            batch = {name: self._read(array[rows]) for name, array in self._arrays.items()}
            yield tuple(batch.values()) if self._positional else batch

    def every(self, ranks: int, rank: int) -> Batches:
        """The batches of one of so many ranks; the others are not read.

        >>> [len(batch["x"]) for batch in Batches({"x": torch.zeros(5, 2)}, 2).every(2, 0)]
        [2, 1]
        """
        part = copy.copy(self)
        part._ranks, part._rank = ranks, rank
        return part

    def _starts(self) -> range:
        first = self._rank * self._batch_size
        return range(first, self.samples, self._ranks * self._batch_size)

    def _read(self, rows: Array) -> torch.Tensor:
        tensor = _tensor(rows)
        return tensor.float() if self._float32 and tensor.dtype == torch.float64 else tensor


def _tensor(rows: Array) -> torch.Tensor:
    """A tensor that shares no memory with ``rows``."""
    return rows.clone() if isinstance(rows, torch.Tensor) else torch.from_numpy(np.array(rows))


def load_data(text: str, model: nn.Module, batch_size: int) -> Iterable[Any]:
    """The batches that ``--data`` names, as arguments that ``model`` takes.

    Raises ``UsageError`` for what cannot be found or read, or does not fit the model's arguments.
    """
    path = Path(text)
    if path.exists():
        found = _read(path)
        return _bind(found, path, model, batch_size) if isinstance(found, dict) else found
    if re.fullmatch(r"[\w.]+:[\w.]+", text):
        return _iterable(text)
    raise UsageError(f"there is no file or folder {text!r}", where="--data", fix=_FIX)


def _iterable(text: str) -> Iterable[Any]:
    found = import_object(text, "--data")
    made = found if _is_set(found) else call(found, text, "--data")
    if not _is_set(made):
        raise UsageError(
            f"{text} gives {type(made).__name__}, not an iterable of batches",
            where=f"--data {text}",
            fix="name a list, a DataLoader, or a function that returns one",
        )
    batches: Iterable[Any] = made
    return batches


def _is_set(value: Any) -> bool:
    one_batch = isinstance(value, torch.Tensor | Mapping | str)
    return isinstance(value, Iterable) and not isinstance(value, type) and not one_batch


def _read(path: Path) -> dict[str, Array] | list[Any]:
    """The arrays of a file by name, as numpy arrays or tensors of supported dtypes; or batches (rule 4)."""
    try:
        if path.is_dir():
            if batches := sorted(path.glob("*.pt")):
                return list(map(_saved, batches))
            files = sorted(path.glob("*.npy"))
            arrays = {p.stem: np.load(p, mmap_mode="r", allow_pickle=False) for p in files}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        elif path.suffix == ".npy":
            arrays = {path.stem: np.load(path, mmap_mode="r", allow_pickle=False)}
        elif path.suffix in (".pt", ".pth"):
            saved = _saved(path)
            if isinstance(saved, list | tuple):
                return list(saved)
            arrays = dict(saved) if isinstance(saved, Mapping) else {path.stem: saved}
        elif path.suffix == ".safetensors":
            arrays = dict(load_file(path))
        else:
            raise UsageError(f"{path} is no file of arrays", where="--data", fix=_FIX)
        for array in arrays.values():
            _tensor(array[:0] if array.ndim else array)  # TypeError: torch has no such dtype
    except UsageError:
        raise
    except (*_OF_FILES, *_OF_VALUES) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{path} cannot be read: {reason}",
            where="--data",
            fix="save plain arrays of numbers: numpy.savez(path, x=images)",
        ) from error
    return arrays


def _saved(path: Path) -> Any:
    return torch.load(path, map_location="cpu", weights_only=True)


def _bind(arrays: dict[str, Array], path: Path, model: nn.Module, batch_size: int) -> Iterable[Any]:
    """Rules 1, 2 and 4."""
    where = f"--data {path}"
    if not arrays:
        kind = "no .npy file" if path.is_dir() else "no array"
        raise UsageError(f"{path} holds {kind}", where=where, fix=_FIX)
    lengths = {name: array.shape[0] if array.ndim else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{name} has {count}" for name, count in lengths.items())
        raise UsageError(
            f"the arrays differ in their number of samples: {counts}",
            where=where,
            fix="axis 0 counts samples; save as many of each argument",
        )
    float32 = _reads_float32(arrays, model)
    if all(map(_POSITIONAL.fullmatch, arrays)):
        in_order = dict(sorted(arrays.items(), key=lambda item: int(item[0].removeprefix("arr_"))))
        return Batches(in_order, batch_size, positional=True, float32=float32)
    strange = _strange(arrays, model)
    if strange and len(arrays) > 1:
        raise UsageError(
            f"the model takes no argument {strange[0]!r}",
            where=where,
            fix="name the arrays after the arguments of forward: " + ", ".join(_arguments(model)),
        )
    return Batches(arrays, batch_size, positional=bool(strange), float32=float32)


def _reads_float32(arrays: dict[str, Array], model: nn.Module) -> bool:
    if any(parameter.dtype == torch.float64 for parameter in model.parameters()):
        return False
    wide = [name for name, a in arrays.items() if str(a.dtype) in ("float64", "torch.float64")]
    if wide:
        note(f"{', '.join(wide)}: float64 in the file, read as float32 like the model")
    return bool(wide)


def _arguments(model: nn.Module) -> list[str]:
    return list(inspect.signature(model.forward).parameters)


def _strange(arrays: dict[str, Array], model: nn.Module) -> list[str]:
    """Names that ``forward`` does not take as keywords."""
    parameters = inspect.signature(model.forward).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return []
    keywords = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return [name for name in arrays if name not in keywords]
