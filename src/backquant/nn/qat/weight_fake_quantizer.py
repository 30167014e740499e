"""What QAT modules share: the fake-quantizer of their weight, the way from a float module and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn
from torch.nn.utils.parametrize import (
    is_parametrized,
    transfer_parametrizations_and_params,
    type_before_parametrizations,
)

from backquant.errors import ConfigError
from backquant.graph.hooks import removal_of
from backquant.observe.fake_quantize import FusedMovingAvgObsFakeQuantize

_Float = TypeVar("_Float", bound=nn.Module)
_QAT = TypeVar("_QAT", bound="QATModule")


class QATModule(nn.Module):
    """Comes before the float class in the bases of a QAT class.

    ``_FLOAT_MODULE``: the class that ``from_float`` takes; ``_ROOT``: the class of the operator itself, which
    differs where ``_FLOAT_MODULE`` is a fused sequence.
    """

    _FLOAT_MODULE: ClassVar[type[nn.Module]]
    _ROOT: ClassVar[type[nn.Module]]
    weight: torch.Tensor
    weight_fake_quant: nn.Module

    def _attach(self, qconfig: Any, room: str = "qat") -> None:
        """Take ``qconfig``, and a fake-quantizer of the weight from it; called by constructors."""
        self.qconfig = qconfig
        self.weight_fake_quant = weight_fake_quant_of(
            qconfig, f"{room}.{type(self).__name__}", self.weight.device
        )

    @classmethod
    def _arguments_of(cls, root: nn.Module) -> dict[str, Any]:
        """The constructor arguments of an operator like ``root``, without its tensors."""
        raise NotImplementedError

    def _take(self, float_module: nn.Module) -> None:
        """Take what of ``float_module`` is beside its root, or raise ``ConfigError``."""

    @classmethod
    def from_float(
        cls: type[_QAT],
        mod: nn.Module,
        use_precomputed_fake_quant: bool = False,  # noqa: ARG003
    ) -> _QAT:
        """The QAT form of ``mod``, which needs a ``qconfig``; it shares the tensors of ``mod``.

        Sharing keeps tied weights tied; copy ``mod`` first if it should not be trained.
        ``use_precomputed_fake_quant`` has no effect, as in PyTorch. Raises ``ConfigError`` for a module of
        another type, without ``qconfig``, whose batch norm cannot train, or with a ``qconfig`` that the class
        does not take.
        """
        float_module = checked_float_module(cls, mod, cls._FLOAT_MODULE)
        root = float_module[0] if isinstance(float_module, nn.Sequential) else float_module
        qat = cls(**cls._arguments_of(root), qconfig=float_module.qconfig, device="meta")
        qat._take(float_module)
        adopt(qat, root, mod)
        return qat

    def to_float(self) -> nn.Module:
        """A new float module with copies of the trained parameters."""
        make: Callable[..., nn.Module] = self._ROOT
        return fresh_float_copy(make(**self._arguments_of(self), device="meta"), self)


def weight_fake_quant_of(qconfig: Any, owner: str, device: torch.device | None = None) -> nn.Module:
    """A new fake quantize module from ``qconfig.weight``, on ``device``.

    Raises ``ConfigError`` when ``qconfig`` is missing or its ``weight`` gives no module.

    >>> from types import SimpleNamespace
    >>> weight_fake_quant_of(SimpleNamespace(weight=nn.Identity), "qat.Linear")
    Identity()
    """
    make = getattr(qconfig, "weight", None)
    fake_quant = make() if callable(make) else None
    if not isinstance(fake_quant, nn.Module):
        raise ConfigError(
            f"{owner} needs a QConfig whose weight is a fake quantize class, got {qconfig!r}",
            where=f"{owner}(..., qconfig=...)",
            fix="qconfig=backquant.get_default_qat_qconfig('x86')",
        )
    on_device = device is None or device.type == "meta"
    return fake_quant if on_device else fake_quant.to(device)


def checked_float_module(cls: type[nn.Module], module: nn.Module, expected: type[_Float]) -> _Float:
    """``module``, if it is exactly an ``expected`` with a ``qconfig``; else ``ConfigError``.

    >>> module = nn.Linear(1, 1); module.qconfig = "any"
    >>> checked_float_module(nn.Linear, module, nn.Linear) is module
    True
    """
    kind = type_before_parametrizations(module)
    if kind is not expected:
        raise ConfigError(
            f"{cls.__name__}.from_float takes a {expected.__module__}.{expected.__name__}, "
            f"got {kind.__module__}.{kind.__name__}",
            where=f"{cls.__module__}.{cls.__name__}.from_float(module)",
            fix="BackendPatternConfig(...).set_qat_module(the QAT class of that module)",
        )
    if not getattr(module, "qconfig", None):
        raise ConfigError(
            f"the {kind.__name__} to train has no qconfig",
            where=f"{cls.__module__}.{cls.__name__}.from_float(module)",
            fix="module.qconfig = backquant.get_default_qat_qconfig('x86')",
        )
    assert isinstance(module, expected)
    return module


def fresh_float_copy(float_module: _Float, qat_module: nn.Module) -> _Float:
    """Give ``float_module`` copies of weight and bias of ``qat_module``, and its training flag.

    >>> fresh_float_copy(nn.Linear(2, 1, device="meta"), nn.Linear(2, 1)).weight.device.type
    'cpu'
    """
    for name in ("weight", "bias"):
        if not hasattr(qat_module, name):  # embeddings have no bias
            continue
        value = getattr(qat_module, name)
        copy = None if value is None else nn.Parameter(value.detach().clone(), value.requires_grad)
        float_module.register_parameter(name, copy)
    float_module.train(qat_module.training)
    return float_module


def adopt(qat: nn.Module, root: nn.Module, float_module: nn.Module) -> None:
    """Finish ``from_float``: parameters of ``root``, device and training flag.

    >>> a, b = nn.Linear(1, 1, device="meta"), nn.Linear(1, 1).eval()
    >>> adopt(a, b, b); a.weight is b.weight, a.training
    (True, False)
    """
    take_parameters(qat, root)
    weight = root.weight
    if isinstance(weight, torch.Tensor) and "weight_fake_quant" in qat._modules:
        fake_quantize = qat.get_submodule("weight_fake_quant").to(weight.device)
        if isinstance(fake_quantize, FusedMovingAvgObsFakeQuantize):
            fake_quantize.take_shape(weight)
    qat.train(float_module.training)


def take_parameters(qat: nn.Module, linear: nn.Module) -> None:
    """Let ``qat`` share weight and bias of ``linear``, with their parametrizations.

    Raises ``ConfigError`` for a weight that a hook computes (``nn.utils.weight_norm``, ``prune``).

    >>> a, b = nn.Linear(1, 1), nn.Linear(1, 1)
    >>> take_parameters(a, b); a.weight is b.weight
    True
    """
    for name in ("weight", "bias"):
        if is_parametrized(linear, name):
            qat.register_parameter(name, nn.Parameter(_a_value(linear, name).detach()))
            transfer_parametrizations_and_params(linear, qat, name)
        elif hasattr(linear, name):  # embeddings have no bias
            value = getattr(linear, name)
            if value is not None and not isinstance(value, nn.Parameter):
                hooks = linear._forward_pre_hooks.values()
                removals = [removal_of(hook) for hook in hooks]
                raise ConfigError(
                    f"a {name} that is computed by a hook (old weight norm, pruning) cannot be trained",
                    where=f"{linear}",
                    fix=f"{'; '.join(removals)}, before the model is prepared; a parametrization "
                    "(torch.nn.utils.parametrizations) is trained as it is",
                )
            setattr(qat, name, value)


def _a_value(module: nn.Module, name: str) -> torch.Tensor:
    """A tensor to set parametrizations up with: the original, whose use changes none of their state."""
    parametrized = module.parametrizations[name]  # type: ignore[index]
    original: torch.Tensor | None = getattr(parametrized, "original", None)
    return getattr(module, name) if original is None else original
