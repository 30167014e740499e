"""Fused float modules: sequences that a backend runs as one operator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.errors import ConfigError


class FusedModule(nn.Module):
    """Marks every module that stands for several: the sequences below, and their QAT forms.

    >>> isinstance(LinearReLU(nn.Linear(2, 2), nn.ReLU()), FusedModule)
    True
    """


class _FusedSequence(nn.Sequential, FusedModule):
    """A sequence of fixed types, its children named ``"0"``, ``"1"``, … as in PyTorch.

    Subclasses only list their parts, by the argument names of the constructor. ``ConfigError`` is
    raised for modules of other types; a subclass of a part counts as another type, because whoever
    replaces the sequence by one kernel cannot know what the subclass does.
    """

    _parts: ClassVar[Mapping[str, type[nn.Module]]]

    def __init__(self, *modules: nn.Module, **named: nn.Module) -> None:
        parts = self._in_order(modules, named)
        wrong = [type_before_parametrizations(part) for part in parts]
        if wrong != list(self._parts.values()):
            raise self._error(f"cannot be made of {', '.join(kind.__name__ for kind in wrong)}")
        super().__init__(*parts)
        self.training = parts[0].training

    @classmethod
    def _in_order(
        cls, modules: tuple[nn.Module, ...], named: Mapping[str, nn.Module]
    ) -> list[nn.Module]:
        names = list(cls._parts)
        given = {**dict(zip(names, modules, strict=False)), **named}
        if len(modules) + len(named) != len(names) or set(given) != set(names):
            raise cls._error(f"takes {len(names)} modules, got {len(modules) + len(named)}")
        return [given[name] for name in names]

    @classmethod
    def _error(cls, what: str) -> ConfigError:
        parts = ", ".join(f"{name}: nn.{kind.__name__}" for name, kind in cls._parts.items())
        return ConfigError(
            f"{cls.__name__} {what}",
            where=f"backquant.nn.intrinsic.{cls.__name__}(...)",
            fix=f"{cls.__name__}({parts})",
        )

    def __getitem__(self, index: Any) -> Any:
        """A child; a slice gives a plain ``nn.Sequential`` of children."""
        if isinstance(index, slice):
            return nn.Sequential(*list(self)[index])
        return super().__getitem__(index)


class ConvReLU1d(_FusedSequence):
    """Conv1d, ReLU.

    >>> ConvReLU1d(nn.Conv1d(1, 2, 3), nn.ReLU())(torch.ones(1, 1, 4)).shape
    torch.Size([1, 2, 2])
    """

    _parts: ClassVar = {"conv": nn.Conv1d, "relu": nn.ReLU}


class ConvReLU2d(_FusedSequence):
    """Conv2d, ReLU.

    >>> list(ConvReLU2d(nn.Conv2d(1, 2, 3), nn.ReLU()).state_dict())
    ['0.weight', '0.bias']
    """

    _parts: ClassVar = {"conv": nn.Conv2d, "relu": nn.ReLU}


class ConvReLU3d(_FusedSequence):
    """Conv3d, ReLU.

    >>> ConvReLU3d(nn.Conv3d(1, 2, 1), nn.ReLU())(torch.ones(1, 1, 2, 2, 2)).shape
    torch.Size([1, 2, 2, 2, 2])
    """

    _parts: ClassVar = {"conv": nn.Conv3d, "relu": nn.ReLU}


class ConvBn1d(_FusedSequence):
    """Conv1d, BatchNorm1d: waits for quantization-aware training.

    >>> ConvBn1d(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2))(torch.ones(2, 1, 4)).shape
    torch.Size([2, 2, 2])
    """

    _parts: ClassVar = {"conv": nn.Conv1d, "bn": nn.BatchNorm1d}


class ConvBn2d(_FusedSequence):
    """Conv2d, BatchNorm2d: waits for quantization-aware training.

    >>> type(ConvBn2d(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2))[1]).__name__
    'BatchNorm2d'
    """

    _parts: ClassVar = {"conv": nn.Conv2d, "bn": nn.BatchNorm2d}


class ConvBn3d(_FusedSequence):
    """Conv3d, BatchNorm3d: waits for quantization-aware training.

    >>> len(ConvBn3d(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)))
    2
    """

    _parts: ClassVar = {"conv": nn.Conv3d, "bn": nn.BatchNorm3d}


class ConvBnReLU1d(_FusedSequence):
    """Conv1d, BatchNorm1d, ReLU: waits for quantization-aware training.

    >>> len(ConvBnReLU1d(nn.Conv1d(1, 2, 3), nn.BatchNorm1d(2), nn.ReLU()))
    3
    """

    _parts: ClassVar = {"conv": nn.Conv1d, "bn": nn.BatchNorm1d, "relu": nn.ReLU}


class ConvBnReLU2d(_FusedSequence):
    """Conv2d, BatchNorm2d, ReLU: waits for quantization-aware training.

    >>> len(ConvBnReLU2d(conv=nn.Conv2d(1, 2, 3), bn=nn.BatchNorm2d(2), relu=nn.ReLU()))
    3
    """

    _parts: ClassVar = {"conv": nn.Conv2d, "bn": nn.BatchNorm2d, "relu": nn.ReLU}


class ConvBnReLU3d(_FusedSequence):
    """Conv3d, BatchNorm3d, ReLU: waits for quantization-aware training.

    >>> len(ConvBnReLU3d(nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2), nn.ReLU()))
    3
    """

    _parts: ClassVar = {"conv": nn.Conv3d, "bn": nn.BatchNorm3d, "relu": nn.ReLU}


class BNReLU2d(_FusedSequence):
    """BatchNorm2d, ReLU.

    >>> BNReLU2d(nn.BatchNorm2d(2).eval(), nn.ReLU())(-torch.ones(1, 2, 1, 1)).max().item()
    0.0
    """

    _parts: ClassVar = {"batch_norm": nn.BatchNorm2d, "relu": nn.ReLU}


class BNReLU3d(_FusedSequence):
    """BatchNorm3d, ReLU.

    >>> len(BNReLU3d(nn.BatchNorm3d(2), nn.ReLU()))
    2
    """

    _parts: ClassVar = {"batch_norm": nn.BatchNorm3d, "relu": nn.ReLU}


class LinearReLU(_FusedSequence):
    """Linear, ReLU.

    >>> LinearReLU(nn.Linear(3, 2), nn.Tanh())
    Traceback (most recent call last):
        ...
    backquant.errors.ConfigError: LinearReLU cannot be made of Linear, Tanh
      where  backquant.nn.intrinsic.LinearReLU(...)
      fix    LinearReLU(linear: nn.Linear, relu: nn.ReLU)
    """

    _parts: ClassVar = {"linear": nn.Linear, "relu": nn.ReLU}


class LinearBn1d(_FusedSequence):
    """Linear, BatchNorm1d: waits for quantization-aware training.

    >>> len(LinearBn1d(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    2
    """

    _parts: ClassVar = {"linear": nn.Linear, "bn": nn.BatchNorm1d}


class LinearLeakyReLU(_FusedSequence):
    """Linear, LeakyReLU.

    >>> LinearLeakyReLU(nn.Linear(3, 2), nn.LeakyReLU(0.1))[1].negative_slope
    0.1
    """

    _parts: ClassVar = {"linear": nn.Linear, "leaky_relu": nn.LeakyReLU}


class LinearTanh(_FusedSequence):
    """Linear, Tanh.

    >>> LinearTanh(nn.Linear(3, 2), nn.Tanh())(torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """

    _parts: ClassVar = {"linear": nn.Linear, "tanh": nn.Tanh}


class ConvAdd2d(nn.Sequential, FusedModule):
    """``add(conv(x1), x2)``: child ``"0"`` is the convolution, ``add`` a function or a module.

    >>> x = torch.ones(1, 1, 2, 2)
    >>> ConvAdd2d(nn.Conv2d(1, 1, 1), torch.add)(x, x).shape
    torch.Size([1, 1, 2, 2])
    """

    def __init__(self, conv: nn.Module, add: Callable[..., torch.Tensor]) -> None:
        super().__init__(conv)
        self.add = _callable("ConvAdd2d", add)
        self.training = conv.training

    def forward(  # type: ignore[override]  # two inputs, as in PyTorch
        self, x1: torch.Tensor, x2: torch.Tensor
    ) -> torch.Tensor:
        """``x1`` is the convolution's input, ``x2`` of the shape of its output."""
        return self.add(self[0](x1), x2)


class ConvAddReLU2d(nn.Sequential, FusedModule):
    """``relu(add(conv(x1), x2))``: child ``"0"`` is the convolution.

    >>> block = ConvAddReLU2d(nn.Conv2d(1, 1, 1), torch.add, nn.ReLU())
    >>> block(torch.ones(1, 1, 2, 2), torch.ones(1, 1, 2, 2)).shape
    torch.Size([1, 1, 2, 2])
    """

    def __init__(
        self,
        conv: nn.Module,
        add: Callable[..., torch.Tensor],
        relu: Callable[..., torch.Tensor],
    ) -> None:
        super().__init__(conv)
        self.add = _callable("ConvAddReLU2d", add)
        self.relu = _callable("ConvAddReLU2d", relu)
        self.training = conv.training

    def forward(  # type: ignore[override]  # two inputs, as in PyTorch
        self, x1: torch.Tensor, x2: torch.Tensor
    ) -> torch.Tensor:
        """``x1`` is the convolution's input, ``x2`` of the shape of its output."""
        return self.relu(self.add(self[0](x1), x2))


def _callable(owner: str, part: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    if callable(part):
        return part
    raise ConfigError(
        f"{owner} needs functions or modules, got {part!r}",
        where=f"backquant.nn.intrinsic.{owner}(...)",
        fix=f"{owner}(conv, torch.add, ...)",
    )
