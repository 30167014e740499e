"""The tensor table of an artifact: stored once each, contiguous, with their memory format."""

from __future__ import annotations

from typing import Any

import torch

from backquant.errors import ArtifactError

__all__ = ["TensorReader", "TensorWriter"]

_FORMATS = {"channels_last": torch.channels_last, "channels_last_3d": torch.channels_last_3d}


def _memory_format(tensor: torch.Tensor) -> str:
    if tensor.is_contiguous():
        return ""
    for name, fmt in _FORMATS.items():
        if tensor.dim() == (4 if name == "channels_last" else 5) and tensor.is_contiguous(
            memory_format=fmt
        ):
            return name
    return ""


class TensorWriter:
    """Collects tensors under short keys; one that is seen twice (tied weights) is stored once."""

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.formats: dict[str, str] = {}
        self._keys: dict[tuple[Any, ...], str] = {}
        self._alive: list[torch.Tensor] = []  # keeps data pointers from being reused

    def add(self, tensor: torch.Tensor) -> str:
        """Key under which ``tensor`` is stored."""
        if tensor.is_quantized or tensor.is_sparse or tensor.is_mkldnn:
            raise ArtifactError(
                f"a {tensor.layout} tensor of dtype {tensor.dtype} cannot be stored",
                fix="artifacts hold plain dense tensors; keep packed weights out of buffers",
            )
        detached = tensor.detach()
        identity = (
            detached.untyped_storage().data_ptr(),
            detached.storage_offset(),
            tuple(detached.shape),
            detached.stride(),
            detached.dtype,
        )
        if detached.numel() and identity in self._keys:
            return self._keys[identity]
        key = f"t{len(self.tensors)}"
        self._keys[identity] = key
        self._alive.append(detached)
        self.tensors[key] = detached.cpu().contiguous().clone()
        if fmt := _memory_format(detached):
            self.formats[key] = fmt
        return key


class TensorReader:
    """Gives back the tensors of a table; a key read twice gives the same tensor."""

    def __init__(self, tensors: dict[str, torch.Tensor], formats: dict[str, str]) -> None:
        self._tensors = {
            key: tensor.to(memory_format=_FORMATS[formats[key]]) if key in formats else tensor
            for key, tensor in tensors.items()
        }

    def get(self, key: str) -> torch.Tensor:
        return self._tensors[key]
