"""Values of a captured graph that depend on no input, computed once.

For inference: standardized weights, biases that are put together, tables of relative positions. Nothing is
computed ahead that is random, that changes a tensor, that calls code of the user, that looks up an
embedding (tables have entries of their own), or that is large and made of little.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.nn import functional as F

from backquant.graph.edit import NamePool, get_module
from backquant.graph.mutation import changed_tensors, may_change
from backquant.graph.provenance import Scope

_LARGE = 1 << 22  # elements
_PACKAGES = ("torch", "_operator", "builtins", "math")
_RANDOM = ("rand", "bernoulli", "multinomial", "normal", "poisson", "dropout", "uniform")
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


class _Constants:
    """The nodes whose values may be computed ahead; each is looked at once and computed at most once."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._module = module
        self._values: dict[fx.Node, Any] = {}
        self._changed = changed_tensors(module)
        self._nodes: set[fx.Node] = set()
        for node in module.graph.nodes:
            if all(source in self._nodes for source in node.all_input_nodes) and self._may(node):
                self._nodes.add(node)

    def __contains__(self, node: object) -> bool:
        return node in self._nodes

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
        call: Callable[..., Any] = node.target  # type: ignore[assignment]
        if node.op == "call_method":
            first, *args = args
            call = getattr(first, str(node.target))
        elif node.op == "call_module":
            call = get_module(self._module, str(node.target))
            if getattr(call, "inplace", False):
                args = (args[0].clone(), *args[1:])
        return call(*args, **kwargs)


# -- which calls may be computed at capture ---------------------------------------------------------------


def _is_known(target: Any, node: fx.Node) -> bool:
    if isinstance(target, OpOverload):
        random = torch.Tag.nondeterministic_seeded in target.tags
        return target.namespace == "aten" and not random and "embedding" not in target._schema.name
    name = getattr(target, "__name__", "")
    package = (getattr(target, "__module__", None) or "torch").partition(".")[0]
    if package not in _PACKAGES or is_random(name) or name in ("embedding", "embedding_bag"):
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
    return name not in _SAFE_NAMES and any(word in name for word in _RANDOM)
