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

from backquant.backend_config.checks import check_callable
from backquant.backend_config.naming import operator_name
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
class _Reordered:
    fuser: Fuser

    def __post_init__(self) -> None:
        check_callable(self.fuser, "fuser")

    def __repr__(self) -> str:
        is_data = isinstance(self.fuser, (SequentialFuser, _Reordered))
        name = repr(self.fuser) if is_data else operator_name(self.fuser)
        return f"{type(self).__name__}({name})"


class ReversedFuser(_Reordered):
    """Takes its modules as a reversed nested tuple and calls ``fuser`` in forward order.

    >>> swap = ReversedFuser(lambda is_qat, conv, bn, relu: [conv, bn, relu])
    >>> swap(False, "relu", ("bn", "conv"))
    ['conv', 'bn', 'relu']
    """

    def __call__(self, is_qat: bool, *modules: Any) -> Any:
        forward: list[Any] = []
        rest: Any = modules
        while isinstance(rest, tuple):
            if len(rest) != 2:
                raise SpecError(f"{rest!r} is not (last module, those before it)")
            last, rest = rest
            forward.append(last)
        return self.fuser(is_qat, rest, *reversed(forward))


class ForwardFuser(_Reordered):
    """Takes its modules in forward order and calls ``fuser`` with the reversed nested tuple.

    >>> ForwardFuser(lambda is_qat, relu, rest: (relu, rest))(False, "conv", "bn", "relu")
    ('relu', ('bn', 'conv'))
    """

    def __call__(self, is_qat: bool, *modules: Any) -> Any:
        if len(modules) < 2:
            raise SpecError(f"{self!r} takes two or more modules, got {len(modules)}")
        nested = modules[0]
        for module in modules[1:]:
            nested = (module, nested)
        return self.fuser(is_qat, *nested)


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
