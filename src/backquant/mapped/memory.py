"""Tensors whose bytes lie in files: the system reads what is used, and what was used is given back.

Pages of a mapped file that nobody wrote to can be dropped at any moment, and are read again when they are
needed. The system drops them when memory gets short; here they are dropped before that, so that the memory of
the process stays below a bound that can be measured, whatever else runs on the machine.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, cast

import torch
from torch.utils._pytree import tree_leaves

from backquant.errors import ArtifactError
from backquant.graph.dispatch_mode import DispatchMode
from backquant.runtime.heap import give_back

_RESIDENT = 128 << 20  # bytes of mapped tensors that may stay in memory
_LEAST = 1 << 16  # bytes of a tensor that is worth a file
_PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
_DONT_NEED = 4  # MADV_DONTNEED of Linux
_PLAIN = (torch.Tensor, torch.nn.Parameter)


class MappedMemory(DispatchMode):
    """While it is active, at most ``resident`` bytes of mapped tensors, and those of the operator that runs,
    stay in memory. Mapped tensors must not be written to.

    Args:
        folder: where files for ``kept`` are made; each is without a name, and gone with its tensor.
        resident: bytes.

    >>> with MappedMemory(Path(tempfile.gettempdir())) as memory:
    ...     kept = memory.kept(torch.ones(1 << 15))
    ...     float(kept.sum())
    32768.0
    """

    def __init__(self, folder: Path, resident: int = _RESIDENT) -> None:
        super().__init__()
        self._folder, self._resident = folder, resident
        # By where its memory begins; held, so that nothing else comes to lie there.
        self._mapped: dict[int, torch.UntypedStorage] = {}
        self._touched: dict[int, int] = {}

    def note(self, tensor: torch.Tensor) -> None:
        """``tensor`` is mapped."""
        storage = tensor.untyped_storage()
        self._mapped[storage.data_ptr()] = storage

    def kept(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same values, mapped from a file if they are many and lie in order.

        Raises ``ArtifactError`` where it cannot be written.
        """
        size = tensor.numel() * tensor.element_size()
        if size < _LEAST or tensor.device.type != "cpu" or not tensor.is_contiguous():
            return tensor
        if tensor.untyped_storage().data_ptr() in self._mapped:
            return tensor
        plain = tensor.detach().reshape(-1).view(torch.uint8)
        try:
            with tempfile.NamedTemporaryFile(prefix=".backquant-", dir=self._folder) as file:
                file.write(plain.numpy().data)
                file.flush()
                storage = torch.UntypedStorage.from_file(file.name, shared=False, nbytes=size)
        except OSError as error:
            raise ArtifactError(
                f"integer weights cannot be kept in {self._folder}: {error.strerror or error}",
                where=str(self._folder),
                fix="make room, or choose another folder; they need as much again as the artifact",
            ) from error
        flat = torch.empty(0, dtype=torch.uint8).set_(cast(torch.UntypedStorage, storage))
        made: torch.Tensor = flat.view(tensor.dtype)
        made = made.view(tensor.shape)
        self.note(made)
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        used = {begin: self._mapped[begin].nbytes() for begin in self._among((args, kwargs))}
        if used:
            schema = getattr(func, "_schema", None)
            if schema is not None and schema.is_mutable:
                self._forget(used)  # may be written to: these pages are in no file
            else:
                self._make_room(used)
        return func(*args, **kwargs)

    def _among(self, values: Any) -> Iterator[int]:
        for value in tree_leaves(values):
            if type(value) in _PLAIN and value.layout == torch.strided and value.is_cpu:
                begin = value.untyped_storage().data_ptr()
                if begin in self._mapped:
                    yield begin

    def _forget(self, used: Iterable[int]) -> None:
        for begin in used:
            self._mapped.pop(begin, None)
            self._touched.pop(begin, None)

    def _make_room(self, used: dict[int, int]) -> None:
        if sum((self._touched | used).values()) > self._resident:
            for begin, size in self._touched.items():
                _drop(begin, size)
            give_back()  # the gaps between small tensors add up, layer by layer
            self._touched = {}
        self._touched |= used


_SYSTEM = ctypes.CDLL(None) if os.name == "posix" else None
_ADVISE = getattr(_SYSTEM, "madvise", None)


def _drop(begin: int, size: int) -> None:
    """Give the pages of a private mapping back, where the system can."""
    first, end = -(-begin // _PAGE) * _PAGE, (begin + size) // _PAGE * _PAGE
    if _ADVISE is not None and end > first:
        _ADVISE(ctypes.c_void_p(first), ctypes.c_size_t(end - first), _DONT_NEED)
