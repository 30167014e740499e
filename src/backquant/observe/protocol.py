"""What counts as an observer or a fake-quantizer: ours, or any module with the same methods.

A class written against PyTorch's base classes is recognised by its methods, or, for kinds that
differ only in meaning, by the name of the class in its inheritance; nothing of PyTorch's own
quantization package is imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from backquant.dtypes import (
    Granularity,
    ObservedQParams,
    find_dtype,
    is_narrow_float,
    is_per_channel,
    is_per_tensor,
)
from backquant.errors import BackquantError, ConfigError


def is_observer_or_fake_quantize(module: Any) -> bool:
    """Whether ``module`` is an ``nn.Module`` that measures: it has ``calculate_qparams`` and a dtype.

    >>> import torch
    >>> from backquant.observe import MinMaxObserver
    >>> is_observer_or_fake_quantize(MinMaxObserver()), is_observer_or_fake_quantize(nn.ReLU())
    (True, False)
    """
    if not isinstance(module, nn.Module):
        return False
    if not callable(getattr(module, "calculate_qparams", None)):
        return False
    return any(hasattr(module, name) for name in ("dtype", "target_dtype", "fake_quant_enabled"))


def lacks_of_observer(module: Any) -> str:
    """What ``module`` lacks to be an observer, in words; empty if it is one.

    >>> lacks_of_observer(nn.ReLU())
    'it has no method calculate_qparams() and no attribute dtype'
    """
    if is_observer_or_fake_quantize(module):
        return ""
    if not isinstance(module, nn.Module):
        return "it is no nn.Module"
    lacks = []
    if not callable(getattr(module, "calculate_qparams", None)):
        lacks.append("no method calculate_qparams()")
    if not any(hasattr(module, name) for name in ("dtype", "target_dtype", "fake_quant_enabled")):
        lacks.append("no attribute dtype")
    return f"it has {' and '.join(lacks)}"


def is_fake_quantize(module: Any) -> bool:
    """Whether ``module`` is a fake-quantizer: an observer whose rounding can be switched.

    >>> from backquant.observe import FakeQuantize, MinMaxObserver
    >>> is_fake_quantize(FakeQuantize()), is_fake_quantize(MinMaxObserver())
    (True, False)
    """
    return is_observer_or_fake_quantize(module) and all(
        callable(getattr(module, name, None))
        for name in (
            "enable_fake_quant",
            "disable_fake_quant",
            "enable_observer",
            "disable_observer",
        )
    )


def is_placeholder(module: Any) -> bool:
    """Whether ``module`` only carries a dtype: a ``PlaceholderObserver`` of ours or PyTorch's.

    >>> from backquant.observe import PlaceholderObserver
    >>> is_placeholder(PlaceholderObserver())
    True
    """
    return _descends_from(module, "PlaceholderObserver")


def is_noop(module: Any) -> bool:
    """Whether ``module`` is a ``NoopObserver``.

    >>> from backquant.observe import NoopObserver
    >>> is_noop(NoopObserver())
    True
    """
    return _descends_from(module, "NoopObserver")


def is_reuse_input(module: Any) -> bool:
    """Whether ``module`` asks for the observer of the operator's input: a ``ReuseInputObserver``.

    >>> from backquant.observe import ReuseInputObserver
    >>> is_reuse_input(ReuseInputObserver())
    True
    """
    return _descends_from(module, "ReuseInputObserver")


def is_fixed_qparams(module: Any) -> bool:
    """Whether scale and zero point are given instead of measured, in an observer or fake-quantizer.

    >>> from backquant.observe import default_fixed_qparams_range_0to1_fake_quant
    >>> is_fixed_qparams(default_fixed_qparams_range_0to1_fake_quant())
    True
    """
    return _descends_from(module, "FixedQParamsObserver") or _descends_from(
        module, "FixedQParamsFakeQuantize"
    )


def _descends_from(module: Any, name: str) -> bool:
    return isinstance(module, nn.Module) and any(
        cls.__name__ == name for cls in type(module).__mro__
    )


# What an observer found: as data, and as reference modules take it.

_Pair = tuple[Tensor, Tensor]
_BLOCKS = ("per_group", "per_block")


def qparam_dict(observer: Any, calculated: _Pair | None = None) -> dict[str, Any]:
    """The qparams that a reference module needs, from the observer of its weight.

    ``calculated``: the result of its ``calculate_qparams()``, if that is known already.

    Keys: ``qscheme`` (affine; None when the observer has none or measures nothing), ``dtype``,
    and then ``scale``, ``zero_point``, ``axis`` (per channel), ``quant_min``, ``quant_max``.

    >>> from backquant.observe import default_weight_observer
    >>> observer = default_weight_observer()
    >>> _ = observer(torch.tensor([-1.0, 1.275]))
    >>> sorted(qparam_dict(observer))
    ['dtype', 'qscheme', 'quant_max', 'quant_min', 'scale', 'zero_point']
    """
    qscheme = getattr(observer, "qscheme", None)
    if qscheme is None or is_placeholder(observer):
        return {"qscheme": None, "dtype": observer.dtype}
    result: dict[str, Any] = {"dtype": observer.dtype}
    if is_per_tensor(qscheme):
        result["qscheme"] = torch.per_tensor_affine
    else:
        symmetric = qscheme == torch.per_channel_symmetric
        result["qscheme"] = torch.per_channel_affine if symmetric else qscheme
        if not getattr(observer, "granularity", ""):
            result["axis"] = observer.ch_axis
    pair = observer.calculate_qparams() if calculated is None else calculated
    result["scale"], result["zero_point"] = pair
    for bound in ("quant_min", "quant_max"):
        if hasattr(observer, bound):
            result[bound] = getattr(observer, bound)
    return result


def measure(observer: Any, calculated: _Pair | None = None) -> ObservedQParams:
    """The qparams of an observer or fake-quantizer, ours or by protocol.

    ``calculated``: what its ``calculate_qparams()`` would return, if that is known.

    >>> from backquant.observe import MinMaxObserver
    >>> observer = MinMaxObserver()
    >>> _ = observer(torch.tensor([0.0, 2.55]))
    >>> found = measure(observer)
    >>> round(found.number.scale, 4), found.number.zero_point, found.quant_max, found.storage
    (0.01, 0, 255, torch.uint8)
    """
    dtype: torch.dtype = observer.dtype
    dynamic = bool(getattr(observer, "is_dynamic", False))
    qscheme = getattr(observer, "qscheme", None)
    # observers of others may do without a qscheme: then there is one scale
    unmeasured = qscheme is None and (dtype.is_floating_point or is_noop(observer))
    if dynamic or is_narrow_float(dtype) or unmeasured or is_placeholder(observer):
        shared = str(getattr(observer, "granularity", ""))
        return ObservedQParams(
            None,
            None,
            *_bounds(observer),
            dtype,
            is_dynamic=dynamic,
            qscheme=qscheme,
            eps=float(getattr(observer, "eps", torch.finfo(torch.float32).eps)),
            per_token=shared == "per_token",
            groups=Granularity.parse(shared) if shared.startswith(_BLOCKS) else None,
        )
    scale, zero_point = _calculated(observer) if calculated is None else calculated
    return ObservedQParams(
        scale.detach().clone(),
        zero_point.detach().clone(),
        *_bounds(observer),
        dtype,
        axis=None if scale.dim() > 1 or not is_per_channel(qscheme) else int(observer.ch_axis),
        qscheme=qscheme,
    )


def _calculated(observer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    name = type(observer).__name__
    try:
        scale, zero_point = observer.calculate_qparams()
        return torch.as_tensor(scale), torch.as_tensor(zero_point)
    except BackquantError:
        raise
    except Exception as error:
        raise ConfigError(
            f"{name}.calculate_qparams raised {type(error).__name__}: {error}",
            where=name,
            fix="calculate_qparams() -> (scale, zero_point), two tensors",
        ) from error


def _bounds(observer: Any) -> tuple[int, int]:
    """The range; that of the dtype where the observer has none (placeholders)."""
    low, high = getattr(observer, "quant_min", None), getattr(observer, "quant_max", None)
    row = find_dtype(observer.dtype)
    own = (row.low, row.high) if row is not None and row.has_scale else (0, 0)
    return int(own[0] if low is None else low), int(own[1] if high is None else high)


# Buffers whose length is known after the first batch only.
def with_shape(buffer: Tensor, shape: Sequence[int]) -> Tensor:
    """``buffer`` itself, of this shape; where that changes it, its values are undefined afterwards.

    Memory is exchanged and not resized: what ``torch.load`` returns cannot be resized, and a tensor
    that failed to be points behind its memory.

    >>> import torch
    >>> buffer = torch.tensor([])
    >>> with_shape(buffer, (3,)) is buffer, buffer.shape
    (True, torch.Size([3]))
    """
    return buffer if buffer.shape == tuple(shape) else buffer.set_(buffer.new_empty(shape))  # type: ignore[call-overload]


# Factories of observers: ``Observer.with_args(...)`` and ``Observer.with_callable_args(...)``.


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
