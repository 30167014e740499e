"""Kernel modules that can be stored: JSON-able configuration beside tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from itertools import count
from typing import Any, ClassVar

import torch
from torch import nn

from backquant.errors import ArtifactError

_packings = [0]
_numbers = count(1)  # threads that drop packed weights at the same time get different numbers


def packings() -> int:
    """A number that changes whenever a kernel drops its packed weights."""
    return _packings[0]


def encode_config(config: Any) -> dict[str, Any]:
    """The fields of a configuration (a dataclass of numbers, texts, tuples and dtypes) for JSON.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> encode_config(LinearConfig(0.5, 0, 1.0, 0, torch.uint8))["out_dtype"]
    'uint8'
    """
    return {
        key: str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value
        for key, value in asdict(config).items()
    }


def decode_config(config_class: type, data: Mapping[str, Any]) -> Any:
    """Inverse of ``encode_config``, also after JSON has made lists of the tuples.

    >>> from backquant.lower.kernels.linear import LinearConfig
    >>> config = LinearConfig(0.5, 0, 1.0, 0, torch.uint8)
    >>> decode_config(LinearConfig, encode_config(config)) == config
    True
    """
    return config_class(**{key: _decode(key, value) for key, value in data.items()})


def _decode(key: str, value: Any) -> Any:
    if key.endswith("dtype") and isinstance(value, str):
        return getattr(torch, value)
    return tuple(value) if isinstance(value, list) else value


class KernelModule(nn.Module):
    """A kernel with state. A subclass gives ``config_class`` and ``name``."""

    config_class: ClassVar[type]
    config: Any

    @property
    def name(self) -> str:
        """The kernel's name, with what is fused into it."""
        raise NotImplementedError

    def artifact_config(self) -> dict[str, Any]:
        """The configuration as JSON-able data; ``from_artifact`` takes it back, with the buffers."""
        return encode_config(self.config)

    def stored_tensors(self) -> Mapping[str, torch.Tensor | None]:
        """The tensors of a file, from which ``from_artifact`` makes the kernel again."""
        return self._buffers

    def packed_tensors(self) -> Iterable[torch.Tensor]:
        """The tensors, beside parameters and buffers, that the kernel reads."""
        return ()

    def _derived(self) -> dict[str, Any]:
        """The attributes that are made from the buffers when they are needed, each with what it is before."""
        return {}

    def _drop(self) -> None:
        """Drop everything that was derived from the buffers."""
        self.__dict__.update(self._derived())
        self.note_dropped()

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, **self._derived()}

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self._drop()

    @staticmethod
    def note_dropped() -> None:
        """Declare packed weights invalid; recordings that read them become invalid, too."""
        _packings[0] = next(_numbers)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Move the buffers; ``.half()`` and the like do not touch what the kernel reads as it is."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, old in before.items():
            new = self._buffers[name]
            if old is not None and new is not None and new.dtype != old.dtype:
                self._buffers[name] = old.to(new.device)
        self._drop()
        return self

    def extra_repr(self) -> str:
        fields = ", ".join(f"{key}={value}" for key, value in asdict(self.config).items())
        return f"{self.name}, {fields}"


def lacking(kernel: type, names: Iterable[str]) -> ArtifactError:
    """An artifact that lacks tensors of a kernel."""
    return ArtifactError(
        f"{kernel.__name__} lacks {', '.join(names)}",
        where=kernel.__name__,
        fix="save the model again: backquant.save(quantized, path)",
    )
