"""Methods that a model's own submodule of the same name hides: graphs call their children by name."""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any, TypeVar, cast

_Method = TypeVar("_Method", bound=Callable[..., Any])


class _ChildFirst:
    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method
        self.__doc__ = method.__doc__

    def __get__(self, module: Any, owner: type) -> Any:
        if module is None:
            return self._method
        child = module._modules.get(self._method.__name__)
        return MethodType(self._method, module) if child is None else child


def child_first(method: _Method) -> _Method:
    """``method`` of a module, unless the module has a child of its name.

    >>> from torch import nn
    >>> class Saved(nn.Sequential):
    ...     @child_first
    ...     def save(self):
    ...         return "saved"
    >>> model = Saved()
    >>> model.save()
    'saved'
    >>> model.save = nn.ReLU()
    >>> model.save
    ReLU()
    """
    return cast(_Method, _ChildFirst(method))
