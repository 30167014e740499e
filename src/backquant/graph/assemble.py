"""Graph modules put together without the detours of ``fx.GraphModule(...)`` and ``copy.deepcopy``.

Of a graph of n nodes those generate and compile n lines of code, set n attributes by way of
``nn.Module.__setattr__``, and make n nodes by way of ``Graph.create_node``. Between two steps nobody
runs the graph: its code is generated when somebody does.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import fx, nn
from torch.fx.graph import _illegal_names, _name_regex
from torch.fx.graph_module import _USER_PRESERVED_ATTRIBUTES_KEY
from torch.utils._pytree import tree_leaves

from backquant.graph.call_table import CallTableModule
from backquant.identifiers import PREFIX, attribute, label


class DeferredGraphModule(CallTableModule):
    """A graph module that ``assemble`` makes without a table of calls; ``recompile()``, the first call, or
    reading its code builds it. The keys of its ``state_dict`` are the user's own names, by which
    modules and tensors are found, too, where the graph module has nothing else of the name."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Build the table, which takes the place of this method, and run it."""
        self.recompile()
        return self.forward(*args, **kwargs)

    @property
    def code(self) -> str:
        """The Python code of the graph."""
        if "_code" not in self.__dict__:
            self.recompile()
        code: str = self._code
        return code

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of any module, by the names that the model had that was captured."""
        state = super().state_dict(*args, **kwargs)
        if any(PREFIX in key for key in state):
            entries = [(label(key), value) for key, value in state.items()]
            state.clear()
            state.update(entries)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        tensors = (*self.named_parameters(prefix[:-1]), *self.named_buffers(prefix[:-1]))
        for key in (key for key, _ in tensors if PREFIX in key):
            if label(key) in state_dict:
                state_dict[key] = state_dict.pop(label(key))
        super()._load_from_state_dict(state_dict, prefix, *rest)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            written = attribute(name)
            for table in ("_modules", "_parameters", "_buffers"):
                if written in self.__dict__.get(table, ()):
                    return self.__dict__[table][written]
            raise

    def get_submodule(self, target: str) -> nn.Module:
        """As of any module; by the user's own path, too."""
        first, dot, rest = target.partition(".")
        if first not in self._modules and attribute(first) in self._modules:
            first = attribute(first)
        return super().get_submodule(f"{first}{dot}{rest}")

    def __reduce__(self) -> tuple[Any, ...]:
        _ = self.code
        return super().__reduce__()

    def __str__(self) -> str:
        _ = self.code
        return super().__str__()


_Kind = TypeVar("_Kind", bound=DeferredGraphModule)
_GENERATED = ("_code", "_lineno_map", "_prologue_start")


def assemble(
    kind: type[_Kind],
    graph: fx.Graph,
    root: nn.Module,
    values: Mapping[str, Any] | None = None,
) -> _Kind:
    """A graph module of class ``kind`` over ``graph`` itself, without code.

    It holds what the nodes of the graph call and read, found in ``values`` by path (then what stands
    less deep comes first), else in ``root``; nothing else. Modules in between are new, with the
    training flags that they have in ``root``.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> made = assemble(DeferredGraphModule, copied_graph(gm.graph), gm)
    >>> made(torch.tensor([-1.0])), made.get_submodule("0") is gm.get_submodule("0")
    (tensor([0.]), True)
    """
    empty = fx.Graph()
    empty.output(None)
    made = kind(nn.Module(), empty)
    del type(made).forward
    given = {} if values is None else values
    take_graph(made, graph, root)
    nodes = (node for node in graph.nodes if node.op in ("call_module", "get_attr"))
    paths = dict.fromkeys(str(node.target) for node in nodes)  # children will stand in this order
    for path in paths if values is None else sorted(paths, key=lambda path: path.count(".")):
        value = given[path] if path in given else _value(root, path)
        _install(made, root, path, value)
    return made


def take_graph(made: fx.GraphModule, graph: fx.Graph, root: nn.Module) -> None:
    """Make ``graph`` itself that of ``made``, whose code is generated when it is first read.

    >>> made = DeferredGraphModule(nn.Module(), fx.Graph())
    >>> take_graph(made, copied_graph(fx.symbolic_trace(nn.ReLU()).graph), nn.ReLU())
    >>> made.code.count("relu") > 0
    True
    """
    for name in _GENERATED:
        made.__dict__.pop(name, None)
    made._graph.owning_module = None
    made._graph = graph
    graph.owning_module = made
    tracer = graph._tracer_cls
    if tracer is not None and "<locals>" not in tracer.__qualname__:
        made._tracer_cls = tracer
    made._tracer_extras = graph._tracer_extras or {}
    made.training = root.training


def _value(root: nn.Module, path: str) -> Any:
    value: Any = root
    for name in path.split("."):
        children = value.__dict__.get("_modules", ())
        value = children[name] if name in children else getattr(value, name)
    return value


def _child(module: Any, name: str) -> Any:
    children = getattr(module, "_modules", {})
    # TorchScript's table has no get()
    return (children if isinstance(children, dict) else dict(children.items())).get(name)


def _install(made: nn.Module, root: nn.Module, path: str, value: Any) -> None:
    *owners, name = path.split(".")
    owner: nn.Module = made
    like: Any = root
    for part in owners:
        like = _child(like, part)
        child = owner._modules.get(part)
        if child is not None and child is like:
            return  # a module above it was copied whole, with all it contains
        if child is None:
            child = nn.Module()
            child.training = root.training if like is None else like.training
            owner._modules[part] = child
        owner = child
    if isinstance(value, nn.Module):
        owner._modules[name] = value
    elif isinstance(value, torch.Tensor) and not isinstance(value, nn.Parameter):
        owner.register_buffer(name, value)
    else:
        setattr(owner, name, value)


def copied_graph(graph: fx.Graph) -> fx.Graph:
    """A graph of its own with the same nodes: names, meta data and code generation included.

    As ``copy.deepcopy``, in a third of its time.

    >>> graph = fx.symbolic_trace(lambda x: x + 1).graph
    >>> [node.name for node in copied_graph(graph).nodes]
    ['x', 'add', 'output']
    """
    made = fx.Graph(tracer_cls=graph._tracer_cls)
    made._codegen = copy.deepcopy(graph._codegen)
    found: dict[fx.Node, fx.Node] = {}
    names, table = made._graph_namespace, made._find_nodes_lookup_table
    for node in graph.nodes:
        name = node.name
        parts = _name_regex.match(name)
        if parts is None or name in _illegal_names:
            # not a name that fx makes: one like it that is not taken
            name = names.create_name(name, None)
        else:
            base, number = parts.groups()
            known = names._base_count
            known[base] = known.get(base, 0) if number is None else int(number)
            names._used_names.add(name)
        args = fx.node.map_arg(node.args, found.__getitem__)
        kwargs = fx.node.map_arg(node.kwargs, found.__getitem__)
        new = fx.Node(made, name, node.op, node.target, args, kwargs, node.type)
        names._obj_to_name[new] = name
        new.meta = copy.copy(node.meta)
        made._root._prepend(new)
        table.insert(new)
        made._len += 1
        found[node] = new
    return made


def returning(module: fx.GraphModule, values: Any) -> fx.GraphModule:
    """A graph module over the modules of ``module`` that returns ``values``: its nodes, nested as wished.

    >>> module = fx.symbolic_trace(lambda x: torch.relu(x + 1))
    >>> _, one, two, _ = module.graph.nodes
    >>> returning(module, [one, two])(torch.tensor(-3.0))
    [tensor(-2.), tensor(0.)]
    """
    graph = copied_graph(module.graph)
    copies = dict(zip(module.graph.nodes, graph.nodes, strict=True))
    graph.output_node().args = (fx.node.map_arg(values, copies.__getitem__),)
    return fx.GraphModule(module, graph)


def call_before(
    position: fx.Node, op: str, target: Any, args: tuple[Any, ...], name: str | None = None
) -> fx.Node:
    """A new call right before ``position``, as ``Graph.create_node`` makes it.

    That one looks through all arguments for symbolic numbers, to warn of them, which takes as long as
    making the node.

    >>> gm = fx.symbolic_trace(lambda x: x)
    >>> last = gm.graph.output_node()
    >>> call_before(last, "call_function", torch.relu, (last.args[0],)).name
    'relu'
    """
    graph = position.graph
    names = graph._graph_namespace
    chosen = names.create_name(graph._target_to_str(target) if name is None else name, None)
    node = fx.Node(graph, chosen, op, target, args, fx.immutable_collections.immutable_dict())
    names.associate_name_with_obj(chosen, node)
    position.prepend(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def rebuilt(kind: type[_Kind], module: fx.GraphModule, root: nn.Module) -> _Kind:
    """A graph module of class ``kind``, with a graph of its own (same names), over the modules of
    ``root``, a copy of ``module``.

    Meta data, preserved attributes and training flags are kept. It has no code yet.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    >>> again = rebuilt(DeferredGraphModule, gm, gm)
    >>> again.graph is gm.graph, again.code == gm.code
    (False, True)
    """
    made = assemble(kind, copied_graph(module.graph), root)
    made.meta.update(module.meta)
    for name, value in made.meta.get(_USER_PRESERVED_ATTRIBUTES_KEY, {}).items():
        setattr(made, name, value)
    return made


# Whether two graph modules compute the same.


def alike(one: fx.GraphModule, other: fx.GraphModule) -> bool:
    """Whether both make the same calls with the same tensors, whatever their nodes are called.

    >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    >>> alike(fx.symbolic_trace(model), fx.symbolic_trace(model))
    True
    >>> alike(fx.symbolic_trace(model), fx.symbolic_trace(torch.nn.Sequential(torch.nn.ReLU())))
    False
    """
    nodes = list(one.graph.nodes), list(other.graph.nodes)
    if len(nodes[0]) != len(nodes[1]):
        return False
    places = [{node: place for place, node in enumerate(every)} for every in nodes]
    for pair in zip(*nodes, strict=True):
        first, second = (
            _call(node, of, module)
            for node, of, module in zip(pair, places, (one, other), strict=True)
        )
        if first != second:
            return False
    return _same_tensors(one.state_dict(), other.state_dict())


def _call(node: fx.Node, places: dict[fx.Node, int], module: fx.GraphModule) -> tuple[Any, ...]:
    """What a node does; values that it reads are named by their place."""
    read = fx.node.map_arg((node.args, node.kwargs), lambda arg: ("value", places[arg]))
    target: Any = node.target
    if node.op in ("placeholder", "output"):
        target = ""
    if node.op == "call_module":
        target = (target, repr(module.get_submodule(str(target))))
    return node.op, target, _plain(read)


def _plain(read: Any) -> str:
    """Arguments as words: tensors by their identity."""
    leaves = tree_leaves(read)
    tensors = [id(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor)]
    return f"{tensors}" if tensors else repr(read)


def _same_tensors(one: dict[str, Any], other: dict[str, Any]) -> bool:
    if one.keys() != other.keys():
        return False
    return all(
        torch.equal(value, other[name]) if isinstance(value, torch.Tensor) else value == other[name]
        for name, value in one.items()
    )
