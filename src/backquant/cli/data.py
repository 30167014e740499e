"""``--data`` on the command line: .npz, .safetensors, a folder of arrays, or ``module:iterable``.

In files, axis 0 counts samples, and an array's name is the argument it is for; a file with a single
array may call it anything. Each batch is a dict of keyword arguments, or a tensor for a single array.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from backquant.cli.models import import_object
from backquant.errors import UsageError

__all__ = ["Batches", "load_data"]


class Batches:
    """Slices of arrays along axis 0, in order; the last batch may be smaller.

    >>> [len(batch) for batch in Batches({"x": torch.zeros(5, 2)}, 2, positional=True)]
    [2, 2, 1]
    """

    def __init__(
        self, arrays: dict[str, torch.Tensor], batch_size: int, *, positional: bool
    ) -> None:
        self._arrays = arrays
        self._batch_size = batch_size
        self._positional = positional
        self.samples = len(next(iter(arrays.values())))

    def __len__(self) -> int:
        return math.ceil(self.samples / self._batch_size)

    def __iter__(self) -> Iterator[Any]:
        for start in range(0, self.samples, self._batch_size):
            batch = {k: v[start : start + self._batch_size] for k, v in self._arrays.items()}
            yield next(iter(batch.values())) if self._positional else batch


def load_data(text: str, model: nn.Module, batch_size: int) -> Iterable[Any]:
    """The batches that ``--data`` names, as arguments that ``model`` takes."""
    path = Path(text)
    if path.exists():
        return _bind(_read(path), text, model, batch_size)
    if ":" in text and path.suffix == "":
        found = import_object(text, "--data")
        made = found() if callable(found) else found
        if not isinstance(made, Iterable):
            raise UsageError(
                f"{text!r} is {type(made).__name__}, not an iterable of batches",
                where=f"--data {text!r}",
                fix="name a list, a DataLoader, or a function that returns one",
            )
        return made
    raise UsageError(
        f"there is no file or folder {text!r}",
        where="--data",
        fix="give an .npz or .safetensors file, a folder of .npy files, or module:iterable",
    )


def _read(path: Path) -> dict[str, torch.Tensor]:
    try:
        if path.is_dir():
            arrays = {p.stem: np.load(p, allow_pickle=False) for p in sorted(path.glob("*.npy"))}
        elif path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as archive:
                arrays = {name: archive[name] for name in archive.files}
        elif path.suffix == ".safetensors":
            return load_file(path)
        else:
            raise UsageError(
                f"{path} has the suffix {path.suffix!r}, which is not read",
                where="--data",
                fix="give an .npz or .safetensors file, or a folder of .npy files",
            )
    except (ValueError, OSError, SafetensorError) as error:
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{path} cannot be read: {error}", where="--data") from error
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def _bind(
    arrays: dict[str, torch.Tensor], text: str, model: nn.Module, batch_size: int
) -> Iterable[Any]:
    if not arrays:
        raise UsageError(f"{text} holds no array", where="--data", fix="save at least one array")
    lengths = {name: array.shape[0] if array.dim() else 0 for name, array in arrays.items()}
    if len(set(lengths.values())) > 1:
        raise UsageError(
            "the arrays have different numbers of samples: "
            + ", ".join(f"{name} {count}" for name, count in lengths.items()),
            where=f"--data {text}",
            fix="axis 0 counts samples and must agree",
        )
    known = inspect.signature(model.forward).parameters
    strange = [name for name in arrays if name not in known]
    if strange and len(arrays) > 1:
        raise UsageError(
            f"the model takes no argument {strange[0]!r}",
            where=f"--data {text}",
            fix="name the arrays after the arguments of forward: " + ", ".join(known),
        )
    return Batches(arrays, batch_size, positional=bool(strange))
