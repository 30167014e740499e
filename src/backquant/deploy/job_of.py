"""From a quantized model, example inputs and options to what a target is given to write."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from types import NoneType
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.nn.utils import rnn
from torch.utils._pytree import tree_leaves

from backquant.backend_config import BackendConfig, QDQRules
from backquant.convert import IntegerEdges, ReferenceModel, keep_integers, reference_state
from backquant.deploy.job import OUTPUT, ExportJob, expected_operators
from backquant.deploy.portable import portable
from backquant.deploy.read_sizes import Recorder, known_nodes, write_read_sizes
from backquant.deploy.session import resized, two_for_one, with_row_major
from backquant.deploy.target import IntegerTarget, Target
from backquant.dtypes import QParams
from backquant.errors import ExportError, InputError, UsageError, first_line, literal
from backquant.graph import DeferredGraphModule, as_arguments, get_module, rebuilt, shallow_copy
from backquant.graph.clone import with_own_state
from backquant.graph.costs import GraphCosts, graph_costs
from backquant.graph.edit import NamePool, weighted_part
from backquant.graph.example import ExampleSpec, describe_value
from backquant.graph.export.program import of_all_inputs
from backquant.graph.in_place import changed_tensors
from backquant.graph.plain_arguments import plain_shapes, with_plain_arguments, with_plain_outputs
from backquant.lower.qdq import is_dequantize, is_quantize
from backquant.match import Plan
from backquant.nn.quantized.reference import Conv2d
from backquant.operators import overload
from backquant.prepare import Record
from backquant.runtime import QuantizedModel
from backquant.runtime.boundary import integer_arguments

# Convolutions along a column of one pixel, written along a line.
#
# Networks on sounds and series slide kernels of ``[taps, 1]`` over images ``[n, channels, length, 1]``.
# Runtimes have fast kernels for lines, ``[1, taps]``, and take several times as long for columns
# (torchcrepe's first three convolutions: ONNX Runtime 15 ms in place of 4, OpenVINO and Inductor 40 in
# place of 4). With both axes of image, kernel and result swapped it is the same sum. Where the width is 1
# that moves nothing.

_SIZES = ("kernel_size", "stride", "padding", "dilation")
_WEIGHTS = ("weight", "weight_float")

#: Between a convolution and the quantize node behind it.
_SINGLE = (
    nn.ReLU,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.SiLU,
    nn.GELU,
    nn.Sigmoid,
    nn.Tanh,
    nn.LeakyReLU,
)


def lay_columns(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], rule: str = "lines"
) -> None:
    """Write those integer convolutions of ``module`` so whose images are one pixel wide, in place, in its
    modules, too. Names of nodes are kept.

    Args:
        module: a reference graph whose modules nobody else has; it is run once if there are such kernels.
        args: inputs of it.
        kwargs: the same, by keyword.
        rule: ``QDQRules.columns``: what is transposed are dequantized values, or integers.

    >>> graph = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 1, (3, 1))))
    >>> lay_columns(graph, (torch.ones(1, 1, 3, 1),), {})  # no integers
    >>> [node.op for node in graph.graph.nodes]
    ['placeholder', 'call_module', 'output']
    """
    columns = {
        path: nodes
        for path, nodes in _called(module)
        if all(node.args for node in nodes) and _is_column(get_module(module, path))
    }
    narrow = _narrow(module, columns, args, kwargs) if columns else set()
    for path in narrow:
        _turn(weighted_part(get_module(module, path)))
        for node in columns[path]:
            _lay(node, module, rule)
    if narrow:
        module.recompile()


def _called(module: fx.GraphModule) -> Iterator[tuple[str, list[fx.Node]]]:
    calls: dict[str, list[fx.Node]] = {}
    for node in module.graph.nodes:
        if node.op == "call_module":
            calls.setdefault(str(node.target), []).append(node)
    yield from calls.items()


def _is_column(part: nn.Module) -> bool:
    own = weighted_part(part)
    if type(own) is not Conv2d or own.weight.is_floating_point() or own.weight_scale.dim() > 1:
        return False
    padding: Any = own.padding
    plain = own.padding_mode == "zeros" and not isinstance(padding, str) and not padding[-1]
    return bool(plain and own.kernel_size[0] > 1 and own.kernel_size[1] == 1)


def _narrow(
    module: fx.GraphModule, paths: Iterable[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> set[str]:
    """Those of ``paths`` whose images are one pixel wide at each call."""
    widths: dict[str, set[int]] = {path: set() for path in paths}

    def seen(own: set[int], _: nn.Module, given: tuple[Any, ...]) -> None:
        own.add(given[0].shape[-1] if given[0].dim() == 4 else 0)

    with ExitStack() as hooks, torch.no_grad(), with_own_state(module):
        for path, own in widths.items():
            hook = get_module(module, path).register_forward_pre_hook(partial(seen, own))
            hooks.callback(hook.remove)
        module(*args, **kwargs)
    return {path for path, own in widths.items() if own == {1}}


def _turn(own: Any) -> None:
    for name in _SIZES:
        setattr(own, name, tuple(getattr(own, name))[::-1])
    own._reversed_padding_repeated_twice = [n for n in reversed(own.padding) for _ in range(2)]
    for name in _WEIGHTS:
        if name in own._buffers:
            own._buffers[name] = own._buffers[name].transpose(2, 3).contiguous()


def _lay(node: fx.Node, module: fx.GraphModule, rule: str) -> None:
    read: Any = node.args[0]
    graph = node.graph
    integers = rule == "integer_lines" and is_dequantize(read)
    with graph.inserting_before(node):
        turned = graph.call_function(torch.transpose, (read.args[0] if integers else read, 2, 3))
        if integers:
            turned = graph.call_function(read.target, (turned, *read.args[1:]), dict(read.kwargs))
            turned.meta = dict(read.meta)
    node.replace_input_with(read, turned)
    if not read.users:
        graph.erase_node(read)
    last = _end(node, module)
    after = [last]
    if is_quantize(last) and rule == "lines":
        after = [user for user in last.users if is_dequantize(user)]
    for each in after:
        with graph.inserting_after(each):
            back = graph.call_function(torch.transpose, (each, 2, 3))
        each.replace_all_uses_with(back, delete_user_cb=partial(operator.is_not, back))


def _end(node: fx.Node, module: fx.GraphModule) -> fx.Node:
    """The quantize node behind ``node``, where only that reads it, or an activation between them."""
    last = node
    while len(last.users) == 1:
        [user] = last.users
        if is_quantize(user):
            return user
        if user.op != "call_module" or not isinstance(
            get_module(module, str(user.target)), _SINGLE
        ):
            break
        last = user
    return node


def export_job(reference: ReferenceModel, target: Target, args: tuple[Any, ...]) -> ExportJob:
    """What ``target`` is given to write ``reference`` for inputs of these sizes. Raises as ``export`` does.

    >>> import torch
    >>> from pathlib import Path
    >>> from backquant.deploy import find_target
    >>> from backquant import convert_to_reference_fx, get_default_qconfig_mapping, prepare_fx
    >>> x, mapping = (torch.ones(1, 2),), get_default_qconfig_mapping("onnxruntime")
    >>> prepared = prepare_fx(nn.Sequential(nn.Linear(2, 2)), mapping, x, backend_config="onnxruntime")
    >>> _ = prepared(*x)
    >>> reference = convert_to_reference_fx(prepared, dialect="decomposed")
    >>> export_job(reference, find_target("onnx", Path("model.onnx")), x).expected[0].node
    '_0'
    """
    return job_of(reference_of(reference, target), args, {}, None, {})


def backend_name(quantized: nn.Module) -> str:
    """The backend that a model was quantized for; empty where it does not say.

    >>> backend_name(nn.ReLU())
    ''
    """
    if isinstance(quantized, QuantizedModel):
        return quantized.backend_config.name
    return (
        reference_state(quantized).backend_config.name
        if isinstance(quantized, ReferenceModel)
        else ""
    )


_PACKING = (
    rnn.pack_padded_sequence,
    rnn.pack_sequence,
    overload("_pack_padded_sequence"),
)


class Reference(NamedTuple):
    """A reference graph with its record, and what the integers at its edges stand for, by position."""

    module: fx.GraphModule
    record: Record
    inputs: Mapping[int, QParams | None]
    outputs: Mapping[int | str, QParams | None]

    @property
    def plan(self) -> Plan:
        """The plan that it was made by."""
        return self.record.plan

    @property
    def config(self) -> BackendConfig:
        """The backend that it was made for."""
        return self.record.backend_config

    @property
    def has_integers(self) -> bool:
        """Whether an input or output is integers."""
        return bool(self.inputs or self.outputs)

    def for_target(self, target: Target, integer_io: Any) -> Reference:
        """With integers at the edges that ``integer_io`` says, or else the target. Raises ``ConfigError``
        where that cannot be, ``UsageError`` where it has integers already."""
        edges = IntegerEdges.of(integer_io)
        if integer_io is None and isinstance(target, IntegerTarget) and not self.has_integers:
            edges = target.edges
        if edges is None:
            return self
        if self.has_integers:
            raise UsageError(
                "the model takes or gives integers already",
                where="integer_io",
                fix="integer_io=None   # they are kept",
            )
        module = rebuilt(DeferredGraphModule, self.module, shallow_copy(self.module))
        found = keep_integers(module, edges, self.record)
        return self._replace(module=module, inputs=found.inputs, outputs=found.outputs)


def reference_of(quantized: nn.Module, target: Target) -> Reference:
    """The reference graph of a quantized model. Raises ``UsageError`` and ``ExportError`` as ``export``."""
    if isinstance(quantized, ReferenceModel):
        state = reference_state(quantized)
        if state.dialect != "decomposed":
            raise UsageError(
                f"the reference model is in the dialect {state.dialect!r}",
                where="export",
                fix='backquant.convert_to_reference_fx(prepared, dialect="decomposed")',
            )
        return Reference(quantized, state, state.inputs, state.outputs)
    if not isinstance(quantized, QuantizedModel):
        raise UsageError(
            f"{type(quantized).__name__} is not a quantized model",
            where="export",
            fix=f"quantized = backquant.quantize(model, ..., backend={literal(target.backend)})",
        )
    if quantized.engine is not None:
        raise lowered_error(quantized.engine.name, target)
    devices = {str(t.device) for t in (*quantized.parameters(), *quantized.buffers())} - {"cpu"}
    if devices:
        raise ExportError(
            f"the model is on {', '.join(sorted(devices))}, and {target.name} is written from the CPU",
            where="export",
            fix="backquant.export(quantized.cpu(), ...)",
        )
    record = quantized.record
    quantized.check_unedited("backquant.export")
    return Reference(quantized.graph_module, record, record.inputs, record.outputs)


def lowered_error(engine: str, target: Target) -> UsageError:
    """What is said of a model, or a backend, with an engine of its own."""
    return UsageError(
        f"the model is lowered to kernels of {engine}, which no other runtime has",
        where=f"to={target.name!r}",
        fix=f"backquant.quantize(model, ..., backend={literal(target.backend)})",
    )


def check_options(target: Target, options: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for an option that the target does not have."""
    fix = f"one of {', '.join(target.options)}" if target.options else "it has none"
    for key in options:
        if key not in target.options:
            raise UsageError(
                f"{target.name} has no option {key!r}",
                where=f"options[{key!r}]",
                fix=_FORMER_OPTIONS.get(key, fix),
            )


#: What is an argument of ``export`` now.
_FORMER_OPTIONS = {
    "integer_inputs": 'backquant.export(quantized, path, integer_io=True), or {"x": True} for an input',
    "integer_outputs": "backquant.export(quantized, path, integer_io=True), or {0: True} for an output",
}


def _check_names(dynamic_shapes: Any, names: list[str]) -> None:
    if not isinstance(dynamic_shapes, Mapping | list | tuple | NoneType):
        wrong = f"dynamic_shapes is a {type(dynamic_shapes).__name__}, not a dict by input"
    else:
        given = dynamic_shapes if isinstance(dynamic_shapes, Mapping) else ()
        wrong = next(
            (f"the model has no input {name!r}" for name in given if name not in names), ""
        )
    if wrong:
        raise UsageError(
            wrong,
            where=f"dynamic_shapes={dynamic_shapes!r}",
            fix=f"dynamic_shapes={ {one: {0: 'batch'} for one in names}!r}",
        )


def _check_packing(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in _PACKING:
            raise ExportError(
                "the model packs sequences of several lengths, and a file has tensors of one length each",
                where=f"{node.target.__name__}, node {node.name!r}",
                fix="call the recurrent layer on the padded batch, and torch.where(position < length, y, 0)\n"
                'after it; quantized for backend="x86" the model runs as it is, and can be saved',
            )


def example_of(quantized: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments to export with: ``given``, or values of the sizes that the model was quantized with.

    Raises ``UsageError`` where neither is there.
    """
    if given is not None:
        args, kwargs = as_arguments(given)
    else:
        spec = getattr(quantized, "example", None)
        if not isinstance(spec, ExampleSpec):
            raise UsageError(
                "example inputs are needed: the model does not know the shapes of its inputs",
                where="export",
                fix="backquant.export(quantized, path, example_inputs=(x,))",
            )
        args, kwargs = spec.arguments()
    return args, kwargs


def _costs(module: fx.GraphModule, inputs: Any) -> GraphCosts:
    """What ``module`` costs. Raises ``InputError`` for inputs on which the model fails."""
    try:
        return graph_costs(module, inputs)
    except Exception as error:
        reason = first_line(error)
        args, kwargs = as_arguments(inputs)
        passed = [describe_value(value) for value in args]
        passed += [f"{name}={describe_value(value)}" for name, value in kwargs.items()]
        raise InputError(
            f"the model fails on the example inputs: {reason}",
            where=f"export of a model called with ({', '.join(passed)})",
            fix="backquant.export(quantized, path, example_inputs=one_batch_of_real_inputs)",
        ) from error


def job_of(
    reference: Reference,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    options: Mapping[str, Any],
) -> ExportJob:
    """What the target is to write: the graph as targets take it, its costs, and what must become integer.

    Raises ``UsageError`` for names of inputs that the model lacks, ``InputError`` where the model fails on
    the arguments.
    """
    config = reference.config
    names = [str(node.target) for node in reference.module.graph.find_nodes(op="placeholder")]
    if (
        isinstance(dynamic_shapes, Mapping)
        and {*map(type, dynamic_shapes)} == {int}
        and len(names) == 1
    ):
        dynamic_shapes = {names[0]: dynamic_shapes}  # the axes of the one input
    _check_names(dynamic_shapes, names)
    _check_packing(reference.module.graph)
    module = portable(reference.module, config.qdq or QDQRules())
    dynamic_shapes = plain_shapes(dynamic_shapes, names, args, kwargs)
    given = {index: qparams for index, qparams in reference.inputs.items() if qparams is not None}
    args, kwargs = integer_arguments(reference.module.graph, given, args, kwargs)
    args, kwargs = with_plain_arguments(module, args, kwargs)
    dynamic_shapes = of_all_inputs(dynamic_shapes, dict(zip(names, args, strict=False)) | kwargs)
    args, kwargs = with_row_major(resized(args, kwargs, dynamic_shapes, names, two_for_one))
    shown = _costs(module, kwargs if kwargs and not args else args)
    costs = shown.multiply_adds
    with_plain_outputs(module, args, kwargs)
    if config.qdq is not None and config.qdq.columns != "columns":
        lay_columns(module, args, dict(kwargs), config.qdq.columns)
    if dynamic_shapes is None:
        write_read_sizes(module, args, kwargs)
        ahead = compute_ahead(module, args, kwargs, costs)
        costs = {name: count for name, count in costs.items() if name not in ahead}
    return ExportJob(
        module=module,
        args=args,
        kwargs=kwargs,
        dynamic_shapes=dynamic_shapes,
        config=config,
        plan=reference.plan,
        multiply_adds=costs,
        expected=expected_operators(reference.plan, config, costs),
        options=options,
        uncounted=tuple(shown.uncounted),
        edges=_edges(names, reference),
    )


def _edges(names: list[str], reference: Reference) -> dict[str, QParams]:
    """What integers stand for, by the name of an input and the label of an output."""
    inputs = {names[index].lstrip("*"): q for index, q in reference.inputs.items()}
    found = {**inputs, **{f"{OUTPUT}{label}": q for label, q in reference.outputs.items()}}
    return {name: qparams for name, qparams in found.items() if qparams is not None}


# Products, tables and numbers that depend on no input, in a file of fixed sizes: constants, computed once.
#
# 1. The first self-attention of a detector's decoder reads its queries alone, which are parameters
#   repeated for each image. A runtime folds what it reads to a float constant, and computes the product
#   in float at each call.
# 2. Masks of shifted windows are written region by region into new zeros. Regions of a small input are empty,
# and OpenVINO does not write into nothing.
# 3. Margins are computed in tensors of sizes, and read from them (``torch.tensor(x.shape) ...
#   .tolist()``): to ``torch.export`` such numbers depend on the values of a tensor.
_WRITES = ("slice_scatter", "select_scatter")
_READS = ("tolist", "item", "int", "float", "bool")


def compute_ahead(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], products: Collection[str]
) -> frozenset[str]:
    """Replace, in place, what depends on constants and sizes by its value: the ``products``, what is made of
    writes into tensors, and numbers that are read from tensors. The names of these products.

    Args:
        module: a reference graph, which is run once if it has something of these.
        args: inputs of it, of the sizes that the file is for.
        kwargs: the same, by keyword.
        products: the names of the nodes that multiply.

    >>> class Model(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.table = torch.nn.Parameter(torch.ones(1, 2))
    ...         self.w = torch.nn.Parameter(torch.ones(2, 2))
    ...     def forward(self, x):
    ...         return x @ self.w + self.table.expand(x.shape[0], 2) @ self.w
    >>> module = fx.symbolic_trace(Model())
    >>> compute_ahead(module, (torch.ones(3, 2),), {}, ["matmul", "matmul_1"])
    frozenset({'matmul_1'})
    >>> module(torch.ones(3, 2))[0].tolist()
    [4.0, 4.0]
    """
    known = known_nodes(module, changed_tensors(module))
    wanted = [node for node in module.graph.nodes if node in known and node.name in products]
    numbers = [node for node in module.graph.nodes if node in known and _reads_numbers(node)]
    wanted = list(dict.fromkeys((*wanted, *_written(module, known), *numbers)))
    if not wanted:
        return frozenset()
    recorded = Recorder(module, set(wanted))
    with torch.no_grad():
        recorded.call(args, kwargs)
    pool = NamePool(module)
    computed = [node for node in wanted if isinstance(recorded.values[node], torch.Tensor)]
    for node in computed:
        path = pool.take(f"{node.name}_computed_")
        module.register_buffer(path, recorded.values[node].clone())
        with module.graph.inserting_before(node):
            node.replace_all_uses_with(module.graph.get_attr(path))
    for node in numbers:
        _write(node, recorded.values[node])
    for node in reversed(list(module.graph.nodes)):
        if node in known and not node.users:
            module.graph.erase_node(node)
    module.recompile()
    return frozenset(node.name for node in computed if node.name in products)


def _reads_numbers(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return node.op in ("call_function", "call_method") and name in _READS


def _write(node: fx.Node, value: Any) -> None:
    """Let the readers of ``node`` read ``value`` in its place, if it is numbers."""
    if not all(isinstance(number, (bool, int, float)) for number in tree_leaves(value)):
        return
    for user in list(node.users):
        user.args, user.kwargs = fx.map_arg(
            (user.args, user.kwargs), lambda given: value if given is node else given
        )


def _written(module: fx.GraphModule, known: Collection[fx.Node]) -> list[fx.Node]:
    """The results of writes into known tensors that any other node reads, or that are rounded: a product
    reads them as integers then."""
    made: set[fx.Node] = set()
    for node in module.graph.nodes:
        reads = not made.isdisjoint(node.all_input_nodes) and not _rounds(node)
        if node in known and (_writes(node) or reads):
            made.add(node)
    return [
        node
        for node in module.graph.nodes
        if node in made
        and any(user.op != "output" and (user not in known or _rounds(user)) for user in node.users)
    ]


def _rounds(node: fx.Node) -> bool:
    return "quantize_per_" in str(node.target)


def _writes(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target)).partition(".")[0]
    return node.op.startswith("call_") and name in _WRITES
