"""Which modules become one fused module.

Fusion patterns are the entries with a fuser. They are tried as in ``matcher``; the root, whose place
the fused module takes, has to call a module. Nothing is fused that would change what is computed.
*Different* from PyTorch:

1. Operators that disappear may have no argument that the fused module does not know. PyTorch drops
   it: ``torch.add(conv(x), y, alpha=2)`` loses its ``alpha``.
2. Extra inputs of a fused module are values of the graph. PyTorch passes constants, too:
   ``conv(x) + 1`` becomes a ``ConvAdd2d`` for which there is no kernel.
3. No extra input is computed inside of the fusion. PyTorch fails on ``y + y`` with ``y = conv(x)``.
4. A batch norm is folded where it normalises the features of the layer before it. Behind a linear layer
   over sequences, or a convolution without a batch, it normalises another axis; PyTorch folds it there,
   too, and computes something else. Where no run showed the rank, the fused module refuses others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    GraphPattern,
    is_for_inference_only,
)
from backquant.backend_config.pattern import NormalPattern
from backquant.errors import ConfigError
from backquant.graph import GraphIndex
from backquant.graph.shapes import GraphValues
from backquant.match.matcher import Found, Matcher, PatternIndex
from backquant.match.plan import Fusion
from backquant.match.refusal import entry_text
from backquant.nn.intrinsic.rank import rank_to_fold

# The shape in which root getters, input getters and fusers of a backend receive nodes.
#
# Such functions unpack nested tuples. During fusion the shape is that of the reversed pattern,
# ``[relu, (bn, conv)]``. During quantization PyTorch flattens the arguments of an operator that has
# several: ``(add, x, (relu, conv))`` arrives as ``[add, x, relu, conv]``. The getters of a graph pattern
# receive ``{name: node}``.


def nested(pattern: NormalPattern, values: tuple[Any, ...]) -> list[Any]:
    """Values in the shape of the reversed pattern; the outermost level is a list.

    >>> from torch import nn
    >>> from backquant.backend_config.pattern import normal_form
    >>> nested(normal_form((nn.Conv2d, nn.BatchNorm2d, nn.ReLU)), ("conv", "bn", "relu"))
    ['relu', ('bn', 'conv')]
    """

    def build(position: int) -> Any:
        inputs = pattern.nodes[position].inputs
        if inputs is None:
            return values[position]
        return (values[position], *map(build, inputs))

    inputs = pattern.anchor.inputs
    return [values[-1], *(map(build, inputs) if inputs is not None else ())]


def flattened(pattern: NormalPattern, values: tuple[Any, ...]) -> list[Any]:
    """Values in the shape that PyTorch gives them when it matches for quantization.

    >>> import torch
    >>> from backquant.backend_config.pattern import MatchAllNode, from_reversed
    >>> add = from_reversed((torch.add, MatchAllNode, (torch.relu, torch.nn.Conv2d)))
    >>> flattened(add, ("x", "conv", "relu", "add"))
    ['add', 'x', 'relu', 'conv']
    """

    def build(position: int) -> list[Any]:
        inputs = pattern.nodes[position].inputs
        if inputs is None:
            return [values[position]]
        below = [value for item in inputs for value in build(item)]
        if len(inputs) == 1 and len(below) > 1:
            return [values[position], tuple(below)]
        return [values[position], *below]

    return build(len(pattern.nodes) - 1)


def root_of(
    found: Found,
    backend: BackendConfig,
    shape: Callable[[NormalPattern, tuple[Any, ...]], list[Any]],
) -> fx.Node:
    """The node whose inputs are observed: the entry's own choice, or the first operator.

    The first operator is found from the anchor along the last argument that is an operator. Of a graph
    pattern it is the first module that is written, or else the first operator.

    Raises:
        ConfigError: the entry's root getter fails or returns no node of the match.
    """
    candidate = found.candidate
    getter = candidate.config._root_node_getter
    if getter is None:
        if isinstance(candidate.config.pattern, GraphPattern):
            return _named_root(candidate.config.pattern, found)
        return _default_root(candidate.pattern, found.bound)
    where = (
        f"root_node_getter of {backend.name}, entry {candidate.entry} ({candidate.pattern}), "
        f"at node {found.anchor.name!r}"
    )
    fix = "return one of the nodes that the pattern binds"
    try:
        root = getter(_named(found) or shape(candidate.pattern, found.bound))
    except Exception as error:
        raise ConfigError(
            f"the root getter raised {type(error).__name__}: {error}", where=where, fix=fix
        ) from error
    if not isinstance(root, fx.Node) or root not in found.members:
        raise ConfigError(
            f"the root getter returned {root!r}, which is no operator of the match",
            where=where,
            fix=fix,
        )
    return root


def extra_inputs_of(found: Found, backend: BackendConfig) -> tuple[fx.Node, ...]:
    """Inputs that a fused module takes beyond those of its root, in order.

    Without a getter there are none, but for a graph pattern: those that its root does not read.

    Raises:
        ConfigError: the getter fails or returns something that is no node.
    """
    candidate = found.candidate
    getter = candidate.config._extra_inputs_getter
    if getter is None:
        return other_inputs(found)
    where = (
        f"extra_inputs_getter of {backend.name}, entry {candidate.entry} ({candidate.pattern}), "
        f"at node {found.anchor.name!r}"
    )
    try:
        extra = list(getter(_named(found) or nested(candidate.pattern, found.bound)))
    except Exception as error:
        raise ConfigError(
            f"the getter raised {type(error).__name__}: {error}", where=where
        ) from error
    for value in extra:
        if not isinstance(value, fx.Node):
            raise ConfigError(f"the getter returned {value!r}, which is no node", where=where)
    return tuple(extra)


def _named(found: Found) -> dict[str, Any] | None:
    pattern = found.candidate.config.pattern
    return pattern.named(found.bound) if isinstance(pattern, GraphPattern) else None


def other_inputs(found: Found) -> tuple[Any, ...]:
    """What is bound to the inputs of a graph pattern that its root does not read, in order.

    None when the entry has a getter for them, or another kind of pattern.
    """
    config = found.candidate.config
    pattern = config.pattern
    if not isinstance(pattern, GraphPattern) or config._extra_inputs_getter is not None:
        return ()
    bound = pattern.named(found.bound)
    getter = config._root_node_getter
    root = _named_root(pattern, found) if getter is None else getter(bound)
    read = next((node.arguments for node in pattern.nodes if bound[node.name] is root), None) or ()
    return tuple(bound[name] for name in pattern.inputs if name not in read)


def _named_root(pattern: GraphPattern, found: Found) -> fx.Node:
    kinds = dict(zip(pattern.names, pattern.normal.nodes, strict=True))
    modules = [name for name in pattern.operators if kinds[name].kind == "module"]
    root: fx.Node = pattern.named(found.bound)[(modules or pattern.operators)[0]]
    return root


def _default_root(pattern: NormalPattern, values: tuple[Any, ...]) -> fx.Node:
    position = len(pattern.nodes) - 1
    while True:
        inputs = pattern.nodes[position].inputs or ()
        operators = [i for i in inputs if pattern.nodes[i].kind not in ("any", "literal")]
        operators = [i for i in operators if isinstance(values[i], fx.Node)]
        if not operators:
            root: fx.Node = values[position]
            return root
        position = operators[-1]


def plan_fusion(
    module: fx.GraphModule,
    backend_config: BackendConfig,
    *,
    is_qat: bool = False,
    declined: Collection[tuple[str, int]] = (),
    values: GraphValues | None = None,
) -> tuple[Fusion, ...]:
    """The fusions that a backend wants in a captured graph, in graph order. Edits nothing.

    Args:
        module: a captured graph.
        backend_config: its entries with a ``fuser_method`` are the fusion patterns.
        is_qat: plan for training: a batch norm whose fuser is marked
            ``folds_for_inference_only`` is not fused. *Different:* PyTorch raises there.
        declined: (anchor node, entry) of fusions not to plan; shorter ones may take their place.
        values: the ranks of the graph's tensors.

    Raises:
        ConfigError: a getter of an entry fails, or the root of a pattern calls no module.

    >>> from backquant.backend_config import BackendPatternConfig
    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
    ...     lambda is_qat, linear, relu: nn.Sequential(linear, relu))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> plan_fusion(gm, BackendConfig("b").set_backend_pattern_config(entry))[0].nodes
    ('_0', '_1')
    """
    graph, known = GraphIndex(module), values or GraphValues(None)
    patterns = PatternIndex.of(backend_config, _trainable if is_qat else _fusible)

    def accepts(found: Found) -> bool:
        if (found.anchor.name, found.candidate.entry) in declined:
            return False
        return _keeps_meaning(found, graph) and keeps_channels(found.members, graph, known)

    matcher = Matcher(graph, patterns, accepts)
    return tuple(_fusion(found, graph, backend_config) for found in matcher.run())


def _fusible(config: BackendPatternConfig) -> bool:
    return config.fuser_method is not None


def _trainable(config: BackendPatternConfig) -> bool:
    """Whether the fuser has a form for training of everything in its pattern."""
    if config.fuser_method is None:
        return False
    kinds = [node.op for node in config.normal_pattern.nodes if node.kind == "module"]
    with_batch_norm = any(issubclass(kind, _BatchNorm) for kind in kinds)
    return not (with_batch_norm and is_for_inference_only(config.fuser_method))


def _fusion(found: Found, graph: GraphIndex, backend: BackendConfig) -> Fusion:
    candidate = found.candidate
    root = root_of(found, backend, nested)
    if root.op != "call_module":
        raise ConfigError(
            f"the root of a fusion has to be a module, and {root.name!r} is none",
            where=_where(found, backend),
            fix="_set_root_node_getter(...) with a getter that returns the convolution or linear",
        )
    extra = extra_inputs_of(found, backend)
    members = sorted(found.members, key=graph.position.__getitem__)
    for node in extra:
        if node in members:
            raise ConfigError(
                f"the extra input {node.name!r} of a fusion lies inside of it",
                where=_where(found, backend),
                fix="_set_extra_inputs_getter(...) with a getter of nodes outside of the pattern",
            )
    for node in root.all_input_nodes:
        if node in members:
            raise ConfigError(
                f"the root {root.name!r} of a fusion reads {node.name!r}, which lies inside of it",
                where=_where(found, backend),
                fix="_set_root_node_getter(...) with a getter of an operator that reads inputs only",
            )
    fused = candidate.config.fused_module
    return Fusion(
        entry=candidate.entry,
        pattern=entry_text(candidate.config),
        nodes=tuple(node.name for node in members),
        root=root.name,
        fused_module="" if fused is None else f"{fused.__module__}.{fused.__qualname__}",
        bound=tuple(v.name if isinstance(v, fx.Node) else "" for v in found.bound),
        extra_inputs=tuple(node.name for node in extra),
    )


def _where(found: Found, backend: BackendConfig) -> str:
    candidate = found.candidate
    return f"{backend.name}, entry {candidate.entry} ({candidate.pattern})"


def _keeps_meaning(found: Found, graph: GraphIndex) -> bool:
    pattern = found.candidate.pattern
    inside = set(found.members)
    has_extra = found.candidate.config._extra_inputs_getter is not None
    if not all(isinstance(value, fx.Node) for value in other_inputs(found)):
        return False
    for part, value in zip(pattern.nodes, found.bound, strict=True):
        if part.kind == "any":
            if value in inside or (has_extra and not isinstance(value, fx.Node)):
                return False
            continue
        if part.inputs is None or not isinstance(value, fx.Node):
            continue
        if not _drops_nothing(value, len(part.inputs), graph.module_of(value)):
            return False
    return True


def _drops_nothing(node: fx.Node, count: int, module: nn.Module | None) -> bool:
    """Whether a call has no arguments beyond the first ``count`` that change its result."""
    from backquant.graph.arguments import ordered_arguments

    if not node.kwargs and len(node.args) == count:
        return True
    ordered: tuple[Any, ...] | None = ordered_arguments(node, module)
    return ordered is not None and len(ordered) == count


# Whether a batch norm normalises the features of the layer that it would be folded into.
#
# Without statistics it cannot be folded at all. Its channels are axis 1. Those of a linear layer over
# sequences, and of a convolution without a batch, are another axis: folded, the model would compute something
# else. *Different:* PyTorch looks at classes only.
def keeps_channels(nodes: Iterable[fx.Node], graph: GraphIndex, values: GraphValues) -> bool:
    """Whether every batch norm among ``nodes`` may be folded, as far as ``values`` are known."""
    for node, root, norm in _norms(nodes, graph):
        if norm.running_mean is None:
            return False
        if isinstance(root, nn.Linear) and root.out_features != norm.num_features:
            return False
        needed = rank_to_fold(root, norm)
        known = None if needed is None else values.of(node.name)
        if known is not None and len(known.shape) != needed:
            return False
    return True


def unseen_rank(nodes: Iterable[fx.Node], graph: GraphIndex, values: GraphValues) -> int | None:
    """The rank of inputs at which ``nodes`` may be folded, if ``values`` do not know which they have."""
    for node, root, norm in _norms(nodes, graph):
        needed = rank_to_fold(root, norm)
        if needed is not None and values.of(node.name) is None:
            return needed
    return None


def _norms(
    nodes: Iterable[fx.Node], graph: GraphIndex
) -> Iterator[tuple[fx.Node, nn.Module, _BatchNorm]]:
    """The batch norms among ``nodes``, each with the node before it and the module which that one calls."""
    inside = set(nodes)
    for node in inside:
        norm, source = graph.module_of(node), node.args[0] if node.args else None
        if isinstance(norm, _BatchNorm) and isinstance(source, fx.Node) and source in inside:
            root = graph.module_of(source)
            if root is not None:
                yield source, root, norm
