"""Whether a graph module is as it was, asked before each call."""

from __future__ import annotations

import hashlib
import re
from itertools import chain, compress
from operator import attrgetter, not_
from typing import Any

import torch
from torch import fx, nn

from backquant.graph import DeferredGraphModule
from backquant.lower.kernels.configured import KernelModule
from backquant.nn.quantized.scaled import Counted, Scaled, changed

TABLES = ("_modules", "_parameters", "_buffers")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")


class Part(DeferredGraphModule):
    """A standalone module that is there to be shown. ``changes`` counts edits of its graph.

    >>> from backquant.graph import assemble
    >>> part = assemble(Part, fx.symbolic_trace(nn.ReLU()).graph, nn.ReLU())
    >>> part.settle(); _ = part.recompile(); part.changes
    0
    """

    changes: int = 0
    _as_settled: list[str]

    def settle(self) -> None:
        """Take the graph, as it is, for unchanged."""
        self.__dict__["_as_settled"] = _written(self.graph)

    def recompile(self) -> Any:
        """As of any graph module."""
        written = _written(self.graph)
        if written != self.__dict__.get("_as_settled", written):
            self.__dict__.update(_as_settled=written, changes=self.changes + 1)
            changed()
        return super().recompile()


def _written(graph: fx.Graph) -> list[str]:
    return [f"{n.name} {n.op} {n.target} {n.args} {n.kwargs}" for n in graph.nodes]


class Watched:
    """What a graph module was like at the beginning.

    ``with_tensors``: parameters, buffers and hooks, too, where the graph module that runs has modules of its
    own; those that both have tell themselves. ``is_void``: it was another one before.

    Tables of modules that are there to be shown count their changes, and their small tensors are views of
    few: a call compares some numbers, however many modules there are.
    """

    def __init__(self, model: fx.GraphModule, *, with_tensors: bool) -> None:
        self.with_tensors = with_tensors
        self._nodes = _contents(model.graph)
        self.has_same_graph, self.is_void = True, False
        self._look_at_modules(model)

    def _look_at_modules(self, model: Any) -> None:
        shown, users = self._parts(model)
        for part in shown:
            vars(part).update((name, _counted(vars(part)[name])) for name in (*TABLES, *_HOOKS))
        _gather([vars(part)["_buffers"] for part in shown])
        run = set(map(id, model.graph_module.modules())) if self.with_tensors else set()
        alone = [part for part in users if self.with_tensors and id(part) not in run]
        self._counting = [vars(part)[name] for part in shown for name in TABLES]
        tables = [vars(part).get("_modules") for part in users]  # TorchScript has none that changes
        tables += [vars(part)[name] for part in alone for name in TABLES[1:]]
        self._tables = [table for table in tables if table]
        self._counted_hooks = [vars(part)[name] for part in shown[1:] for name in _HOOKS]
        self._hooks = [vars(part)[name] for part in alone for name in _HOOKS]
        self._scaled = [part for part in shown if isinstance(part, (Scaled, Part))]
        # by a call of C, here and in each call of the model
        self._last, self._is_hooked = Counted.last, any(self._counted_hooks)
        self._ids, self._counted_ids = _ids(self._tables), _ids(self._counting)
        self._changes = [*map(_changes, self._scaled)]
        held = chain.from_iterable(map(dict.values, (*self._tables, *self._counting)))
        bases = (v if v._base is None else v._base for v in held if isinstance(v, torch.Tensor))
        # tensors of inference mode count nothing, and cannot be changed outside of it
        self._tensors = [*{id(base): base for base in bases if not base.is_inference()}.values()]
        self._numbers = [*map(_version, self._tensors)]

    def _parts(self, model: nn.Module) -> tuple[list[nn.Module], list[nn.Module]]:
        """The modules that are there for their reader alone, ``model`` first, and all others."""
        parts = [*model.modules()]
        if not self.with_tensors:
            return [], parts
        kinds = [p is model or type(p) is nn.Module or isinstance(p, (Scaled, Part)) for p in parts]
        return [*compress(parts, kinds)], [*compress(parts, map(not_, kinds))]

    def renew(self, model: nn.Module, *, is_same: bool) -> None:
        """Look again, after all tensors were changed here and in what runs. ``is_same``: before that."""
        self.is_void = self.is_void or (self.has_same_graph and not is_same)
        self._look_at_modules(model)

    def look_at(self, graph: fx.Graph) -> None:
        """Note whether ``graph`` is as it was."""
        self.has_same_graph = _contents(graph) == self._nodes

    def nodes(self) -> set[fx.Node]:
        """The nodes that were there at the beginning."""
        return {node for node, *_ in self._nodes}

    def is_same(self) -> bool:
        """Whether graph, modules and tensors are the same."""
        return (
            self.has_same_graph
            and not self.is_void
            and _ids(self._tables) == self._ids
            and [*map(_version, self._tensors)] == self._numbers
            and (Counted.last == self._last or self._is_same_as_counted())
        )

    def _is_same_as_counted(self) -> bool:
        """Whether what was counted since was elsewhere."""
        last = Counted.last
        if _ids(self._counting) != self._counted_ids:
            return False
        if [*map(_changes, self._scaled)] != self._changes:
            return False
        self._last, self._is_hooked = last, any(self._counted_hooks)
        return True

    def is_unchanged(self) -> bool:
        """Whether it is the same, and nobody looks at a module."""
        return self.is_same() and not self._is_hooked and not any(self._hooks)


_changes = attrgetter("changes")
_version = attrgetter("_version")
# the names of what the dialect holds beside weights
_SMALL = re.compile(r"(weight_)?(scale|zero_point)|bias|.*_(scale|zero_point)_\d+_*")


def _ids(tables: list[dict[str, Any]]) -> list[int]:
    return [*map(id, chain.from_iterable(map(dict.values, tables)))]


def _contents(graph: fx.Graph) -> list[tuple[Any, ...]]:
    return [(node, node.op, node.target, node.args, node.kwargs) for node in graph.nodes]


def _counted(table: dict[str, Any]) -> Counted:
    return table if isinstance(table, Counted) else Counted(table)


def _gather(tables: list[dict[str, Any]]) -> None:
    """Make scales, zero points and biases in ``tables`` views of one tensor for each dtype.

    >>> table = {"scale": torch.tensor(0.5), "weight": torch.ones(2, 2)}
    >>> other = {"scale": torch.tensor(2.0)}
    >>> _gather([table, other])
    >>> table["scale"]._base is other["scale"]._base, table["weight"]._base, other["scale"].item()
    (True, None, 2.0)
    """
    places: dict[tuple[torch.dtype, torch.device], list[tuple[dict[str, Any], str]]] = {}
    for table in tables:
        for name, value in table.items():
            if isinstance(value, torch.Tensor) and _SMALL.fullmatch(name):
                places.setdefault((value.dtype, value.device), []).append((table, name))
    for of_kind in places.values():
        tensors = [table[name].detach() for table, name in of_kind]
        base, at = torch.cat([tensor.reshape(-1) for tensor in tensors]), 0
        for (table, name), tensor in zip(of_kind, tensors, strict=True):
            view = base.narrow(0, at, tensor.numel()).view(tensor.shape)
            dict.__setitem__(table, name, view)
            at += tensor.numel()


# A digest of what a lowered graph computes beside its weights: operators, qparams, order.


def fingerprint(graph_module: fx.GraphModule) -> torch.Tensor:
    """The SHA-256 of every operation with its literal arguments, as ``uint8[32]``.

    Equal for two graphs that differ in names and weights only.

    >>> one, two = (fx.symbolic_trace(lambda x: x * 2 + step) for step in (1, 3))
    >>> bool((fingerprint(one) == fingerprint(one)).all()), fingerprint(one).shape
    (True, torch.Size([32]))
    >>> bool((fingerprint(one) == fingerprint(two)).all())
    False
    """
    number = {node: position for position, node in enumerate(graph_module.graph.nodes)}
    digest = hashlib.sha256()
    for node in graph_module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: f"%{number[n]}")
        digest.update(f"{node.op} {_called(node, graph_module)} {arguments}\n".encode())
    return torch.tensor(list(digest.digest()), dtype=torch.uint8)


def _called(node: fx.Node, graph_module: fx.GraphModule) -> str:
    if node.op == "call_module":
        module = graph_module.get_submodule(str(node.target))
        config: Any = (
            sorted(module.artifact_config().items()) if isinstance(module, KernelModule) else module
        )
        return f"{node.target} {type(module).__name__} {config}"
    if node.op == "call_function":
        target: Any = node.target
        return f"{getattr(target, '__module__', '')}.{getattr(target, '__name__', target)}"
    return "" if node.op in ("placeholder", "output") else str(node.target)
