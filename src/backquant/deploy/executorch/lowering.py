"""From an exported reference model to an ExecuTorch program with XNNPACK delegates.

1. What the partitioner refuses and reads integers (weights, activations quantized at run time) has no
   kernel at all: these weights become floats, these activations stay floats, and the program is lowered
   once more. The operator then runs in float.
2. Static quantize and dequantize nodes around an operator in float are XNNPACK's own.
3. Free sizes keep their bounds: PyTorch asks sizes for the kernel that a convolution would have (another one
   from 16 samples on), and each answer narrows them to the example's side, which memory is then planned for.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.executorch.workarounds import REASON, means_of_free_sizes
from backquant.deploy.job import spell_groups
from backquant.deploy.program import Program, stored_names
from backquant.deploy.session import row_major
from backquant.dtypes import block_of, dequantize_tensor
from backquant.errors import ExportError
from backquant.graph.objects import tensors_of
from backquant.graph.silence import quiet
from backquant.operators import overload

# A partition of a program for XNNPACK whose parts can each be lowered as a unit, and loaded.
#
# 1. ExecuTorch 1.5 merges two parts as long as no value leaves the merged part and comes back into it. Its
# test    misses two parts that each read a result of the other: neither can run first. Where that happens,
# the    operators that XNNPACK takes are grouped anew, by level. The level of an operator is the largest
# number of    times that a value, on its way from the inputs, has gone from XNNPACK to an operator outside
# of it. What    leaves a level is read back at a higher level only, so that the levels have an order. 2. It
# takes operators on more axes than XNNPACK's tensors have (views of eight cut a video into windows), and
# the delegate does not load: these stay outside.


#: Of XNNPACK's tensors.
_MOST_AXES = 6


def partitioner() -> Any:
    """ExecuTorch's partitioner for XNNPACK, with partitions that have an order."""
    from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
    from torch.fx.passes.infra.partitioner import Partition

    class Partitioner(XnnpackPartitioner):
        def generate_partitions(self, ep: Any) -> list[Any]:
            proposed: list[Any] = super().generate_partitions(ep)
            if can_be_cut_out(ep.graph, [part.nodes for part in proposed]):
                return proposed
            levels = by_levels(ep.graph, self.get_matched_nodes_from_configs(ep))
            return [Partition(id=i, nodes=nodes) for i, nodes in enumerate(levels)]

        def get_matched_nodes_from_configs(self, ep: Any) -> list[Any]:
            found: list[Any] = super().get_matched_nodes_from_configs(ep)
            return [nodes for nodes in found if all(map(has_axes_for, nodes))]

    return Partitioner()


def has_axes_for(node: fx.Node) -> bool:
    """Whether XNNPACK has tensors of as many axes as ``node`` reads and gives.

    >>> program = torch.export.export(torch.nn.ReLU(), (torch.ones([1] * 7),))
    >>> [has_axes_for(node) for node in program.graph.find_nodes(op="placeholder")]
    [False]
    """
    values = [each.meta.get("val") for each in (node, *node.all_input_nodes)]
    return all(v.dim() <= _MOST_AXES for v in values if isinstance(v, torch.Tensor))


def can_be_cut_out(graph: fx.Graph, parts: Iterable[Collection[fx.Node]]) -> bool:
    """Whether the graph has an order in which each part runs as one operator.

    >>> gm = fx.symbolic_trace(lambda x: (x + 1, (x + 1).exp() * 2))
    >>> one, other, exp, product = [n for n in gm.graph.nodes if n.op == "call_function" or n.target == "exp"]
    >>> can_be_cut_out(gm.graph, [[one, other], [product]]), can_be_cut_out(gm.graph, [[other, product]])
    (True, False)
    """
    try:
        _ordered(_sources(graph, _of_node(parts)))
    except CycleError:
        return False
    return True


def by_levels(graph: fx.Graph, groups: Sequence[Collection[fx.Node]]) -> list[list[fx.Node]]:
    """The nodes of each level, in graph order; the nodes of one group stay together.

    Raises ``CycleError`` where single groups have no order.
    """
    of_node = _of_node(groups)
    sources = _sources(graph, of_node)
    levels: dict[Any, int] = {}
    for part in _ordered(sources):
        outside = isinstance(part, fx.Node)
        before = sources.get(part, ())
        steps = (levels[each] + (outside and not isinstance(each, fx.Node)) for each in before)
        levels[part] = max(steps, default=0)
    found: dict[int, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        if node in of_node:
            found[levels[of_node[node]]].append(node)
    return [found[level] for level in sorted(found)]


def _of_node(parts: Iterable[Collection[fx.Node]]) -> dict[fx.Node, int]:
    return {node: i for i, part in enumerate(parts) for node in part}


def _sources(graph: fx.Graph, of_node: Mapping[fx.Node, int]) -> dict[Any, set[Any]]:
    """What each part, and each node outside of parts, reads. Constants are copied for each part."""
    sources: dict[Any, set[Any]] = defaultdict(set)
    for node in graph.nodes:
        own = of_node.get(node, node)
        read = (of_node.get(s, s) for s in node.all_input_nodes if s.op != "placeholder")
        sources[own].update(each for each in read if each != own)
    return sources


def _ordered(sources: Mapping[Any, set[Any]]) -> list[Any]:
    return list(TopologicalSorter(sources).static_order())


# An ExecuTorch program in ExecuTorch's runtime, called like the model it was made from.


#: The method of a program that gives the names and sizes of its inputs.
INPUTS = "backquant_inputs"


def registered_kernels() -> frozenset[str]:
    """Names of the operators that this build of the runtime has kernels for: ``"aten::add.out"``.

    >>> "aten::add.out" in registered_kernels()
    True
    """
    with quiet():
        from executorch.runtime import Runtime

        return frozenset(Runtime.get().operator_registry.operator_names)


class ExecuTorchModel:
    """The method ``forward`` of a ``.pte`` file, or of its bytes.

    Takes tensors as the exported program does: positional arguments first, then keyword arguments in
    their order; nested ones and the tensors of objects, such as caches, are flattened. Gives a tensor, or
    a tuple of the flattened outputs.
    Raises ``ExportError`` for a program that the runtime refuses.
    """

    def __init__(self, program: Path | bytes) -> None:
        with quiet():
            from executorch.runtime import Runtime

        try:
            self._program = Runtime.get().load_program(program)
            self._forward = self._program.load_method("forward")
        except RuntimeError as error:
            raise ExportError(
                f"ExecuTorch's runtime cannot load the program: {error}",
                where=str(program) if isinstance(program, Path) else "the program",
                fix="its log on standard error names the operator or the delegate",
            ) from error

    def described_inputs(self) -> dict[str, list[int | None]]:
        """Names and sizes of the inputs as ``export`` wrote them; empty of other programs.

        Raises ``ExportError`` for what says none of these.
        """
        if INPUTS not in self._program.method_names:
            return {}
        told = self._program.load_method(INPUTS).execute([])[0]
        try:
            found = json.loads(bytes(told.tolist()))
            good = all(isinstance(sizes, list) for sizes in found.values())
        except (AttributeError, TypeError, ValueError):
            good = False
        if good:
            return found  # type: ignore[no-any-return]
        raise ExportError(
            "the program does not describe its inputs", where=INPUTS, fix="export the model again"
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once. Copies what is not in row-major order. Raises ``ExportError`` when it fails."""
        leaves = pytree.tree_leaves((args, kwargs))
        given = [part for leaf in leaves for part in tensors_of(leaf) or [leaf]]
        inputs = [row_major(t) if isinstance(t, torch.Tensor) else t for t in given]
        try:
            outputs = self._forward.execute(inputs)
        except RuntimeError as error:
            raise ExportError(
                f"ExecuTorch's runtime cannot run the program: {error}",
                where="forward",
                fix="its log on standard error names the operator or the delegate; "
                "leave the part out of the quantization, or report it to ExecuTorch",
            ) from error
        return outputs[0] if len(outputs) == 1 else tuple(outputs)


class LoadedProgram:
    """See ``backquant.deploy.session.Loaded``."""

    def __init__(self, path: Path) -> None:
        self._model = ExecuTorchModel(path)
        self.inputs: Mapping[str, Sequence[int | None]] = self._model.described_inputs()

    def run(self, inputs: Sequence[Any]) -> list[Any]:
        """One call."""
        found = self._model(*(torch.as_tensor(value) for value in inputs))
        return [value.numpy() for value in pytree.tree_leaves(found)]


_LOGGER = "executorch.backends.xnnpack.partition"
_READS = (overload("_local_scalar_dense"), overload("item"))
_MARK, _NODE = "backquant_origin", "backquant_node"
_DELEGATE_CALL = "executorch_call_delegate"


@dataclass(frozen=True)
class LoweredProgram:
    """``buffer``: the bytes of the ``.pte`` file.

    ``origins``: the node of the reference graph by debug handle of the edge operators. ``refused``: why
    the partitioner left an operator alone, by node of the reference graph (or of the exported one).
    ``in_float``: why an operator of the delegate is in float, by node of the reference graph.
    """

    buffer: bytes
    origins: Mapping[int, str]
    refused: Mapping[str, str]
    in_float: Mapping[str, str]


def lower_program(program: Program) -> LoweredProgram:
    """Partition, lower and serialise; ``program`` is not changed.

    Raises ``ExportError`` where an input may not be as large as ``program`` says.
    """
    requested = _bounds(program.exported)
    with ShapeEnv().suppress_guards():
        lowered = _lowered(program)
    for name, planned in _bounds(program.exported).items():
        if planned != requested[name]:
            raise ExportError(
                f"ExecuTorch plans memory for {planned} of input {name!r}, not for {requested[name]}",
                where="dynamic_shapes",
                fix="example inputs of the greatest sizes, or a smaller bound",
            )
    return lowered


def _bounds(exported: ExportedProgram) -> dict[str, list[int]]:
    """The greatest sizes of each input, as ExecuTorch reads them."""
    with quiet():
        from executorch.exir.sym_util import eval_upper_bound

    names = exported.graph_signature.user_inputs
    values = {
        node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")
    }
    return {
        str(name): [eval_upper_bound(size) for size in values[name].shape]
        for name in names
        if isinstance(values.get(name), torch.Tensor)
    }


def _lowered(program: Program) -> LoweredProgram:
    with quiet():
        exported = program.exported.run_decompositions({})
    _mark(exported, program.origins)
    spell_groups(exported)
    in_float = {_origin(node): REASON for node in means_of_free_sizes(exported.graph)}
    rewrite(exported)
    _fold_constants(exported)
    constants = dict(exported.constants)
    _name_nodes(exported)
    edge, refused = _partitioned(exported)
    stuck = _stuck(exported, edge)
    if stuck:
        exported.constants.update(constants)  # the first time took those of delegates away
        _to_float(exported, stuck)
        edge, again = _partitioned(exported)
        refused = {**again, **refused}
    with quiet():
        finished = edge.to_executorch()
    return LoweredProgram(bytes(finished.buffer), _handles(edge), refused, in_float)


def _fold_constants(exported: ExportedProgram) -> None:
    """Values that depend on no input (masks, positions) are computed now; integer weights stay."""
    with quiet(), torch.no_grad():
        from executorch.exir.passes.constant_prop_pass import constant_prop_pass

        nodes = exported.graph.nodes
        kept = {n.target for n in nodes if _name(n.target).startswith(("quantize", "dequantize"))}
        _fold_numbers(exported, kept)
        constant_prop_pass(exported, custom_skip_targets=kept)
    _contiguous_constants(exported)


def _fold_numbers(exported: ExportedProgram, kept: set[Any]) -> None:
    """Numbers that are read from constants (the largest of ids, say) become literals, and what is asserted
    of them is left out: ExecuTorch 1.5 takes them for tensors."""
    graph = exported.graph
    if not any(graph.find_nodes(op="call_function", target=each) for each in _READS):
        return
    from executorch.exir.passes.constant_prop_pass import get_propagated_const_tensor_dict

    values = get_propagated_const_tensor_dict(exported, kept)
    numbers = {n: v for n, v in values.items() if isinstance(v, (bool, int, float))}
    for node in list(graph.nodes):
        if node.op == "call_function" and numbers.keys() & node.all_input_nodes:
            node.args = fx.map_arg(node.args, lambda arg: numbers.get(arg, arg))
            node.kwargs = fx.map_arg(node.kwargs, lambda arg: numbers.get(arg, arg))
            if _name(node.target).startswith("_assert_scalar") and node.args[0]:
                graph.erase_node(node)
    graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _contiguous_constants(exported: ExportedProgram) -> None:
    """Constants in row-major order, in place of a transposed view's (position biases, say).

    ExecuTorch stores the order of the strides, and hands XNNPACK the sizes in that order: the delegate
    then has the wrong shape and fails at run time (1.5). So it is where only an axis of size 1 has another
    stride (``[4, 1, 16]`` transposed from ``[1, 4, 16]``), which PyTorch calls contiguous.
    """
    names = stored_names(exported)
    for node in exported.graph.nodes:
        name = names.get(node.name) if node.op == "placeholder" else None
        for kept in (exported.state_dict, exported.constants):
            tensor = kept.get(name) if name is not None else None
            if not isinstance(tensor, torch.Tensor):
                continue
            ordered = row_major(tensor.detach())
            if ordered.stride() != tensor.stride():
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                kept[name] = torch.nn.Parameter(ordered, False) if is_parameter else ordered
                node.meta["val"] = row_major(node.meta["val"])


def _mark(exported: ExportedProgram, origins: Mapping[str, str]) -> None:
    """``meta["custom"]`` is what ExecuTorch carries through its passes."""
    for node in exported.graph.nodes:
        sources = node.meta.get("from_node") or ()
        name = str(sources[0].name) if sources else node.name
        node.meta["custom"] = {_MARK: origins.get(name, origins.get(node.name, ""))}


def _name_nodes(exported: ExportedProgram) -> None:
    """The same for each node's own name, which the edge program has others for."""
    for node in exported.graph.nodes:
        node.meta["custom"] = {**(node.meta.get("custom") or {}), _NODE: node.name}


def _origin(node: fx.Node) -> str:
    return str((node.meta.get("custom") or {}).get(_MARK, ""))


def described_inputs(exported: ExportedProgram) -> torch.Tensor:
    """Names and sizes of the inputs, of which the format has none: JSON as bytes, free sizes as null.

    >>> described_inputs(torch.export.export(torch.nn.ReLU(), (torch.zeros(2, 3),))).numpy().tobytes()
    b'{"input": [2, 3]}'
    """
    names = exported.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in exported.graph.nodes}
    sizes = {
        str(name): [size if isinstance(size, int) else None for size in value.shape]
        for name, value in ((name, values.get(name)) for name in names)
        if isinstance(value, torch.Tensor)
    }
    return torch.tensor(list(json.dumps(sizes).encode()), dtype=torch.uint8)


def _partitioned(exported: ExportedProgram) -> tuple[Any, dict[str, str]]:
    """The edge program with delegates, and the partitioner's reasons by origin."""
    with quiet():
        from executorch.exir import EdgeCompileConfig, to_edge_transform_and_lower

    with quiet(), _reasons() as reasons:
        edge = to_edge_transform_and_lower(
            exported,
            partitioner=[partitioner()],
            constant_methods={INPUTS: described_inputs(exported)},
            compile_config=EdgeCompileConfig(_check_ir_validity=False),
        )
    refused = {}
    for node in _left(edge.exported_program().graph_module):
        target = _name(node.target)
        refused[_origin(node) or node.name] = reasons.get(
            node.name, f"XNNPACK's partitioner of ExecuTorch has no {target}"
        )
    return edge, refused


@contextmanager
def _reasons() -> Iterator[dict[str, str]]:
    """What the partitioner says of nodes, by name, while this is open: the last word on each."""
    found: dict[str, str] = {}

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            node, reason = getattr(record.msg, "node", None), getattr(record.msg, "reason", "")
            if node is not None and reason:
                found[node.name] = reason

    logger, listener = logging.getLogger(_LOGGER), Listener()
    level, propagate, disabled = logger.level, logger.propagate, logging.root.manager.disable
    logging.disable(logging.NOTSET)  # the reasons are debug messages
    logger.addHandler(listener)
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield found
    finally:
        logging.disable(disabled)
        logger.removeHandler(listener)
        logger.setLevel(level)
        logger.propagate = propagate


def _left(module: fx.GraphModule) -> Iterator[fx.Node]:
    """The operators outside of delegates that compute something."""
    for node in module.graph.nodes:
        if node.op == "call_function" and _name(node.target) not in (_DELEGATE_CALL, "getitem"):
            yield node


def _dequantized(exported: ExportedProgram) -> Iterator[Any]:
    """The dequantize nodes of weights, and of activations that are quantized at run time."""
    stored = stored_names(exported)
    for node in exported.graph.nodes:
        name = _name(node.target) if node.op == "call_function" else ""
        if name.startswith("dequantize_per"):
            is_weight = node.args[0].name in stored
            if is_weight or name.endswith(".tensor"):
                yield node


def _stuck(exported: ExportedProgram, edge: Any) -> set[str]:
    """The readers of such nodes that stayed outside of delegates; others of their origin may be inside."""
    readers = {user.name for node in _dequantized(exported) for user in node.users}
    left = _left(edge.exported_program().graph_module)
    return readers & {str((node.meta.get("custom") or {}).get(_NODE)) for node in left}


def _to_float(exported: ExportedProgram, stuck: set[str]) -> None:
    """Rule 1, in place."""
    stored = stored_names(exported)
    for node in list(_dequantized(exported)):
        users = [user for user in node.users if user.name in stuck]
        if users and node.args[0].name in stored:
            _weight_to_float(exported, node)
            continue
        for user in users:
            user.replace_input_with(node, node.args[0].args[0])
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _weight_to_float(exported: ExportedProgram, dequantize: Any) -> None:
    """Store the dequantized weight under the name of the integer one."""
    weight, scale, zero_point, *more = dequantize.args
    names = stored_names(exported)
    tensors = {**exported.state_dict, **exported.constants}
    values = [
        tensors[names[arg.name]] if isinstance(arg, fx.Node) else torch.tensor(arg)
        for arg in (weight, scale, zero_point)
    ]
    per_channel = isinstance(scale, fx.Node) and values[1].dim() == 1
    axis = more[0] if per_channel else 0
    block = block_of(values[0].shape, values[1].shape)
    floats = dequantize_tensor(values[0], values[1], values[2], axis, block)
    for kept in (exported.state_dict, exported.constants):
        if names[weight.name] in kept:
            kept[names[weight.name]] = floats
    weight.meta["val"] = dequantize.meta["val"]
    for user in list(weight.users):
        user.replace_all_uses_with(weight)


def _handles(edge: Any) -> dict[int, str]:
    """Operators within delegates come first: decompositions give what stays outside handles of theirs."""
    module = edge.exported_program().graph_module
    outside = list(module.graph.nodes)
    inside = [
        operator
        for node in outside
        if node.op == "get_attr"
        for operator in getattr(module, str(node.target)).original_module.graph_module.graph.nodes
    ]
    found: dict[int, str] = {}
    for operator in (*inside, *outside):
        handle = operator.meta.get("debug_handle")
        if operator.op == "call_function" and isinstance(handle, int) and _origin(operator):
            found.setdefault(handle, _origin(operator))
    return found


def _name(target: Any) -> str:
    """``add.Tensor`` of ``torch.ops.aten.add.Tensor`` and of its edge form."""
    name = getattr(target, "__name__", str(target))
    return str(name).removeprefix("quantized_decomposed.").removeprefix("aten.")
