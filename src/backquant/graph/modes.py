"""Capture of a model that is going to be trained: what depends on the mode keeps depending on it.

Symbolic tracing writes the mode of the moment into the graph: ``F.dropout(x, training=self.training)``
becomes ``F.dropout(x, training=True)``, and drops after ``eval()``, too (in PyTorch's flow it does).
Here the model is traced in both modes:

1. Arguments that differ between the two graphs are read from a ``ModeValue`` in the module that
   they come from, so that ``train()`` and ``eval()``, of the whole model or of a part, reach them.
2. A part without parameters in which more than arguments differs (``if not self.training: return x``, as
   dropped paths have it) becomes a ``ByMode`` of both graphs.
3. Where more differs elsewhere, the graph of the model's own mode is taken, and the difference reported.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, zip_longest
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from backquant.errors import CaptureError
from backquant.graph.by_mode import ByMode, ModeValue, is_identity, may_be_by_mode
from backquant.graph.capture import Captured
from backquant.graph.capture import capture as capture_trace
from backquant.graph.clone import shallow_copy
from backquant.graph.edit import NamePool, get_module, set_module
from backquant.graph.example_call import first_calls
from backquant.graph.folding import inline_call, passed_on
from backquant.graph.own_thread import in_turn
from backquant.graph.provenance import Scope

# Functions with a gradient of their own (``torch.autograd.Function``) in models that are trained.
#
# A trace runs their ``forward`` and records what it computes, with the gradient of that: a rounding that
# passes its gradient on (a straight-through estimator) would pass none, and say nothing.
#
# 1. While a model is captured for training, such a call is recorded as a call of a ``CustomGradient``.
# 2. A converted model has no gradients: there the call is what ``forward`` computes, where that can be
# traced.


class CustomGradient(nn.Module):
    """A call of ``function.apply``.

    >>> class Same(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x.clone()
    >>> CustomGradient(Same)
    CustomGradient(Same)
    """

    def __init__(self, function: type[torch.autograd.Function]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function.apply(*args, **kwargs)

    def extra_repr(self) -> str:
        return self.function.__name__


@contextmanager
def kept_custom_gradients() -> Iterator[None]:
    """Rule 1, for what this thread traces within the block.

    ``Function.apply`` itself may be bound already (``scan = Scan.apply``): up to torch 2.14 what it calls is
    replaced, in the class above. Since 2.15 it is C's own: there what was bound before keeps no gradient.
    """
    thread = threading.get_ident()
    function: Any = torch.autograd.Function
    own = vars(function).get("apply")
    is_python = isinstance(own, classmethod)
    holder: Any = function.__mro__[1] if is_python else function

    def apply(called: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() == thread:
            tracer = _tracer_of((args, kwargs))
            if tracer is not None:
                return _recorded(tracer, called, args, kwargs)
        plain = super(holder, called).apply if is_python else own.__get__(None, called)
        return plain(*args, **kwargs)

    with in_turn():
        if is_python and "apply" in vars(holder):  # a capture within
            yield
            return
        holder.apply = classmethod(apply)
        try:
            yield
        finally:
            if is_python:
                del holder.apply
            else:
                holder.apply = own


def _tracer_of(arguments: Any) -> fx.Tracer | None:
    """That of the first value of a trace among ``arguments``."""
    found: list[fx.Tracer] = []

    def note(value: Any) -> Any:
        if issubclass(type(value), fx.Proxy) and isinstance(value.tracer, fx.Tracer):
            found.append(value.tracer)
        return value

    fx.node.map_aggregate(arguments, note)
    return found[0] if found else None


def _recorded(
    tracer: fx.Tracer, function: type[torch.autograd.Function], args: Any, kwargs: Any
) -> Any:
    number = 0
    while f"custom_gradient_{number}" in tracer.root._modules:
        number += 1
    path = f"custom_gradient_{number}"
    tracer.root.add_module(path, CustomGradient(function).train(tracer.root.training))
    return tracer.create_proxy("call_module", path, args, kwargs)


def inline_custom_gradients(module: fx.GraphModule) -> None:
    """Rule 2, in place; a function that cannot be traced stays a call.

    >>> class Twice(torch.autograd.Function):
    ...     @staticmethod
    ...     def forward(ctx, x):
    ...         return x * 2
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_module("twice", (graph.placeholder("x"),)))
    >>> module = fx.GraphModule({"twice": CustomGradient(Twice)}, graph)
    >>> inline_custom_gradients(module)
    >>> [node.name for node in module.graph.nodes]
    ['x', 'mul', 'output']
    """
    for node in list(module.graph.nodes):
        called = get_module(module, str(node.target)) if node.op == "call_module" else None
        if isinstance(called, CustomGradient):
            inline_call(module.graph, node, partial(CustomGradient.forward, called))


ONLY_IN_MODE = "the prepared model computes in both modes what the model does in {} mode"


class CapturedForTraining(NamedTuple):
    """``difference`` says what else the model does in the other mode; ``""`` where nothing."""

    captured: Captured
    difference: str


def capture_for_training(
    model: nn.Module, capture: Callable[[nn.Module], Captured], example_inputs: Any = None
) -> CapturedForTraining:
    """Capture ``model`` with ``capture``, which is called once per mode. The model is not changed.

    With ``example_inputs`` the parts of rule 2 may ask for the sizes that they have there.

    Raises CaptureError when it cannot be captured in its own mode.

    >>> import torch.nn.functional as F
    >>> from backquant.graph import capture
    >>> class Net(nn.Module):
    ...     def forward(self, x):
    ...         return F.dropout(x, 0.5, self.training)
    >>> module = capture_for_training(Net(), capture).captured.module
    >>> [node.op for node in module.graph.nodes]
    ['placeholder', 'call_module', 'call_function', 'output']
    """
    with kept_custom_gradients():
        return _captured(model, capture, example_inputs)


def _captured(
    model: nn.Module, capture: Callable[[nn.Module], Captured], example_inputs: Any
) -> CapturedForTraining:
    made = _in_both_modes(model, capture)
    if not made.difference:
        return made
    parted = _with_parts_by_mode(model, example_inputs)
    if parted is None:
        return made
    try:
        again = _in_both_modes(parted, capture)
    except CaptureError:  # it reads more of a part than its numbers
        return made
    return made if again.difference else again


def _with_parts_by_mode(model: nn.Module, example_inputs: Any) -> nn.Module | None:
    """A copy in which the parts of rule 2 are ``ByMode``; ``None`` where there are none."""
    copied, found = shallow_copy(model), False
    paths = [path for path, part in copied.named_modules() if path and may_be_by_mode(part)]
    given = {} if example_inputs is None else first_calls(model, paths, example_inputs)
    for path in reversed(paths):  # the innermost first
        by_mode = _by_mode(copied.get_submodule(path), given.get(path))
        if by_mode is not None:
            set_module(copied, path, by_mode)
            found = True
    return copied if found else None


def _by_mode(part: nn.Module, inputs: Any) -> ByMode | None:
    """``part`` as both graphs, if they differ, and it can be traced."""
    training, evaluation = (_traced(shallow_copy(part).train(on), inputs) for on in (True, False))
    if training is None or evaluation is None:
        return None
    if not _first_difference(training.graph, evaluation.graph):
        return None
    graphs = (fx.GraphModule(each, each.graph) for each in (training, evaluation))
    return ByMode(part, *graphs)


def _traced(part: nn.Module, inputs: Any) -> fx.GraphModule | None:
    """Its graph; where it asks for sizes, by those of ``inputs``."""
    for example in (None,) if inputs is None else (None, inputs):
        with suppress(CaptureError):
            return capture_trace(part, example_inputs=example).module
    return None


def _in_both_modes(
    model: nn.Module, capture: Callable[[nn.Module], Captured]
) -> CapturedForTraining:
    """``model`` by rule 1, or by rule 3."""
    own = capture(model)
    flags = {module.training for module in model.modules()}
    try:
        training = own if flags == {True} else capture(shallow_copy(model).train())
        evaluation = own if flags == {False} else capture(shallow_copy(model).eval())
    except CaptureError as error:
        return CapturedForTraining(own, f"{_only_in_own_mode(model)}: {error.what}")
    graphs = [captured.module.graph for captured in (own, training, evaluation)]
    difference = _first_difference(*graphs[1:]) or _first_difference(*graphs[:2])
    if difference:
        return CapturedForTraining(own, f"{_only_in_own_mode(model)}: {difference}")
    insert = partial(_insert, model, own, NamePool(own.module))
    for node, one, two in zip(*(list(graph.nodes) for graph in graphs), strict=True):
        for position, (first, second) in enumerate(zip(_leaves(one), _leaves(two), strict=True)):
            if not _equal(first, second):
                insert(node, position, ModeValue(first, second))
    return CapturedForTraining(own, "")


def passed_on_in_evaluation(modules: Mapping[str, nn.Module], node: fx.Node) -> fx.Node | None:
    """The input that ``node`` returns as it is in evaluation, while it does something else in training (drops
    a path, say): ``ByMode``, and calls of functions that the trace left whole. ``None`` for other nodes.

    ``modules``: those of the graph, by path.
    """
    if node.op == "call_module":
        called = modules[str(node.target)]
        is_dropped = isinstance(called, ByMode) and is_identity(called.in_evaluation.graph)
        first: Any = [*node.args, *node.kwargs.values()][0] if is_dropped else None
        return first if isinstance(first, fx.Node) else None
    read = (each for each in node.all_input_nodes if each.op == "call_module")
    values = {each: modules[str(each.target)] for each in read}
    known = {
        each: value.in_evaluation for each, value in values.items() if isinstance(value, ModeValue)
    }
    return passed_on(node, known) if known else None


def settle_mode_values(module: fx.GraphModule) -> None:
    """Replace the calls of every ``ModeValue`` by its value in evaluation, and nodes that pass an input on in
    evaluation (``passed_on_in_evaluation``) by that input. Edits in place.

    >>> class Half(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.factor = ModeValue(1.0, 0.5)
    ...     def forward(self, x):
    ...         return x * self.factor()
    >>> class Leaves(fx.Tracer):
    ...     def is_leaf_module(self, m, name): return True
    >>> half = Half(); gm = fx.GraphModule(half, Leaves().trace(half))
    >>> settle_mode_values(gm); _ = gm.recompile(); gm(1.0)
    0.5
    """
    modules = dict(module.named_modules(remove_duplicate=False))
    for node in list(module.graph.nodes):
        given = passed_on_in_evaluation(modules, node)
        if given is not None:
            node.replace_all_uses_with(given)
            module.graph.erase_node(node)
    for node in list(module.graph.find_nodes(op="call_module")):
        called = modules[str(node.target)]
        if isinstance(called, ModeValue):
            for user in list(node.users):
                _replace(user, partial(_settled, node, called.in_evaluation))
            module.graph.erase_node(node)


def _settled(read: fx.Node, value: Any, leaf: Any) -> Any:
    return value if leaf is read else leaf


def _only_in_own_mode(model: nn.Module) -> str:
    mode = "training" if model.training else "evaluation"
    return ONLY_IN_MODE.format(mode)


def _first_difference(one: fx.Graph, two: fx.Graph) -> str:
    """The first nodes in which two graphs differ by more than a constant, or ``""``."""
    for mine, other in zip_longest(one.nodes, two.nodes):
        if mine is None or other is None or not _alike(mine, other):
            return f"{_text(mine)} in one mode is {_text(other)} in the other"
    return ""


def _text(node: fx.Node | None) -> str:
    if node is None:
        return "the end"
    return f"{node.name!r}" if node.op in ("placeholder", "output") else f"the call {node.name!r}"


def _alike(one: fx.Node, two: fx.Node) -> bool:
    """Whether two nodes do the same but for constants among their arguments."""
    if (one.op, one.target, one.name) != (two.op, two.target, two.name):
        return False
    mine, others = _leaves(one), _leaves(two)
    if _shape(one) != _shape(two) or len(mine) != len(others):
        return False
    pairs = zip(mine, others, strict=True)
    return all(_equal(a, b) or (_is_constant(a) and _is_constant(b)) for a, b in pairs)


def _leaves(node: fx.Node) -> list[Any]:
    """Every argument and entry of nested lists, tuples, dicts and slices, in a fixed order."""
    found: list[Any] = []

    def note(leaf: Any) -> Any:
        found.append(leaf)
        return leaf

    _replace_in(node, note)
    return found


def _shape(node: fx.Node) -> str:
    return str(_replace_in(node, lambda _: 0))


def _replace_in(node: fx.Node, change: Callable[[Any], Any]) -> Any:
    return fx.node.map_aggregate((node.args, node.kwargs), change)


def _replace(node: fx.Node, change: Callable[[Any], Any]) -> None:
    node.args, node.kwargs = _replace_in(node, change)


def _is_constant(value: Any) -> bool:
    return value is None or isinstance(value, (bool, int, float, str))


def _equal(one: Any, two: Any) -> bool:
    if isinstance(one, fx.Node) and isinstance(two, fx.Node):
        return one.name == two.name
    return type(one) is type(two) and bool(one == two)


def _insert(
    model: nn.Module,
    captured: Captured,
    names: NamePool,
    node: fx.Node,
    position: int,
    value: ModeValue,
) -> None:
    """Let the ``position``-th leaf of ``node`` be the result of ``value``, in its scope."""
    scope = captured.scopes.get(node.name, Scope("", None))
    owner = scope.parent if node.op == "call_module" else scope.path
    path = ".".join(filter(None, (owner, names.take("mode_value_"))))
    set_module(captured.module, path, value)
    value.train(model.get_submodule(owner).training)
    with captured.module.graph.inserting_before(node):
        read = captured.module.graph.call_module(path)
    captured.scopes[read.name] = Scope(path, ModeValue)
    leaves = count()
    _replace(node, lambda leaf: read if next(leaves) == position else leaf)
    while owner:  # containers on the way may be new: they get the flags that they have in the model
        captured.module.get_submodule(owner).training = model.get_submodule(owner).training
        owner = owner.rpartition(".")[0]
