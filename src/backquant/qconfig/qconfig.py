"""QConfig: how to measure the inputs, the weight and the output of an operator."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import nn

from backquant.dtypes import is_quantized
from backquant.errors import ConfigError
from backquant.observe import factories_equal, factory_hash


class _Pair(NamedTuple):
    activation: Any
    weight: Any


class QConfig(_Pair):
    """Observer classes or factories for activations and weight: a named tuple of two, as PyTorch's.

    The attribute ``output`` is another observer for outputs than for inputs; ``None``: ``activation`` is for
    both. Operators whose output shares its input's qparams do not use it.

    Each is called once per observed tensor, so it is a class, or ``Observer.with_args(...)``, or
    any callable that returns a new observer, but not an observer itself. ``torch.nn.Identity`` leaves the
    tensor unquantized. Raises ConfigError for an instance; what cannot be called is refused where an observer
    is made of it.

    >>> from backquant.observe import HistogramObserver, default_weight_observer
    >>> QConfig(activation=HistogramObserver, weight=default_weight_observer).weight().dtype
    torch.qint8
    """

    output: Any = None

    def __new__(cls, activation: Any, weight: Any, output: Any = None) -> QConfig:
        for role, factory in (("activation", activation), ("weight", weight), ("output", output)):
            _check_factory(role, factory)
        made = super().__new__(cls, activation, weight)
        if output is not None:
            made.output = output
        return made

    def _replace(self, **factories: Any) -> QConfig:
        own = {"activation": self.activation, "weight": self.weight, "output": self.output}
        return type(self)(**{**own, **factories})

    def __eq__(self, other: object) -> bool:
        return hasattr(other, "activation") and qconfig_equals(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash((factory_hash(self.activation), factory_hash(self.weight)))

    def __repr__(self) -> str:
        output = "" if self.output is None else f", output={_name(self.output)}"
        return f"QConfig(activation={_name(self.activation)}, weight={_name(self.weight)}{output})"


QConfigAny: TypeAlias = QConfig | None


def qconfig_equals(q1: Any, q2: Any) -> bool:
    """Whether two QConfigs (or None) make equal observers; PyTorch's QConfigs are understood, too.

    >>> from backquant.observe import MinMaxObserver
    >>> one = QConfig(MinMaxObserver.with_args(quant_min=0), MinMaxObserver)
    >>> two = QConfig(MinMaxObserver.with_args(quant_min=0), MinMaxObserver)
    >>> qconfig_equals(one, two), qconfig_equals(one, None)
    (True, False)
    """
    if q1 is q2 or q1 is None or q2 is None:
        return q1 is q2
    roles = ("weight", "output")
    return factories_equal(getattr(q1, "activation", q1), getattr(q2, "activation", q2)) and all(
        factories_equal(getattr(q1, r, None), getattr(q2, r, None)) for r in roles
    )


def _check_factory(role: str, factory: Any) -> None:
    if isinstance(factory, nn.Module):
        name = type(factory).__name__
        raise ConfigError(
            f"QConfig got an instance of {name} as {role}; it makes an observer per tensor",
            where=f"QConfig({role}={name}(...))",
            fix=f"{role}={name}, or {role}={name}.with_args(...) to set its arguments",
        )


def _name(factory: Any) -> str:
    return factory.__name__ if isinstance(factory, type) else repr(factory)


# How a module is quantized: dynamic, static, trained, or its weight only.


class QuantType(IntEnum):
    """Kinds of quantization, numbered as PyTorch numbers them.

    >>> QuantType.STATIC.key
    'static'
    """

    DYNAMIC = 0
    STATIC = 1
    QAT = 2
    WEIGHT_ONLY = 3

    @property
    def key(self) -> str:
        """The name used as a key in dicts."""
        return self.name.lower()


def quant_type_from_str(name: str) -> QuantType:
    """The inverse of ``QuantType.key``; raises ConfigError for an unknown name.

    >>> quant_type_from_str("weight_only")
    <QuantType.WEIGHT_ONLY: 3>
    """
    for quant_type in QuantType:
        if quant_type.key == name:
            return quant_type
    raise ConfigError(
        f"{name!r} is no kind of quantization",
        where="quant_type_from_str",
        fix="use one of " + ", ".join(repr(kind.key) for kind in QuantType),
    )


def quant_type_of(
    activation: torch.dtype, activation_is_dynamic: bool, weight: torch.dtype
) -> QuantType | None:
    """The kind of quantization that a QConfig asks for, from the dtypes of what it makes.

    ``None`` for what PyTorch knows no kind of, such as float32 weights.

    >>> quant_type_of(torch.float32, False, torch.qint8)
    <QuantType.WEIGHT_ONLY: 3>
    """
    if is_quantized(weight):
        if activation_is_dynamic:
            return QuantType.DYNAMIC
        return QuantType.STATIC if is_quantized(activation) else QuantType.WEIGHT_ONLY
    if weight == torch.float16:
        if activation_is_dynamic:
            return QuantType.DYNAMIC
        return QuantType.STATIC if activation == torch.float16 else None
    return None
