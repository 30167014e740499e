"""Linear layers with weights of 4 or 8 bits and activations in bfloat16, and tables of 4-bit rows.

The kernels are torch's ``_weight_int4pack_mm_for_cpu``, whose weight is ``(q - 8) * scale + zero`` for
unsigned ``q``, and ``_weight_int8pack_mm``. Scales are rounded to bfloat16, as the activations are.
The first takes multiples of 16 output features, the second of 16 input features (with others it reads past
the end of a row, torch 2.13): weights are padded with zeros to that.
Source: ``aten/src/ATen/native/LinearAlgebra.cpp`` (limits), ``cpu/int4mm_kernel.cpp``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from backquant.dtypes import bits_of_values, pack_integers
from backquant.lower.kernels.configured import KernelModule, decode_config, lacking
from backquant.lower.kernels.repacked import RepackedKernel

_STEP = 16  # features that the kernels take at a time
_STORED = ("weight", "weight_scale")
_INNER_TILES = 1  # a setting of the GPU layout, which the CPU ignores


@dataclass(frozen=True)
class LowbitLinearConfig:
    """``bits`` of a weight; ``group``: how many of a row share a scale (0: all)."""

    bits: int
    group: int = 0


class LowbitLinear(RepackedKernel):
    """Takes float ``[..., in]`` and returns float ``[..., out]``, of the dtype of the input; computes in
    bfloat16, sums in float32. Buffers: ``weight`` int8 ``[out, in]``, ``weight_scale`` float32
    ``[out, in / group]`` or ``[out]``, ``bias``.

    >>> tensors = {"weight": torch.ones(3, 32, dtype=torch.int8), "weight_scale": torch.ones(3, 1)}
    >>> LowbitLinear(LowbitLinearConfig(4, 32), tensors)(torch.ones(1, 32))
    tensor([[32., 32., 32.]])
    """

    config_class = LowbitLinearConfig
    config: LowbitLinearConfig
    weight: Tensor
    weight_scale: Tensor
    bias: Tensor | None

    @property
    def name(self) -> str:
        if self.config.bits == 4:
            return f"aten._weight_int4pack_mm_for_cpu(bfloat16, groups of {self.config.group})"
        return "aten._weight_int8pack_mm(bfloat16)"

    @classmethod
    def buffer_names(cls, config: LowbitLinearConfig) -> Iterable[str]:  # noqa: ARG003
        return ("weight", "weight_scale", "bias")

    def _pack(self) -> tuple[Tensor, Tensor]:
        scale = self.weight_scale.to(torch.bfloat16)
        if self.config.bits == 8:
            return pad(self.weight, (0, -self.weight.shape[1] % _STEP)).contiguous(), scale
        missing = (0, 0, 0, -self.weight.shape[0] % _STEP)
        unsigned, scale = pad(self.weight, missing).to(torch.int32) + 8, pad(scale, missing)
        packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(unsigned, _INNER_TILES)
        pairs = torch.stack([scale, torch.zeros_like(scale)], -1)  # [out, groups, 2]
        return packed, pairs.transpose(0, 1).contiguous()

    def forward(self, x: Tensor) -> Tensor:
        """Float ``[..., in]`` to ``[..., out]``. Raises ``InputError``."""
        self.check_floats(x, self.weight.shape[1])
        rows = x.to(torch.bfloat16).reshape(-1, x.shape[-1]).contiguous()
        packed, scales = self.packed
        aten = torch.ops.aten
        if not rows.shape[0]:
            out = rows.new_empty(0, self.weight.shape[0])
        elif self.config.bits == 4:
            out = aten._weight_int4pack_mm_for_cpu(rows, packed, self.config.group, scales)
            out = out[:, : self.weight.shape[0]]
        else:
            rows = pad(rows, (0, packed.shape[1] - rows.shape[1]))
            out = aten._weight_int8pack_mm(rows, packed, scales)
        floats = out.to(x.dtype)
        if self.bias is not None:
            floats = floats + self.bias.to(x.dtype)
        return floats.reshape(*x.shape[:-1], self.weight.shape[0])


@dataclass(frozen=True)
class GroupedTableConfig:
    """``bits`` of an entry, 4 or 8; ``columns`` of the table."""

    bits: int
    columns: int


class GroupedTable(KernelModule):
    """Rows of a symmetric integer table with scales of groups, called like ``nn.Embedding``. The floats are
    the reference model's, bit for bit.

    Buffers: ``table`` uint8 ``[rows, columns / 2]`` (4 bits) or int8 ``[rows, columns]``, ``scale`` float32
    ``[rows, groups]``. ``tensors``: the weight and its scales, if kept; files hold them in the table's place.

    >>> weight = torch.tensor([[1, -2], [7, 3]], dtype=torch.int8)
    >>> table = GroupedTable.of({"weight": weight, "weight_scale": torch.ones(2, 1)})
    >>> table(torch.tensor([1, 0]))
    tensor([[ 7.,  3.],
            [ 1., -2.]])
    """

    config_class = GroupedTableConfig
    config: GroupedTableConfig
    table: Tensor
    scale: Tensor

    def __init__(
        self,
        config: GroupedTableConfig,
        table: Tensor,
        scale: Tensor,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.config, self.tensors = config, tensors
        self.register_buffer("table", table.detach())
        self.register_buffer("scale", scale.detach())

    @classmethod
    def of(cls, tensors: Mapping[str, Any]) -> GroupedTable:
        """The kernel of an int8 ``weight`` ``[rows, columns]`` with the scales of its rows or groups
        (``weight_scale``), packed where it can be."""
        weight, scale = kept = [tensors[name] for name in _STORED]
        (rows, columns), grid = weight.shape, scale.reshape(len(weight), -1)
        config, table = GroupedTableConfig(8, columns), weight
        if not columns % 2 and bits_of_values(weight) <= 4:
            config = GroupedTableConfig(4, columns)
            table = pack_integers(weight, 4).reshape(rows, columns // 2)
        return cls(config, table, grid, dict(zip(_STORED, kept, strict=True)))

    def stored_tensors(self) -> Mapping[str, Tensor | None]:
        return self._buffers if self.tensors is None else self.tensors

    @classmethod
    def from_artifact(
        cls, config: Mapping[str, Any], tensors: Mapping[str, Tensor | None]
    ) -> GroupedTable:
        """Build the kernel again from ``artifact_config()`` and its buffers; raises ``ArtifactError``."""
        if "weight" in tensors:
            return cls.of(tensors)
        table, scale = tensors.get("table"), tensors.get("scale")
        decoded = decode_config(cls.config_class, config)
        if table is None or scale is None:
            raise lacking(cls, ["its table or its scales"])
        return cls(decoded, table, scale)

    @property
    def name(self) -> str:
        group = self.config.columns // self.scale.shape[1]
        return f"embedding({self.config.bits} bits, groups of {group})"

    def forward(self, indices: Tensor) -> Tensor:
        """Integer indices of any shape to floats with the columns appended."""
        rows = torch.nn.functional.embedding(indices.reshape(-1), self.table)
        if self.config.bits == 4:
            pairs = torch.stack([rows & 15, rows >> 4], -1).flatten(1)
            rows = (pairs ^ 8).view(torch.int8) - 8
        scale = torch.nn.functional.embedding(indices.reshape(-1), self.scale)
        size = self.config.columns // scale.shape[1]
        groups = rows.reshape(len(rows), scale.shape[1], size).float() * scale.unsqueeze(-1)
        return groups.reshape(*indices.shape, self.config.columns)
