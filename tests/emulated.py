"""The library of kernels for ARM, run by an emulator: called as ``torch.ops.backquant_kernels`` is.

Needs Debian's ``g++-aarch64-linux-gnu`` and ``qemu-user``, or others that ``$AARCH64_CXX`` and
``$AARCH64_EMULATOR`` (with its options) name.
"""

from __future__ import annotations

import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

_DTYPES = {0: torch.uint8, 6: torch.float32}
_Value = torch.Tensor | list[torch.Tensor] | float
_SOURCE = Path(__file__).with_name("emulated.cpp")


def compiler() -> str:
    return os.environ.get("AARCH64_CXX", "aarch64-linux-gnu-g++")


def emulator() -> list[str]:
    return shlex.split(os.environ.get("AARCH64_EMULATOR", "qemu-aarch64 -L /usr/aarch64-linux-gnu"))


def lacking() -> str:
    """Why nothing can be emulated; empty if it can."""
    names = (compiler(), emulator()[0])
    absent = [name for name in names if shutil.which(name) is None]
    return f"no {' and no '.join(absent)} (see CONTRIBUTING.md)" if absent else ""


def build_driver(folder: Path) -> Path:
    """Compile ``emulated.cpp``; returns the program."""
    made = folder / "emulated"
    command = [compiler(), "-std=c++17", "-O1", "-rdynamic", str(_SOURCE), "-o", str(made), "-ldl"]
    subprocess.run(command, check=True, capture_output=True)
    return made


class Emulated:
    """``driver`` with ``library``, on an emulated CPU of the given name, until ``close``."""

    def __init__(self, driver: Path, library: Path, cpu: str) -> None:
        command = [*emulator(), "-cpu", cpu, str(driver), str(library)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self._process: Any = subprocess.Popen(command, **pipes)  # type: ignore[call-overload]
        self.magic = self._number()

    def close(self) -> None:
        self._process.communicate()

    def __getattr__(self, name: str) -> Callable[..., torch.Tensor]:
        if name.startswith("_"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *values: _Value) -> torch.Tensor:
        parts = [_packed(len(name)), name.encode(), _packed(len(values)), *map(_encoded, values)]
        try:
            self._process.stdin.write(b"".join(parts))
            self._process.stdin.flush()
        except BrokenPipeError:
            raise AssertionError(self._ended()) from None
        length = self._number()
        if length:
            raise RuntimeError(self._read(length).decode())
        dtype, dims = _DTYPES[self._number()], self._number()
        sizes, strides = ([self._number() for _ in range(dims)] for _ in range(2))
        data = torch.frombuffer(bytearray(self._read(self._number())), dtype=torch.uint8)
        return data.view(dtype).as_strided(sizes, strides)

    def _number(self) -> int:
        found: int = struct.unpack("<q", self._read(8))[0]
        return found

    def _read(self, size: int) -> bytes:
        found: bytes = self._process.stdout.read(size)
        assert len(found) == size, self._ended()
        return found

    def _ended(self) -> str:
        message = self._process.communicate()[1].decode()
        return f"the emulated program ended with {self._process.returncode}: {message}"


def _packed(*numbers: int) -> bytes:
    return struct.pack(f"<{len(numbers)}q", *numbers)


def _encoded(value: _Value) -> bytes:
    if isinstance(value, int):
        return _packed(0, value)
    if isinstance(value, float):
        return _packed(0) + struct.pack("<d", value)
    if isinstance(value, list):
        return _packed(2, len(value)) + b"".join(map(_tensor, value))
    return _packed(1) + _tensor(value)


def _tensor(value: torch.Tensor) -> bytes:
    dtype = next(number for number, known in _DTYPES.items() if known == value.dtype)
    steps = zip(value.shape, value.stride(), strict=True)
    extent = 1 + sum((size - 1) * stride for size, stride in steps)  # with what lies between
    storage = torch.as_strided(value, (extent,), (1,)).contiguous()
    data = storage.view(torch.uint8).numpy().tobytes()
    head = _packed(dtype, value.dim(), *value.shape, *value.stride(), len(data))
    return head + data
