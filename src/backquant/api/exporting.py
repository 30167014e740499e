"""``export``: from a quantized model to a file of a deployment target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from torch import fx, nn

from backquant.api.arguments import Model, opened_model
from backquant.backend_config import BackendConfig, QDQRules
from backquant.calibrate.examples import checked_example
from backquant.convert import ReferenceModel, reference_state
from backquant.deploy import (
    Exported,
    ExportJob,
    Target,
    check_installed,
    check_modules,
    check_operators,
    check_version,
    expected_operators,
    find_target,
    portable,
    run_export,
    write_read_sizes,
)
from backquant.deploy.computed_ahead import compute_ahead
from backquant.deploy.examples import with_two_on_free_axes
from backquant.deploy.files import check_place
from backquant.errors import ExportError, InputError, UsageError, first_line
from backquant.graph import as_arguments
from backquant.graph.costs import GraphCosts, graph_costs
from backquant.graph.example import describe_value
from backquant.graph.example_spec import ExampleSpec
from backquant.graph.plain_arguments import with_plain_arguments
from backquant.match import Plan
from backquant.pipeline.capture import Capturing
from backquant.pipeline.plan import evaluation_copy, planned
from backquant.prepare import Request
from backquant.qconfig import get_default_qconfig_mapping
from backquant.report.requirements import given_requirement
from backquant.runtime import QuantizedModel
from backquant.runtime.as_integers import as_integers


# size: the model, the file, and one keyword per independent choice of the user
def export(
    quantized: nn.Module,
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    require: float | str | tuple[str, ...] | None = None,
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a quantized model for another runtime, and say which kernels it will run there.

    The model is one for a backend without an engine of its own (``onnxruntime``, ``openvino``, …), from
    ``quantize``, ``convert_fx`` or ``load``; or a reference model in the decomposed dialect.

    Args:
        quantized: the model; it is not changed.
        path: the file. It is written under another name first.
        to: the target (``backquant.deploy.list_targets()``); default: by the file's suffix, and where
            several write such files, the one of the backend that the model was quantized for.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments;
            default: those that the model was quantized with (integers as they were, floats drawn in
            their range).
        dynamic_shapes: as in ``torch.export``, where a string names an axis:
            ``{"x": {0: "batch"}}``, with a bound ``"batch<=64"``. Default: the shapes of the example
            inputs and no others.
        require: a share (0 to 1) of the multiply-adds, or dotted paths of modules, that the target must
            compute on integer kernels. Default: every quantized operator with multiply-adds; ``0.0``: no
            requirement.
        overwrite: replace an existing file.
        options: options of the target itself.

    Raises:
        UsageError: the model or an argument is of the wrong kind; the file exists.
        MissingExtraError: the target's packages are not installed; names the extra.
        ExportError: the target cannot take operators of the model (named), or these dynamic shapes.
        CoverageError: fewer operators than required became integer; lists them.

    Warns once if the target's version was not tested.

    >>> import tempfile
    >>> import torch
    >>> import backquant
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> quantized = backquant.quantize(model, backend="onnxruntime", calibration=[torch.randn(4, 8)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     exported = export(quantized, f"{folder}/model.onnx")
    >>> exported.integer_share
    1.0
    """
    target_path = Path(path)
    target = find_target(to, target_path, _backend_name(quantized))
    reference = _reference(quantized, target)
    check_place(target_path, overwrite)
    check_installed(target)
    required = given_requirement(require)
    _check_options(target, options or {})
    args, kwargs = _example(quantized, example_inputs)
    job = _job(reference, args, kwargs, dynamic_shapes, options or {})
    check_modules(job, required)
    check_version(target)
    return run_export(job, target, target_path, required)


def export_job(reference: ReferenceModel, target: Target, args: tuple[Any, ...]) -> ExportJob:
    """What ``target`` is given to write ``reference`` for inputs of these sizes. Raises as ``export`` does.

    >>> import torch
    >>> from backquant import convert_to_reference_fx, get_default_qconfig_mapping, prepare_fx
    >>> x, mapping = (torch.ones(1, 2),), get_default_qconfig_mapping("onnxruntime")
    >>> prepared = prepare_fx(nn.Sequential(nn.Linear(2, 2)), mapping, x, backend_config="onnxruntime")
    >>> _ = prepared(*x)
    >>> reference = convert_to_reference_fx(prepared, dialect="decomposed")
    >>> export_job(reference, find_target("onnx", Path("model.onnx")), x).expected[0].node
    '_0'
    """
    return _job(_reference(reference, target), args, {}, None, {})


def _backend_name(quantized: nn.Module) -> str:
    if isinstance(quantized, QuantizedModel):
        return quantized.backend_config.name
    return (
        reference_state(quantized).backend_config.name
        if isinstance(quantized, ReferenceModel)
        else ""
    )


class _Reference(NamedTuple):
    """A reference graph with the plan and the backend that it was made by."""

    module: fx.GraphModule
    plan: Plan
    config: BackendConfig


def _reference(quantized: nn.Module, target: Target) -> _Reference:
    if isinstance(quantized, ReferenceModel):
        state = reference_state(quantized)
        if state.dialect != "decomposed":
            raise UsageError(
                f"the reference model is in the dialect {state.dialect!r}",
                where="export",
                fix='backquant.convert_to_reference_fx(prepared, dialect="decomposed")',
            )
        return _Reference(quantized, state.plan, state.backend_config)
    if not isinstance(quantized, QuantizedModel):
        raise UsageError(
            f"{type(quantized).__name__} is not a quantized model",
            where="export",
            fix=f'quantized = backquant.quantize(model, ..., backend="{target.backend}")',
        )
    if quantized.engine is not None:
        raise _lowered(quantized.engine.name, target)
    devices = {str(t.device) for t in (*quantized.parameters(), *quantized.buffers())} - {"cpu"}
    if devices:
        raise ExportError(
            f"the model is on {', '.join(sorted(devices))}, and {target.name} is written from the CPU",
            where="export",
            fix="backquant.export(quantized.cpu(), ...)",
        )
    return _Reference(quantized.graph_module, quantized.plan, quantized.backend_config)


def _lowered(engine: str, target: Target) -> UsageError:
    return UsageError(
        f"the model is lowered to kernels of {engine}, which no other runtime has",
        where=f"to={target.name!r}",
        fix=f'backquant.quantize(model, ..., backend="{target.backend}")',
    )


def check_exportable(
    model: Model, example_inputs: Any, backend: BackendConfig, target: Target
) -> None:
    """Refuse before calibration what ``export`` would refuse after it: the backend, or operators.

    Raises ``UsageError`` for a backend with an engine, ``ExportError`` with the operators that the target
    cannot take, ``CaptureError`` for a model that no capture takes.
    """
    if backend.engine is not None:
        raise _lowered(backend.engine, target)
    frozen = evaluation_copy(opened_model(model))
    example = checked_example(frozen, example_inputs)
    mapping = get_default_qconfig_mapping(backend)
    step = planned(frozen, Request(backend, mapping), Capturing("auto", example))
    args, kwargs = as_arguments(example)
    job = ExportJob(step.module, args, kwargs, None, backend, step.record.plan, {}, ())
    check_operators(job, target)


def _check_options(target: Target, options: Mapping[str, Any]) -> None:
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


def _example(quantized: nn.Module, given: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
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


def _job(
    reference: _Reference,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dynamic_shapes: Any,
    options: Mapping[str, Any],
) -> ExportJob:
    config = reference.config
    names = [str(node.target) for node in reference.module.graph.find_nodes(op="placeholder")]
    _check_names(dynamic_shapes, names)
    module = portable(reference.module, config.qdq or QDQRules())
    args, kwargs = with_plain_arguments(module, args, kwargs)
    args, kwargs = with_two_on_free_axes(args, kwargs, dynamic_shapes, names)
    shown = _costs(module, kwargs if kwargs and not args else args)
    costs = shown.multiply_adds
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
