"""What a QConfig asks for, read off the observers that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from backquant.errors import ConfigError
from backquant.match.plan import TensorRequest
from backquant.observe.protocol import (
    is_fake_quantize,
    is_fixed_qparams,
    is_observer_or_fake_quantize,
    lacks_of_observer,
)
from backquant.qconfig import QConfig


class QConfigReader:
    """Reads each factory once, however many nodes it applies to.

    >>> from backquant.observe import MinMaxObserver
    >>> asks = QConfigReader()
    >>> narrow = MinMaxObserver.with_args(quant_min=0, quant_max=127)
    >>> ask = asks.activation(QConfig(narrow, MinMaxObserver), "")
    >>> ask.dtype, ask.quant_min, ask.quant_max
    (torch.quint8, 0, 127)
    """

    def __init__(self) -> None:
        self._known: dict[int, tuple[Any, TensorRequest]] = {}

    def activation(self, qconfig: QConfig | None, where: str) -> TensorRequest | None:
        """What is asked for inputs, and for outputs unless ``output`` is; ``where``: the rule, for errors."""
        return None if qconfig is None else self._read(qconfig.activation, f"{where}, activation")

    def output(self, qconfig: QConfig | None, where: str) -> TensorRequest | None:
        """What is asked for outputs, where it is not as for inputs."""
        return self._read(getattr(qconfig, "output", None), f"{where}, output")

    def weight(self, qconfig: QConfig | None, where: str) -> TensorRequest | None:
        """What is asked for the weight."""
        return None if qconfig is None else self._read(qconfig.weight, f"{where}, weight")

    def _read(self, factory: Callable[[], Any] | None, where: str) -> TensorRequest | None:
        if factory is None:
            return None
        if id(factory) not in self._known:
            # The cache holds the factory, so that no other object can get its id.
            self._known[id(factory)] = (factory, _request(factory, where))
        return self._known[id(factory)][1]


def _request(factory: Callable[[], Any], where: str) -> TensorRequest:
    try:
        made = factory()
    except Exception as error:
        name = getattr(factory, "__name__", repr(factory))
        raise ConfigError(
            f"a QConfig makes no observer: {name} raised {type(error).__name__}: {error}",
            where=where.strip(", "),
            fix="a class, or Class.with_args(...), that is called without arguments",
        ) from error
    if isinstance(made, nn.Identity):  # weight-only QConfigs have it as activation: not observed
        return TensorRequest(torch.float32, "Identity", spelled="PlaceholderObserver")
    if not is_observer_or_fake_quantize(made):
        raise ConfigError(
            f"a QConfig makes a {type(made).__name__}, which is neither an observer nor a "
            f"fake-quantizer: {lacks_of_observer(made)}",
            where=where.strip(", "),
            fix="its class needs an attribute dtype, forward(x) -> x, and "
            "calculate_qparams() -> (scale, zero_point)",
        )
    measured = _measuring(made)
    fixed = is_fixed_qparams(made) or is_fixed_qparams(measured)
    return TensorRequest(
        dtype=made.dtype,
        observer=type(made).__name__,
        qscheme=str(getattr(measured, "qscheme", None) or "").removeprefix("torch."),
        quant_min=getattr(measured, "quant_min", None),
        quant_max=getattr(measured, "quant_max", None),
        eps=_number(getattr(measured, "eps", None)),
        is_dynamic=bool(getattr(made, "is_dynamic", False)),
        ch_axis=_axis(measured),
        scale=_number(measured.scale) if fixed else None,
        zero_point=_whole(measured.zero_point) if fixed else None,
        is_fake_quantize=is_fake_quantize(made),
        spelled=factory.__name__ if isinstance(factory, type) else repr(factory),
        granularity=str(getattr(measured, "granularity", None) or ""),
    )


def _measuring(made: nn.Module) -> nn.Module:
    """The observer inside a fake-quantizer, or the observer itself."""
    inner = getattr(made, "activation_post_process", None)
    return inner if isinstance(inner, nn.Module) else made


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float, torch.Tensor)) else None


def _whole(value: Any) -> int | None:
    number = _number(value)
    return None if number is None else int(number)


def _axis(measured: nn.Module) -> int | None:
    axis = getattr(measured, "ch_axis", None)
    per_channel = "per_channel" in str(getattr(measured, "qscheme", ""))
    return axis if isinstance(axis, int) and per_channel else None
