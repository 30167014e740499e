"""Factories of observers: ``Observer.with_args(...)`` and ``Observer.with_callable_args(...)``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class ObserverPartial:
    """An observer class with some constructor arguments filled in; calling it makes an observer.

    ``p`` is one flat ``functools.partial`` over the class; ``callable_args`` maps argument names
    to functions that are called anew for every observer. Precedence, strongest first: arguments
    of the call, then ``callable_args``, then ``p.keywords``; the later ``with_*`` wins.

    >>> from backquant.observe import MinMaxObserver
    >>> factory = MinMaxObserver.with_args(quant_min=0).with_args(quant_max=127)
    >>> factory
    MinMaxObserver.with_args(quant_min=0, quant_max=127)
    >>> factory().quant_max
    127
    """

    def __init__(self, p: Any) -> None:
        self.p: Any = p
        self.callable_args: dict[str, Callable[[], Any]] = {}

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        fresh = {n: make() for n, make in self.callable_args.items() if n not in keywords}
        return self.p(*args, **{**keywords, **fresh})

    def with_args(self, **kwargs: Any) -> ObserverPartial:
        """A new factory in which ``kwargs`` replace arguments of the same name."""
        result = ObserverPartial(functools.partial(self.p, **kwargs))
        result.callable_args = {n: f for n, f in self.callable_args.items() if n not in kwargs}
        return result

    def with_callable_args(self, **kwargs: Callable[[], Any]) -> ObserverPartial:
        """A new factory that calls each value of ``kwargs`` at construction of an observer."""
        result = ObserverPartial(self.p)
        result.callable_args = {**self.callable_args, **kwargs}
        return result

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ObserverPartial):
            return NotImplemented
        return (
            bool(self.p.func == other.p.func)
            and bool(self.p.args == other.p.args)
            and _keywords_equal(self.p.keywords, other.p.keywords)
            and self.callable_args == other.callable_args
        )

    def __hash__(self) -> int:
        return factory_hash(self)

    def __repr__(self) -> str:
        name = getattr(self.p.func, "__name__", repr(self.p.func))
        text = f"{name}.with_args({_arguments(self.p.keywords)})"
        if self.callable_args:
            text += f".with_callable_args({_arguments(self.callable_args)})"
        return text


def with_args(cls: Any, /, **kwargs: Any) -> ObserverPartial:
    """A factory of ``cls`` with ``kwargs`` filled in; usable as a class method.

    >>> class Mine:
    ...     def __init__(self, a, b): self.sum = a + b
    ...     with_args = classmethod(with_args)
    >>> Mine.with_args(a=1)(b=2).sum
    3
    """
    return ObserverPartial(functools.partial(cls, **kwargs))


def with_callable_args(cls: Any, /, **kwargs: Callable[[], Any]) -> ObserverPartial:
    """A factory of ``cls`` that calls each value of ``kwargs`` for every new object.

    >>> class Mine:
    ...     def __init__(self, made): self.made = made
    ...     with_callable_args = classmethod(with_callable_args)
    >>> factory = Mine.with_callable_args(made=list)
    >>> factory().made is factory().made
    False
    """
    return ObserverPartial(functools.partial(cls)).with_callable_args(**kwargs)


def factories_equal(first: Any, second: Any) -> bool:
    """Whether two observer factories (classes or partials, PyTorch's included) make equal observers.

    A partial of PyTorch's is recognised by its attribute ``p``; ``observer=`` arguments are
    compared as factories in turn.

    >>> from backquant.observe import MinMaxObserver
    >>> factories_equal(MinMaxObserver.with_args(quant_min=0), MinMaxObserver.with_args(quant_min=0))
    True
    >>> factories_equal(MinMaxObserver, MinMaxObserver.with_args(quant_min=0))
    False
    """
    if first is second:
        return True
    one, two = getattr(first, "p", None), getattr(second, "p", None)
    if not isinstance(one, functools.partial) or not isinstance(two, functools.partial):
        return bool(first == second)
    return (
        factories_equal(one.func, two.func)
        and bool(one.args == two.args)
        and _keywords_equal(one.keywords, two.keywords)
        and getattr(first, "callable_args", {}) == getattr(second, "callable_args", {})
    )


def factory_hash(factory: Any) -> int:
    """A hash that is equal for factories that are equal (see ``factories_equal``).

    >>> from backquant.observe import MinMaxObserver
    >>> factory_hash(MinMaxObserver) == hash(MinMaxObserver)
    True
    """
    partial = getattr(factory, "p", None)
    if not isinstance(partial, functools.partial):
        return hash(factory)
    return hash((factory_hash(partial.func), frozenset(partial.keywords)))


def _keywords_equal(first: dict[str, Any], second: dict[str, Any]) -> bool:
    if first.keys() != second.keys():
        return False
    return all(factories_equal(value, second[name]) for name, value in first.items())


def _arguments(keywords: dict[str, Any]) -> str:
    return ", ".join(f"{name}={_readable(value)}" for name, value in keywords.items())


def _readable(value: Any) -> str:
    return value.__name__ if isinstance(value, type) else repr(value)
