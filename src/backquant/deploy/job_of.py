"""From a quantized model, example inputs and options to what a target is given to write."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import fx, nn
from torch.nn.utils import rnn

from backquant.backend_config import BackendConfig, QDQRules
from backquant.convert import ReferenceModel, reference_state
from backquant.deploy.columns import lay_columns
from backquant.deploy.computed_ahead import compute_ahead
from backquant.deploy.examples import with_row_major, with_two_on_free_axes
from backquant.deploy.job import ExportJob, expected_operators
from backquant.deploy.portable import portable
from backquant.deploy.read_sizes import write_read_sizes
from backquant.deploy.target import Target
from backquant.errors import ExportError, InputError, UsageError, first_line, literal
from backquant.graph import as_arguments
from backquant.graph.costs import GraphCosts, graph_costs
from backquant.graph.example import describe_value
from backquant.graph.example_spec import ExampleSpec
from backquant.graph.export.dims import of_all_inputs
from backquant.graph.plain_arguments import plain_shapes, with_plain_arguments
from backquant.graph.plain_outputs import with_plain_outputs
from backquant.match import Plan
from backquant.operators import overload
from backquant.runtime import QuantizedModel
from backquant.runtime.as_integers import as_integers


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
    """A reference graph with the plan and the backend that it was made by."""

    module: fx.GraphModule
    plan: Plan
    config: BackendConfig


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
        return Reference(quantized, state.plan, state.backend_config)
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
    return Reference(quantized.graph_module, quantized.plan, quantized.backend_config)


def lowered_error(engine: str, target: Target) -> UsageError:
    """What is said of a model, or a backend, with an engine of its own."""
    return UsageError(
        f"the model is lowered to kernels of {engine}, which no other runtime has",
        where=f"to={target.name!r}",
        fix=f"backquant.quantize(model, ..., backend={literal(target.backend)})",
    )


def check_options(target: Target, options: Mapping[str, Any]) -> None:
    """Raise ``UsageError`` for an option that the target does not have."""
    for key in options:
        if key not in target.options:
            raise UsageError(
                f"{target.name} has no option {key!r}",
                where=f"options[{key!r}]",
                fix=f"one of {', '.join(target.options)}" if target.options else "it has none",
            )


def _check_names(dynamic_shapes: Any, names: list[str]) -> None:
    for name in dynamic_shapes if isinstance(dynamic_shapes, Mapping) else ():
        if name not in names:
            raise UsageError(
                f"the model has no input {name!r}",
                where=f"dynamic_shapes={dynamic_shapes!r}",
                fix=f"its inputs are {', '.join(map(repr, names))}",
            )


def _check_packing(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.target in _PACKING:
            raise ExportError(
                "the model packs sequences of several lengths, and a file has tensors of one length each",
                where=f"{node.target.__name__}, node {node.name!r}",
                fix="call the recurrent layer on the padded batch, and torch.where(position < length, y, 0)\n"
                'behind it; quantized for backend="x86" the model runs as it is, and can be saved',
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
    if isinstance(quantized, QuantizedModel) and quantized.input_qparams:
        args = tuple(
            as_integers(value, quantized.input_qparams[index])
            if index in quantized.input_qparams
            else value
            for index, value in enumerate(args)
        )
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
    _check_names(dynamic_shapes, names)
    _check_packing(reference.module.graph)
    module = portable(reference.module, config.qdq or QDQRules())
    dynamic_shapes = plain_shapes(dynamic_shapes, names, args, kwargs)
    args, kwargs = with_plain_arguments(module, args, kwargs)
    dynamic_shapes = of_all_inputs(dynamic_shapes, dict(zip(names, args, strict=False)) | kwargs)
    args, kwargs = with_row_major(with_two_on_free_axes(args, kwargs, dynamic_shapes, names))
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
    )
