"""Example inputs: as arguments, and whether they fit a model."""

from __future__ import annotations

import inspect
import math
from collections import namedtuple
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from backquant.errors import InputError
from backquant.graph.clone import own_buffers
from backquant.graph.interception import user_line
from backquant.graph.objects import Shell, fresh, object_classes
from backquant.graph.settle import WritesParameterError, unwritten_parameters


def as_arguments(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments of one batch.

    A tuple or list holds positional arguments, a dict with string keys keyword arguments;
    anything else is the only argument.

    >>> as_arguments({"x": 1}), as_arguments((1, 2)), as_arguments(3)
    (((), {'x': 1}), ((1, 2), {}), ((3,), {}))
    """
    if isinstance(inputs, Mapping) and all(isinstance(key, str) for key in inputs):
        return (), dict(inputs)
    if isinstance(inputs, (tuple, list)) and not hasattr(inputs, "_fields"):
        return tuple(inputs), {}
    return (inputs,), {}


def with_distinct_tensors(inputs: Any, model: nn.Module | None = None) -> Any:
    """``inputs`` with copies of tensors that share memory with another one, or with one of ``model``.

    ``torch.export`` takes arguments that are one tensor for one argument, whatever they are in other calls:
    the program of ``model(x, state, state)`` reads its second argument twice.

    >>> x = torch.zeros(2)
    >>> one, other = with_distinct_tensors((x, x))
    >>> one is x, other is x, torch.equal(one, other)
    (True, False, True)
    """
    owned = [] if model is None else [*model.parameters(), *model.buffers()]
    seen = {memory for tensor in owned if (memory := _memory(tensor)) is not None}

    def distinct(leaf: Any) -> Any:
        memory = _memory(leaf)
        if memory in seen:
            return leaf.detach().clone()
        if memory is not None:
            seen.add(memory)
        return leaf

    return pytree.tree_map(distinct, inputs)


def _memory(value: Any) -> int | None:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return None
    return int(value.untyped_storage()._cdata)


def check_inputs(
    model: nn.Module,
    inputs: Any,
    *modes: AbstractContextManager[Any],
    trial: nn.Module | None = None,
) -> Any:
    """Run ``model`` once on example inputs, without gradients, and return its output.

    Neither the model (its buffers included, in train mode too) nor the state of the random
    number generators changes, nor objects among the inputs. Forward hooks run. ``modes`` (dispatch modes that
    count, say) are open during the call alone. ``trial``: the copy of ``model``, with buffers of its own,
    that is called; default: a new one.

    Raises:
        InputError: the model does not accept them; names what was passed and what it takes. Its subclass
            WritesParameterError: the call would change a parameter, and is stopped before.

    >>> check_inputs(nn.Linear(3, 2), torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """
    args, kwargs = as_arguments(inputs)
    leaves = pytree.tree_leaves((args, kwargs))
    if any(isinstance(one, torch.Tensor) and one.is_nested for one in leaves):
        raise InputError(
            "an input is a nested tensor, whose rows have sizes of their own: no observer takes it",
            where=f"example inputs of {type(model).__name__}",
            fix="nested.to_padded_tensor(0.0), and a mask where the model takes one",
        )
    try:
        unchanged = torch.random.fork_rng(devices=_cuda_devices(model))
        with torch.no_grad(), ExitStack() as during_the_call:
            # Copies (of hundreds of buffers, say) are made before: the modes would see each operator.
            trial = own_buffers(model) if trial is None else trial
            given, named = fresh(args), fresh(kwargs)
            for mode in (unchanged, *modes, unwritten_parameters(model)):
                during_the_call.enter_context(mode)
            return trial(*given, **named)
    except WritesParameterError:
        raise
    except Exception as error:
        passed = [describe_value(value) for value in args]
        passed += [f"{name}={describe_value(value)}" for name, value in kwargs.items()]
        line = user_line(error)
        reason = str(error).strip().splitlines()
        raise InputError(
            f"the example inputs do not fit the model: {reason[0] if reason else repr(error)}",
            where=f"{type(model).__name__}({', '.join(passed)})" + (f", {line}" if line else ""),
            fix=_image_fix(model, leaves) or _type_fix(model, args, kwargs) or inputs_of(model),
        ) from error


def call(model: nn.Module, inputs: Any) -> Any:
    """What ``model`` gives for a batch, without gradients. The state of the random numbers and objects among
    the inputs stay as they are.

    >>> call(nn.Linear(3, 2), torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """
    args, kwargs = as_arguments(inputs)
    with torch.no_grad(), torch.random.fork_rng(devices=_cuda_devices(model)):
        return model(*fresh(args), **fresh(kwargs))


_BYTES = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _image_fix(model: nn.Module, leaves: list[Any]) -> str:
    """``image_fix`` of the first image, for the first convolution."""
    first = next((m for m in model.modules() if isinstance(m, nn.Conv2d | nn.Conv3d)), None)
    image = next((x for x in leaves if isinstance(x, torch.Tensor) and x.dim() == 4), None)
    return "" if first is None or image is None else image_fix(first.in_channels, image)


def image_fix(channels: int, image: torch.Tensor) -> str:
    """What to do where ``image`` of four axes is as files hold it: bytes, or channels last; else empty.

    >>> image_fix(3, torch.zeros(1, 8, 8, 3))
    'channels come first: images.permute(0, 3, 1, 2)'
    """
    fixes = []
    if image.shape[1] != channels and image.shape[3] == channels:
        fixes.append("channels come first: images.permute(0, 3, 1, 2)")
    if image.dtype in _BYTES:
        fixes.append(
            "bytes become floats as in training: images.float() / 255, then its mean and deviation"
        )
    return "; ".join(fixes)


def _type_fix(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
    """The call with inputs of the parameters' type, where the model takes that one; else empty.

    >>> _type_fix(nn.Linear(2, 1), (torch.ones(1, 2).half(),), {}).partition("   #")[0]
    'example_inputs=(input.float(),)'
    """
    types = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if types != {torch.float32} or len(args) + len(kwargs) != 1:
        return ""
    [given] = (*args, *kwargs.values())
    if not isinstance(given, torch.Tensor) or given.dtype == torch.float32:
        return ""
    real = given.abs() if given.is_complex() else given
    name = next(iter(kwargs or inspect.signature(model.forward).parameters))
    try:
        check_inputs(model, {name: real.float()} if kwargs else real.float())
    except InputError:
        return ""
    code = f"{name}.abs()" if given.is_complex() else f"{name}.float()"
    called = f"{{{name!r}: {code}}}" if kwargs else f"({code},)"
    return f"example_inputs={called}   # float32 like the weights, not {describe_value(given)}"


def _cuda_devices(model: nn.Module) -> list[int]:
    if not torch.cuda.is_initialized():  # then no tensor is on one; the search takes time
        return []
    return sorted({p.device.index or 0 for p in model.parameters() if p.device.type == "cuda"})


def describe_value(value: Any) -> str:
    """Shape and dtype of a tensor; the type of anything else.

    >>> describe_value(torch.zeros(1, 3))
    'float32[1, 3]'
    """
    if isinstance(value, torch.Tensor):
        return f"{str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
    return type(value).__name__


def inputs_of(model: nn.Module) -> str:
    """What a call of the model takes, in code.

    >>> inputs_of(nn.Bilinear(2, 3, 4)).partition("   #")[0]
    'example_inputs=(input1, input2)'
    """
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return "example_inputs=(...)"
    needed = [one for one in signature.parameters.values() if one.default is one.empty]
    named = [one.name for one in needed if one.kind is one.KEYWORD_ONLY]
    first = [
        one.name for one in needed if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    inputs = f"({', '.join(first)}{',' * (len(first) == 1)})"
    if named:
        inputs = "{" + ", ".join(f"{name!r}: {name}" for name in first + named) + "}"
    return f"example_inputs={inputs}   # forward takes {signature}"


# Example inputs as data: enough to make inputs that a graph can be traced with.
#
# 1. Integers, truth values and floats that are whole or infinite (masks, one-hot rows) are kept as they
# are, up    to 16384 of a tensor: indices, offsets and lengths belong together, and others would not run.
# Above that,    integers are drawn within their range. 2. Of objects (caches of keys and values) the parts
# that hold tensors are kept; they come back as namespaces,    of which a graph reads the same parts. Named
# tuples come back as such, of a class of their own. 3. Of other floats (images, sounds, features) only
# shape, mean, deviation and range are kept: they may be    large, or nobody else's business, and any of
# their kind runs.

_TENSOR, _RANGE, _VALUES, _SPREAD = "tensor", "range", "values", "spread"
_OBJECT, _NAMED = "object", "named"
_KEPT = 16384  # elements up to which the values of an integer tensor are kept
_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class ExampleSpec:
    """What a model was called with: JSON-able, and ``arguments()`` makes inputs of it.

    ``args`` and ``kwargs`` hold, for each tensor, ``{"tensor": [sizes…], "dtype": name}`` with either
    ``"values"`` (row by row, infinities as text), or ``"range": [least, greatest]`` and for floats
    ``"spread": [mean, deviation]``; lists, tuples (as lists) and dicts of such; ``{"object": {name: …}}``,
    ``{"named": {field: …}}``; and numbers, strings and ``None`` as they are.

    >>> spec = ExampleSpec.of((torch.tensor([0, 3, 5]), torch.rand(2, 3), True))
    >>> spec.args[0]
    {'tensor': [3], 'dtype': 'int64', 'values': [0, 3, 5]}
    >>> sorted(spec.args[1])
    ['dtype', 'range', 'spread', 'tensor']
    >>> [getattr(value, "shape", value) for value in spec.arguments()[0]]
    [torch.Size([3]), torch.Size([2, 3]), True]
    >>> pair = namedtuple("Pair", ["first", "second"])(torch.ones(1), 2)
    >>> ExampleSpec.of((pair,)).arguments()[0][0].first
    tensor([1.])
    """

    args: list[Any]
    kwargs: dict[str, Any]

    @classmethod
    def of(cls, inputs: Any) -> ExampleSpec | None:
        """The spec of a batch (tensor, tuple or dict); ``None`` where it holds other objects.

        >>> ExampleSpec.of(object()) is None
        True
        """
        args, kwargs = as_arguments(inputs)
        try:
            return cls(_described(list(args)), _described(kwargs))
        except TypeError:
            return None

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Positional and keyword arguments: the values that were kept, and others drawn with a fixed seed.

        Integers of which only the range is known are drawn from it, floats from the normal distribution
        of their mean and deviation, cut off at their range.
        """
        generator = torch.Generator().manual_seed(0)
        return tuple(_made(self.args, generator)), _made(self.kwargs, generator)

    def to_dict(self) -> dict[str, Any]:
        """``args`` and ``kwargs``; the inverse of ``ExampleSpec(**values)``."""
        return {"args": self.args, "kwargs": self.kwargs}


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor) and value.layout is torch.strided:  # no sparse one
        told = {_TENSOR: list(value.shape), "dtype": str(value.dtype).removeprefix("torch.")}
        return told | _range(value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return {_NAMED: dict(zip(value._fields, map(_described, value), strict=True))}
    if isinstance(value, (list, tuple)):
        return [_described(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _described(item) for key, item in value.items()}
    if isinstance(value, _PLAIN):
        return value
    if object_classes(value) and (held := Shell.of(value))[0]:
        return {_OBJECT: dict(zip(held[1].names, map(_described, held[0]), strict=True))}
    raise TypeError(type(value).__name__)


def _range(value: torch.Tensor) -> dict[str, Any]:
    if value.is_complex() or value.is_quantized or not value.numel():
        return {}
    values = value.detach()
    if values.is_floating_point():
        values = values.double()
        if not _is_whole(values):
            return _spread(values)
    if values.numel() <= _KEPT:
        return {_VALUES: [_plain(number) for number in values.flatten().tolist()]}
    finite = values[values.isfinite()]
    if not finite.numel():
        return {}
    return {_RANGE: [int(finite.min()), int(finite.max())]}


def _is_whole(values: torch.Tensor) -> bool:
    return not bool(values.isnan().any()) and torch.equal(values, values.trunc())


def _plain(number: float) -> Any:
    return str(number) if isinstance(number, float) and math.isinf(number) else number


def _spread(values: torch.Tensor) -> dict[str, Any]:
    finite = values[values.isfinite()]
    if not finite.numel():
        return {}
    spread = [float(finite.mean()), float(finite.std(correction=0))]
    return {_RANGE: [float(finite.min()), float(finite.max())], _SPREAD: spread}


def _made(value: Any, generator: torch.Generator) -> Any:
    if isinstance(value, list):
        return [_made(item, generator) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_OBJECT}:
        return SimpleNamespace(**_made(value[_OBJECT], generator))
    if value.keys() == {_NAMED}:
        fields = _made(value[_NAMED], generator)
        return namedtuple("Arguments", fields, rename=True)(*fields.values())
    if _TENSOR not in value:
        return {key: _made(item, generator) for key, item in value.items()}
    dtype, shape = getattr(torch, value["dtype"]), tuple(value[_TENSOR])
    if _VALUES in value:
        numbers = [float(item) if isinstance(item, str) else item for item in value[_VALUES]]
        return torch.tensor(numbers, dtype=dtype).reshape(shape)
    if dtype.is_floating_point:
        return _floats(value, shape, generator).to(dtype)
    if _RANGE not in value:
        return torch.zeros(shape, dtype=dtype)
    least, greatest = value[_RANGE]
    return torch.randint(least, greatest + 1, shape, generator=generator).to(dtype)


def _floats(
    told: Mapping[str, Any], shape: tuple[int, ...], generator: torch.Generator
) -> torch.Tensor:
    made = torch.randn(shape, generator=generator)
    if _SPREAD in told:
        mean, deviation = told[_SPREAD]
        made = made * deviation + mean
    return made.clamp(*told[_RANGE]) if _RANGE in told else made
