"""Integers that modules keep as tensors without axes, as the numbers that they are.

Codecs keep strides and kernel sizes so, and compute from them and the length of the input how much to pad:
``n = (length - self.kernel_size) / self.stride; pad(x, (0, (torch.ceil(n) * self.stride).int()))``. For an
export the values of tensors are unknown, and such a size ends it. While ``kept_as_numbers`` is open, these
attributes are ``Number`` objects: what is computed from them alone and from sizes stays a number, exact and
free where the size is free.

1. Quotients are fractions until ``ceil``, ``floor`` or a conversion to integers.
2. In a call with tensors a ``Number`` is a Python number.
3. What else is asked of one raises ``NotANumberError``; a counter that the model writes does so, too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from backquant.graph.interception import is_users
from backquant.graph.own_thread import replaced


class NotANumberError(AttributeError, TypeError):
    """Something is done to a ``Number`` that one does to a tensor."""


def _binary(compute: Callable[[Number, Number], Any]) -> Callable[[Any, Any], Any]:
    """A method of ``Number`` for another one, an integer or a size."""

    def method(self: Number, other: Any) -> Any:
        two = _number(other)
        return NotImplemented if two is None else compute(self, two)

    return method


class Number:
    """The value of an integer tensor without axes, or what is computed from some: ``above / below``.

    Both are integers, or sizes that are free in an export; ``below`` is positive.

    >>> frames = (Number(17) - 5) / Number(8) + 1
    >>> frames, torch.ceil(frames).to(torch.int64) * 8, frames > 2, int(Number(3))
    (Number(20 / 8), Number(24), True, 3)
    """

    def __init__(self, above: Any, below: Any = 1) -> None:
        self.above, self.below = above, below

    @property
    def value(self) -> Any:
        """A Python number; of a fraction the quotient in floating point."""
        return self.above if _is_one(self.below) else self.above / self.below

    device = torch.device("cpu")
    dtype = torch.int64
    shape = torch.Size([])

    def __repr__(self) -> str:
        return f"Number({self.above}{'' if _is_one(self.below) else f' / {self.below}'})"

    def __getattr__(self, name: str) -> Any:
        raise NotANumberError(f"{name!r} is asked of an integer that the model keeps as a tensor")

    __add__ = __radd__ = _binary(
        lambda a, b: Number(a.above * b.below + b.above * a.below, a.below * b.below)
    )
    __mul__ = __rmul__ = _binary(lambda a, b: Number(a.above * b.above, a.below * b.below))
    __sub__ = _binary(lambda a, b: a + -b)
    __rsub__ = _binary(lambda a, b: b + -a)
    __truediv__ = _binary(lambda a, b: a.over(b))
    __rtruediv__ = _binary(lambda a, b: b.over(a))
    __floordiv__ = _binary(lambda a, b: a.over(b).floor())
    __rfloordiv__ = _binary(lambda a, b: b.over(a).floor())
    __mod__ = _binary(lambda a, b: a + -(a.over(b).floor() * b))
    __rmod__ = _binary(lambda a, b: b % a)
    __eq__ = _binary(lambda a, b: a.above * b.below == b.above * a.below)
    __ne__ = _binary(lambda a, b: a.above * b.below != b.above * a.below)
    __lt__ = _binary(lambda a, b: a.above * b.below < b.above * a.below)
    __le__ = _binary(lambda a, b: a.above * b.below <= b.above * a.below)
    __gt__ = _binary(lambda a, b: a.above * b.below > b.above * a.below)
    __ge__ = _binary(lambda a, b: a.above * b.below >= b.above * a.below)
    __hash__ = object.__hash__

    def __neg__(self) -> Number:
        return Number(-self.above, self.below)

    def over(self, other: Number) -> Number:
        """The quotient."""
        if other.above <= 0:
            raise NotANumberError("division by a number that is not positive")
        return Number(self.above * other.below, self.below * other.above)

    def __bool__(self) -> bool:
        return bool(self.above != 0)

    def __index__(self) -> int:
        if not _is_one(self.below):
            raise NotANumberError("a fraction is no index")
        return int(self.above)

    def __int__(self) -> int:
        return int(self.long().above)

    def __float__(self) -> float:
        return float(self.value)

    def ceil(self) -> Number:
        """The next integer above."""
        return self if _is_one(self.below) else Number(-(-self.above // self.below))

    def floor(self) -> Number:
        """The next integer below."""
        return self if _is_one(self.below) else Number(self.above // self.below)

    def long(self) -> Number:
        """Without what is behind the point."""
        return self.floor() if _is_one(self.below) or self.above >= 0 else self.ceil()

    int = long

    def to(self, *given: Any, **named: Any) -> Number:
        """As an integer where one is asked for; devices and data types else say nothing of a number."""
        dtypes = [d for d in (*given, *named.values()) if isinstance(d, torch.dtype)]
        return self.long() if any(not d.is_floating_point for d in dtypes) else self

    def item(self) -> Any:
        """A Python number."""
        return self.value

    def dim(self) -> Any:
        """0: it has no axes."""
        return 0

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """As in the mode: what PyTorch calls with numbers of this class among the arguments."""
        own = _OWN.get(func)
        if own is not None and len(args) == 1 and isinstance(args[0], Number):
            return own(args[0])
        return func(*_plain(args), **_plain(kwargs or {}))


_OWN: dict[Any, Callable[[Number], Number]] = {
    torch.ceil: Number.ceil,
    torch.floor: Number.floor,
    torch.neg: Number.__neg__,
}


def _is_one(size: Any) -> bool:
    return isinstance(size, int) and size == 1


def _number(value: Any) -> Number | None:
    if isinstance(value, Number):
        return value
    return Number(value) if isinstance(value, (int, torch.SymInt)) else None


def _plain(tree: Any) -> Any:
    """``tree`` with Python numbers for ours, also within slices."""

    def of(leaf: Any) -> Any:
        if isinstance(leaf, slice):
            return slice(*(of(part) for part in (leaf.start, leaf.stop, leaf.step)))
        return leaf.value if isinstance(leaf, Number) else leaf

    return pytree.tree_map(of, tree)


class _Plain(TorchFunctionMode):
    """Rule 2 where a ``Number`` hides in a list: PyTorch looks at tensors only."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return Number.__torch_function__(func, types, args, kwargs)


def _is_kept(value: Any) -> bool:
    is_integer = isinstance(value, torch.Tensor) and not value.dtype.is_floating_point
    return is_integer and value.dim() == 0 and value.dtype not in (torch.bool, torch.complex64)


def _kept(model: nn.Module) -> Iterator[tuple[nn.Module, str, torch.Tensor]]:
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            continue  # its counter (num_batches_tracked) is no state of evaluation
        for name, value in (*module._buffers.items(), *vars(module).items()):
            if _is_kept(value):
                yield module, name, value


def keeps_numbers(model: nn.Module) -> bool:
    """Whether a module of ``model`` keeps an integer as a tensor without axes.

    >>> model = nn.Linear(2, 2)
    >>> keeps_numbers(model), model.register_buffer("stride", torch.tensor(2)), keeps_numbers(model)
    (False, None, True)
    """
    return next(_kept(model), None) is not None


@contextmanager
def kept_as_numbers(model: nn.Module) -> Iterator[None]:
    """These integers of ``model`` are ``Number`` objects in the block, and what they were behind it.

    Raises ``NotANumberError`` where a call of a module writes one.
    """
    kept = list(_kept(model))
    in_buffers = [name in module._buffers for module, name, _ in kept]
    hooks = []
    try:
        for module, name, value in kept:
            number = Number(int(value))
            module._buffers.pop(name, None)
            module.__dict__[name] = number
            # torch.export restores assigned attributes, so assignments are noticed by a hook
            hooks.append(module.register_forward_hook(partial(_check, name, number)))
        with _Plain():
            yield
    finally:
        for hook in hooks:
            hook.remove()
        for (module, name, value), is_buffer in zip(kept, in_buffers, strict=True):
            module.__dict__.pop(name, None)
            (module._buffers if is_buffer else module.__dict__)[name] = value


def _check(name: str, number: Number, module: nn.Module, *_: Any) -> None:
    if getattr(module, name) is not number:
        raise NotANumberError(f"{name!r} is written")


# ``len(x)`` of a tensor as a size that may be free.
#
# Python's ``len`` must give a plain integer, so that an export fixes the batch of a model that writes
# ``batch = len(x)``. While a model is exported, ``len`` gives the first size of a tensor in the files that
# define its classes. Not all that takes an integer takes such a size (text, keys of a dict, numpy): where an
# export fails that has asked for one, it is tried once more with Python's.
_TORCH = ("torch", "builtins")


@contextmanager
def lengths_as_sizes(model: nn.Module) -> Iterator[list[Any]]:
    """Within it, ``len`` of a tensor is its first size in the code of ``model``'s classes; gives those that
    are no plain integers, once they were asked for.

    >>> with lengths_as_sizes(nn.ReLU()) as asked:  # PyTorch's own code stays as it is
    ...     "len" in vars(sys.modules["torch.nn.modules.activation"])
    False
    """
    files = [names for names in _files(model) if "len" not in names]
    asked: list[Any] = []
    for names in files:
        names["len"] = _length_into(asked)
    try:
        yield asked
    finally:
        for names in files:
            del names["len"]


def _files(model: nn.Module) -> list[dict[str, Any]]:
    """The global names of each file that defines a class of the model, one each."""
    classes = {base for kind in {type(m) for m in model.modules()} for base in kind.__mro__}
    names = {kind.__module__ for kind in classes if kind.__module__.partition(".")[0] not in _TORCH}
    found = (sys.modules.get(name) for name in sorted(names))
    return [vars(module) for module in found if module is not None]


def _length_into(asked: list[Any]) -> Callable[[Any], Any]:
    def length(value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or not value.dim():
            return len(value)
        size: Any = value.shape[0]
        if not isinstance(size, int):
            asked.append(size)
        return size

    return length


# Comparisons of sizes as plain truths, for functions that take nothing else.

_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")


def wants_plain_truth(error: BaseException) -> bool:
    """Whether an export failed since a function took the comparison of a size for no ``bool``.

    >>> wants_plain_truth(TypeError("f(): argument 'is_causal' must be bool, not SymBool"))
    True
    """
    return isinstance(error, TypeError) and "must be bool, not SymBool" in str(error)


@contextmanager
def plain_comparisons() -> Iterator[None]:
    """In this thread, comparisons of dynamic sizes in code that is not PyTorch's give ``True`` or ``False``.

    In an export ``x.shape[1] > 1`` is a ``SymBool``, which ``F.scaled_dot_product_attention(is_causal=...)``
    refuses. What it was for the example inputs then holds for all: the program asks for such sizes, as after
    an ``if``. Comparisons that the values of tensors decide stay as they are.

    >>> with plain_comparisons():
    ...     torch.zeros(3).shape[0] > 1
    True
    """
    with ExitStack() as stack:
        for name in _COMPARISONS:
            compared = _plain_comparison(getattr(torch.SymInt, name))
            stack.enter_context(replaced(torch.SymInt, name, here=compared))
        yield


def _plain_comparison(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    # imported here: it loads the compiler, which loading a model does not need
    from torch.fx.experimental.symbolic_shapes import has_free_unbacked_symbols

    def compared(one: Any, other: Any) -> Any:
        found = original(one, other)
        if not isinstance(found, torch.SymBool):
            return found
        # the frame behind that which chooses by thread
        if not is_users(sys._getframe(2).f_code.co_filename) or has_free_unbacked_symbols(found):
            return found
        return bool(found)

    return compared
