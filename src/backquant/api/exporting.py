"""``export``: from a quantized model to a file of a deployment target."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from backquant.api.arguments import Model, opened_model, plain_model, with_known_names
from backquant.api.checkpoints import checkpoint_target, export_checkpoint
from backquant.backend_config import BackendConfig
from backquant.calibrate.batches import called_on_example
from backquant.convert import IntegerEdges
from backquant.deploy import (
    Exported,
    ExportJob,
    Target,
    check_installed,
    check_modules,
    check_operators,
    check_version,
    find_target,
    run_export,
)
from backquant.deploy.checkpoints.read import QuantizedCheckpoint
from backquant.deploy.checkpoints.target import CheckpointTarget
from backquant.deploy.job_of import (
    backend_name,
    check_options,
    example_of,
    job_of,
    lowered_error,
    reference_of,
)
from backquant.deploy.target import check_place
from backquant.errors import UsageError
from backquant.graph import as_arguments
from backquant.pipeline.capture import Capturing
from backquant.pipeline.plan import evaluation_copy, planned
from backquant.prepare import Request
from backquant.qconfig import get_default_qconfig_mapping
from backquant.report.model import given_requirement


@with_known_names
def export(
    quantized: nn.Module | QuantizedCheckpoint,
    path: str | os.PathLike[str],
    *,
    to: str | None = None,
    example_inputs: Any = None,
    dynamic_shapes: Any = None,
    require: float | str | tuple[str, ...] | None = None,
    integer_io: bool | Mapping[str | int, Any] | None = None,
    overwrite: bool = False,
    options: Mapping[str, Any] | None = None,
) -> Exported:
    """Write a quantized model for another runtime, and say which kernels it will run there.

    The model is one for a backend without an engine of its own (``onnxruntime``, ``openvino``, …), from
    ``quantize``, ``convert_fx`` or ``load``; or a reference model in the decomposed dialect.

    Args:
        quantized: the model; it is not changed. Or what ``load_checkpoint`` gives, to another format of
            checkpoints.
        path: the file; of checkpoints the folder. It is written under another name first.
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
        integer_io: integers in place of floats at the edges of the file, as in ``quantize``. What they
            stand for is in ``edges`` of the result, and beside the file in ``<name>.qparams.json``. Default:
            as the model has them; for ``ethos-u`` all that are quantized.
        overwrite: replace an existing file.
        options: options of the target itself.

    Raises:
        UsageError: the model or an argument is of the wrong kind; the file exists.
        MissingExtraError: the target's packages are not installed; names the extra.
        ExportError: the target cannot take operators of the model (named), or these dynamic shapes.
        CoverageError: fewer operators than required became integer; lists them.
        ConfigError: an input or output that ``integer_io`` names is not quantized.

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
    if isinstance(quantized, QuantizedCheckpoint):
        _check_no_edges(integer_io)
        written = checkpoint_target(to or quantized.form.name, target_path)
        check_options(written, options or {})
        return export_checkpoint(
            quantized, target_path, written, options or {}, overwrite=overwrite
        )
    target = find_target(to, target_path, backend_name(quantized))
    if isinstance(target, CheckpointTarget):
        _check_no_edges(integer_io)
        check_options(target, options or {})
        layers = reference_of(quantized, target)
        return export_checkpoint(layers, target_path, target, options or {}, overwrite=overwrite)
    reference = reference_of(quantized, target).for_target(target, integer_io)
    check_place(target_path, overwrite)
    check_installed(target)
    required = given_requirement(require)
    check_options(target, options or {})
    args, kwargs = example_of(quantized, example_inputs)
    job = job_of(reference, args, kwargs, dynamic_shapes, options or {})
    check_modules(job, required)
    check_version(target)
    return run_export(job, target, target_path, required)


def _check_no_edges(integer_io: Any) -> None:
    if IntegerEdges.of(integer_io) is not None:
        raise UsageError(
            "a checkpoint holds weights, and has no inputs and outputs",
            where="integer_io",
            fix="integer_io=None",
        )


def check_exportable(
    model: Model, example_inputs: Any, backend: BackendConfig, target: Target
) -> None:
    """Refuse before calibration what ``export`` would refuse after it: the backend, or operators.

    Raises ``UsageError`` for a backend with an engine, ``ExportError`` with the operators that the target
    cannot take, ``CaptureError`` for a model that no capture takes.
    """
    if backend.engine is not None:
        raise lowered_error(backend.engine, target)
    frozen = evaluation_copy(plain_model(opened_model(model), backend=backend))
    example = called_on_example(frozen, example_inputs).inputs
    mapping = get_default_qconfig_mapping(backend)
    step = planned(frozen, Request(backend, mapping), Capturing("auto", example))
    args, kwargs = as_arguments(example)
    job = ExportJob(step.module, args, kwargs, None, backend, step.record.plan, {}, ())
    check_operators(job, target)
