"""QConfig: how to measure the inputs, the weight and the output of an operator."""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

from torch import nn

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
