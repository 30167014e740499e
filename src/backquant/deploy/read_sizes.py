"""Modules that read sizes from tensors, written for the sizes of the example inputs.

Models that were imported from ONNX pass shapes, axes and bounds of slices as tensors of integers, put
together from constants and from sizes: ``Reshape()(x, shape)``. Code that reads the values of such a tensor
cannot be captured by ``torch.export``, so for a file of fixed sizes these calls are replaced beforehand.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from backquant.graph import get_module
from backquant.graph.edit import NamePool
from backquant.graph.folding import is_random
from backquant.graph.silence import quiet

_SIZES = ("size", "dim", "ndimension", "numel", "shape", "ndim")
_LIKE = ("new_ones", "new_zeros", "new_full", "ones_like", "zeros_like", "full_like")
_FILLED = (*_LIKE, "ones", "zeros", "full", "arange", "eye", "scalar_tensor", "linspace")
_OURS = ("torch", "backquant")


def write_read_sizes(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[str, ...]:
    """Replace, in place, calls of modules that read numbers known from constants and sizes; their names.

    1. A call of which all inputs are known becomes its value.
    2. Any other becomes the operators that it runs on these inputs. What also reads the values of
       something unknown stays as it is.
    3. Conditions that are known are written into the calls that stay.

    ``args`` and ``kwargs`` are inputs of ``module``, which is run once if it calls such modules.

    >>> class Reshape(nn.Module):
    ...     def forward(self, x, shape):
    ...         return x.reshape(shape.tolist())
    >>> Reshape.__module__ = "others"  # of a package that is not ours
    >>> class Tracer(fx.Tracer):
    ...     def is_leaf_module(self, module, name): return True
    >>> class Model(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.reshape, self.shape = Reshape(), nn.Buffer(torch.tensor([2, 3]))
    ...     def forward(self, x):
    ...         return self.reshape(x, self.shape)
    >>> module = fx.GraphModule(Model(), Tracer().trace(Model()))
    >>> write_read_sizes(module, (torch.zeros(6),), {}), module(torch.zeros(6)).shape
    (('reshape',), torch.Size([2, 3]))
    """
    known = known_nodes(module)
    calls = [node for node in module.graph.nodes if _may_read(node, module, known)]
    if not calls:
        return ()
    recorded = Recorder(module, {*calls, *(s for n in calls for s in n.all_input_nodes)})
    with torch.no_grad():
        recorded.call(args, kwargs)
        done = [
            node.name
            for node in calls
            if _is_written(node, module, known, recorded.values)
            or _has_conditions(node, known, recorded.values)
        ]
    for node in reversed(list(module.graph.nodes)):
        if node in known and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return tuple(done)


def known_nodes(module: fx.GraphModule, changed: Collection[str] = ()) -> set[fx.Node]:
    """Nodes that depend on constants and sizes only. ``changed``: tensors that are not constant."""
    found: set[fx.Node] = set()
    for node in module.graph.nodes:
        if node.op == "get_attr":
            if str(node.target) not in changed:
                found.add(node)
        elif _is_size(node) or _is_filled(node):
            found.add(node)
        elif node.op.startswith("call_") and node.all_input_nodes:
            name = getattr(node.target, "__name__", str(node.target))
            if found.issuperset(node.all_input_nodes) and not is_random(name):
                found.add(node)
    return found


def _is_size(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _SIZES
    if node.op != "call_function":
        return False
    if node.target is getattr:
        return node.args[1] in _SIZES
    return getattr(node.target, "__name__", "").startswith("sym_size")


def _is_filled(node: fx.Node) -> bool:
    """New memory with values that are written in the model, whatever tensor gives its size and dtype."""
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    if not node.op.startswith("call_") or name not in _FILLED or "out" in node.kwargs:
        return False
    given = node.args[1:] if name in _LIKE else node.args
    return not any(isinstance(value, fx.Node) for value in given)


def _may_read(node: fx.Node, module: fx.GraphModule, known: set[fx.Node]) -> bool:
    """Whether a module that others wrote is given something known."""
    if node.op != "call_module" or known.isdisjoint(node.all_input_nodes):
        return False
    kind = type(get_module(module, str(node.target)))
    return kind.__module__.partition(".")[0] not in _OURS


class Recorder(fx.Interpreter):
    """Runs a graph and keeps the values of the nodes ``kept``, in ``values``."""

    def __init__(self, module: fx.GraphModule, kept: set[fx.Node]) -> None:
        super().__init__(module)
        self._kept = kept
        self.values: dict[fx.Node, Any] = {}
        self._signature = inspect.signature(module.forward)

    def call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Run on these arguments; those left out, also between others, have their defaults."""
        bound = self._signature.bind(*args, **kwargs)
        bound.apply_defaults()
        self.run(*bound.args, *bound.kwargs.values())

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n in self._kept:
            self.values[n] = value
        return value


def _is_written(
    node: fx.Node, module: fx.GraphModule, known: set[fx.Node], values: dict[fx.Node, Any]
) -> bool:
    if not any(_may_be_read(values[s]) for s in node.all_input_nodes if s in known):
        return False
    result = values[node]
    if node in known:
        if not isinstance(result, torch.Tensor):
            return False
        with module.graph.inserting_before(node):
            made = _constant(module, result)
        node.replace_all_uses_with(made)
        known.add(made)
        values[made] = result
        return True
    read = [s for s in node.all_input_nodes if s not in known or not _may_be_read(values[s])]
    traced = _traced(node, get_module(module, str(node.target)), read, values)
    if traced is None:
        return False
    with module.graph.inserting_before(node):
        results = _spliced(module, traced, read)
    values |= _made_values(results, result)
    return _given_to_users(node, results)


def _has_conditions(node: fx.Node, known: set[fx.Node], values: dict[fx.Node, Any]) -> bool:
    """Whether a call was given conditions that are known, which are literals in it now."""
    found = {
        source: bool(values[source])
        for source in node.all_input_nodes
        if source in known and _is_condition(values[source])
    }
    if found:
        written = fx.map_arg((node.args, node.kwargs), lambda arg: found.get(arg, arg))
        node.args, node.kwargs = written
    return bool(found)


def _is_condition(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool and value.dim() == 0


def _may_be_read(value: Any) -> bool:
    """Integers, and single numbers (the rate of a dropout)."""
    if not isinstance(value, torch.Tensor) or value.is_complex():
        return False
    return not value.is_floating_point() or (value.dim() == 0 and value.dtype == torch.float32)


def _traced(
    node: fx.Node, called: nn.Module, read: Sequence[fx.Node], values: dict[fx.Node, Any]
) -> fx.GraphModule | None:
    """The operators that a call runs, with ``read`` as inputs; ``None`` where it reads their values."""

    def run(*given: Any) -> Any:
        inside = values | dict(zip(read, given, strict=True))
        args, kwargs = fx.map_arg((node.args, node.kwargs), inside.__getitem__)
        return called(*args, **kwargs)

    try:
        with quiet():
            return traced_with_values(run, [values[source] for source in read])
    except Exception:  # whatever it raises, the call stays, and export says what it makes of it
        return None


def _constant(module: fx.GraphModule, value: torch.Tensor) -> fx.Node:
    path = NamePool(module).take("read_size_")
    module.register_buffer(path, value.detach())
    return module.graph.get_attr(path)


def _spliced(module: fx.GraphModule, traced: fx.GraphModule, read: Sequence[fx.Node]) -> Any:
    """The nodes of ``traced``, copied to where nodes are inserted; what it returns."""
    made: dict[fx.Node, fx.Node] = dict(
        zip(traced.graph.find_nodes(op="placeholder"), read, strict=True)
    )
    for node in traced.graph.nodes:
        if node.op == "output":
            return fx.map_arg(node.args[0], made.__getitem__)
        if node.op == "get_attr":
            made[node] = _constant(module, getattr(traced, str(node.target)))
        elif node.op != "placeholder":
            made[node] = module.graph.node_copy(node, made.__getitem__)
    raise AssertionError("a traced graph has an output")


def _made_values(results: Any, value: Any) -> dict[fx.Node, Any]:
    """The values of the nodes in ``results``, for the calls after this one."""
    if isinstance(results, fx.Node):
        return {results: value}
    if isinstance(results, (list, tuple)):
        return {n: v for n, v in zip(results, value, strict=True) if isinstance(n, fx.Node)}
    return {}


def _given_to_users(node: fx.Node, results: Any) -> bool:
    """Whether every reader of a call could be given what is now computed in its place."""
    if isinstance(results, fx.Node):
        node.replace_all_uses_with(results)
        node.graph.erase_node(node)
        return True
    items = list(node.users)
    if not isinstance(results, (list, tuple)) or not all(_is_item(user) for user in items):
        return False
    for user in items:
        place: Any = user.args[1]
        user.replace_all_uses_with(results[place])
        user.graph.erase_node(user)
    node.graph.erase_node(node)
    return True


def _is_item(node: fx.Node) -> bool:
    return getattr(node.target, "__name__", "") == "getitem" and isinstance(node.args[1], int)


# Traces one call with the values at hand: code may ask for sizes, and read tensors that are known.


def traced_with_values(run: Callable[..., Any], values: Sequence[Any]) -> fx.GraphModule:
    """The operators that ``run(*values)`` calls on ``values``, which become the placeholders.

    What is no tensor (sizes, dtypes) is read from the values and becomes a constant, as do all other tensors
    that ``run`` holds. Raises what ``run`` raises, and ``TraceError`` where it branches on a value.

    >>> shape = torch.tensor([3, 0])
    >>> def run(x):
    ...     return x.reshape([n or x.shape[i] for i, n in enumerate(shape.tolist())])
    >>> [(n.name, n.args) for n in traced_with_values(run, [torch.zeros(3, 1)]).graph.nodes][1]
    ('reshape', (value_0, [3, 1]))
    """
    tracer = _Tracer()
    given = [
        tracer.with_value(tracer.create_proxy("placeholder", f"value_{i}", (), {}), value)
        for i, value in enumerate(values)
    ]
    with torch.no_grad():
        result = run(*given)
    tracer.graph.output(tracer.create_arg(result))
    return fx.GraphModule(tracer.root, tracer.graph)


class _Valued(fx.Proxy):
    """A proxy of a tensor, or of a nest of tensors, that holds its value."""

    value: Any

    def __getattr__(self, k: str) -> Any:
        found = getattr(self.value, k)
        if callable(found) or isinstance(found, torch.Tensor):
            return super().__getattr__(k)
        return found

    def __len__(self) -> int:
        return len(self.value)


class _Tracer(fx.Tracer):
    def __init__(self) -> None:
        super().__init__()
        self.root, self.graph, self.tensor_attrs = nn.Module(), fx.Graph(), {}

    def with_value(self, proxy: Any, value: Any) -> Any:
        proxy.value = value
        return proxy

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Valued(node, self)

    def create_proxy(
        self, kind: str, target: Any, args: Any, kwargs: Any, *rest: Any, **more: Any
    ) -> Any:
        if kind == "placeholder":
            return super().create_proxy(kind, target, args, kwargs, *rest, **more)
        inside: Any = torch.utils._pytree.tree_map_only(fx.Proxy, _value_of, (args, kwargs))
        call = getattr(inside[0][0], target) if kind == "call_method" else target
        given = inside[0][1:] if kind == "call_method" else inside[0]
        value = call(*given, **inside[1])
        if not any(isinstance(v, torch.Tensor) for v in torch.utils._pytree.tree_leaves(value)):
            return value
        return self.with_value(
            super().create_proxy(kind, target, args, kwargs, *rest, **more), value
        )

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, (np.integer, np.bool_)):
            return a.item()
        if isinstance(a, torch.Tensor):
            if a.dim() == 0 and (
                a.dtype == torch.float32 or not (a.is_floating_point() or a.is_complex())
            ):
                return a.item()
            path = f"value_constant_{len(self.tensor_attrs)}"
            self.tensor_attrs[path] = path  # type: ignore[index]
            self.root.register_buffer(path, a.detach())
            return self.create_node("get_attr", path, (), {})
        return super().create_arg(a)

    def iter(self, obj: Any) -> Iterator[Any]:
        return iter([obj[i] for i in range(len(obj))])


def _value_of(proxy: Any) -> Any:
    return proxy.value
