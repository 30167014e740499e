"""An exported graph without what export adds: contexts, checks, copies of values, in-place calls.

1. Blocks under ``torch.no_grad`` and under a disabled autocast are put in their place.
2. Assertions about sizes and dtypes go; the arguments are checked when the model is called.
3. Casts to the dtype that a value has, full slices, copies, dropout in evaluation: their input. What is
   the tensor itself is replaced before calls in place are, copies behind them.
4. What an operator was decomposed to becomes that operator again (``composed``).
5. A call in place becomes the call that returns a new value, and later readers read that. Of a slice
   (``mask[:, 2:] = 1``) it is scattered into what it is a slice of. Where other views of the value are read
   later, ``needs_functional`` says so, and the whole program is made functional first.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

from backquant.graph.export.opaque import NotExportedError

# Which operator gives as a new value what another one writes into its first argument.

_aten = torch.ops.aten


@cache
def functional(overload: OpOverload) -> OpOverload | None:
    """``aten.add.Tensor`` for ``aten.add_.Tensor``: of the same arguments, whatever the name (of
    ``aten.pow_.Scalar`` it is ``aten.pow.Tensor_Scalar``; ``aten.pow.Scalar`` raises a number to a tensor).

    >>> functional(_aten.floor_divide_.Tensor), functional(_aten.rrelu_with_noise_.default)
    (<OpOverload(op='aten.floor_divide', overload='default')>, None)
    """
    name = overload._schema.name.split("::")[1]
    packet = getattr(_aten, name.removesuffix("_"), None) if name.endswith("_") else None
    found = [] if packet is None else [getattr(packet, one) for one in packet.overloads()]
    wanted = _arguments(overload)
    return next(
        (one for one in found if not one._schema.is_mutable and _arguments(one) == wanted), None
    )


def _arguments(overload: OpOverload) -> list[tuple[str, str, bool]]:
    return [(a.name, str(a.type), a.kwarg_only) for a in overload._schema.arguments]


# Where in the module tree a node of an exported graph comes from: ``nn_module_stack`` read.


@dataclass(frozen=True)
class Place:
    """``call`` tells calls of one module apart; ``cls`` is the class by its import path."""

    call: str
    path: str
    cls: str


_ROOT = Place("", "", "")


def place_of(node: fx.Node) -> Place:
    """The innermost module whose ``forward`` made ``node``; the model itself where none is noted."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return _ROOT
    call, entry = list(stack.items())[-1]
    path, cls = entry[0], entry[1]
    if str(call).startswith("_empty_nn_module_stack"):
        return _ROOT
    name = cls if isinstance(cls, str) else f"{cls.__module__}.{cls.__qualname__}"
    return Place(str(call), _clean(path), name)


def _clean(path: str) -> str:
    """``layers.0`` for ``layers.0`` and for ``L['self'].layers[0]``, as older exports have it."""
    for prefix in ("L['self']", "L__self__"):
        path = path.removeprefix(prefix)
    return path.replace("[", ".").replace("]", "").replace("'", "").strip(".")


class NotFunctionalError(Exception):
    """A value is changed in place while views of it are read later."""


def tidy(
    graph: fx.Graph, owner: torch.nn.Module, composed: Callable[[fx.Node], fx.Node | None]
) -> None:
    """Edit ``graph`` as the module says; ``owner`` holds the graphs of its blocks.

    ``composed``: see ``Speller``.

    Raises ``NotFunctionalError``, and ``NotExportedError`` for what cannot be put into one graph.
    """
    while _inline_blocks(graph, owner):
        pass
    for node in list(graph.nodes):
        if _is_check(node):
            graph.erase_node(node)
        elif _trains(node):
            raise NotExportedError("it was exported in training mode: batch norm is trained")
    _replace(graph, _ITSELF)
    aliases = _Aliases(graph)
    for node in list(graph.nodes):
        if node.op == "call_function" and not _is_pure(node):
            _out_of_place(node, aliases)
    _replace(graph, _SAME)
    for node in list(graph.nodes):
        value = composed(node) if node.op == "call_function" else None
        if value is not None:
            node.replace_all_uses_with(value)
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and _is_pure(node):
            graph.erase_node(node)


def _trains(node: fx.Node) -> bool:
    """Whether a call is a batch norm that updates its statistics (and not one without any)."""
    return node.target is _aten.batch_norm.default and bool(
        node.args[5] and node.args[3] is not None
    )


# -- blocks ----------------------------------------------------------------------------------------
def _inline_blocks(graph: fx.Graph, owner: torch.nn.Module) -> bool:
    found = False
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
            continue
        name = node.target._name
        if name == "wrap_with_set_grad_enabled":
            block, args = node.args[1], node.args[2:]
        elif name == "wrap_with_autocast" and node.args[2] is False:
            block, args = node.args[4], node.args[5:]
        else:
            raise NotExportedError(f"it uses {_spelled(name)}", place_of(node).path)
        assert isinstance(block, fx.Node)
        _inline(graph, node, getattr(owner, str(block.target)), args)
        if not block.users:
            graph.erase_node(block)
        found = True
    return found


def _spelled(name: str) -> str:
    return {"wrap_with_autocast": "torch.autocast"}.get(name, f"torch.{name}")


def _inline(graph: fx.Graph, call: fx.Node, block: fx.GraphModule, args: tuple[Any, ...]) -> None:
    made: dict[fx.Node, Any] = {}
    given = iter(args)
    results: Any = ()
    with graph.inserting_before(call):
        for node in block.graph.nodes:
            if node.op == "placeholder":
                made[node] = next(given)
            elif node.op == "output":
                results = fx.node.map_arg(node.args[0], made.__getitem__)
            else:
                made[node] = graph.node_copy(node, made.__getitem__)
    for user in list(call.users):
        if user.target is not operator.getitem:
            raise NotExportedError(f"the exported block {call.name!r} is read as a whole")
        user.replace_all_uses_with(results[user.args[1]])
        graph.erase_node(user)
    graph.erase_node(call)


# -- assertions, and nodes whose value is another node's ----------------------------------------------
_CHECKS = frozenset(
    {
        "aten::_assert_async",
        "aten::_assert_scalar",
        "aten::_assert_tensor_metadata",
        "aten::sym_constrain_range",
        "aten::sym_constrain_range_for_size",
        "aten::_functional_assert_async",
    }
)


def _is_check(node: fx.Node) -> bool:
    name = node.target.name() if isinstance(node.target, OpOverload) else ""
    return name.rpartition(".")[0] in _CHECKS or name in _CHECKS


def _first(node: fx.Node) -> fx.Node | None:
    value = node.args[0] if node.args else None
    return value if isinstance(value, fx.Node) else None


def _alike(node: fx.Node, value: fx.Node) -> bool:
    """Whether two values have the same dtype, device and shape."""
    one, two = node.meta.get("val"), value.meta.get("val")
    if not isinstance(one, torch.Tensor) or not isinstance(two, torch.Tensor):
        return False
    return one.dtype == two.dtype and one.device == two.device and one.shape == two.shape


def _cast(node: fx.Node) -> fx.Node | None:
    value = _first(node)
    plain = node.kwargs.get("memory_format") in (None, torch.preserve_format)
    return value if value is not None and plain and _alike(node, value) else None


def _uncopied(node: fx.Node) -> fx.Node | None:
    """What ``to`` gives where nothing is to change: the tensor, and no copy of it."""
    target: Any = node.target
    schema = [argument.name for argument in target._schema.arguments]
    given = dict(zip(schema, node.args, strict=False)) | dict(node.kwargs)
    return None if given.get("copy") else _cast(node)


def _slice(node: fx.Node) -> fx.Node | None:
    start, end, step = ((*node.args, None, None, None)[i] for i in (2, 3, 4))
    value = _first(node)
    whole = start in (None, 0) and end in (None, 2**63 - 1) and step in (None, 1)
    return value if whole else None


def _drops(node: fx.Node) -> bool:
    return node.target in _DROPOUTS and bool(node.args[2] and node.args[1])


def refuse_active_dropout(graph: fx.Graph) -> None:
    """Raise ``NotExportedError`` for a program that somebody exported before he called ``eval()``.

    A model in evaluation mode may drop values at each call, too (``F.dropout(x, training=True)``).

    >>> refuse_active_dropout(fx.Graph())
    """
    if any(_drops(node) for node in graph.nodes if node.op == "call_function"):
        raise NotExportedError("it was exported in training mode: dropout is active")


_DROPOUTS = frozenset(
    {_aten.dropout.default, _aten.feature_dropout.default, _aten.alpha_dropout.default}
)
_ITSELF: dict[Any, Callable[[fx.Node], fx.Node | None]] = {
    _aten.alias.default: _first,
    _aten.detach.default: _first,
    _aten.detach_.default: _first,
    _aten.type_as.default: _cast,
    _aten.to.dtype: _uncopied,
    _aten.to.dtype_layout: _uncopied,
    _aten.to.device: _uncopied,
    _aten.to.other: _uncopied,
    # of a tensor to itself: what ``self.table = self.table.to(device)`` leaves in an export
    _aten.copy_.default: lambda node: _first(node) if node.args[0] is node.args[1] else None,
    _aten.slice.Tensor: _slice,
    **dict.fromkeys(_DROPOUTS, lambda node: None if _drops(node) else _first(node)),
}
_SAME: dict[Any, Callable[[fx.Node], fx.Node | None]] = _ITSELF | {
    _aten.lift_fresh_copy.default: _first,
    _aten.lift_fresh.default: _first,
    _aten.clone.default: _cast,
    _aten.to.dtype: _cast,
    _aten.to.dtype_layout: _cast,
    _aten.to.device: _cast,
    _aten.to.other: _cast,
    _aten._to_copy.default: _cast,
}


def _replace(graph: fx.Graph, rules: Mapping[Any, Callable[[fx.Node], fx.Node | None]]) -> None:
    """``rules``: by target, what gives the value that stands for a node's, if one does."""
    for node in list(graph.nodes):
        rule = rules.get(node.target)
        value = None if rule is None else rule(node)
        if value is not None:
            node.replace_all_uses_with(value)
            graph.erase_node(node)


def _is_pure(node: fx.Node) -> bool:
    return not isinstance(node.target, OpOverload) or not node.target._schema.is_mutable


# -- in place ----------------------------------------------------------------------------------------
class _Aliases:
    """Which values are views of one tensor, and where each is read last."""

    def __init__(self, graph: fx.Graph) -> None:
        self.position = {node: i for i, node in enumerate(graph.nodes)}
        self.base: dict[fx.Node, fx.Node] = {}
        self.views: dict[fx.Node, list[fx.Node]] = {}
        self._whole: dict[
            fx.Node, fx.Node
        ] = {}  # from a tensor that was changed in place to the node of its current value
        for node in graph.nodes:
            base = node
            for value in _viewed(node):
                base = self.base[value]
            self.base[node] = base
            self.views.setdefault(base, []).append(node)

    def read_later(self, value: fx.Node, after: fx.Node, among: list[fx.Node]) -> bool:
        """Whether a view of the tensor of ``value`` that is there when ``after`` changes it is read later.

        ``among``: ``value`` and what it is a slice of, up to the tensor itself; what reads those later is
        given the new value. Where the tensor itself is none of them, all its views count.
        """
        limit = self.position[after]
        whole = self.is_whole(among[-1])
        known = among if whole else [value]
        return any(
            view not in known and view is not after and self.position[user] > limit
            for view in self.views[self.base[value]]
            if not whole or self.position[view] < limit
            for user in view.users
            if user in self.position
        )

    def is_whole(self, value: fx.Node) -> bool:
        """Whether ``value`` is a tensor itself, or the node of its current value; not a view of it."""
        base = self.base[value]
        return value in (base, self._whole.get(base))

    def change(self, node: fx.Node) -> None:
        """``node`` is from now on the value of the tensor that it changes as a whole."""
        self._whole[self.base[node]] = node

    def add(self, new: fx.Node, source: fx.Node, changed: fx.Node) -> None:
        """``new`` holds from the node ``changed`` on what ``source``, a value of the same tensor, held."""
        base = self.base[source]
        self.base[new] = base
        self.position[new] = self.position[changed]
        self.views[base].append(new)
        self._whole[base] = new


def _viewed(node: fx.Node) -> list[fx.Node]:
    """The arguments that the result of ``node`` may be a view of."""
    if not isinstance(node.target, OpOverload):
        source = node.args[0] if node.target is operator.getitem else None
        return [source] if isinstance(source, fx.Node) else []
    schema = node.target._schema
    named = zip(schema.arguments, node.args, strict=False)
    return [
        value
        for argument, value in named
        if argument.alias_info is not None and isinstance(value, fx.Node)
    ]


def _out_of_place(node: fx.Node, aliases: _Aliases) -> None:
    value = _first(node)
    assert value is not None and isinstance(node.target, OpOverload)
    base = aliases.base[value]
    if base.op == "placeholder":
        raise NotExportedError(
            f"it changes {base.name!r} in place", place_of(node).path, str(node.target)
        )
    target = functional(node.target)
    chain = _slices(value)
    if target is None or aliases.read_later(value, node, among=chain):
        raise NotFunctionalError(f"{node.name} changes {value.name} in place")
    node.target = target
    _read_instead(value, node, node, aliases)
    if aliases.is_whole(value):
        aliases.change(node)
    changed, last = node, node
    for view in chain[:-1]:
        source = view.args[0]
        assert isinstance(source, fx.Node)
        with node.graph.inserting_after(last):
            scattered = node.graph.call_function(
                SCATTER[view.target], (source, changed, *view.args[1:])
            )
        scattered.meta = {**node.meta, "val": source.meta.get("val")}
        aliases.add(scattered, source, node)
        _read_instead(source, scattered, node, aliases)
        changed = last = scattered


#: For each view: the operator that writes a changed view back into its base.
SCATTER: dict[Any, OpOverload] = {
    _aten.slice.Tensor: _aten.slice_scatter.default,
    _aten.select.int: _aten.select_scatter.default,
}


def _slices(value: fx.Node) -> list[fx.Node]:
    """``value``, what it is a slice of, and so on."""
    found = [value]
    while found[-1].target in SCATTER and not found[-1].kwargs:
        source = found[-1].args[0]
        assert isinstance(source, fx.Node)
        found.append(source)
    return found


def _read_instead(value: fx.Node, new: fx.Node, after: fx.Node, aliases: _Aliases) -> None:
    """Who reads ``value`` after the node ``after`` reads ``new``."""
    position = aliases.position
    for user in list(value.users):
        if user is not new and position.get(user, -1) > position[after]:
            user.replace_input_with(value, new)
