"""Values of a captured graph that depend on no input, computed once.

For inference: standardized weights, biases that are put together, tables of relative positions. Nothing is
computed ahead that is random, that changes a tensor, that calls code of the user, that looks up an
embedding (tables have entries of their own), or that is large and made of little.
"""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from operator import attrgetter
from types import FunctionType, MappingProxyType
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.fx.proxy import GraphAppendingTracer
from torch.nn import functional as F

from backquant.graph.edit import NamePool, get_module
from backquant.graph.in_place import changed_tensors, may_change
from backquant.graph.provenance import Scope

_LARGE = 1 << 22  # elements
_PACKAGES = ("torch", "_operator", "builtins", "math")
_RANDOM = re.compile("rand|bernoulli|multinomial|normal|poisson|dropout|uniform|exponential")
_SAFE_NAMES = frozenset({"batch_norm", "layer_norm", "group_norm", "instance_norm", "normalize"})
_KEPT = (
    nn.Embedding,
    nn.EmbeddingBag,
    nn.RNNBase,
    nn.RNNCellBase,
    nn.MultiheadAttention,
    nn.Transformer,
    nn.TransformerEncoder,
    nn.TransformerDecoder,
    nn.TransformerEncoderLayer,
    nn.TransformerDecoderLayer,
)


def fold_constants(module: fx.GraphModule, scopes: dict[str, Scope]) -> int:
    """Replace what depends on no input by buffers of ``module``, in place; how many.

    ``module`` is in evaluation mode and holds the tensors that it will be run with.

    >>> class Shifted(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = nn.Parameter(torch.ones(2, 2))
    ...     def forward(self, x):
    ...         return F.linear(x, self.w / self.w.sum())
    >>> module = fx.symbolic_trace(Shifted())
    >>> fold_constants(module, {}), [node.name for node in module.graph.nodes]
    (1, ['x', 'constant_0', 'linear', 'output'])
    """
    constants = _Constants(module)
    names = NamePool(module)
    count = 0
    for node in list(module.graph.nodes):
        if not constants.is_read_outside(node):
            continue
        value = constants.value(node)
        if not isinstance(value, torch.Tensor) or not constants.is_worth(node, value):
            continue
        path = names.take("constant_")
        module.register_buffer(path, value.detach())
        with module.graph.inserting_before(node):
            made = module.graph.get_attr(path)
        made.meta.update(node.meta)
        scopes[made.name] = scopes.get(node.name, Scope("", None))
        for user in constants.readers_outside(node):
            user.replace_input_with(node, made)
        count += 1
    if count:
        _drop_unread(module, scopes, constants)
    return count


def _drop_unread(module: fx.GraphModule, scopes: dict[str, Scope], constants: _Constants) -> None:
    for node in reversed(list(module.graph.nodes)):
        if node in constants and not node.users:
            module.graph.erase_node(node)
            scopes.pop(node.name, None)


class ConstantValues:
    """The values of nodes that depend on no input; each is looked at once and computed at most once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._values: dict[fx.Node, Any] = {}
        self._nodes: set[fx.Node] = set()
        for node in module.graph.nodes:
            if all(source in self._nodes for source in node.all_input_nodes) and self._may(node):
                self._nodes.add(node)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

    def _may(self, node: fx.Node) -> bool:
        return node.op not in ("placeholder", "output")

    def value(self, node: fx.Node) -> Any:
        """The value of a constant; ``None`` where it cannot be computed by itself."""
        stack = [node]
        with torch.no_grad():
            while stack:
                missing = [s for s in stack[-1].all_input_nodes if s not in self._values]
                stack.extend(missing)
                if not missing:
                    current = stack.pop()
                    if current not in self._values:
                        self._values[current] = self._computed(current)
        return self._values[node]

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "get_attr":
            return attrgetter(str(node.target))(self._module)
        given: Any = fx.map_arg((node.args, node.kwargs), self._values.__getitem__)
        args, kwargs = given
        call: Any = node.target
        if node.op == "call_method":
            first, *args = args
            call = getattr(first, str(node.target))
        elif node.op == "call_module":
            call = get_module(self._module, str(node.target))
            if getattr(call, "inplace", False):
                args = (args[0].clone(), *args[1:])
        return call(*args, **kwargs)


class _Constants(ConstantValues):
    """The nodes whose values may be computed ahead."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._changed = changed_tensors(module)
        super().__init__(module)

    def _may(self, node: fx.Node) -> bool:
        if node.op == "get_attr":
            value = attrgetter(str(node.target))(self._module)
            return isinstance(value, torch.Tensor) and str(node.target) not in self._changed
        if not node.all_input_nodes or may_change(node):
            return False
        if node.op == "call_module":
            called = get_module(self._module, str(node.target))
            is_own = type(called).__module__.startswith("torch.nn.modules.")
            return is_own and not called.training and not isinstance(called, _KEPT)
        if node.op == "call_method":
            return not is_random(str(node.target))
        return node.op == "call_function" and _is_known(node.target, node)

    def readers_outside(self, node: fx.Node) -> list[fx.Node]:
        """The readers of a constant that are not constant themselves."""
        return [user for user in node.users if user not in self._nodes]

    def is_read_outside(self, node: fx.Node) -> bool:
        """Whether a node is computed ahead and read by one that is not."""
        return node in self._nodes and node.op != "get_attr" and bool(self.readers_outside(node))

    def is_worth(self, node: fx.Node, value: torch.Tensor) -> bool:
        """Whether to keep a value: not if it is large, and made of much less."""
        if value.numel() <= _LARGE:
            return True
        return value.numel() <= 2 * sum(self._sizes(node))

    def _sizes(self, node: fx.Node) -> Iterator[int]:
        seen, pending = set(), [node]
        while pending:
            for source in pending.pop().all_input_nodes:
                if source not in seen:
                    seen.add(source)
                    pending.append(source)
                    if source.op == "get_attr":
                        yield self._values[source].numel()


# -- which calls may be computed at capture ---------------------------------------------------------------
def is_plain(target: Any) -> bool:
    """Whether a function is torch's or Python's, and draws no random numbers.

    >>> is_plain(torch.add), is_plain(torch.rand), is_plain(torch.ops.aten.bernoulli.default)
    (True, False, False)
    """
    if isinstance(target, OpOverload):
        seeded = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace == "aten" and not seeded
    package = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    return package in _PACKAGES and not is_random(getattr(target, "__name__", ""))


def _is_known(target: Any, node: fx.Node) -> bool:
    name = (
        target._schema.name if isinstance(target, OpOverload) else getattr(target, "__name__", "")
    )
    if not is_plain(target) or "embedding" in name:
        return False
    if target is F.batch_norm and _argument(node, 1, "running_mean") is not None:
        return not _argument(node, 5, "training")
    return True


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)


def is_random(name: str) -> bool:
    """Whether an operator of this name draws random numbers.

    >>> is_random("rand_like"), is_random("normalize")
    (True, False)
    """
    return name not in _SAFE_NAMES and _RANDOM.search(name) is not None


# Functions that a trace left whole (``torch.fx.wrap``), taken apart where that is possible.
#
# A wrapped function whose branches hang on constants alone, such as the ``stochastic_depth`` of a model in
# evaluation mode, is no more than the operators that it calls.

_OPERATORS = ("torch.", "backquant.")


def inline_wrapped(
    module: fx.GraphModule, scopes: dict[str, Scope], whole: Collection[Callable[..., Any]] = ()
) -> None:
    """Put operators in the place of calls of functions that are neither torch's nor among ``whole``.

    A function that looks at values or sizes, or draws random numbers, is left.

    >>> def twice(x, times):
    ...     return x * 2 if times == 2 else x
    >>> twice.__module__ = "somebody"
    >>> graph = fx.Graph()
    >>> _ = graph.output(graph.call_function(twice, (graph.placeholder("x"), 2)))
    >>> module = fx.GraphModule({}, graph)
    >>> inline_wrapped(module, {})
    >>> [node.name for node in module.graph.nodes]
    ['x', 'mul', 'output']
    """
    for node in list(module.graph.nodes):
        if not _is_wrapped(node) or node.target in whole:
            continue
        scope, read = scopes.get(node.name), list(node.users)
        made = inline_call(module.graph, node)
        if made is not None and scope is not None:
            gone = (node, *(item for item in read if item._erased))
            for each in gone:
                scopes.pop(each.name, None)
            scopes.update((new.name, scope) for new in made)


def _is_wrapped(node: fx.Node) -> bool:
    target = node.target
    if node.op != "call_function" or not isinstance(target, FunctionType):
        return False
    return not f"{target.__module__}.".startswith(_OPERATORS)


def passed_on(node: fx.Node, known: Mapping[fx.Node, Any]) -> fx.Node | None:
    """The input that ``node``, a call of a wrapped function, returns as it is; ``None`` for other calls.

    ``known``: inputs that are constants.

    >>> def drop(x, training):
    ...     return x * 2 if training else x
    >>> drop.__module__ = "somebody"
    >>> graph = fx.Graph()
    >>> node = graph.call_function(drop, (graph.placeholder("x"), flag := graph.placeholder("training")))
    >>> passed_on(node, {flag: False}), passed_on(node, {flag: True})
    (x, None)
    """
    if not _is_wrapped(node):
        return None
    body = _body(node, node.target, known)
    if body is None:
        return None
    inner = (each for each in body.nodes if each.op == "placeholder")
    given = (each for each in node.all_input_nodes if each not in known)
    returned = body.output_node().args[0]
    return next((own for each, own in zip(inner, given, strict=True) if each is returned), None)


def inline_call(
    graph: fx.Graph, node: fx.Node, function: Callable[..., Any] | None = None
) -> list[fx.Node] | None:
    """Replace the call ``node`` of a function by the operators that it calls, and return them.

    ``function``: what it calls, where that is not its target.

    ``None``, and nothing is changed, where the function cannot be taken apart.
    """
    body = _body(node, node.target if function is None else function)
    if body is None:
        return None
    inner = [n for n in body.nodes if n.op == "placeholder"]
    known: dict[fx.Node, fx.Node] = dict(zip(inner, node.all_input_nodes, strict=True))
    is_tuple = isinstance(body.output_node().args[0], (tuple, list))
    if is_tuple and not all(user.target is operator.getitem for user in node.users):
        return None
    with graph.inserting_before(node):
        result: Any = graph.graph_copy(body, known)
    made = [known[n] for n in body.nodes if n.op not in ("placeholder", "output")]
    for new in made:
        new.stack_trace = node.stack_trace
    if isinstance(result, fx.Node):
        node.replace_all_uses_with(result)
    else:
        for item in list(node.users):
            item.replace_all_uses_with(result[item.args[1]])
            graph.erase_node(item)
    graph.erase_node(node)
    return made


def _body(
    node: fx.Node, function: Any, known: Mapping[fx.Node, Any] = MappingProxyType({})
) -> fx.Graph | None:
    """What the function does with these arguments, one placeholder for each of ``node``'s inputs that is not
    ``known``."""
    body = fx.Graph()
    tracer = GraphAppendingTracer(body)
    proxies: dict[fx.Node, Any] = {
        n: known[n] if n in known else fx.Proxy(body.placeholder(n.name), tracer)
        for n in node.all_input_nodes
    }
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), proxies.__getitem__)
    dice, drawn = random.getstate(), torch.get_rng_state()
    try:
        result = function(*args, **kwargs)
    except Exception:  # user code that needs values: the call stays a node
        return None
    finally:
        is_random = random.getstate() != dice or not torch.equal(torch.get_rng_state(), drawn)
        random.setstate(dice)
        torch.set_rng_state(drawn)
    items = result if isinstance(result, (tuple, list)) else (result,)
    if is_random or not all(isinstance(item, fx.Proxy) for item in items):
        return None
    nodes = tuple(item.node for item in items)
    body.output(nodes[0] if isinstance(result, fx.Proxy) else nodes)
    return body
