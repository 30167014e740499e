"""Graph modules that interpret a table of calls: no name of a graph becomes source text.

``torch.fx`` writes a graph as Python and executes the text. Here a graph becomes a table, once:

1. A call is a function, the path of a module or the name of a method; places of its arguments; keywords; the
   place of its result; the places that nobody reads later. Literals have places of their own.
2. Modules and tensors are looked up by path at each call, so that what replaces them is called, and traces of
   ``torch.fx`` see them. No text is looked up as anything but a key or an attribute.
3. Python's operators of numbers and sequences are total: ``total.py``.
4. ``code`` is text for readers, written when it is read. Nothing here compiles it.

A graph with a code generator of its own (flattened arguments of ``concrete_args``) runs as ``torch.fx`` has
it; no file holds one.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from operator import attrgetter, itemgetter
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.fx.graph import CodeGen, PythonCode
from torch.fx.node import map_arg

from backquant.graph.arguments import KINDS, parameters_of
from backquant.graph.total import parts, total, total_method

_SELF = 0  # the place of the module itself
_LOCALS = (
    inspect.Parameter.POSITIONAL_ONLY,
    KINDS[0],
    inspect.Parameter.KEYWORD_ONLY,
    *KINDS[1:],
)
_Reader = Callable[[list[Any]], Any]


class _Call(NamedTuple):
    """``function`` of the arguments; or of the module at ``path``; or ``method`` of the first argument."""

    function: Callable[..., Any] | None
    path: tuple[str, ...]
    method: str
    arguments: _Reader
    keywords: _Reader | None
    place: int
    dropped: tuple[int, ...]


class CallTableModule(fx.GraphModule):
    """A ``torch.fx.GraphModule`` whose ``forward`` interprets its graph, as of the last ``recompile()``.

    >>> module = CallTableModule({}, fx.symbolic_trace(lambda x, y=2: (x * y).relu()).graph)
    >>> import torch
    >>> module(torch.tensor([-1.0, 3.0]), y=4)
    tensor([ 0., 12.])
    >>> inspect.signature(module.forward)
    <Signature (x, y=2)>
    """

    @property
    def code(self) -> str:
        """The graph as Python code, to be read."""
        return str(self._code)

    def recompile(self) -> PythonCode:
        """Take over the changes of ``graph``. Returns its text, which nothing executes."""
        if type(self._graph._codegen) is not CodeGen:
            return super().recompile()
        type(self).forward = _forward(self._graph)
        written = self._graph.python_code(root_module="self")
        self._code = written.src
        self._lineno_map, self._prologue_start = {}, 0  # torch.compile reads them
        return written


class _Places:
    """Where values lie while a graph runs: the module, literals, arguments, results of calls."""

    def __init__(self) -> None:
        self.initial: list[Any] = [None]
        self.of: dict[fx.Node, int] = {}

    def new(self, value: Any = None) -> int:
        self.initial.append(value)
        return len(self.initial) - 1

    def values(self, arguments: tuple[Any, ...]) -> _Reader:
        """Reads a sequence of these arguments."""
        if all(isinstance(value, fx.Node) or not _nodes(value) for value in arguments):
            places = [
                self.of[value] if isinstance(value, fx.Node) else self.new(value)
                for value in arguments
            ]
            if len(places) > 1:
                return itemgetter(*places)
            start = places[0] if places else 0
            return itemgetter(slice(start, start + len(places)))
        readers = [self.value(value) for value in arguments]
        return lambda values: [read(values) for read in readers]

    def value(self, argument: Any) -> _Reader:
        """Reads one argument, whatever it is put together of."""
        if isinstance(argument, fx.Node):
            return itemgetter(self.of[argument])
        if not _nodes(argument):
            return itemgetter(self.new(argument))
        if isinstance(argument, dict):
            keys, read = tuple(argument), self.values(tuple(argument.values()))
            return lambda values: dict(zip(keys, read(values), strict=True))
        if isinstance(argument, slice):
            read = self.values((argument.start, argument.stop, argument.step))
            return lambda values: slice(*read(values))
        read, kind = self.values(tuple(argument)), type(argument)
        if hasattr(kind, "_fields"):
            return lambda values: kind(*read(values))
        made: type = tuple if issubclass(kind, tuple) else list
        return lambda values: made(read(values))


def _nodes(argument: Any) -> list[fx.Node]:
    found: list[fx.Node] = []
    map_arg(argument, found.append)
    return found


def _forward(graph: fx.Graph) -> Callable[..., Any]:
    places = _Places()
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for node in placeholders:
        places.of[node] = places.new()
    first = places.of[placeholders[0]] if placeholders else 1
    last = first + len(placeholders)
    table = tuple(_calls(graph, places))
    output = next((node for node in graph.nodes if node.op == "output"), None)
    result = places.value(None if output is None else output.args[0])
    this = inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)
    signature = inspect.Signature([this, *parameters_of(graph)])
    initial = places.initial
    is_built = output is not None and not isinstance(output.args[0], fx.Node)
    taken = list(signature.parameters.values())[1:]
    defaults = tuple(p.default for p in taken)
    least = sum(default is inspect.Parameter.empty for default in defaults)
    is_plain = all(p.kind is KINDS[0] for p in taken)

    def forward(self: CallTableModule, /, *args: Any, **kwargs: Any) -> Any:
        if is_plain and not kwargs and least <= len(args) <= len(defaults):
            args += defaults[len(args) :]  # what binding gives, which takes a tenth of a small call
        else:
            bound = signature.bind(self, *args, **kwargs)
            bound.apply_defaults()
            args = tuple(bound.arguments.values())[1:]
        values = initial.copy()
        values[_SELF] = self
        values[first:last] = args
        _run(self, table, values)
        returned = result(values)
        if is_built:
            parts(forward, returned)
        return returned

    vars(forward).update(__signature__=signature, __wrapped__=_shape(signature))
    return forward


def _run(module: fx.GraphModule, table: tuple[_Call, ...], values: list[Any]) -> None:
    """The calls of ``table``, one after the other. Un-recorded calls of models spend their time here."""
    for function, path, method, arguments, keywords, place, dropped in table:
        found: Any = function
        given = arguments(values)
        if path:
            found = module
            for name in path:
                found = found._modules[name]
        elif method:
            owner = given[0]
            is_tensor = isinstance(owner, torch.Tensor)
            found = getattr(owner, method) if is_tensor else total_method(owner, method)
            given = given[1:]
        values[place] = found(*given) if keywords is None else found(*given, **keywords(values))
        for done in dropped:
            values[done] = None


def failed_node(error: Exception, module: fx.GraphModule) -> fx.Node | None:
    """The node of ``module`` whose call raised ``error``; ``None`` if none did.

    >>> module = CallTableModule({}, fx.symbolic_trace(lambda x: (x + 1) / 0).graph)
    >>> try: module(1)
    ... except ZeroDivisionError as error: print(failed_node(error, module))
    truediv
    """
    trace = error.__traceback__
    while trace is not None:
        running = trace.tb_frame.f_locals
        if trace.tb_frame.f_code is _run.__code__ and running["module"] is module:
            nodes: list[fx.Node] = list(module.graph.nodes)
            calls = [node for node in nodes if node.op not in ("placeholder", "output")]
            places = [call.place for call in running["table"]]
            return calls[places.index(running["place"])]
        trace = trace.tb_next
    return None


def _calls(graph: fx.Graph, places: _Places) -> Iterator[_Call]:
    dropped = _last_reads(graph)
    for node in graph.nodes:
        if node.op in ("placeholder", "output"):
            continue
        function, path, method = _callee(node)
        arguments: Callable[[list[Any]], Any] = itemgetter(slice(_SELF, _SELF + 1))
        if node.op != "get_attr":
            arguments = places.values(node.args)
        keywords = places.value(dict(node.kwargs)) if node.kwargs else None
        place = places.of[node] = places.new()
        done = [places.of[other] for other in dropped.get(node, ())]
        yield _Call(function, path, method, arguments, keywords, place, tuple(done))


def _callee(node: fx.Node) -> tuple[Callable[..., Any] | None, tuple[str, ...], str]:
    if node.op == "call_method":
        return None, (), str(node.target)
    if callable(node.target):
        return total(node.target), (), ""
    path = str(node.target)
    if node.op == "call_module":
        return None, tuple(path.split(".")), ""
    return attrgetter(path), (), ""


def _last_reads(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """What nobody reads after a node: its own result, where nobody does at all."""
    last: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        if node.op not in ("placeholder", "output"):
            last[node] = node
        for source in node.all_input_nodes:
            last[source] = node
    dropped: dict[fx.Node, list[fx.Node]] = {}
    for source, reader in last.items():
        dropped.setdefault(reader, []).append(source)
    return dropped


def _shape(signature: inspect.Signature) -> Callable[..., Any]:
    """A function that is not called: traces of ``torch.fx`` read arguments of ``forward`` off its code."""
    parameters = signature.parameters.values()
    counts = Counter(p.kind for p in parameters)
    names = [p.name for p in sorted(parameters, key=lambda p: _LOCALS.index(p.kind))]
    flags = [inspect.CO_VARARGS, inspect.CO_VARKEYWORDS]
    rest = [flag for flag, kind in zip(flags, KINDS[1:], strict=True) if counts[kind]]
    code = _not_called.__code__
    code = code.replace(
        co_argcount=counts[inspect.Parameter.POSITIONAL_ONLY] + counts[KINDS[0]],
        co_kwonlyargcount=counts[inspect.Parameter.KEYWORD_ONLY],
        co_varnames=tuple(names),
        co_nlocals=len(names),
        co_flags=code.co_flags | sum(rest),
    )
    return FunctionType(code, {}, "forward")


def _not_called() -> None:
    raise NotImplementedError
