"""One operator between integers: what is compared, and the parts of which cases are drawn."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from backquant.dtypes import QParams
from backquant.nn.quantized import reference as nnqr

__all__ = ["Case", "Operator", "drawn_qparams", "fitting", "integers", "weighted"]

Operator = Callable[..., Any]  # (module that holds the children, *float tensors) to a float tensor
Shapes = tuple[tuple[int, ...], ...]


@dataclass
class Case:
    """``operator`` on dequantized tensors, between integers.

    ``shapes``: of the inputs of each call, one entry per input. ``qparams``: of the inputs. ``out``: of the
    result, ``None``: a float. ``exact``: values are moved or selected, not computed. ``steps``: how far
    integers may be from the reference model's (one, but where the operator rounds in between).
    """

    family: str
    label: str
    operator: Operator
    shapes: Sequence[Shapes]
    qparams: tuple[QParams, ...]
    out: QParams | None
    children: dict[str, nn.Module] = field(default_factory=dict)
    exact: bool = False
    steps: int = 1


def drawn_qparams(choice: random.Random, dtype: torch.dtype = torch.uint8) -> QParams:
    """Scales over a wide range, zero points at the ends and between; sometimes 7 bits."""
    info = torch.iinfo(dtype)
    low, high = info.min, info.max
    if choice.random() < 0.2:
        low, high = low // 2, high // 2
    zero_point = choice.choice((low, high, (low + high) // 2, choice.randint(low, high)))
    return QParams(_exact(10 ** choice.uniform(-3, 0)), zero_point, low, high, dtype)


def _exact(scale: float) -> float:
    """A scale as observers give it: a float32."""
    return float(torch.tensor(scale, dtype=torch.float32))


def fitting(value: torch.Tensor, choice: random.Random, dtype: torch.dtype) -> QParams:
    """Qparams that cut some values off; zero points at the ends and between, sometimes 7 bits."""
    drawn = drawn_qparams(choice, dtype)
    finite = value.float().flatten()[:10_000]
    if not finite.numel():
        return drawn
    low, high = finite.quantile(0.05).item(), finite.quantile(0.95).item()
    span = max(high - low, 1e-3 * max(abs(low), abs(high)), 1e-4)
    scale = _exact(span / (drawn.quant_max - drawn.quant_min))
    zero_point = drawn.zero_point
    if choice.random() < 0.7:
        zero_point = min(
            max(drawn.quant_min - round(low / scale), drawn.quant_min), drawn.quant_max
        )
    return QParams(scale, zero_point, drawn.quant_min, drawn.quant_max, dtype)


def integers(shape: Sequence[int], qparams: QParams, choice: random.Random) -> torch.Tensor:
    """Integers in the range of ``qparams``: any, all of them at one end, at both ends, or all zero points."""
    generator = torch.Generator().manual_seed(choice.randrange(1 << 30))
    low, high = qparams.quant_min, qparams.quant_max
    kind = choice.choice(("any", "any", "any", "ends", "lowest", "highest", "zero"))
    if kind == "any":
        found = torch.randint(low, high + 1, tuple(shape), generator=generator)
    elif kind == "ends":
        found = torch.randint(0, 2, tuple(shape), generator=generator) * (high - low) + low
    else:
        found = torch.full(
            tuple(shape), {"lowest": low, "highest": high, "zero": qparams.zero_point}[kind]
        )
    return found.to(qparams.dtype)


_REFERENCES: dict[type, Any] = {
    nn.Linear: nnqr.Linear,
    nn.Conv1d: nnqr.Conv1d, nn.Conv2d: nnqr.Conv2d, nn.Conv3d: nnqr.Conv3d,
    nn.ConvTranspose1d: nnqr.ConvTranspose1d, nn.ConvTranspose2d: nnqr.ConvTranspose2d,
    nn.ConvTranspose3d: nnqr.ConvTranspose3d,
}  # fmt: skip


def weighted(module: nn.Module, choice: random.Random, per_channel: bool = True) -> Any:
    """The reference form of ``module`` with an integer weight: any integers, or all at an end."""
    weight: torch.Tensor = module.weight.data  # type: ignore[assignment,union-attr]
    others = [dim for dim in range(weight.dim()) if dim != 0]
    channels = per_channel and choice.random() < 0.7
    widest = weight.abs().amax(others) if channels else weight.abs().amax()
    scale = (widest / 127).clamp_min(1e-6)
    qparams: dict[str, Any] = {
        "qscheme": torch.per_channel_symmetric if channels else torch.per_tensor_symmetric,
        "dtype": torch.qint8,
        "scale": scale,
        "zero_point": torch.zeros(scale.shape, dtype=torch.int64),
    }
    made = _REFERENCES[type(module)].from_float(
        module, {**qparams, "axis": 0} if channels else qparams
    )
    kind = choice.choice(("any", "any", "highest", "lowest", "ends"))
    if kind != "any":
        ends = {"highest": (127, 127), "lowest": (-128, -128), "ends": (-128, 127)}[kind]
        generator = torch.Generator().manual_seed(choice.randrange(1 << 30))
        picks = torch.randint(0, 2, made.weight.shape, generator=generator)
        made.weight.copy_((picks * (ends[1] - ends[0]) + ends[0]).to(torch.int8))
    return made
