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
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from backquant.deploy.examples import row_major
from backquant.deploy.executorch.partitions import partitioner
from backquant.deploy.executorch.rewrites import rewrite
from backquant.deploy.executorch.runtime import INPUTS
from backquant.deploy.executorch.workarounds import REASON, means_of_free_sizes
from backquant.deploy.groups import spell_groups
from backquant.deploy.program import Program, quiet
from backquant.dtypes import block_of, dequantize_tensor
from backquant.errors import ExportError
from backquant.operators import overload

__all__ = ["LoweredProgram", "lower_program"]

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
    names = _stored_names(exported)
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


def _stored_names(exported: ExportedProgram) -> dict[str, str]:
    """What the program keeps, by the name of the placeholder that stands for it."""
    signature = exported.graph_signature
    return {
        **signature.inputs_to_buffers,
        **signature.inputs_to_parameters,
        **signature.inputs_to_lifted_tensor_constants,
    }


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
    placeholders = {node for node in exported.graph.nodes if node.op == "placeholder"}
    for node in exported.graph.nodes:
        name = _name(node.target) if node.op == "call_function" else ""
        if name.startswith("dequantize_per"):
            is_weight = node.args[0] in placeholders
            if is_weight or name.endswith(".tensor"):
                yield node


def _stuck(exported: ExportedProgram, edge: Any) -> set[str]:
    """The readers of such nodes that stayed outside of delegates; others of their origin may be inside."""
    readers = {user.name for node in _dequantized(exported) for user in node.users}
    left = _left(edge.exported_program().graph_module)
    return readers & {str((node.meta.get("custom") or {}).get(_NODE)) for node in left}


def _to_float(exported: ExportedProgram, stuck: set[str]) -> None:
    """Rule 1, in place."""
    for node in list(_dequantized(exported)):
        users = [user for user in node.users if user.name in stuck]
        if users and node.args[0].op == "placeholder":
            _weight_to_float(exported, node)
            continue
        for user in users:
            user.replace_input_with(node, node.args[0].args[0])
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()


def _weight_to_float(exported: ExportedProgram, dequantize: Any) -> None:
    """Store the dequantized weight under the name of the integer one."""
    weight, scale, zero_point, *more = dequantize.args
    names = _stored_names(exported)
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
