"""Fusers as data: sequential wrappers, and the change between the two argument orders.

A fuser is ``f(is_qat, *modules) -> module``. Its modules stand in the order of the pattern it
belongs to: of a forward tuple ``(conv, bn, relu)`` as ``f(is_qat, conv, bn, relu)``; of a reversed
nested tuple ``(relu, (bn, conv))`` as ``f(is_qat, relu, (bn, conv))``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import torch

from backquant.backend_config.checks import (
    check_callable,
    check_choice,
    check_count,
    check_module_class,
)
from backquant.backend_config.graph_pattern import as_getter
from backquant.backend_config.kinds import Kind
from backquant.backend_config.naming import operator_label, operator_name, spelled
from backquant.backend_config.observation import ObservationType, check_observation_type
from backquant.errors import SpecError

Fuser: TypeAlias = Callable[..., Any]
_FuserT = TypeVar("_FuserT", bound=Callable[..., Any])
_MARK = "folds_for_inference_only"


@dataclass(frozen=True, repr=False)
class SequentialFuser:
    """Fuses ``arity`` modules into ``module_class(*modules)``, for QAT and for inference alike.

    Two of the same class are equal. Raises ``SpecError`` for another number of modules.

    >>> fuse = SequentialFuser(torch.nn.Sequential)
    >>> fuse(False, torch.nn.Linear(2, 2), torch.nn.ReLU())[1]
    ReLU()
    >>> fuse == SequentialFuser(torch.nn.Sequential)
    True
    """

    module_class: Callable[..., torch.nn.Module]
    arity: int = 2

    def __post_init__(self) -> None:
        check_callable(self.module_class, "module_class")

    def __call__(
        self,
        is_qat: bool,  # noqa: ARG002  # every fuser takes it
        *modules: torch.nn.Module,
    ) -> torch.nn.Module:
        if len(modules) != self.arity:
            raise SpecError(f"{self!r} takes {self.arity} modules, got {len(modules)}")
        return self.module_class(*modules)

    @property
    def __signature__(self) -> inspect.Signature:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        names = ["is_qat", *(f"module{i}" for i in range(self.arity))]
        return inspect.Signature([inspect.Parameter(name, kind) for name in names])

    def __repr__(self) -> str:
        arity = "" if self.arity == 2 else f", arity={self.arity}"
        return f"SequentialFuser({operator_name(self.module_class)}{arity})"


@dataclass(frozen=True, repr=False)
class ReversedFuser:
    """Takes its modules as a reversed nested tuple and calls ``fuser`` in forward order.

    >>> swap = ReversedFuser(lambda is_qat, conv, bn, relu: [conv, bn, relu])
    >>> swap(False, "relu", ("bn", "conv"))
    ['conv', 'bn', 'relu']
    """

    fuser: Fuser

    def __post_init__(self) -> None:
        check_callable(self.fuser, "fuser")

    def __call__(self, is_qat: bool, *modules: Any) -> Any:
        forward: list[Any] = []
        rest: Any = modules
        while isinstance(rest, tuple):
            if len(rest) != 2:
                raise SpecError(f"{rest!r} is not (last module, those before it)")
            last, rest = rest
            forward.append(last)
        return self.fuser(is_qat, rest, *reversed(forward))

    def __repr__(self) -> str:
        return f"ReversedFuser({_fuser_name(self.fuser)})"


@dataclass(frozen=True, repr=False)
class ForwardFuser:
    """Takes its modules in forward order and calls ``fuser`` with the reversed nested tuple.

    >>> ForwardFuser(lambda is_qat, relu, rest: (relu, rest))(False, "conv", "bn", "relu")
    ('relu', ('bn', 'conv'))
    """

    fuser: Fuser

    def __post_init__(self) -> None:
        check_callable(self.fuser, "fuser")

    def __call__(self, is_qat: bool, *modules: Any) -> Any:
        if len(modules) < 2:
            raise SpecError(f"{self!r} takes two or more modules, got {len(modules)}")
        nested = modules[0]
        for module in modules[1:]:
            nested = (module, nested)
        return self.fuser(is_qat, *nested)

    def __repr__(self) -> str:
        return f"ForwardFuser({_fuser_name(self.fuser)})"


def reverse_sequential_wrapper2(sequential: Callable[..., torch.nn.Module]) -> ReversedFuser:
    """A fuser for a reversed pattern ``(last, first)`` that returns ``sequential(first, last)``.

    Configs written for PyTorch 1.13 use it; current ones take ``SequentialFuser``.

    >>> fuse = reverse_sequential_wrapper2(torch.nn.Sequential)
    >>> fuse(False, torch.nn.ReLU(), torch.nn.Linear(2, 2))[1]
    ReLU()
    """
    return ReversedFuser(SequentialFuser(sequential))


def folds_for_inference_only(fuser: _FuserT) -> _FuserT:
    """Mark a fuser that folds a batch norm for inference and has no form of it for training.

    ``prepare_qat_fx`` then does not fuse patterns with a batch norm; without the mark it calls the fuser with
    ``is_qat=True``, as PyTorch does.

    >>> @folds_for_inference_only
    ... def fuse(is_qat, root, bn): ...
    >>> is_for_inference_only(in_forward_order(in_reversed_order(fuse)))
    True
    """
    setattr(fuser, _MARK, True)
    return fuser


def is_for_inference_only(fuser: Fuser | None) -> bool:
    """Whether ``fuser`` has the mark of ``folds_for_inference_only``, itself or inside of a wrapper.

    >>> is_for_inference_only(SequentialFuser(torch.nn.Sequential))
    False
    """
    while isinstance(fuser, (ReversedFuser, ForwardFuser)):
        fuser = fuser.fuser
    return bool(getattr(fuser, _MARK, False))


def in_forward_order(fuser: Fuser) -> Fuser:
    """The fuser that takes in forward order what ``fuser`` takes as reversed nested tuple.

    >>> in_forward_order(reverse_sequential_wrapper2(torch.nn.Sequential))
    SequentialFuser(torch.nn.Sequential)
    """
    return fuser.fuser if isinstance(fuser, ReversedFuser) else ForwardFuser(fuser)


def in_reversed_order(fuser: Fuser) -> Fuser:
    """The fuser that takes as reversed nested tuple what ``fuser`` takes in forward order.

    >>> fuse = in_reversed_order(SequentialFuser(torch.nn.Sequential))
    >>> fuse == reverse_sequential_wrapper2(torch.nn.Sequential)
    True
    """
    return fuser.fuser if isinstance(fuser, ForwardFuser) else ReversedFuser(fuser)


def _fuser_name(fuser: Fuser) -> str:
    data = isinstance(fuser, (SequentialFuser, ReversedFuser, ForwardFuser))
    return repr(fuser) if data else operator_name(fuser)


# Kinds of values that the fields of an entry take.


class OnePattern(Kind):
    """A pattern, in one of the two forms."""

    def source(self, value: Any) -> str:
        return spelled(value)


class Observation(Kind):
    """An ``ObservationType``."""

    @property
    def default(self) -> Any:
        return ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT

    def check(self, value: Any, field: str) -> Any:
        check_observation_type(value, field)
        return value

    def words(self, value: Any) -> str:
        return str(value.name)


class ModuleClass(Kind):
    """A class of modules."""

    def check(self, value: Any, field: str) -> Any:
        return check_module_class(value, field)

    def source(self, value: Any) -> str:
        return spelled(value)

    def words(self, value: Any) -> str:
        return operator_label(value)


class Function(Kind):
    """A function: a fuser, a factory of observers."""

    def check(self, value: Any, field: str) -> Any:
        return check_callable(value, field)

    def source(self, value: Any) -> str:
        return spelled(value)

    def words(self, value: Any) -> str:
        named = isinstance(value, type) or hasattr(value, "__qualname__")
        return operator_label(value) if named else str(value)


@dataclass(frozen=True)
class Getter(Function):
    """A function of the matched nodes that chooses one, or ``several``; or their names."""

    several: bool

    def check(self, value: Any, field: str) -> Any:
        return as_getter(value, field, several=self.several)


class _Mapping(Kind):
    @property
    def default(self) -> Any:
        return {}

    def to_data(self, value: Any) -> Any:
        return dict(value)

    def words(self, value: Any) -> str:
        return ", ".join(f"{key}: {getattr(item, 'name', item)}" for key, item in value.items())


class ByCount(_Mapping):
    """Observation types by the number of tensor arguments."""

    def check(self, value: Any, field: str) -> Any:
        mapping = dict(value)
        for count, observation_type in mapping.items():
            place = f"{field}[{count!r}]"
            check_count(count, place)
            check_observation_type(observation_type, place)
        return mapping


class Positions(_Mapping):
    """Positions of tensors among the arguments of a call, by what they are."""

    def check(self, value: Any, field: str) -> Any:
        mapping = dict(value)
        for name, index in mapping.items():
            check_choice(name, field, ("input", "weight", "bias"))
            check_count(index, f"{field}[{name!r}]")
        return mapping


class Ports(_Mapping):
    """How the inputs and the output of a graph pattern are observed, by name."""
