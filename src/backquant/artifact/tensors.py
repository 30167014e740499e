"""The tensor table of an artifact: stored once each, contiguous, with their strides where those matter.

8-bit integers that fit into four or two bits are packed, two or four to a byte.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from backquant.dtypes import bits_of_values, dtype_name, pack_integers, unpack_integers
from backquant.errors import ArtifactError, ConfigError


def _dense_strides(tensor: torch.Tensor) -> list[int] | None:
    """Strides of a tensor that fills its memory in another order than contiguous ones do.

    Kernels choose their path by strides, so that channels-last weights must come back as such.
    """
    strides = list(tensor.stride())
    if strides == _contiguous_strides(tensor.shape):
        return None
    return strides if _is_dense(tensor.shape, strides) else None


def _contiguous_strides(shape: Any) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return strides[::-1]


def _is_dense(shape: Any, strides: list[int]) -> bool:
    """Whether the elements fill their memory without gaps or overlaps."""
    step = 1
    for stride, size in sorted((b, a) for a, b in zip(shape, strides, strict=True) if a != 1):
        if stride != step or size == 0:
            return False
        step *= size
    return all(0 <= stride <= step for stride in strides)


class TensorWriter:
    """Collects tensors under short keys; one that is seen twice (tied weights) is stored once.

    ``kept``: gives back a tensor that was made for the file, which may then lie elsewhere.
    """

    def __init__(self, kept: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach) -> None:
        self._kept = kept
        self.tensors: dict[str, torch.Tensor] = {}
        self.strides: dict[str, list[int]] = {}
        self.packed: dict[str, dict[str, Any]] = {}
        self._keys: dict[tuple[Any, ...], str] = {}
        self._alive: list[torch.Tensor] = []  # keeps data pointers from being reused

    def add(self, tensor: torch.Tensor) -> str:
        """Key under which ``tensor`` is stored. Raises ``ArtifactError`` for what is not plain and dense.

        >>> writer = TensorWriter()
        >>> x = torch.zeros(2)
        >>> writer.add(x), writer.add(torch.ones(2)), writer.add(x)
        ('t0', 't1', 't0')
        """
        _check_plain(tensor)
        detached = tensor.detach()
        identity = (
            detached.untyped_storage().data_ptr(),
            detached.storage_offset(),
            tuple(detached.shape),
            detached.stride(),
            detached.dtype,
            detached.is_conj(),
            detached.is_neg(),
        )
        if detached.numel() and identity in self._keys:
            return self._keys[identity]
        key = f"t{len(self.tensors)}"
        self._keys[identity] = key
        self._alive.append(detached)
        plain = detached.cpu().resolve_conj().resolve_neg()
        bits = bits_of_values(plain)
        if bits < 8:
            self.tensors[key] = self._kept(pack_integers(plain.contiguous(), bits))
            self.packed[key] = {
                "bits": bits,
                "shape": list(plain.shape),
                "dtype": dtype_name(plain.dtype),
            }
        else:
            self.tensors[key] = plain.contiguous()
        if (strides := _dense_strides(plain)) is not None:
            self.strides[key] = strides
        return key

    @property
    def size(self) -> int:
        """Bytes of what was added."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def drop_after(self, count: int) -> None:
        """Forget what was added after the first ``count`` tensors."""
        dropped = set([*self.tensors][count:])
        for table in (self.tensors, self.strides, self.packed):
            for key in dropped & table.keys():
                del table[key]
        self._keys = {identity: k for identity, k in self._keys.items() if k not in dropped}


def _check_plain(tensor: torch.Tensor) -> None:
    kind = type(tensor)
    lazy = nn.parameter.is_lazy(tensor)
    unusual = kind not in (torch.Tensor, nn.Parameter) or lazy
    if unusual or tensor.is_quantized or tensor.layout != torch.strided or tensor.is_meta:
        what = kind.__name__ if unusual else f"{tensor.layout} tensor of {tensor.dtype}"
        raise ArtifactError(
            f"a {what} on {tensor.device} cannot be stored",
            fix="artifacts hold plain dense tensors with values: convert it before quantizing",
        )


class TensorReader:
    """Gives back the tensors of a table; a key read twice gives the same tensor, or parameter."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        strides: Mapping[str, list[int]],
        packed: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        for key, tensor in tensors.items():
            _check_booleans(key, tensor)
        plain = dict(tensors)
        for key, how in (packed or {}).items():
            plain[key] = _unpacked(key, plain.get(key), how)
        self._tensors = {
            key: _restride(tensor, strides[key]) if key in strides else tensor
            for key, tensor in plain.items()
        }
        self._parameters: dict[tuple[int, bool], nn.Parameter] = {}

    def get(self, key: str) -> torch.Tensor:
        """The tensor under ``key``. Raises ``ArtifactError`` if there is none."""
        if not isinstance(key, str) or key not in self._tensors:
            raise ArtifactError(f"there is no tensor {key!r}", where=repr(key)[:80])
        return self._tensors[key]

    def parameter(self, tensor: torch.Tensor, requires_grad: bool) -> nn.Parameter:
        """``tensor``, which ``get`` returned, as a parameter.

        The flag is kept because modules choose their path by it (``nn.MultiheadAttention`` does).
        """
        key = (id(tensor), requires_grad)
        if key not in self._parameters:
            self._parameters[key] = nn.Parameter(tensor, requires_grad=requires_grad)
        return self._parameters[key]


def _unpacked(key: str, packed: torch.Tensor | None, how: Mapping[str, Any]) -> torch.Tensor:
    dtype = {"int8": torch.int8, "uint8": torch.uint8}[how["dtype"]]
    packed = torch.empty(0) if packed is None else packed
    try:
        return unpack_integers(packed, how["bits"], list(how["shape"]), dtype)
    except ConfigError as error:
        raise ArtifactError(error.what, where=f"{key}: {error.where}", fix=error.fix) from error


def _check_booleans(key: str, tensor: torch.Tensor) -> None:
    """A byte of a boolean is 0 or 1: with others, counting and selecting disagree on how many there are."""
    if tensor.dtype == torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
        raise ArtifactError("a tensor of booleans holds other bytes than 0 and 1", where=key)


def _restride(tensor: torch.Tensor, strides: list[int]) -> torch.Tensor:
    numbers = isinstance(strides, list) and all(type(step) is int for step in strides)
    if not numbers or len(strides) != tensor.dim() or not _is_dense(tensor.shape, strides):
        raise ArtifactError(
            f"the strides {strides} do not fit a tensor of shape {list(tensor.shape)}",
            fix="save the model again: backquant.save(quantized, path)",
        )
    return torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype).copy_(tensor)
