"""``compare`` and ``sensitivity``: what quantization costs, and where."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch.distributed as dist

from backquant.accuracy.compare import compared
from backquant.accuracy.comparison import Comparison
from backquant.accuracy.metric import Metric, measured_metric
from backquant.accuracy.sensitivity import Sensitivity, sensitivities
from backquant.accuracy.twin import Twin
from backquant.api.arguments import Model, opened_model, plain_model
from backquant.api.calibrated import CalibrationCall
from backquant.backend_config.registry import Backend
from backquant.calibrate import ProgressBar
from backquant.calibrate.batches import check_set, check_some, first_batch, inputs_of, kept_set
from backquant.calibrate.group import sharing
from backquant.errors import UsageError
from backquant.identifiers import labelled_data
from backquant.pipeline.plan import evaluation_copy
from backquant.pipeline.recapture import float_graph_of
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.runtime import QuantizedModel


def compare(
    model: Model,
    quantized: QuantizedModel,
    data: Iterable[Any],
    *,
    metric: Metric | None = None,
    progress: bool = False,
) -> Comparison:
    """Run ``quantized`` beside the float ``model``, operator by operator: what did it cost, and where?

    Args:
        model: the float model that was quantized; it is not changed.
        quantized: from ``quantize``, ``convert_fx`` or ``load``.
        data: batches, as for calibration; preferably others than those.
        metric: a function that takes a model and returns a number; it is called for both models.
        progress: show a progress bar on standard error.

    Returns:
        For every operator the error that it adds and the error that has accumulated, as SQNR in dB; cosine
        similarity, largest error, the share of values that are clipped and of the range that is unused. The
        same for the outputs, and the metric. Print it, or use ``save_html`` and ``to_dict``.

    Raises:
        UsageError: ``model`` is not the one that was quantized; the metric fails or returns no number.
        InputError: a batch does not fit the model.
        CalibrationError: there is no batch.

    >>> import torch
    >>> from torch import nn
    >>> import backquant
    >>> model, data = nn.Sequential(nn.Linear(8, 8), nn.ReLU()).eval(), [torch.randn(64, 8)]
    >>> quantized = backquant.quantize(model, calibration=data, slower="keep")
    >>> found = compare(model, quantized, data)
    >>> found.sqnr > 20, [row.operators for row in found.rows if not row.rounds]
    (True, [('_0',)])
    """
    if not isinstance(quantized, QuantizedModel):
        raise UsageError(
            f"{type(quantized).__name__} is not a quantized model",
            where="backquant.compare(model, quantized, data)",
            fix="quantized = backquant.quantize(model, calibration=batches)",
        )
    record = quantized.record
    source = plain_model(opened_model(model), record.custom, record.backend_config)
    check_set(data, "data")
    data = inputs_of(source, data, "data")
    example, batches = first_batch(data, "data")
    graph = float_graph_of(source, record, example)
    with ProgressBar("comparing") if progress else nullcontext() as bar:
        found = labelled_data(compared(graph, quantized, batches, bar))
    if metric is None:
        return found
    in_float = measured_metric(metric, evaluation_copy(source), "the float model")
    return replace(
        found, metric=(in_float, measured_metric(metric, quantized, "the quantized model"))
    )


def sensitivity(
    model: Model,
    data: Iterable[Any] | None = None,
    backend: Backend | None = None,
    *,
    example_inputs: Any = None,
    calibration: Iterable[Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    progress: bool = False,
    resume: str | os.PathLike[str] | None = None,
    group: dist.ProcessGroup | None = None,
) -> Sensitivity:
    """What each operator costs: the error at the outputs if it alone is quantized, or it alone stays float.

    Operators that can only be quantized together (because they are fused or share an observer) are one
    group. What runs is the reference model, which computes what kernels compute without any engine.

    Args:
        model, backend, example_inputs, qconfig_mapping, prepare_custom_config, capture: as in ``quantize``.
        data: batches that outputs are compared on.
        calibration: batches for measuring ranges. Default: ``data``, which must then be iterable repeatedly.
        progress: show progress bars on standard error.
        resume: a file that keeps what was measured, batch by batch, to go on from. Not with ``group``.
        group: the ranks that measure together, each on its own batches, as in ``quantize``; all get the
            figures of all. Where rank r of n has every n-th batch from r on they are those of one process.

    Returns:
        SQNR of the outputs in dB for each group; ``ranking()`` has what to leave in float first.

    Raises:
        UsageError: there is no data, or ``resume`` is of another model.
        CaptureError, InputError, CalibrationError, EngineError: as ``quantize``.

    >>> import torch
    >>> from torch import nn
    >>> _ = torch.manual_seed(0)
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)).eval()
    >>> found = sensitivity(model, [torch.randn(64, 8)])
    >>> [group.name for group in found.groups], all(group.alone > found.sqnr for group in found.groups)
    (['0', '2'], True)
    """
    if data is None:
        raise UsageError(
            "there is nothing to compare outputs on",
            where="backquant.sensitivity(data=None)",
            fix="backquant.sensitivity(model, [batch, ...], ...)",
        )
    if group is not None and resume is not None:
        raise UsageError(
            "a sensitivity of several ranks keeps no file",
            where="resume beside group",
            fix="resume=None",
        )
    model = opened_model(model)
    data = kept_set(inputs_of(model, data, "data"))
    call = CalibrationCall(
        backend,
        qconfig_mapping,
        prepare_custom_config=prepare_custom_config,
        capture=capture,
    )
    measured = data if calibration is None else calibration
    with sharing(group) as ranks:
        ready = call.calibrated(model, example_inputs, measured, progress=progress, ranks=ranks)
        twin = Twin(ready.prepared, ready.reference())
        with ProgressBar("sensitivity") if progress else nullcontext() as bar:
            found = sensitivities(twin, data, progress=bar, resume=resume, ranks=ranks)
    check_some(found.batches, data, "data")
    return labelled_data(found)
