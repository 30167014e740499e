"""A reference graph as a ``torch.export`` program whose nodes know where they come from."""

from __future__ import annotations

import importlib
import inspect
import itertools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from itertools import compress
from typing import Any

import torch
from torch import fx, nn
from torch._ops import OpOverload
from torch.export import Dim, ExportedProgram
from torch.export.graph_signature import OutputKind, TensorArgument
from torch.fx import traceback

from backquant.errors import CaptureError, ExportError
from backquant.graph.example import with_distinct_tensors
from backquant.graph.example_call import ExampleCall
from backquant.graph.export.opaque import NotExportedError
from backquant.graph.export.program import DEPENDS, as_dims, failure_of, fixed_size
from backquant.graph.silence import quiet
from backquant.graph.structure import Structure
from backquant.operators import all_operators, overload


@dataclass(frozen=True)
class Program:
    """``exported``, and for each of its call nodes the node of the reference graph it was made for.

    The same stands as the module stack of each of its nodes, which survives decompositions.
    """

    exported: ExportedProgram
    origins: Mapping[str, str]

    @property
    def output_names(self) -> list[str]:
        """Of each tensor that the model returns: its keys, or ``output`` and its number where it stands in no
        dict or record, and where another one has the same keys."""
        kinds = [
            isinstance(one.arg, TensorArgument)
            for one in self.exported.graph_signature.output_specs
            if one.kind is OutputKind.USER_OUTPUT
        ]
        names = [*Structure.of(self.exported.call_spec.out_spec).leaf_names()]
        counts = Counter(names)
        usual = (
            [f"output_{number}" for number in range(len(names))] if len(names) > 1 else ["output"]
        )
        return [
            name if name and counts[name] == 1 else other
            for name, other in compress(zip(names, usual, strict=True), kinds)
        ]


class _Traced(nn.Module):
    """Runs a graph node by node, so that every captured operator is marked with its node's name."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__()
        self.module = module
        for node in module.graph.nodes:  # torch marks only what comes from nodes with metadata
            node.meta.setdefault("desc", node.name)
        signature = inspect.signature(module.forward)

        def forward(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            return fx.Interpreter(module).run(*bound.args, *bound.kwargs.values())

        forward.__signature__ = signature  # type: ignore[attr-defined]  # names for torch.export
        self.forward = forward


def export_program(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> Program:
    """Capture ``module``, a copy of our own, with ``torch.export`` (not strict: no bytecode is read).

    ``dynamic_shapes`` as for ``torch.export.export``; see ``as_dims`` for strings in place of ``Dim``.
    The program is functional: what the model changes in place is a new value there, an input too.
    Raises ``CaptureError`` with torch's reason, ``ExportError`` where a module keeps state from call to call.

    >>> program = export_program(fx.symbolic_trace(nn.ReLU()), (torch.zeros(2),), {}, None)
    >>> dict(program.origins)
    {'relu': 'relu'}
    """
    args, kwargs = with_distinct_tensors((args, kwargs), module)
    _refuse_state(module, args, kwargs)
    try:
        exported = _exported(module, args, kwargs, as_dims(dynamic_shapes))
    except Exception as error:
        reason = str(error).strip() or type(error).__name__
        found = None
        if dynamic_shapes and "Constraints violated" in reason:
            found = _with_assumptions(module, args, kwargs, dynamic_shapes)
        if found is None:
            raise _refusal(reason, dynamic_shapes, failure_of(error, module)) from error
        exported = found
    settle_numbers(exported.graph)
    return _functional(Program(exported, _origins(exported.graph)))


def _refuse_state(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    own = ("torch.", "backquant.")
    if all(f"{type(part).__module__}.".startswith(own) for part in module.modules()):
        return
    called = ExampleCall.of(module, kwargs if kwargs and not args else args)
    for path, names in (*called.state.items(), *called.outside.items()):
        written = " and ".join(map(repr, names)) or "something"
        raise ExportError(
            f"no file keeps state: {path!r} writes {written}, which the next call reads",
            where=path,
            fix="pass the state as an input, and return it",
        )


def _exported(
    module: fx.GraphModule,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dims: Any,
    *,
    defer: bool = False,
) -> ExportedProgram:
    """``defer``: guards that cannot be proved become assertions in the graph."""
    with quiet(), torch.no_grad(), traceback.preserve_node_meta():
        return torch.export.export(
            _Traced(module),
            args,
            kwargs,
            dynamic_shapes=dims,
            strict=False,
            prefer_deferred_runtime_asserts_over_guards=defer,
        )


def _with_assumptions(
    module: fx.GraphModule, args: tuple[Any, ...], kwargs: dict[str, Any], dynamic_shapes: Any
) -> ExportedProgram | None:
    """The program where export finds the ranges of sizes itself; ``None`` if it fails so, too."""
    dims = with_inferred_ranges(dynamic_shapes)
    try:
        exported = _exported(module, args, kwargs, dims, defer=True)
    except Exception:  # the first reason is the one to tell
        return None
    check_assumptions(exported, dynamic_shapes)
    return exported


def _functional(program: Program) -> Program:
    """``program`` without operators in place (``relu_``, ``add_``, ``copy_`` to a slice): no target has them.

    Changes of the model's inputs are left out: a file gives its outputs, and nothing else.
    """
    targets = (node.target for node in program.exported.graph.nodes)
    if not any(isinstance(t, OpOverload) and t._schema.is_mutable for t in targets):
        return program
    with quiet(), torch.no_grad():
        exported = program.exported.run_decompositions({})
    _leave_out_input_changes(exported)
    return Program(exported, origins_of_stacks(exported.graph))


def settle_numbers(graph: fx.Graph) -> None:
    """Numbers as files have them, in place: one for all axes (``stride=[2]`` of images) becomes one for each,
    and numbers of one call that are integers and floats (``clamp(0, 0.5)``) become floats.

    >>> pooled = torch.export.export(nn.MaxPool2d([3], [2]), (torch.zeros(1, 1, 8, 8),))
    >>> settle_numbers(pooled.graph)
    >>> pooled.graph.output_node().args[0][0].args[1:]
    ([3, 3], [2, 2])
    """
    for node in graph.nodes:
        if isinstance(node.target, OpOverload):
            arguments = node.target._schema.arguments
            given = itertools.zip_longest(node.args, arguments[: len(node.args)])
            node.args = tuple(_spread(value, argument) for value, argument in given)
            _settle_types(node, arguments)


def _settle_types(node: fx.Node, arguments: Any) -> None:
    places = {argument.name: place for place, argument in enumerate(arguments)}
    named = dict(zip(places, node.args, strict=False)) | node.kwargs
    numbers = {a.name: named.get(a.name) for a in arguments if "number" in str(a.type)}
    if any(type(number) is float for number in numbers.values()):
        for name, number in numbers.items():
            if type(number) is int and name in node.kwargs:
                node.update_kwarg(name, float(number))
            elif type(number) is int:
                node.update_arg(places[name], float(number))


def _spread(value: Any, argument: Any) -> Any:
    is_one = isinstance(value, (list, tuple)) and len(value) == 1
    return [*value] * argument.N if is_one and argument.N else value


def stored_names(exported: ExportedProgram) -> dict[str, str]:
    """What a program keeps, by the name of the placeholder that stands for it."""
    signature = exported.graph_signature
    return {
        **signature.inputs_to_buffers,
        **signature.inputs_to_parameters,
        **signature.inputs_to_lifted_tensor_constants,
    }


_NO_STACK = "_empty_nn_module_stack"


def origins_of_stacks(graph: fx.Graph) -> dict[str, str]:
    """The origins of nodes that a decomposition has made, from the module stacks that it kept. Nodes that
    come from none (sizes that are read) have torch.export's own word for an empty stack."""
    origins = {}
    for node in graph.nodes:
        origin = str(next(iter(node.meta.get("nn_module_stack") or ()), _NO_STACK))
        if node.op == "call_function" and not origin.startswith(_NO_STACK):
            origins[node.name] = origin
    return origins


def _leave_out_input_changes(exported: ExportedProgram) -> None:
    signature, output = exported.graph_signature, exported.graph.output_node()
    kept = [spec.kind is not OutputKind.USER_INPUT_MUTATION for spec in signature.output_specs]
    if all(kept):
        return
    signature.output_specs = list(compress(signature.output_specs, kept))
    output.args = (tuple(compress(output.args[0], kept)),)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()


_WITHOUT_INPUT = (
    "quantize it without the input that decides, such as a mask that hides nothing, or\n"
)


def _refusal(
    reason: str, dynamic_shapes: Any, failure: NotExportedError
) -> CaptureError | ExportError:
    first = " ".join(reason.splitlines()[:3])[:400]
    fixed = fixed_size(reason) if dynamic_shapes else None
    if fixed is not None:
        return ExportError(
            f"the model fixes the dynamic size {fixed[0]!r} to {fixed[1]}",
            where=f"dynamic_shapes={dynamic_shapes!r}",
            fix="leave that axis out, or write the model without this number "
            "(x.flatten(1) in place of x.reshape(4, -1))",
        )
    if dynamic_shapes and any(word in reason for word in ("dynamic", "Constraint", "specializ")):
        return ExportError(
            f"the model does not take the dynamic shapes that were asked for: {first}",
            where=f"dynamic_shapes={dynamic_shapes!r}",
            fix="leave that axis out, or give example inputs with a size above 1 on it",
        )
    where = ", ".join(filter(None, (failure.path and f"module {failure.path!r}", failure.line)))
    if failure.path:
        return CaptureError(
            f"torch.export cannot capture a module that stays float as a whole: {failure.reason}",
            where=where,
            fix=(_WITHOUT_INPUT if failure.reason == DEPENDS else "")
            + "rewrite its forward, as the reason says (experts: docs/capture.md), for a file has its\n"
            'operators, too; for an engine that runs here (backend="x86") the module is called as it is',
        )
    if failure.reason == DEPENDS:
        return CaptureError(
            f"torch.export cannot capture the reference model: {failure.reason} ({first})",
            where=where or "export",
            fix=_WITHOUT_INPUT
            + "leave the part out: PrepareCustomConfig().set_non_traceable_module_names([...])",
        )
    return CaptureError(
        f"torch.export cannot capture the reference model: {first}",
        where=where or "export",
        fix="leave the part out: PrepareCustomConfig().set_non_traceable_module_names([...])",
    )


def _origins(graph: fx.Graph) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in graph.nodes:
        sources = node.meta.get("from_node")
        if node.op == "call_function" and sources:
            origin = found[node.name] = str(sources[0].name)
            # what exporters carry through their own decompositions
            node.meta["nn_module_stack"] = {origin: (origin, "backquant")}
    return found


# Dynamic sizes that ``torch.export`` cannot prove: what it assumes of them is tried out instead.
#
# The guard of ``MaxPool2d(2, 2, ceil_mode=True)`` on a size h, ``2*((h - 1)//2) < h``, holds for every h, and
# export refuses it all the same. So the program is captured with these guards as assertions, and each is
# tried on sizes at and above that of the example. One that fails there is a limit of the model, and named;
# one that only small sizes break (a map shrinks to nothing) is the user's to know.
_STEPS = (1, 2, 3, 4, 7, 16, 101)


def with_inferred_ranges(dynamic_shapes: Any) -> Any:
    """``dynamic_shapes`` with dynamic axes whose least size is for ``torch.export`` to find.

    Names become ``Dim.DYNAMIC``; a bound (``"h<=64"``) stays.

    >>> with_inferred_ranges({"x": {0: "batch", 1: None}})["x"][1] is None
    True
    """
    if isinstance(dynamic_shapes, Mapping):
        return {key: with_inferred_ranges(value) for key, value in dynamic_shapes.items()}
    if isinstance(dynamic_shapes, (tuple, list)):
        made = list(map(with_inferred_ranges, dynamic_shapes))
        is_named = hasattr(dynamic_shapes, "_fields")
        return type(dynamic_shapes)(*made) if is_named else type(dynamic_shapes)(made)
    if isinstance(dynamic_shapes, str):
        bound = dynamic_shapes.partition("<=")[2]
        return Dim.DYNAMIC(max=int(bound)) if bound else Dim.DYNAMIC
    return Dim.DYNAMIC if isinstance(dynamic_shapes, Dim) else dynamic_shapes


def check_assumptions(exported: ExportedProgram, dynamic_shapes: Any) -> None:
    """Try the assertions about sizes, and take them out of the graph, in place.

    Raises ``ExportError`` for one that sizes above the example's break; names the axis and the size.
    """
    for node in list(exported.graph.nodes):
        if node.target is overload("_assert_scalar"):
            exported.graph.erase_node(node)
    exported.graph.eliminate_dead_code()
    exported.graph_module.recompile()
    axes = _axes(exported)
    environments = {id(size.node.shape_env): size.node.shape_env for _, size in axes.values()}
    for environment in environments.values():
        assumed = [a.expr for found in environment.deferred_runtime_asserts.values() for a in found]
        environment.deferred_runtime_asserts.clear()
        for expression in assumed:
            _check(expression, axes, exported.range_constraints, dynamic_shapes)


def _axes(exported: ExportedProgram) -> dict[Any, tuple[str, Any]]:
    """Name and size of the axis that each symbol is, by symbol."""
    found: dict[Any, tuple[str, Any]] = {}
    for node in exported.graph.find_nodes(op="placeholder"):
        value = node.meta.get("val")
        sizes: tuple[Any, ...] = tuple(value.shape) if isinstance(value, torch.Tensor) else ()
        for axis, size in enumerate(sizes):
            if isinstance(size, torch.SymInt):
                found.setdefault(size.node.expr, (f"axis {axis} of {node.name!r}", size))
    return found


def _check(
    expression: Any,
    axes: Mapping[Any, tuple[str, Any]],
    ranges: Mapping[Any, Any],
    dynamic_shapes: Any,
) -> None:
    symbols = sorted(expression.free_symbols, key=str)
    if not symbols or not all(symbol in axes for symbol in symbols):
        return
    integer = importlib.import_module("sympy").Integer
    for sizes in _samples({symbol: int(axes[symbol][1].node.hint) for symbol in symbols}):
        bounds = ((ranges.get(symbol), size) for symbol, size in sizes.items())
        if any(bound is not None and size > bound.upper for bound, size in bounds):
            continue
        tried = {symbol: integer(size) for symbol, size in sizes.items()}
        if expression.xreplace(tried) == False:  # noqa: E712 - sympy's
            named = ", ".join(f"{axes[symbol][0]} is {size}" for symbol, size in sizes.items())
            raise ExportError(
                f"the model does not take every size: it fails where {named}",
                where=f"dynamic_shapes={dynamic_shapes!r}",
                fix="leave that axis out of dynamic_shapes, or pad the input to sizes that the model takes",
            )


def _samples(example: Mapping[Any, int]) -> Iterator[dict[Any, int]]:
    """Sizes at and above the example's: one axis at a time, then all of them."""
    yield dict(example)
    for symbol, step in itertools.product(example, _STEPS):
        yield {**example, symbol: example[symbol] + step}
    for step in _STEPS:
        yield {symbol: size + step for symbol, size in example.items()}


# Operators that runtimes lack, taken apart as their records say (``Operator.portable``).
#
# OpenVINO does not take what the ONNX exporter makes of ``embedding_bag``, and ExecuTorch has no kernel for
# it. Equations that are no products of two matrices (``torch.einsum`` of three operands, or without a sum)
# are written as PyTorch computes them: OpenVINO mistakes their axes. So are joins that add axes to lists of
# tensors (``torch.column_stack``): the exporter makes sequences of them, which OpenVINO does not take.
# ONNX's LSTM has no projections (``nn.LSTM(proj_size=8)``): such a layer is written step by step.

_LSTM = overload("lstm", "input")
_JOINS = ("column_stack", "hstack", "vstack", "dstack")


def decomposed_for_runtimes(program: Program) -> Program:
    """``program`` without operators that runtimes lack; the same object where there is none.

    >>> from backquant.deploy.program import export_program
    >>> made = export_program(torch.fx.symbolic_trace(torch.nn.ReLU()), (torch.zeros(2),), {}, None)
    >>> decomposed_for_runtimes(made) is made
    True
    """
    table = _table()
    calls = [node for node in program.exported.graph.nodes if node.target in table]
    if all(node.target is _LSTM and not _projects(node.args[1]) for node in calls):
        return program
    with quiet(), torch.no_grad():
        exported = program.exported.run_decompositions(dict(table))
    return replace(program, exported=exported, origins=origins_of_stacks(exported.graph))


@cache
def _table() -> dict[Any, Callable[..., Any]]:
    found = {each: made for known in all_operators() for each, made in known.portable.items()}
    composed = [overload("einsum"), *map(overload, _JOINS)]
    composed += [overload(f"atleast_{rank}d", "Sequence") for rank in (1, 2, 3)]
    known = torch.export.default_decompositions()
    return {**{each: known[each] for each in composed}, **found, _LSTM: _steps}


def _projects(state: Any) -> bool:
    """Whether the states of an LSTM, nodes or values, are of two widths."""
    hidden, cell = (getattr(each, "meta", {}).get("val", each) for each in state)
    return bool(hidden.shape[-1] != cell.shape[-1])


def _steps(x: torch.Tensor, state: Any, *args: Any) -> Any:
    """An LSTM with projections, step by step; any other stays as it is."""
    if not _projects(state):
        return NotImplemented
    return torch._decomp.decomposition_table[_LSTM](x, state, *args)
