"""What models write in several calls, as the one operator that it is."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.nn import functional as F

from backquant.graph.rewrite import GraphRewriter, arguments_by_name

# What a call computes, whichever way it is spelled in a captured graph.

_ARITHMETIC: Mapping[Any, str] = {
    "add": "add",
    "sub": "sub",
    "mul": "mul",
    "div": "div",
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    torch.add: "add",
    torch.sub: "sub",
    torch.mul: "mul",
    torch.div: "div",
}


def arithmetic_of(node: fx.Node) -> str | None:
    """``"add"``, ``"sub"``, ``"mul"`` or ``"div"`` of two values; ``None``: something else, or with options.

    >>> graph = fx.Graph()
    >>> arithmetic_of(graph.call_function(torch.ops.aten.div.Tensor, (1, 2)))
    'div'
    """
    if len(node.args) != 2 or node.kwargs:
        return None
    return _ARITHMETIC.get(plain_name(node.target))


def plain_name(target: Any) -> Any:
    """The name of an overload of ATen; other targets as they are.

    >>> plain_name(torch.ops.aten.relu6.default), plain_name("clamp")
    ('relu6', 'clamp')
    """
    is_aten = isinstance(target, OpOverload) and target.namespace == "aten"
    return target._opname if is_aten else target


# ``torch.einsum`` of two operands, as the matrix product that it is.
#
# No backend has a kernel for an equation. Each of its letters is one of four kinds: in both operands and in
# the result (a batch), in both alone (summed), in one operand and in the result (rows, columns). With one
# letter or more of the last three the equation is ``torch.matmul`` of permuted operands; of a constant matrix
# and no batch it is a linear layer (``constant_products``). Left as they are: equations with a letter that
# one operand alone has, or twice; outer products and products of vectors, which no integer kernel has.

_EINSUM = (torch.einsum, torch.ops.aten.einsum.default)


def einsum_product(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A ``torch.einsum`` that is a matrix product, as one. With unknown or broadcast sizes it stays.

    >>> from backquant.graph.shapes import GraphValues
    >>> module = fx.symbolic_trace(lambda a, b: torch.einsum("bihd,bjhd->bhij", a, b))
    >>> a, b = torch.randn(2, 3, 4, 5), torch.randn(2, 6, 4, 5)
    >>> wanted = module(a, b)
    >>> GraphRewriter(module, values=GraphValues(module, (a, b))).apply(einsum_product)
    1
    >>> [node.name for node in module.graph.nodes]
    ['a', 'b', 'permute', 'permute_1', 'matmul', 'output']
    >>> torch.allclose(module(a, b), wanted, atol=1e-6)
    True
    """
    product = _product(node, write) if node.target in _EINSUM else None
    return None if product is None else product.written()


@dataclass(frozen=True)
class _Product:
    """``left`` and ``right`` with their letters; ``right`` may be a constant.

    ``batch`` and ``rows``, ``columns`` are in the order of the result, ``summed`` in that of ``left``.
    """

    node: fx.Node
    write: GraphRewriter
    left: fx.Node
    right: fx.Node
    of_left: str
    of_right: str
    result: str
    batch: str
    rows: str
    columns: str
    summed: str
    constant: torch.Tensor | None

    @property
    def is_linear(self) -> bool:
        """Whether it is a linear layer: one constant matrix for all rows."""
        return self.constant is not None and not self.batch

    def written(self) -> fx.Node:
        """Nodes of it in the place of the equation; the last one."""
        left = self._arranged(self.left, self.of_left, (self.batch, self.rows, self.summed))
        made = self._call(torch.matmul, left, self._right())
        if len(self.columns) > 1 or (len(self.rows) > 1 and not self.is_linear):
            sizes = map(self._size, self.batch + self.rows + self.columns)
            made = self._call("reshape", made, *sizes)
        return self._permuted(made, self.batch + self.rows + self.columns, self.result)

    def _right(self) -> fx.Node:
        """The second operand [batch, summed, columns], computed here where it is constant."""
        if self.constant is None:
            return self._arranged(
                self.right, self.of_right, (self.batch, self.summed, self.columns)
            )
        sizes = dict(zip(self.of_right, self.constant.shape, strict=True))
        order = [self.of_right.index(letter) for letter in self.batch + self.summed + self.columns]
        shape = (
            *(sizes[letter] for letter in self.batch),
            *(
                math.prod(sizes[letter] for letter in group)
                for group in (self.summed, self.columns)
            ),
        )
        value = self.constant.detach().permute(order).reshape(shape).contiguous()
        return self.write.buffer(self.node, f"{self.right.target}_permuted_", value)

    def _arranged(self, value: fx.Node, letters: str, groups: tuple[str, str, str]) -> fx.Node:
        """``value`` with its axes in this order; each of the last two groups is one axis."""
        batch, first, second = groups
        made = self._permuted(value, letters, "".join(groups))
        if len(second) > 1:
            made = self._call(torch.flatten, made, -len(second), -1)
        # a linear layer takes any number of leading axes
        if len(first) > 1 and not self.is_linear:
            last = len(batch) + len(first) - 1
            made = self._call(torch.flatten, made, len(batch), last)
        return made

    def _permuted(self, value: fx.Node, letters: str, wanted: str) -> fx.Node:
        if letters == wanted:
            return value
        order = [letters.index(letter) for letter in wanted]
        return self._call("permute", value, *order)

    def _size(self, letter: str) -> Any:
        if self.constant is not None and letter in self.of_right:
            return self.constant.shape[self.of_right.index(letter)]
        if letter == (self.batch + self.rows)[0]:
            return -1
        source, letters = (
            (self.left, self.of_left) if letter in self.of_left else (self.right, self.of_right)
        )
        return self._call("size", source, letters.index(letter))

    def _call(self, target: Any, *args: Any) -> fx.Node:
        return self.write.call(self.node, target, *args)


def _product(node: fx.Node, write: GraphRewriter) -> _Product | None:
    read = _operands(node)
    if read is None:
        return None
    equation, left, right = read
    facts, constants = (write.facts(left), write.facts(right)), write.constants
    if facts[0] is None or facts[1] is None:
        return None
    shapes = facts[0].shape, facts[1].shape
    letters = _letters(equation, [len(shape) for shape in shapes])
    if letters is None:
        return None
    of_left, of_right, result = letters
    sizes = [
        dict(zip(of, shape, strict=True))
        for of, shape in ((of_left, shapes[0]), (of_right, shapes[1]))
    ]
    # written as a linear layer, whose weight is the second argument
    if constants.value(left) is not None:
        left, right, of_left, of_right = right, left, of_right, of_left
    product = _Product(
        node=node,
        write=write,
        left=left,
        right=right,
        of_left=of_left,
        of_right=of_right,
        result=result,
        batch="".join(letter for letter in result if letter in of_left and letter in of_right),
        rows="".join(letter for letter in result if letter not in of_right),
        columns="".join(letter for letter in result if letter not in of_left),
        summed="".join(c for c in of_left if c in of_right and c not in result),
        constant=constants.value(right),
    )
    alone = (set(of_left) ^ set(of_right)) - set(result)
    is_product = product.rows and product.columns and product.summed and not alone
    same = all(sizes[0][letter] == sizes[1][letter] for letter in set(of_left) & set(of_right))
    return product if is_product and same and constants.value(left) is None else None


def _operands(node: fx.Node) -> tuple[str, fx.Node, fx.Node] | None:
    """The equation of ``node`` and its operands, if these are two."""
    equation, *rest = node.args
    operands: Any = rest[0] if len(rest) == 1 and isinstance(rest[0], (list, tuple)) else rest
    nodes = [value for value in operands if isinstance(value, fx.Node)]
    if not isinstance(equation, str) or node.kwargs or len(operands) != 2 or len(nodes) != 2:
        return None
    return equation, nodes[0], nodes[1]


def _letters(equation: str, ranks: list[int]) -> tuple[str, str, str] | None:
    """The letters of both operands and of the result, an ellipsis written out; ``None``: one is twice in an
    operand, or there are not two.
    """
    inputs, arrow, result = equation.replace(" ", "").partition("->")
    operands = inputs.split(",")
    if len(operands) != 2:
        return None
    named = [len(operand.replace("...", "")) for operand in operands]
    longest = max(rank - count for rank, count in zip(ranks, named, strict=True))
    # Greek letters for the axes of "...": equations use Latin ones
    more = "".join(chr(0x3B1 + i) for i in range(longest))
    written = []
    for operand, rank, count in zip(operands, ranks, named, strict=True):
        hidden = rank - count
        written.append(operand.replace("...", more[len(more) - hidden :] if hidden else ""))
    if not arrow:
        letters = "".join(written)
        once = sorted(letter for letter in letters if letters.count(letter) == 1)
        result = "..." + "".join(letter for letter in once if letter not in more)
    result = result.replace("...", more)
    if any(len(set(letters)) != len(letters) for letters in written):
        return None
    return written[0], written[1], result


# Batch norms that are written as functions, as the modules that they are, behind a convolution.
#
# Classes of other libraries that join a batch norm with an activation call ``F.batch_norm`` on their own
# tensors (timm's ``BatchNormAct2d``). Fusion knows modules: as one it is folded into the weights before it.

_BEHIND: dict[type[nn.Module], type[nn.Module]] = {
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}
_NAMES = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def batch_norm_module(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """``F.batch_norm`` of constants, behind a convolution of a batch, as a module.

    >>> from backquant.graph.shapes import GraphValues
    >>> class Joined(nn.BatchNorm2d):
    ...     def forward(self, x):
    ...         return F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias)
    >>> class Tracer(fx.Tracer):
    ...     def is_leaf_module(self, module, path):
    ...         return type(module) is nn.Conv2d
    >>> model = nn.Sequential(nn.Conv2d(1, 2, 1), Joined(2)).eval()
    >>> module = fx.GraphModule(model, Tracer().trace(model))
    >>> values = GraphValues(module, (torch.zeros(1, 1, 4, 4),))
    >>> GraphRewriter(module, values=values).apply(batch_norm_module), len(module.graph.nodes)
    (1, 4)
    """
    source = node.args[0] if node.args else None
    if node.target is not F.batch_norm or not isinstance(source, fx.Node):
        return None
    conv: Any = write.called(source)
    kind = _BEHIND.get(type(conv))
    known = None if kind is None else write.facts(source)
    if kind is None or known is None or len(known.shape) != len(conv.kernel_size) + 2:
        return None
    made = _module(arguments_by_name(node, *_NAMES), kind, write)
    prefix = f"{str(source.target).replace('.', '_')}_batch_norm_"
    return None if made is None else write.submodule(node, prefix, made, source)


def _module(given: dict[str, Any], kind: type[nn.Module], write: GraphRewriter) -> nn.Module | None:
    """The batch norm of these arguments, with the same tensors; ``None`` if these are not constant."""
    tensors = {name: write.constants.value(given.get(name)) for name in _NAMES[1:5]}
    mean, var = tensors["running_mean"], tensors["running_var"]
    is_known = all(tensors[name] is not None for name in tensors if given.get(name) is not None)
    if mean is None or var is None or not is_known or given.get("training", False) is not False:
        return None
    if any(isinstance(given.get(name), fx.Node) for name in ("momentum", "eps")):
        return None
    made: Any = kind(len(mean), eps=given.get("eps", 1e-5), device="meta")
    made.running_mean, made.running_var = mean, var
    ones, zeros = torch.ones_like(mean), torch.zeros_like(mean)
    for name, neutral in (("weight", ones), ("bias", zeros)):
        value = tensors[name]
        kept = isinstance(value, nn.Parameter)
        made.register_parameter(
            name,
            value if kept else nn.Parameter(neutral if value is None else value.detach(), False),
        )
    made.num_batches_tracked = torch.tensor(0)
    norm: nn.Module = made.eval()
    return norm


# Pooling whose window is the whole of its input, written as the global pooling that it is.
#
# ``F.avg_pool2d(x, x.size()[2:])`` asks for a window that is computed, which has no integer kernel and
# which a file may not name; ``F.adaptive_avg_pool2d(x, 1)`` gives the same for all sizes.


#: The number of axes, and what pools all of them.
_POOLS: dict[Any, tuple[int, Callable[..., Any]]] = {
    F.avg_pool1d: (1, F.adaptive_avg_pool1d),
    F.avg_pool2d: (2, F.adaptive_avg_pool2d),
    F.avg_pool3d: (3, F.adaptive_avg_pool3d),
    F.max_pool1d: (1, F.adaptive_max_pool1d),
    F.max_pool2d: (2, F.adaptive_max_pool2d),
    F.max_pool3d: (3, F.adaptive_max_pool3d),
    torch.max_pool1d: (1, F.adaptive_max_pool1d),
    torch.max_pool2d: (2, F.adaptive_max_pool2d),
}

#: What arguments may be where nothing is around the input.
_PLAIN: dict[str, tuple[Any, ...]] = {"dilation": (1,), "count_include_pad": (True, False)}


def whole_pool(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """Such a pooling, under the same name. The rank of the input is that of a batch.

    >>> module = fx.symbolic_trace(lambda x: F.avg_pool2d(x, x.size()[2:]))
    >>> GraphRewriter(module).apply(whole_pool), [node.name for node in module.graph.nodes]
    (1, ['x', 'avg_pool2d', 'output'])
    >>> module(torch.ones(1, 2, 3, 5)).shape
    torch.Size([1, 2, 1, 1])
    """
    axes, pool = _POOLS.get(node.target, (0, None))
    x = None if pool is None else _whole(node, axes)
    return None if x is None else write.retarget(node, pool, x, 1)


def _whole(node: fx.Node, axes: int) -> fx.Node | None:
    """What is pooled, where the window is all of it and nothing else is said."""
    given = arguments_by_name(node, "input", "kernel_size")
    x, window = given.pop("input", None), given.pop("kernel_size", None)
    plain = all(value in _PLAIN.get(word, (None, 0, False)) for word, value in given.items())
    if not isinstance(x, fx.Node) or len(node.args) > 2 or not plain:
        return None
    if isinstance(window, (list, tuple)) and len(window) == axes:
        each = [_axis(one, x, axes) for one in window]
        return x if each == list(range(axes)) else None
    if axes == 1 and _axis(window, x, axes) == 0:
        return x
    return x if _last_sizes(window, x, axes) else None


def _axis(size: Any, x: fx.Node, axes: int) -> int | None:
    """Which of the pooled axes ``size`` is the size of, from the first."""
    if not isinstance(size, fx.Node):
        return None
    place = size.args[1] if len(size.args) == 2 else None
    is_read = size.target == "size" and size.args[0] is x
    is_item = size.target is operator.getitem and _is_shape(size.args[0], x)
    if not isinstance(place, int) or not (is_read or is_item):
        return None
    return place + axes if place < 0 else place - 2


def _last_sizes(sizes: Any, x: fx.Node, axes: int) -> bool:
    """Whether ``sizes`` are ``x.shape[2:]``, or the last ones."""
    if not isinstance(sizes, fx.Node) or sizes.target is not operator.getitem:
        return False
    source, place = sizes.args
    return _is_shape(source, x) and place in (slice(2, None), slice(-axes, None))


def _is_shape(node: object, x: fx.Node) -> bool:
    if not isinstance(node, fx.Node) or not node.args or node.args[0] is not x:
        return False
    return (node.target == "size" and len(node.args) == 1) or (
        node.target is getattr and node.args[1] == "shape"
    )


# Views with the sizes of another tensor (``x.view_as(y)``), for which no backend has an entry.

_AS = {"view_as": "reshape", "reshape_as": "reshape", "expand_as": "expand"}


def sizes_of_another(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """Such a view as one with sizes that are read, under the same name.

    >>> module = fx.symbolic_trace(lambda x, y: x.reshape_as(y))
    >>> GraphRewriter(module).apply(sizes_of_another)
    1
    >>> [node.target for node in module.graph.nodes if node.op == "call_method"]
    ['size', 'reshape']
    """
    view = _AS.get(plain_name(node.target)) if node.op == "call_method" else None
    if view is None or len(node.all_input_nodes) != 2:
        return None
    x, other = node.all_input_nodes
    return write.retarget(node, view, x, write.call(node, "size", other))


# Constant masks (``x[:, mask]``): the sizes of what they take are numbers only where the places are named.


def places_of_masks(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """What a constant mask takes, by the places where it is true, under the same name.

    >>> mask = torch.tensor([True, False, True])
    >>> module = fx.symbolic_trace(lambda x: x[:, mask])
    >>> GraphRewriter(module).apply(places_of_masks)
    1
    >>> module(torch.tensor([[1, 2, 3]]))
    tensor([[1, 3]])
    """
    if node.target not in (operator.getitem, torch.ops.aten.index.Tensor):
        return None
    x, given = node.args[0], node.args[1]
    parts: Any = given if isinstance(given, (list, tuple)) else (given,)
    made: list[Any] = []
    for part in parts:
        mask = write.constants.held(part)
        if mask is None or mask.dtype != torch.bool or not mask.dim():
            made.append(part)
        else:
            places = mask.nonzero(as_tuple=True)
            made += (write.buffer(node, f"{node.name}_places_", each) for each in places)
    if len(made) == len(parts) and all(map(operator.is_, made, parts)):
        return None
    return write.retarget(node, node.target, x, tuple(made))


# Activations that a model writes out in arithmetic, as the functions that they are.
#
# Hard-swish, ``x * relu6(x + 3) / 6``, and its gate alone, hard-sigmoid: models older than the functions, and
# those that were imported from other formats, have them as three to five operators. Each rounds to integers
# where it is quantized, and reads and writes a tensor where it is not.

_GATES = frozenset({F.hardsigmoid, "hardsigmoid"})
_CLAMPS = frozenset({torch.clamp, torch.clip, "clamp", "clip", F.hardtanh, "hardtanh"})
_CLAMPS_TO_6 = frozenset({F.relu6, "relu6"})
_BOUNDS = ("min", "max", "min_val", "max_val")


def hard_sigmoid(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """``F.hardsigmoid`` in the place of its arithmetic on floats, ``relu6(x + 3) / 6``."""
    return _written(node, write, _clamped(_sixth(node, write), write), F.hardsigmoid)


def hard_swish(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """``F.hardswish`` in the place of its arithmetic on floats: ``x * relu6(x + 3) / 6``, in either order, or
    ``x * hardsigmoid(x)``.

    >>> from backquant.graph.shapes import GraphValues
    >>> module = fx.symbolic_trace(lambda x: x * F.relu6(x + 3) / 6)
    >>> values = GraphValues(module, (torch.zeros(2, 3),))
    >>> GraphRewriter(module, values=values).apply(hard_swish), [node.name for node in module.graph.nodes]
    (1, ['x', 'hardswish', 'output'])
    """
    gates = (_sixth(node, write), _clamped), (node, _hard_sigmoid)
    pairs = ((x, gate(y, write)) for read, gate in gates for x, y in _operands_of("mul", read))
    source = next((x for x, gated in pairs if isinstance(x, fx.Node) and gated is x), None)
    return _written(node, write, source, F.hardswish)


def _written(
    node: fx.Node, write: GraphRewriter, source: fx.Node | None, function: Callable[..., Any]
) -> fx.Node | None:
    """``function`` of ``source`` in the place of what stands between that and ``node``."""
    facts = None if source is None else write.facts(source)
    if source is None or facts is None or not facts.dtype.is_floating_point:
        return None
    between = _between(node, source)
    if any(each.target in write.kept for each in between) or not _is_read_within(between, node):
        return None
    made = write.call(node, function, source)
    write.replace(node, made)
    for each in sorted(between - {node}, reverse=True):
        write.erase(each)
    return made


def _operands_of(kind: str, node: object) -> Iterator[tuple[Any, ...]]:
    """The two operands of ``node``, if it is such arithmetic, in each order in which it is the same."""
    if isinstance(node, fx.Node) and arithmetic_of(node) == kind:
        yield node.args
        if kind != "div":
            yield node.args[::-1]


def _sixth(node: fx.Node, write: GraphRewriter) -> Any:
    """What ``node`` is the sixth of."""
    for dividend, divisor in _operands_of("div", node):
        if _number(divisor, write) == 6:
            return dividend
    for dividend, factor in _operands_of("mul", node):
        number = _number(factor, write)
        if number is not None and abs(6 * number - 1) < 1e-5:
            return dividend
    return None


def _hard_sigmoid(node: object, write: GraphRewriter) -> Any:
    """``x`` of ``hardsigmoid(x)``."""
    if not isinstance(node, fx.Node) or len(node.args) != 1:
        return None
    is_gate = _is_call(node) and plain_name(node.target) in _GATES
    return node.args[0] if is_gate or isinstance(write.called(node), nn.Hardsigmoid) else None


def _clamped(node: object, write: GraphRewriter) -> Any:
    """``x`` of ``clamp(x + 3, 0, 6)``."""
    if not isinstance(node, fx.Node) or not node.args or not _clamps_to_6(node, write):
        return None
    pairs = _operands_of("add", node.args[0])
    return next((x for x, y in pairs if isinstance(x, fx.Node) and _number(y, write) == 3), None)


def _clamps_to_6(node: fx.Node, write: GraphRewriter) -> bool:
    called = write.called(node)
    if isinstance(called, nn.Hardtanh):  # ReLU6 is a subclass
        return (called.min_val, called.max_val) == (0, 6)
    if plain_name(node.target) in _CLAMPS_TO_6:
        return True
    return _is_call(node) and plain_name(node.target) in _CLAMPS and _bounds(node) == (0, 6)


def _number(value: Any, write: GraphRewriter) -> float | None:
    """A number, or a tensor that holds one and changes no shape."""
    if isinstance(value, int | float):
        return float(value)
    tensor = write.constants.value(value)
    if tensor is None or tensor.numel() != 1 or tensor.dim() > 1:
        return None
    return float(tensor.detach())


def _is_call(node: fx.Node) -> bool:
    if node.op not in ("call_function", "call_method"):
        return False
    others = {name: value for name, value in node.kwargs.items() if name not in _BOUNDS}
    return others in ({}, {"inplace": False})


def _bounds(node: fx.Node) -> tuple[Any, ...]:
    given: Mapping[str, Any] = node.kwargs
    return (*node.args[1:], *(given[name] for name in _BOUNDS if name in given))


def _between(node: fx.Node, source: fx.Node) -> set[fx.Node]:
    """``node``, and what it reads up to ``source``: a handful, as they were just read."""
    found, waiting = {node}, [node]
    while waiting:
        for each in waiting.pop().all_input_nodes:
            if each is not source and each.op != "get_attr" and each not in found:
                found.add(each)
                waiting.append(each)
    return found


def _is_read_within(between: set[fx.Node], last: fx.Node) -> bool:
    return all(each is last or between.issuperset(each.users) for each in between)


# Memory that nobody has written (``torch.empty``), as zeros.
#
# Whoever reads it before it is written may get anything. Files of models admit no such operator, exporters
# have none, and two calls that should be equal are not.

_ZEROS: dict[Any, Any] = {
    torch.empty: torch.zeros,
    torch.empty_like: torch.zeros_like,
    "new_empty": "new_zeros",
}

#: The same by the names of aten overloads, as in exported graphs.
_OVERLOADS = {
    "aten.empty.memory_format": "zeros",
    "aten.empty_like.default": "zeros_like",
    "aten.new_empty.default": "new_zeros",
}


def zeros_for_unwritten(node: fx.Node, write: GraphRewriter) -> fx.Node | None:
    """A new tensor without values as zeros, under the same name.

    >>> module = fx.symbolic_trace(lambda x: torch.empty_like(x))
    >>> GraphRewriter(module).apply(zeros_for_unwritten), module(torch.ones(2))
    (1, tensor([0., 0.]))
    """
    name = _OVERLOADS.get(str(node.target))
    zeros = _ZEROS.get(node.target) if name is None else getattr(torch.ops.aten, name).default
    if zeros is None or node.op not in ("call_function", "call_method"):
        return None
    kwargs = dict(node.kwargs)
    if "zeros_like" not in str(zeros):
        kwargs.pop("memory_format", None)
    return write.retarget(node, zeros, *node.args, **kwargs)
