"""What decomposition makes of an operator, and the operator again.

Export keeps ``linear``, ``conv2d``, ``batch_norm`` and the like; ``run_decompositions`` does not:

1. A linear layer is ``addmm`` or ``mm`` with its weight transposed (``t``, ``permute`` or ``transpose``),
   between two ``view`` for inputs of more than two dimensions. ``addmm`` with a weight that is not
   transposed is a linear layer, too, and so is ``mm`` or ``matmul`` with a matrix of the model, with the
   vector of the model that is added to it: the weight is transposed here.
2. A convolution of any dimension, transposed or not, is ``convolution``.
3. Norms and max pooling give a tuple of which item 0 is read.
4. A root-mean-square norm is the arithmetic that it stands for.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

__all__ = ["composed"]

_aten = torch.ops.aten
_Call = tuple[Any, tuple[Any, ...]]


def composed(node: fx.Node) -> fx.Node | None:
    """The operator that the calls ending in ``node`` are together, as one call before it, or ``None``.

    >>> graph = fx.Graph()
    >>> x, w, b = (graph.placeholder(name) for name in "xwb")
    >>> turned = graph.call_function(_aten.permute.default, (w, [1, 0]))
    >>> made = composed(graph.call_function(_aten.addmm.default, (b, x, turned)))
    >>> made.target is _aten.linear.default, made.args
    (True, (x, w, b))
    """
    key = node.target
    source = node.args[0] if node.args else None
    if key is operator.getitem and node.args[1] == 0 and isinstance(source, fx.Node):
        rule = _ITEM_ZERO.get(source.target)
        call = None if rule is None else rule(*source.args)
    else:
        whole = _WHOLE.get(key)
        call = None if whole is None else whole(node)
    if call is None:
        return None
    with node.graph.inserting_before(node):
        made = node.graph.call_function(*call)
    made.meta.update(node.meta)
    return made


# -- linear layers -------------------------------------------------------------------------------------


def _transposed(value: Any) -> fx.Node | None:
    """The matrix whose transpose ``value`` is."""
    if not isinstance(value, fx.Node) or not value.args:
        return None
    source, *rest = value.args
    order: Any = rest[0] if rest and isinstance(rest[0], (list, tuple)) else rest
    swaps = {i % 2 for i in order if isinstance(i, int)} == {0, 1} and len(order) == 2
    turned = value.target is _aten.t.default or (
        value.target in (_aten.permute.default, _aten.transpose.int)
        and swaps
        and (value.target is _aten.transpose.int or order[0] % 2 == 1)
    )
    is_matrix = len(_shape(source) or (0, 0)) == 2
    return source if turned and is_matrix and isinstance(source, fx.Node) else None


def _addmm(node: fx.Node) -> _Call | None:
    if node.kwargs:
        return None
    bias, x, matrix = node.args
    weight = _transposed(matrix)
    if weight is None and _is_parameter(matrix) and _is_parameter(bias):
        weight = _turned(node, matrix)
    return None if weight is None else (_aten.linear.default, (x, weight, bias))


def _is_parameter(value: Any) -> bool:
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith("p_")


def _turned(node: fx.Node, matrix: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        weight = node.graph.call_function(_aten.t.default, (matrix,))
    weight.meta["nn_module_stack"] = node.meta.get("nn_module_stack", {})
    return weight


def _mm(node: fx.Node) -> _Call | None:
    x, matrix = node.args
    weight = _transposed(matrix)
    if weight is None and not _is_state(x) and _is_state(matrix) and len(_shape(matrix) or ()) == 2:
        weight = _turned(node, matrix)
    return None if weight is None else (_aten.linear.default, (x, weight))


def _biased(node: fx.Node) -> _Call | None:
    """A product with a matrix of the model, and the vector of the model that alone is added to it."""
    if node.kwargs:
        return None
    bias, product = _with_target(node.args, _aten.linear.default)
    if product is None or len(product.args) != 2 or len(product.users) > 1 or not _is_state(bias):
        return None
    is_product = _calls(product.args[1], _aten.t.default) and _is_state(product.args[1].args[0])
    fits = _shape(bias) == (_shape(product) or ())[-1:]
    return (_aten.linear.default, (*product.args, bias)) if is_product and fits else None


def _is_state(value: Any) -> bool:
    """Whether it is a tensor of the model: a parameter, a buffer or a constant."""
    names = ("p_", "b_", "c_")
    return isinstance(value, fx.Node) and value.op == "placeholder" and value.name.startswith(names)


def _view(node: fx.Node) -> _Call | None:
    """``view(linear(view(x)))`` with the leading dimensions of ``x`` again."""
    product = node.args[0]
    if not isinstance(product, fx.Node) or product.target is not _aten.linear.default:
        return None
    flat = product.args[0]
    if not isinstance(flat, fx.Node) or flat.target not in _VIEWS or len(product.users) > 1:
        return None
    x = flat.args[0]
    shapes = [_shape(value) for value in (x, flat, node)]
    if None in shapes:
        return None
    before, middle, after = shapes
    same = before[:-1] == after[:-1] and before[-1] == middle[-1] and len(middle) == 2  # type: ignore[index, arg-type]
    return (_aten.linear.default, (x, *product.args[1:])) if same else None


_VIEWS = (_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default)


def _shape(value: Any) -> tuple[Any, ...] | None:
    tensor = value.meta.get("val") if isinstance(value, fx.Node) else None
    return tuple(tensor.shape) if isinstance(tensor, torch.Tensor) else None


# -- others --------------------------------------------------------------------------------------------

_CONV = {3: _aten.conv1d.default, 4: _aten.conv2d.default, 5: _aten.conv3d.default}
_CONV_TRANSPOSED = {
    3: _aten.conv_transpose1d.default,
    4: _aten.conv_transpose2d.input,
    5: _aten.conv_transpose3d.input,
}


def _convolution(node: fx.Node) -> _Call | None:
    x, weight, bias, stride, padding, dilation, transposed, output_padding, groups = node.args
    shape = _shape(weight)
    if shape is None or len(shape) not in _CONV:
        return None
    if transposed:
        rest = (stride, padding, output_padding, groups, dilation)
        return _CONV_TRANSPOSED[len(shape)], (x, weight, bias, *rest)
    return _CONV[len(shape)], (x, weight, bias, stride, padding, dilation, groups)


def _rms_norm(node: fx.Node) -> _Call | None:
    """``weight * (x * rsqrt(mean(x ** 2) + eps))``, as models write it that have no module for it."""
    weight, scaled = _with_target(node.args, _aten.mul.Tensor)
    if scaled is None or not _is_parameter(weight) or len(_shape(weight) or ()) != 1:
        return None
    x, root = _with_target(scaled.args, _aten.rsqrt.default)
    added: Any = root.args[0] if root is not None else None
    if not _calls(added, _aten.add.Tensor) or not isinstance(added.args[1], float):
        return None
    mean: Any = added.args[0]
    if not _calls(mean, _aten.mean.dim) or tuple(mean.args[1:]) != ([-1], True):
        return None
    power: Any = mean.args[0]
    if not _calls(power, _aten.pow.Tensor_Scalar) or power.args != (x, 2):
        return None
    inner = (scaled, root, added, mean, power)
    if any(len(part.users) > 1 for part in inner) or _shape(x) is None:
        return None
    eps = added.args[1]
    return _aten.rms_norm.default, (x, list(_shape(weight) or ()), weight, eps)


def _calls(value: Any, target: Any) -> bool:
    return isinstance(value, fx.Node) and value.target is target


def _with_target(values: Any, target: Any) -> tuple[Any, Any]:
    """Of two values: the other one, and the one that calls ``target`` (else ``None``)."""
    if len(values) != 2:
        return None, None
    for one, other in (values, tuple(reversed(values))):
        if _calls(other, target) and isinstance(one, fx.Node):
            return one, other
    return None, None


def _softmax(node: fx.Node) -> _Call | None:
    x, dim, to_float = node.args
    return None if to_float else (_aten.softmax.int, (x, dim))


_WHOLE: dict[Any, Callable[[fx.Node], _Call | None]] = {
    _aten.addmm.default: _addmm,
    _aten.mm.default: _mm,
    _aten.matmul.default: _mm,
    _aten.view.default: _view,
    _aten._unsafe_view.default: _view,
    _aten.reshape.default: _view,
    _aten.convolution.default: _convolution,
    _aten._softmax.default: _softmax,
    _aten.mul.Tensor: _rms_norm,
    _aten.add.Tensor: _biased,
}


def _batch_norm(*args: Any) -> _Call:
    x, weight, bias, mean, var, momentum, eps = args
    return _aten.batch_norm.default, (x, weight, bias, mean, var, False, momentum, eps, False)


def _layer_norm(*args: Any) -> _Call:
    return _aten.layer_norm.default, args


def _group_norm(*args: Any) -> _Call:
    x, weight, bias, _, _, _, groups, eps = args
    return _aten.group_norm.default, (x, groups, weight, bias, eps)


def _max_pool(*args: Any) -> _Call:
    return _aten.max_pool2d.default, args


_ITEM_ZERO: dict[Any, Callable[..., _Call]] = {
    _aten._native_batch_norm_legit_no_training.default: _batch_norm,
    _aten.native_layer_norm.default: _layer_norm,
    _aten.native_group_norm.default: _group_norm,
    _aten.max_pool2d_with_indices.default: _max_pool,
}
