"""Applying planned fusions: the one place where fused modules come into a graph."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    GraphPattern,
    MatchAllNode,
    SequentialFuser,
)
from backquant.errors import BackquantError, ConfigError
from backquant.graph import (
    Breach,
    DeferredGraphModule,
    GraphIndex,
    Provenance,
    Scope,
    assemble,
    contract,
    run_pass,
    set_module,
    verify,
)
from backquant.graph.shapes import GraphValues
from backquant.match.fusion import nested, unseen_rank
from backquant.match.plan import Fusion
from backquant.nn.intrinsic.rank import TakesRank
from backquant.operators import module_for_call

# What fusion returns, and what is true of it.


class Fused(NamedTuple):
    """A graph with fused modules.

    ``scopes`` keeps the entries of nodes that were fused away, for rules that name their modules.
    """

    module: fx.GraphModule
    scopes: dict[str, Scope]
    provenance: Provenance
    fusions: tuple[Fusion, ...]


def patterns_are_fused(
    fused: Fused,
    _module: fx.GraphModule,
    _scopes: Mapping[str, Scope],
    fusions: Sequence[Fusion],
    *_: object,
) -> Iterator[Breach]:
    """Of each planned pattern the root is left, which calls the fused module; its other nodes are gone."""
    left = {node.name: node for node in fused.module.graph.nodes}
    for fusion in fusions:
        root = left.get(fusion.root)
        if root is None or root.op != "call_module":
            yield Breach(fusion.root, f"a call of the fused module of {fusion.pattern}")
        for name in fusion.nodes:
            if name in left and name != fusion.root:
                yield Breach(name, f"to be fused into {fusion.root}, by {fusion.pattern}")


# ``nn.SyncBatchNorm``, which no description lists: fused and quantized as the batch norm it is.
#
# Behind a convolution or linear layer its dimension is known. There it is replaced by a plain batch norm of
# the same tensors, so that patterns match it. For training it is put back afterwards, wherever it then
# stands: in a QAT module, too. *Different:* PyTorch matches classes only, and leaves such models unfused;
# their batch norms stay in float.


_AFTER: dict[type[nn.Module], type[_BatchNorm]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}


def as_plain(sync: nn.SyncBatchNorm, kind: type[_BatchNorm]) -> _BatchNorm:
    """A batch norm of class ``kind`` with the tensors and settings of ``sync``.

    >>> sync = nn.SyncBatchNorm(2, eps=0.1).eval()
    >>> plain = as_plain(sync, nn.BatchNorm2d)
    >>> plain.running_mean is sync.running_mean, plain.eps, plain.training
    (True, 0.1, False)
    """
    plain = kind(sync.num_features, sync.eps, sync.momentum, device="meta")
    plain.affine, plain.track_running_stats = sync.affine, sync.track_running_stats
    plain._parameters = dict(sync._parameters)
    plain._buffers = dict(sync._buffers)
    return plain.train(sync.training)


def without_sync(module: fx.GraphModule) -> dict[nn.Module, nn.SyncBatchNorm]:
    """Replace what can be replaced in a captured graph; returns what each new module stands for.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)))
    >>> _ = without_sync(gm)
    >>> type(gm.get_submodule("1")).__name__
    'BatchNorm2d'
    """
    graph = GraphIndex(module)
    made: dict[nn.Module, nn.SyncBatchNorm] = {}
    for path, nodes in graph.callers.items():
        sync = graph.modules[path]
        if type(sync) is not nn.SyncBatchNorm:
            continue
        kinds = {_kind(node, graph) for node in nodes}
        kind = kinds.pop()
        if kind is not None and not kinds:
            plain = as_plain(sync, kind)
            made[plain] = sync
            set_module(module, path, plain)
    return made


def _kind(node: fx.Node, graph: GraphIndex) -> type[_BatchNorm] | None:
    before = graph.module_of(node.all_input_nodes[0])
    return None if before is None else _AFTER.get(type(before))


def put_back(module: nn.Module, made: dict[nn.Module, nn.SyncBatchNorm]) -> None:
    """Undo ``without_sync`` wherever its modules are by now.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)))
    >>> put_back(gm, without_sync(gm))
    >>> type(gm.get_submodule("1")).__name__
    'SyncBatchNorm'
    """
    for owner in module.modules():
        for name, child in owner._modules.items():
            if child in made:
                owner._modules[name] = made[child]


def apply_fusion(
    module: fx.GraphModule,
    scopes: Mapping[str, Scope],
    fusions: Iterable[Fusion],
    backend_config: BackendConfig,
    is_qat: bool,
    values: GraphValues | None = None,
) -> Fused:
    """A new graph module in which each fusion is one call of its fused module.

    Invariants (PyTorch's)

    1. The fused module has the path of the root's module, and its node the root's name and the
       anchor's place in the order.
    2. ``module`` and its submodules stay as they are; fusers get the submodules themselves and must
       not change them.

    *Different:* calls of one module that are not all fused alike get fused modules of their own (at
    the root's path with a number), so that no call computes what another was fused with. In PyTorch
    the last one wins.

    Args:
        module: a captured graph.
        scopes: the scope of each of its nodes.
        fusions: from ``plan_fusion`` on the same graph and backend.
        backend_config: holds the fusers.
        is_qat: passed on to the fusers, for training-time forms (which keep the batch norm).
        values: the ranks of the graph's tensors. A folded module refuses others than it was folded for,
            where they are unknown.

    Raises:
        ConfigError: a fuser fails or returns no module; names the entry and the node.

    >>> from backquant.backend_config import BackendPatternConfig
    >>> from backquant.match import plan_fusion
    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
    ...     lambda is_qat, linear, relu: nn.Sequential(linear, relu))
    >>> backend = BackendConfig("b").set_backend_pattern_config(entry)
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    >>> fused = apply_fusion(gm, {}, plan_fusion(gm, backend), backend, is_qat=False)
    >>> [node.name for node in fused.module.graph.nodes]
    ['input_1', '_0', 'output']
    """
    planned = tuple(fusions)
    return run_pass(_fuse_patterns, module, scopes, planned, backend_config, is_qat, values)


@contract(ensures=[patterns_are_fused])
def _fuse_patterns(
    module: fx.GraphModule,
    scopes: Mapping[str, Scope],
    planned: tuple[Fusion, ...],
    backend_config: BackendConfig,
    is_qat: bool,
    values: GraphValues | None,
) -> Fused:
    graph = GraphIndex(module)
    made = [_run_fuser(fusion, graph, backend_config, is_qat) for fusion in planned]
    if not is_qat:  # modules for training refuse by themselves
        _check_ranks(zip(planned, made, strict=True), graph, values or GraphValues(None))
    provenance = Provenance()
    copied = _copy_graph(graph, planned, provenance)
    paths = _targets(planned, graph, backend_config)
    targets = dict(zip((fusion.root for fusion in planned), paths, strict=True))
    held: dict[str, Any] = dict(zip(targets.values(), made, strict=True))
    for node in copied.nodes:
        if node.name in targets:
            node.target = targets[node.name]
        elif node.op == "call_module":
            held[str(node.target)] = graph.modules[str(node.target)]
    _keep_reads(copied, module, held)
    result = _graph_module(module, held, copied)
    verify(result, after="fusion")
    return Fused(result, dict(scopes), provenance, planned)


def _run_fuser(
    fusion: Fusion, graph: GraphIndex, backend: BackendConfig, is_qat: bool
) -> nn.Module:
    config = backend.shared_configs[fusion.entry]
    bound = tuple(graph.nodes.get(name) for name in fusion.bound)
    root = graph.module_of(graph.nodes[fusion.root])
    where = f"{backend.name}, entry {fusion.entry} ({fusion.pattern}), node {fusion.root!r}"
    if root is None or config.fuser_method is None:
        raise ConfigError("this fusion was planned for another graph or backend", where=where)
    try:
        fused = run_fuser(config, is_qat, bound, graph.modules, root)
    except BackquantError as error:
        raise type(error)(error.what, where=where, fix=error.fix) from error
    except Exception as error:
        raise ConfigError(
            f"the fuser raised {type(error).__name__}: {error}",
            where=where,
            fix="set_fuser_method(f) with f(is_qat, *modules) that returns a module",
        ) from error
    if not isinstance(fused, nn.Module):
        raise ConfigError(
            f"the fuser returned {fused!r}, which is no module",
            where=where,
            fix="set_fuser_method(f) with f(is_qat, *modules) that returns a module",
        )
    return fused


def _check_ranks(
    made: Iterable[tuple[Fusion, nn.Module]], graph: GraphIndex, values: GraphValues
) -> None:
    for fusion, module in made:
        rank = unseen_rank((graph.nodes[name] for name in fusion.nodes), graph, values)
        if rank is not None:
            module.register_forward_pre_hook(TakesRank(rank))


@dataclass(frozen=True)
class _Alike:
    """What two calls of one module have to share to be served by one fused module."""

    entry: int
    parts: tuple[Any, ...]


def _targets(fusions: tuple[Fusion, ...], graph: GraphIndex, backend: BackendConfig) -> list[str]:
    """Where each fused module goes: the root's path, unless other calls of that path differ."""
    variants: dict[str, dict[_Alike, int]] = {}
    fused_calls: dict[str, int] = {}
    keys = []
    for fusion in fusions:
        path = str(graph.nodes[fusion.root].target)
        bound = tuple(graph.nodes.get(name) for name in fusion.bound)
        key = _Alike(fusion.entry, parts_of_call(backend.shared_configs[fusion.entry], bound))
        keys.append((path, key))
        numbers = variants.setdefault(path, {})
        numbers.setdefault(key, len(numbers))
        fused_calls[path] = fused_calls.get(path, 0) + 1
    taken = set(graph.modules)
    names: dict[tuple[str, int], str] = {}
    for path, numbers in variants.items():
        alone = fused_calls[path] == len(graph.callers[path])
        for number in numbers.values():
            keep = number == 0 and alone
            names[path, number] = path if keep else _unused(path, number + 1, taken)
    return [names[path, variants[path][key]] for path, key in keys]


def _unused(path: str, number: int, taken: set[str]) -> str:
    while f"{path}_{number}" in taken:
        number += 1
    taken.add(f"{path}_{number}")
    return f"{path}_{number}"


def _copy_graph(graph: GraphIndex, fusions: tuple[Fusion, ...], provenance: Provenance) -> fx.Graph:
    """The graph with each fusion's root in the place of its anchor, and the other nodes gone."""
    by_anchor = {fusion.anchor: fusion for fusion in fusions}
    gone = {name for fusion in fusions for name in fusion.nodes}
    copied = fx.Graph()
    made: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes.values():
        fusion = by_anchor.get(node.name)
        if fusion is not None:
            root = graph.nodes[fusion.root]
            new = copied.node_copy(root, made.__getitem__)
            extra = (made[graph.nodes[name]] for name in fusion.extra_inputs)
            new.args = (*new.args, *extra)
            made[node] = new
            provenance.record(new.name, fusion.nodes)
        elif node.name not in gone:
            made[node] = copied.node_copy(node, made.__getitem__)
    return copied


def _keep_reads(graph: fx.Graph, module: nn.Module, values: dict[str, Any]) -> None:
    """Reads of a tensor whose module was replaced find it, unfolded, at a path of its own."""
    for node in graph.nodes:
        if node.op != "get_attr":
            continue
        path = str(node.target)
        tensor = attrgetter(path)(module)
        owners = path.split(".")[:-1]
        inside = (".".join(owners[: i + 1]) for i in range(len(owners)))
        if any(owner in values for owner in inside):
            path = path.replace(".", "_")
            while values.get(path, tensor) is not tensor or hasattr(module, path):
                path += "_"
            node.target = path
        values[path] = tensor


def _graph_module(
    original: fx.GraphModule, values: dict[str, Any], graph: fx.Graph
) -> fx.GraphModule:
    """A graph module over modules and tensors, with flags and preserved attributes as before."""
    result = assemble(DeferredGraphModule, graph, original, values)
    result.meta.update(original.meta)
    for name, value in original.meta.get(_PRESERVED, {}).items():
        setattr(result, name, value)
    return result


_PRESERVED = "_user_preserved_attributes"


# Which modules a fuser gets for the nodes of a pattern, and in which shape or by which names.
#
# The rules are PyTorch's: a called module is passed as it is; ``F.relu`` becomes an ``nn.ReLU`` in the
# mode of the root; another function or method is passed as it stands; an argument that is no
# operator becomes ``MatchAllNode``. *Different:* a ``SequentialFuser`` puts modules together and can
# do nothing with a function, so it gets ``F.leaky_relu(x, 0.2)`` as ``nn.LeakyReLU(0.2)``.


def run_fuser(
    config: BackendPatternConfig,
    is_qat: bool,
    bound: tuple[fx.Node | None, ...],
    modules: Mapping[str, nn.Module],
    root: nn.Module,
) -> Any:
    """What ``config.fuser_method`` gives for the nodes that are bound to the pattern.

    The fuser of a graph pattern gets its operators by name, ``f(is_qat, conv=…, sum=…)``; a
    ``SequentialFuser`` gets the modules among them in the order of writing.

    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(
    ...     lambda is_qat, linear, relu: nn.Sequential(linear, relu))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    >>> nodes = tuple(node for node in gm.graph.nodes if node.op == "call_module")
    >>> len(run_fuser(entry, False, nodes, dict(gm.named_modules()), gm.get_submodule("0")))
    2
    """
    fuser = config.fuser_method
    assert fuser is not None
    arguments = fuser_arguments(config, bound, modules, root)
    pattern = config.pattern
    if not isinstance(pattern, GraphPattern):
        return fuser(is_qat, *arguments)
    by_name = pattern.named(arguments)
    if isinstance(fuser, SequentialFuser):
        parts = (by_name[name] for name in pattern.operators)
        return fuser(is_qat, *(part for part in parts if isinstance(part, nn.Module)))
    return fuser(is_qat, **{name: by_name[name] for name in pattern.operators})


def fuser_arguments(
    config: BackendPatternConfig,
    bound: tuple[fx.Node | None, ...],
    modules: Mapping[str, nn.Module],
    root: nn.Module,
) -> list[Any]:
    """The arguments of ``config.fuser_method`` after ``is_qat``, for each node of a graph pattern.

    For a forward pattern ``(conv, bn, relu)``: three modules in that order. For a reversed pattern
    ``(relu, (bn, conv))``: a module and a tuple.

    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    >>> nodes = tuple(node for node in gm.graph.nodes if node.op == "call_module")
    >>> fuser_arguments(entry, nodes, dict(gm.named_modules()), gm.get_submodule("0"))
    [Linear(in_features=1, out_features=1, bias=True), ReLU()]
    """
    values = [_module(node, modules, root) for node in bound]
    if isinstance(config.fuser_method, SequentialFuser):
        values = [_called_as_module(v, n, root) for v, n in zip(values, bound, strict=True)]
    if config._pattern_complex_format is None:
        return values
    return nested(config.normal_pattern, tuple(values))


def parts_of_call(
    config: BackendPatternConfig, bound: tuple[fx.Node | None, ...]
) -> tuple[Any, ...]:
    """What two calls have to share for their fused modules to be alike; hashable.

    Modules count by path. Inputs of the pattern (``MatchAllNode``) do not count: they are arguments
    of the call.

    >>> entry = BackendPatternConfig((nn.Linear, nn.ReLU))
    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Linear(1, 1), nn.ReLU()))
    >>> parts_of_call(entry, tuple(node for node in gm.graph.nodes if node.op == "call_module"))
    ('0', '1')
    """
    kinds = (node.kind for node in config.normal_pattern.nodes)
    return tuple(
        None if node is None or kind == "any" else node.target
        for node, kind in zip(bound, kinds, strict=True)
    )


def _module(node: fx.Node | None, modules: Mapping[str, nn.Module], root: nn.Module) -> Any:
    if node is None:
        return MatchAllNode
    if node.op == "call_module":
        return modules[str(node.target)]
    if node.op == "call_function" and node.target is F.relu:
        return nn.ReLU().train(root.training)
    return node.target if node.op in ("call_function", "call_method") else MatchAllNode


def _called_as_module(value: Any, node: fx.Node | None, root: nn.Module) -> Any:
    """The module with the settings of a call; ``value`` itself where there are none, or they are
    computed.
    """
    if node is None or isinstance(value, nn.Module) or len(node.all_input_nodes) != 1:
        return value
    options = {name: option for name, option in node.kwargs.items() if name != "input"}
    module = module_for_call(node.target, node.args[1:], options)
    return value if module is None else module.train(root.training)
