"""What stands for an operator in PyTorch's quantized dialect: a function of ``torch.ops.quantized``, a packed
weight, a recurrent layer.
"""

from __future__ import annotations

import math
import operator
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx

# Weights of functional layers in PyTorch's quantized dialect: objects of its engine.

_KINDS: dict[Any, tuple[str, int]] = {
    F.linear: ("linear", 0),
    F.conv1d: ("conv1d", 1),
    F.conv2d: ("conv2d", 2),
    F.conv3d: ("conv3d", 3),
    F.conv_transpose1d: ("conv_transpose1d", 1),
    F.conv_transpose2d: ("conv_transpose2d", 2),
    F.conv_transpose3d: ("conv_transpose3d", 3),
}
_ARGUMENTS = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED = (*_ARGUMENTS[:5], "output_padding", "groups", "dilation")
_STORED = tuple(
    f"quantized_decomposed.dequantize_per_{kind}.default" for kind in ("channel", "tensor")
)


@dataclass
class PackedWeight:
    """A weight as plain tensors, and what an engine of PyTorch makes of it when it is first read.

    The engine's object cannot be pickled; this can.
    """

    kind: str
    integers: torch.Tensor
    scale: Any
    zero_point: Any
    axis: int | None
    bias: torch.Tensor | None
    settings: tuple[Any, ...]
    packing: Callable[[], AbstractContextManager[Any]] = nullcontext
    names: tuple[str, str] = ("", "")  # of the attributes with scale and zero point, in PyTorch
    _packed: Any = None

    def packed(self) -> Any:
        """The engine's object."""
        if self._packed is None:
            half = self.integers.is_floating_point()
            prepack = getattr(torch.ops.quantized, f"{self.kind}_prepack{'_fp16' if half else ''}")
            weight = self.integers.float() if half else self._quantized()
            with self.packing():
                self._packed = prepack(weight, self.bias, *self.settings)
        return self._packed

    def attributes(self) -> dict[str, torch.Tensor]:
        """Scale and zero point by their names."""
        values = torch.as_tensor(self.scale), torch.as_tensor(self.zero_point)
        return dict(zip(self.names, values, strict=True))

    def _quantized(self) -> torch.Tensor:
        if self.axis is None:
            make = torch._make_per_tensor_quantized_tensor
            return make(self.integers, self.scale, self.zero_point)
        scales, zero_points = self.scale.double(), self.zero_point.long()
        per_channel = torch._make_per_channel_quantized_tensor
        return per_channel(self.integers, scales, zero_points, self.axis)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_packed": None}


def functional_name(node: fx.Node) -> str:
    """The word of ``torch.ops.quantized`` for a functional layer; empty where there is none.

    >>> functional_name(fx.symbolic_trace(lambda x, w: F.linear(x, w)).graph.find_nodes(
    ...     op="call_function", target=F.linear)[0])
    'linear'
    """
    return _KINDS.get(node.target, ("", 0))[0] if node.op == "call_function" else ""


def packed_weight(root: Any, node: fx.Node) -> PackedWeight | None:
    """The constant weight and bias of ``node``; ``None`` where they are others, or settings are words."""
    kind, rank = _KINDS[node.target]
    transposed = kind.startswith("conv_transpose")
    names = _TRANSPOSED if transposed else _ARGUMENTS
    called: dict[str, Any] = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    weight, bias = called.get("weight"), called.get("bias")
    if not isinstance(weight, fx.Node) or str(weight.target) not in _STORED:
        return None
    stored = weight.args[0]
    if not isinstance(stored, fx.Node) or stored.op != "get_attr":
        return None
    if isinstance(bias, fx.Node) and bias.op != "get_attr":
        return None
    integers = _tensor(root, stored)
    usual = [("stride", 1), ("padding", 0), ("dilation", 1)][: 3 * rank]
    if transposed:
        usual.insert(2, ("output_padding", 0))
    settings = [called.get(name, default) for name, default in usual]
    if integers.dtype != torch.int8 or any(isinstance(value, str) for value in settings):
        return None
    spread = [[v] * rank if isinstance(v, int) else list(v) for v in settings]
    scale, zero_point = weight.args[1:3]
    axis: Any = None
    if "per_channel" in str(weight.target):
        if transposed:
            return None
        scale, zero_point, axis = _tensor(root, scale), _tensor(root, zero_point), weight.args[3]
    held = None if bias is None else _tensor(root, bias).detach()
    groups = [called.get("groups", 1)] if rank else []
    return PackedWeight(kind, integers, scale, zero_point, axis, held, (*spread, *groups))


def _tensor(root: Any, node: Any) -> torch.Tensor:
    value = root
    for name in str(node.target).split("."):
        value = getattr(value, name)
    tensor: torch.Tensor = value
    return tensor


# Which function of ``torch.ops.quantized`` stands for a function between quantized tensors, with its bits.
#
# Invariants
#
# 1. A function of one value is tried on each integer that it can get, in rows as long as vectors and shorter:
#    operators compute the ends of a row otherwise.
# 2. A number is a quantized tensor without dimensions that stands for it exactly.

RANGES = {torch.quint8: (0, 255), torch.qint8: (-128, 127), torch.qint32: (-(2**31), 2**31 - 1)}
_STORAGE = {torch.quint8: torch.uint8, torch.qint8: torch.int8}
BINARY: dict[Any, str] = {
    operator.add: "add",
    torch.add: "add",
    operator.mul: "mul",
    torch.mul: "mul",
}


class Numbers(NamedTuple):
    """What the integers of a quantized tensor stand for. ``limits``: where narrower than the dtype."""

    scale: float
    zero_point: int
    dtype: torch.dtype
    limits: tuple[int, int] | None


class Form(NamedTuple):
    """``name`` of ``torch.ops.quantized``, which takes its input, then the arguments ``before``, then scale
    and zero point, then those ``after``. ``arguments``: of the float function, with their defaults."""

    name: str
    arguments: dict[str, Any]
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    of_one_value: bool = True


_AFFINE = {"weight": None, "bias": None, "eps": 1e-5}
_STATISTICS = {"running_mean": None, "running_var": None, "weight": None, "bias": None}
FORMS: dict[Any, Form] = {
    F.hardswish: Form("hardswish", {"inplace": False}),
    F.elu: Form("elu", {"alpha": 1.0, "inplace": False}, (), ("alpha",)),
    F.celu: Form("celu", {"alpha": 1.0, "inplace": False}, (), ("alpha",)),
    F.leaky_relu: Form(
        "leaky_relu", {"negative_slope": 0.01, "inplace": False}, ("negative_slope", "inplace")
    ),
    F.layer_norm: Form(
        "layer_norm",
        {"normalized_shape": None, **_AFFINE},
        ("normalized_shape", "weight", "bias", "eps"),
        of_one_value=False,
    ),
    F.group_norm: Form(
        "group_norm",
        {"num_groups": None, **_AFFINE},
        ("num_groups", "weight", "bias", "eps"),
        of_one_value=False,
    ),
    F.instance_norm: Form(
        "instance_norm",
        {**_STATISTICS, "use_input_stats": True, "momentum": 0.1, "eps": 1e-5},
        ("weight", "bias", "eps"),
        of_one_value=False,
    ),
}


class Call(NamedTuple):
    """``torch.ops.quantized.<name>`` of an input, ``before``, scale and zero point, ``after``."""

    name: str
    before: tuple[Any, ...]
    after: tuple[Any, ...] = ()

    def __call__(self, x: torch.Tensor, out: Numbers) -> torch.Tensor:
        """On data."""
        function = getattr(torch.ops.quantized, self.name)
        result: torch.Tensor = function(x, *self.before, out.scale, out.zero_point, *self.after)
        return result


def function_call(node: fx.Node, source: Numbers, out: Numbers) -> Call | None:
    """The call for a function of ``FORMS``; ``None`` where it would give other bits."""
    form = FORMS.get(node.target)
    if form is None or len(node.args) > 1 + len(form.arguments):
        return None
    values = {**form.arguments, **dict(zip(form.arguments, node.args[1:], strict=False))}
    values.update({name: value for name, value in node.kwargs.items() if name != "input"})
    values["inplace"] = False
    call = Call(
        form.name,
        tuple(values[name] for name in form.before),
        tuple(values[name] for name in form.after),
    )
    if not form.of_one_value:
        is_measured = values.get("use_input_stats", True) and values.get("running_mean") is None
        return call if is_measured and measures_as_kernels(source) else None
    rest, kwargs = node.args[1:], {**node.kwargs}
    kwargs.pop("input", None)
    if "inplace" in kwargs:
        kwargs["inplace"] = False
    if any(isinstance(value, fx.Node) for value in (*rest, *kwargs.values())):
        return None
    function: Any = node.target
    return call if _agree(call, lambda x: function(x, *rest, **kwargs), source, out) else None


def number_call(node: fx.Node, relu: bool, source: Numbers, out: Numbers) -> Call | None:
    """The call for a sum or product with a number; ``None`` where it would give other bits."""
    name = BINARY.get(node.target)
    numbers = [value for value in node.args if isinstance(value, (int, float))]
    if name is None or node.kwargs or len(node.args) != 2 or len(numbers) != 1:
        return None
    number = float(numbers[0])
    if not math.isfinite(number) or isinstance(numbers[0], bool):
        return None
    call = Call(f"{name}_relu" if relu else name, (_constant(number, source.dtype),))
    target: Any = node.target

    def real(x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = target(x, numbers[0])
        return y.relu() if relu else y

    return call if _agree(call, real, source, out) else None


def _constant(number: float, dtype: torch.dtype) -> torch.Tensor:
    """Invariant 2: 1 - 0, or 0 - 1, times the scale."""
    integer, zero_point = (0, 1) if number < 0 else (1 if number else 0, 0)
    tensor = torch.tensor(integer, dtype=_STORAGE[dtype])
    return torch._make_per_tensor_quantized_tensor(tensor, abs(number) or 1.0, zero_point)


def measures_as_kernels(source: Numbers) -> bool:
    """Whether norms that measure do so on the values: of scales above 1 kernels take the integers."""
    return source.scale <= 1


def _agree(
    call: Call, real: Callable[[torch.Tensor], torch.Tensor], source: Numbers, out: Numbers
) -> bool:
    """Invariant 1."""
    if source.dtype not in _STORAGE or out.dtype != source.dtype:
        return False
    low, high = source.limits or RANGES[source.dtype]
    integers = torch.arange(low, high + 1, dtype=torch.int32).to(_STORAGE[source.dtype])
    least, most = out.limits or RANGES[out.dtype]
    for length in (len(integers), 31):
        for row in integers.split(length):
            x = torch._make_per_tensor_quantized_tensor(row, source.scale, source.zero_point)
            expected = torch.quantize_per_tensor(
                real(x.dequantize()), out.scale, out.zero_point, out.dtype
            )
            both = (y.int_repr().clamp(least, most) for y in (expected, call(x, out)))
            if not torch.equal(*both):
                return False
    return True


# A static LSTM in PyTorch's quantized dialect: quantized tensors in, a tuple of quantized tensors out.

#: Output, hidden state, cell state.
TENSORS = ((0,), (1, 0), (1, 1))
_TUPLES: tuple[tuple[int, ...], ...] = ((), (1,))


class Results(NamedTuple):
    """``items``: the node of each tensor that is read. ``readers``: who reads it, or the whole tuple at that
    place, and by which node."""

    items: dict[tuple[int, ...], fx.Node]
    readers: dict[tuple[int, ...], list[tuple[fx.Node, fx.Node]]]


def results_of(lstm: fx.Node) -> Results:
    """Read each tensor of a result by one new ``getitem`` right after the call.

    >>> graph = fx.symbolic_trace(lambda x: (x[1][0], x[1][0])).graph
    >>> source = next(iter(graph.nodes))
    >>> [(path, node.name) for path, node in results_of(source).items.items()]
    [((1, 0), 'getitem_5')]
    """
    readers: dict[tuple[int, ...], list[tuple[fx.Node, fx.Node]]] = defaultdict(list)
    for path, user, through in _readers(lstm, ()):
        readers[path].append((user, through))
    wanted = [p for p in TENSORS if readers[p] or readers[()] or readers[p[:-1]]]
    items: dict[tuple[int, ...], fx.Node] = {(): lstm}
    last = lstm
    for path in sorted({p[:i] for p in wanted for i in range(1, len(p) + 1)}):
        with lstm.graph.inserting_after(last):
            last = lstm.graph.call_function(operator.getitem, (items[path[:-1]], path[-1]))
        items[path] = last
    return Results({path: items[path] for path in wanted}, readers)


def _readers(
    node: fx.Node, path: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], fx.Node, fx.Node]]:
    for user in list(node.users):
        index: Any = user.args[1] if user.target is operator.getitem else None
        if path in _TUPLES and type(index) is int and -2 <= index < 2:
            yield from _readers(user, (*path, index % 2))
        else:
            yield path, user, node


def put_together(results: Results, floats: dict[tuple[int, ...], fx.Node], last: fx.Node) -> None:
    """Tuples of ``floats``, after ``last``, for those that read a tuple whole."""
    graph, made = last.graph, dict(floats)
    for path in reversed(_TUPLES):
        if not (results.readers[path] or (path and results.readers[()])):
            continue
        parts = [made[part] for part in ((*path, 0), (*path, 1))]
        with graph.inserting_after(last):
            last = graph.call_function(tuple, (parts,))
        made[path] = last
        for user, through in results.readers[path]:
            user.replace_input_with(through, last)
