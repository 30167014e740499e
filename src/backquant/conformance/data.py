"""What models are calibrated and called with: ranges that put scales and zero points where they are wanted,
values at the ends of them, and the same values in other memory."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from backquant.conformance.models import Input
from backquant.lower.kernels.prepared import channels_last

#: Where the zero point comes to lie: between, at either end; and scales that are large and small.
RANGES: dict[str, tuple[float, float]] = {
    "around zero": (-1.0, 1.3),
    "around zero, on another scale": (-0.9, 1.1),
    "zero point at the lower end": (0.0, 2.0),
    "zero point at the upper end": (-1.7, 0.0),
    "wide": (-30.0, 50.0),
    "narrow": (-0.004, 0.003),
}


@dataclass(frozen=True)
class Probe:
    """One call: what ``values`` the inputs have, how they lie in memory, and the size of the batch
    (``None``: that of the example)."""

    values: str
    layout: str = "contiguous"
    batch: int | None = None

    def __str__(self) -> str:
        batch = "" if self.batch is None else f", batch {self.batch}"
        layout = "" if self.layout == "contiguous" else f", {self.layout}"
        return f"{self.values}{batch}{layout}"


PROBES = (
    Probe("any"),
    Probe("lowest"),
    Probe("highest"),
    Probe("ends"),
    Probe("beyond"),
    Probe("any", batch=1),
    Probe("any", batch=0),
    Probe("any", batch=5),
    Probe("any", "channels last"),
    Probe("any", "transposed"),
    Probe("any", "sliced"),
)


def drawn_ranges(count: int, choice: random.Random, number: int) -> list[str]:
    """A range by name for each input; the first model has values on both sides of zero, and scales of which
    none is a multiple of another: sums of equal scales lie between two integers every other time.

    >>> drawn_ranges(2, random.Random(0), 0)
    ['around zero', 'around zero, on another scale']
    """
    if number == 0:
        return [list(RANGES)[at % 2] for at in range(count)]
    return [choice.choice(list(RANGES)) for _ in range(count)]


def calibration(inputs: Sequence[Input], ranges: Sequence[str]) -> tuple[Tensor, ...]:
    """Values over the whole of each range, its ends among them."""
    return tuple(
        _calibrating(given, RANGES[name]) for given, name in zip(inputs, ranges, strict=True)
    )


def _calibrating(given: Input, span: tuple[float, float]) -> Tensor:
    if given.integers is not None:
        return torch.randint(given.integers, given.shape)
    value = torch.rand(given.shape) * (span[1] - span[0]) + span[0]
    flat = value.view(-1)
    if flat.numel() > 1:
        flat[0], flat[-1] = span
    return value


def called_with(
    probe: Probe, inputs: Sequence[Input], ranges: Sequence[str], grids: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The inputs of one call. ``grids``: scale and zero point of each input, on which its values lie."""
    made = []
    for given, name, grid in zip(inputs, ranges, grids, strict=True):
        shape = given.shape
        if probe.batch is not None:
            shape = (probe.batch, *shape[1:])
        value = (
            torch.randint(given.integers, shape)
            if given.integers is not None
            else _on_grid(_values(probe.values, shape, RANGES[name]), grid)
        )
        made.append(_LAYOUTS[probe.layout](value))
    return tuple(made)


def _values(kind: str, shape: tuple[int, ...], span: tuple[float, float]) -> Tensor:
    low, high = span
    if kind == "lowest":
        return torch.full(shape, low)
    if kind == "highest":
        return torch.full(shape, high)
    if kind == "ends":
        return torch.randint(0, 2, shape) * (high - low) + low
    drawn = torch.rand(shape)
    if kind == "beyond":
        return (drawn * 3 - 1) * (high - low) + low
    return drawn * (high - low) + low


def _on_grid(value: Tensor, grid: Tensor | None) -> Tensor:
    """Values that a quantize node gives back as they are, so that what is compared is the operator."""
    if grid is None:
        return value
    scale = grid[0]
    return ((value.double() / scale).round() * scale).float()


def _transposed(x: Tensor) -> Tensor:
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if x.dim() > 1 else x


def _sliced(x: Tensor) -> Tensor:
    """Every other element of a larger tensor, along the last axis."""
    if not x.dim():
        return x
    large = x.new_zeros((*x.shape[:-1], 2 * x.shape[-1] + 1))
    view = large[..., 1::2]
    view.copy_(x)
    return view


_LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "contiguous": lambda x: x,
    "channels last": channels_last,
    "transposed": _transposed,
    "sliced": _sliced,
}


def input_grids(prepared: fx.GraphModule) -> list[Tensor | None]:
    """Scale and zero point that the observer of each input has found; ``None`` where there is none."""
    found: list[Tensor | None] = []
    modules = dict(prepared.named_modules(remove_duplicate=False))  # shared observers, too
    for node in prepared.graph.nodes:
        if node.op != "placeholder":
            continue
        grid = None
        for user in node.users:
            observer = modules.get(str(user.target)) if user.op == "call_module" else None
            if hasattr(observer, "calculate_qparams") and not getattr(
                observer, "is_dynamic", False
            ):
                grid = _grid_of(observer)
        found.append(grid)
    return found


def _grid_of(observer: object) -> Tensor | None:
    try:
        scale, zero_point = observer.calculate_qparams()  # type: ignore[attr-defined]
    except Exception:  # one that stands for a float dtype has none
        return None
    if scale is None or scale.numel() != 1:
        return None
    return torch.stack([scale.double().reshape(()), zero_point.double().reshape(())])


def output_scale(prepared: fx.GraphModule) -> float | None:
    """The scale that the observer of the result has found."""
    [output] = (node for node in prepared.graph.nodes if node.op == "output")
    result = output.args[0]
    if not isinstance(result, fx.Node) or result.op != "call_module":
        return None
    observer = prepared.get_submodule(str(result.target))
    grid = _grid_of(observer) if hasattr(observer, "calculate_qparams") else None
    return None if grid is None else float(grid[0])
