"""A quantized layer as every checkpoint format sees it: integers, scales, zero points, and how they belong.

All formats say the same of a weight ``[out, in]``; they differ in names, packing and where an offset is
subtracted. So there is one record, which each format writes from and reads into:

1. ``values`` hold one weight a byte: int8, uint8, or float8_e4m3fn.
2. ``scale`` is ``[out, groups]``; one group is a scale for a row; ``[1, 1]`` is one for the tensor.
3. ``zero_point`` has the shape of ``scale`` and the dtype of ``values``. Weights of an unsigned dtype have
   one, others (None) do not: formats that have zero points count from 0 on. Files that store a float in its
   place have ``minimum``, of which other formats take zero points where it is a multiple of the scale.
4. The weight is ``(values - zero_point) * scale``, or ``values * scale + minimum``.
5. Scales of groups may be floats of 8 bits: powers of two (E8M0, of MX), or E4M3 numbers times ``unit``, one
   float32 for the tensor (NVFP4).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from backquant.dtypes import (
    QDType,
    dequantize_tensor,
    find_dtype,
    known_dtypes,
    pack_integers,
    unpack_integers,
)
from backquant.dtypes.granularity import unit_of
from backquant.errors import ExportError
from backquant.nn.quantized import reference

#: Rule 5.
FLOAT8_SCALES = (torch.float8_e8m0fnu, torch.float8_e4m3fn)


@dataclass(frozen=True)
class Activation:
    """How the input of a layer is quantized: at each call, for each token or the tensor; or by ``scale``."""

    dtype: str
    per_token: bool = False
    scale: Tensor | None = None
    symmetric: bool = True

    @property
    def is_dynamic(self) -> bool:
        """Whether scales are computed at each call."""
        return self.scale is None


@dataclass(frozen=True)
class Scheme:
    """What formats admit or refuse: the dtype of the weights by name, and what shares a scale.

    ``group_size``: 0 is one scale for the tensor, -1 one for each row. ``scale_dtype``: rule 5.

    >>> print(Scheme("uint4", 128))
    uint4 in groups of 128 with zero points
    """

    dtype: str
    group_size: int
    activation: Activation | None = None
    scale_dtype: torch.dtype | None = None

    @property
    def row(self) -> QDType:
        """The row of the table of dtypes."""
        return next(
            row for row in known_dtypes() if row.name == self.dtype and not row.tensor_token
        )

    @property
    def bits(self) -> int:
        """Of a weight."""
        return self.row.bits

    @property
    def symmetric(self) -> bool:
        """Whether there are no zero points; rule 3."""
        return not self.dtype.startswith("uint")

    def __str__(self) -> str:
        shared = {0: "with one scale", -1: "by row"}
        text = f"{self.dtype} {shared.get(self.group_size, f'in groups of {self.group_size}')}"
        if not self.symmetric:
            text += " with zero points"
        if self.scale_dtype is not None:
            text += f" with scales in {str(self.scale_dtype).removeprefix('torch.')}"
        if self.activation is None:
            return text
        when = "at each call" if self.activation.is_dynamic else "ahead"
        per = " by token" if self.activation.per_token else ""
        zero = "" if self.activation.symmetric else " with zero points"
        return f"{text}, activations {self.activation.dtype}{per}{zero} {when}"


@dataclass(frozen=True, eq=False)
class Layer:
    """See the module. ``path``: of the layer in the checkpoint, without ``.weight``.

    >>> layer = Layer("fc", "int4", torch.tensor([[1, -8]], dtype=torch.int8), torch.tensor([[0.5]]))
    >>> layer.dequantized(), str(layer.scheme)
    (tensor([[ 0.5000, -4.0000]]), 'int4 by row')
    """

    path: str
    dtype: str
    values: Tensor
    scale: Tensor
    zero_point: Tensor | None = None
    activation: Activation | None = None
    scale_dtype: torch.dtype | None = None
    unit: Tensor | None = None
    minimum: Tensor | None = None

    @property
    def scheme(self) -> Scheme:
        """What formats ask for."""
        rows, groups = self.scale.shape
        per_tensor = (rows, groups) == (1, 1) and len(self.values) > 1
        size = 0 if per_tensor else -1 if groups == 1 else self.group_size
        return Scheme(self.dtype, size, self.activation, self.scale_dtype)

    @property
    def group_size(self) -> int:
        """How many weights of a row share a scale."""
        return int(self.values.shape[1] // self.scale.shape[1])

    @property
    def offset(self) -> int:
        """What is added to ``values`` so that none is below 0."""
        return -self.scheme.row.low if self.values.dtype == torch.int8 else 0

    def unsigned(self) -> tuple[Tensor, Tensor]:
        """``values`` and zero points, both counted from the smallest value of the dtype, as int32.

        Raises ``ExportError`` for minima that are no multiples of the scales.

        >>> Layer("fc", "int4", torch.tensor([[1, -8]], dtype=torch.int8), torch.ones(1, 1)).unsigned()
        (tensor([[9, 0]], dtype=torch.int32), tensor([[8]], dtype=torch.int32))
        """
        zero = torch.zeros_like(self.scale, dtype=torch.int32)
        if self.zero_point is not None:
            zero = self.zero_point.to(torch.int32)
        if self.minimum is not None:
            zero = self._zero_points()
        return self.values.to(torch.int32) + self.offset, zero + self.offset

    def _zero_points(self) -> Tensor:
        assert self.minimum is not None
        zero = zero_points(self.scale, self.minimum, self.scheme.bits)
        if zero is None:
            raise ExportError(
                f"the minima of {self.path} are no zero points times scales",
                where=self.path,
                fix=f'options={{"ignore": [{self.path!r}]}}   # in float, or a format that stores minima',
            )
        return zero

    def dequantized(self) -> Tensor:
        """The weight in float32."""
        if self.minimum is not None:
            size = self.group_size
            scale, low = (
                part.float().repeat_interleave(size, 1) for part in (self.scale, self.minimum)
            )
            return self.values.float() * scale + low
        if self.scheme.group_size == 0:
            return self.values.float() * self.scale.float()
        zero = self.zero_point
        if zero is None:
            kind = torch.int8 if self.values.is_floating_point() else self.values.dtype
            zero = torch.zeros_like(self.scale, dtype=kind)
        block = (1, self.group_size)
        return dequantize_tensor(self.values, self.scale.float(), zero, 0, block)


def zero_points(scale: Tensor, minimum: Tensor, bits: int) -> Tensor | None:
    """The zero points, as int32, whose products with the scales are the minima in their dtype; None: some
    are no such products.

    >>> zero_points(torch.tensor([[0.5]]), torch.tensor([[-1.5]]), 4)
    tensor([[3]], dtype=torch.int32)
    """
    exact = scale.double()
    zero = (-minimum.double() / torch.where(exact == 0, 1.0, exact)).round()
    again = (-zero * exact).to(minimum.dtype)
    inside = bool(((zero >= 0) & (zero < 1 << bits)).all())
    return zero.to(torch.int32) if inside and torch.equal(again, minimum) else None


def from_unsigned(
    path: str, bits: int, values: Tensor, scale: Tensor, zero_point: Tensor | None
) -> Layer:
    """A layer from what ``Layer.unsigned`` gives; without zero points they are the middle of the range.

    >>> from_unsigned("fc", 4, torch.tensor([[9, 0]]), torch.ones(1, 1), None).values
    tensor([[ 1, -8]], dtype=torch.int8)
    """
    if zero_point is None:
        half = 1 << (bits - 1)
        return Layer(path, f"int{bits}", (values.to(torch.int16) - half).to(torch.int8), scale)
    zero = zero_point.to(torch.uint8)
    return Layer(path, f"uint{bits}", values.to(torch.uint8), scale, zero)


def layer_of(
    path: str,
    module: nn.Module,
    activation: Activation | None = None,
    scale_dtype: torch.dtype | None = None,
) -> Layer:
    """The record of a reference module with one integer weight. ``scale_dtype``: what the description says.

    Raises ``ExportError`` for a weight that no checkpoint format has: of several axes, or scales by column.
    """
    assert isinstance(module, reference.ReferenceModule)
    weight, scale, zero = module.weight, module.weight_scale, module.weight_zero_point
    row = find_dtype(module.weight_dtype)
    by_column = scale.dim() == 1 and module.weight_axis != 0
    blocks = scale.dim() == 2 and scale.shape[0] != weight.shape[0]
    if row is None or weight.dim() != 2 or by_column or blocks or zero.is_floating_point():
        raise ExportError(
            f"{path} has weights that no checkpoint holds: {list(weight.shape)}, scales {list(scale.shape)}",
            where=path,
            fix="one scale for the tensor, for each row, or for each group along the input features",
        )
    values, columns = weight.detach(), scale.detach()
    columns = columns.reshape(-1, 1) if columns.dim() < 2 else columns
    if scale_dtype in FLOAT8_SCALES:
        unit = unit_of(columns) if scale_dtype is torch.float8_e4m3fn else None
        return Layer(path, row.name, values, columns, None, activation, scale_dtype, unit)
    if row.is_float or (row.low < 0 and not bool(zero.any())):
        return Layer(path, row.name.removeprefix("q"), values, columns, None, activation)
    offset = -min(row.low, 0)
    raised = values.to(torch.int16) + offset
    zeros = zero.reshape(columns.shape).to(torch.int16) + offset
    return replace(from_unsigned(path, row.bits, raised, columns, zeros), activation=activation)


def quantized_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The linear layers and embeddings of a reference model whose weights are integers, by path."""
    for path, module in model.named_modules():
        if isinstance(module, reference.Linear | reference.Embedding):
            yield path, module


def is_exact(scale: Tensor, dtype: torch.dtype) -> bool:
    """Whether scales are values of ``dtype``.

    >>> is_exact(torch.tensor([0.5]), torch.float16), is_exact(torch.tensor([0.1]), torch.float16)
    (True, False)
    """
    return torch.equal(scale.to(dtype).to(scale.dtype), scale)


def empty_layer(
    path: str, scheme: Scheme, shape: tuple[int, int], scale_dtype: torch.dtype = torch.float32
) -> Layer:
    """A layer of this scheme without values, on ``meta``: what a format makes of it has the real sizes.

    >>> empty_layer("fc", Scheme("int4", 32), (8, 64)).scale.shape
    torch.Size([8, 2])
    """
    rows, columns = shape
    grids = {0: (1, 1), -1: (rows, 1)}
    size = grids.get(scheme.group_size, (rows, columns // max(scheme.group_size, 1)))
    values = torch.empty(shape, dtype=scheme.row.storage, device="meta")
    scale = torch.empty(size, dtype=scale_dtype, device="meta")
    zero = None if scheme.symmetric else torch.empty(size, dtype=values.dtype, device="meta")
    unit = torch.empty((), device="meta") if scheme.scale_dtype is torch.float8_e4m3fn else None
    return Layer(
        path, scheme.dtype, values, scale, zero, scheme.activation, scheme.scale_dtype, unit
    )


# Small integers and floats of 4 bits, packed.
#
# Integers stand in words of 32 bits, as checkpoint formats have them: the first value of a row in the lowest
# bits of its first word, the last word filled up with zeros; or in another order within a word.

_WORD = 32
_E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])  # by the bits behind the sign

#: AWQ: which of the eight values of a word lies at each place.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack_words(values: Tensor, bits: int, order: tuple[int, ...] = ()) -> Tensor:
    """Rows of values from 0 to ``2**bits - 1`` as rows of int32.

    ``order``: which value of a word lies at each place, where it is not the first one first.

    >>> pack_words(torch.tensor([[1, 2, 3]]), 4)
    tensor([[801]], dtype=torch.int32)
    >>> pack_words(torch.tensor([list(range(8))]), 4, AWQ_ORDER) == 0x75316420
    tensor([[True]])
    """
    rows, count = values.shape
    if order:
        values = values.reshape(rows, -1, len(order))[:, :, list(order)].reshape(rows, count)
    whole = _WORD // math.gcd(bits, _WORD)
    padded = torch.nn.functional.pad(values.to(torch.uint8), (0, -count % whole))
    packed = padded.flatten() if bits == 8 else pack_integers(padded, bits)
    words = packed.view(torch.int32).reshape(rows, -1)
    return words[:, : math.ceil(count * bits / _WORD)].contiguous()


def unpack_words(words: Tensor, bits: int, count: int, order: tuple[int, ...] = ()) -> Tensor:
    """The inverse of ``pack_words``: ``count`` values a row, as uint8.

    >>> unpack_words(torch.tensor([[801]], dtype=torch.int32), 4, 3)
    tensor([[1, 2, 3]], dtype=torch.uint8)
    """
    rows = len(words)
    steps = _WORD // math.gcd(bits, _WORD) * bits // _WORD  # words that hold whole values
    padded = torch.nn.functional.pad(words, (0, -words.shape[1] % steps)).contiguous()
    held = padded.shape[1] * _WORD // bits
    packed = padded.view(torch.uint8).flatten()
    values = packed if bits == 8 else unpack_integers(packed, bits, [rows * held], torch.uint8)
    values = values.reshape(rows, held)[:, :count]
    if not order:
        return values.contiguous()
    back = [order.index(place) for place in range(len(order))]
    return values.reshape(rows, -1, len(order))[:, :, back].reshape(rows, count)


def pack_e2m1(values: Tensor) -> Tensor:
    """Rows of E2M1 values as uint8, two a byte, the first in the low bits.

    >>> pack_e2m1(torch.tensor([[0.5, -6.0]]))
    tensor([[241]], dtype=torch.uint8)
    """
    if values.is_meta:
        return values.new_empty((len(values), values.shape[1] // 2), dtype=torch.uint8)
    x = values.float()
    codes = torch.bucketize(x.abs(), _E2M1) + 8 * torch.signbit(x)
    return pack_integers(codes.to(torch.uint8), 4).reshape(len(values), -1)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """The inverse of ``pack_e2m1``, as float8_e4m3fn.

    >>> unpack_e2m1(torch.tensor([[241]], dtype=torch.uint8)).float()
    tensor([[ 0.5000, -6.0000]])
    """
    shape = [len(packed), 2 * packed.shape[1]]
    codes = unpack_integers(packed.flatten(), 4, shape, torch.uint8).long()
    return torch.cat([_E2M1, -_E2M1])[codes].to(torch.float8_e4m3fn)
