"""``compare``, ``sensitivity``, ``search``: what quantization costs, where, and the best model in budget."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, overload

import torch.distributed as dist

from backquant.accuracy.calibrated import Calibrated
from backquant.accuracy.compare import compared
from backquant.accuracy.comparison import Comparison
from backquant.accuracy.exported import compared_file
from backquant.accuracy.figures import Metric, measured_metric
from backquant.accuracy.search.loop import Bench
from backquant.accuracy.search.programme import check_installed
from backquant.accuracy.search.result import (
    SearchResult,
)
from backquant.accuracy.search.runners import (
    Budget,
    EngineRunner,
    ReferenceRunner,
    Runner,
    TargetRunner,
    TimesFile,
    usual_folder,
)
from backquant.accuracy.search.work import Work
from backquant.accuracy.sensitivity import Sensitivity, sensitivities
from backquant.accuracy.twin import Twin
from backquant.api.arguments import (
    Model,
    is_language_model,
    opened_model,
    plain_model,
    refuse_unused,
    with_known_names,
)
from backquant.api.exporting import export
from backquant.api.flow import Flow, Options
from backquant.backend_config.config import Backend
from backquant.calibrate import ProgressBar
from backquant.calibrate.batches import check_set, check_some, first_batch, inputs_of, kept_set
from backquant.calibrate.group import held_by_all, sharing
from backquant.deploy.exported import Exported
from backquant.deploy.session import running_target
from backquant.deploy.target import is_exported
from backquant.errors import UsageError
from backquant.garbage import makes_graphs
from backquant.identifiers import labelled_data
from backquant.pipeline.loading import load
from backquant.pipeline.plan import evaluation_copy
from backquant.pipeline.recapture import float_graph_of
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.runtime import QuantizedModel

if TYPE_CHECKING:
    from backquant.api.folders import CheckpointComparison

# ``compare`` and ``sensitivity``: what quantization costs, and where.


@overload
def compare(
    model: Model,
    quantized: QuantizedModel | Exported | str | os.PathLike[str],
    data: Iterable[Any],
    *,
    metric: Metric | None = ...,
    progress: bool = ...,
) -> Comparison: ...
@overload
def compare(
    model: str | os.PathLike[str], quantized: str | os.PathLike[str]
) -> CheckpointComparison: ...
@with_known_names
def compare(
    model: Model,
    quantized: QuantizedModel | Exported | str | os.PathLike[str],
    data: Iterable[Any] | None = None,
    *,
    metric: Metric | None = None,
    progress: bool = False,
) -> Comparison | CheckpointComparison:
    """Run ``quantized`` beside the float ``model``, operator by operator: what did it cost, and where?

    Args:
        model: the float model that was quantized; it is not changed. Of a language model its folder, with the
            folder or GGUF file of the quantized one, and no data: weights are compared, layer by layer.
        quantized: from ``quantize``, ``convert_fx`` or ``load``; or a file of ``save`` or ``export``. What
            ``export`` wrote runs in its own runtime, and its outputs are compared.
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
    if is_language_model(model) and isinstance(quantized, str | os.PathLike):
        from backquant.api.folders import compared_folders

        unused = {"data": (data, None), "metric": (metric, None), "progress": (progress, False)}
        refuse_unused("language models in files", **unused)
        return compared_folders(model, quantized)
    if data is None:
        raise UsageError(
            "a comparison needs data",
            where="backquant.compare(model, quantized, data)",
            fix="data=batches   # as for calibration",
        )
    if isinstance(quantized, Exported | str | os.PathLike):
        path = Path(quantized.path if isinstance(quantized, Exported) else quantized)
        target = quantized.target if isinstance(quantized, Exported) else None
        if target is None and not is_exported(path):
            quantized = load(path)
        else:
            source = plain_model(opened_model(model))
            check_set(data, "data")
            return compared_file(source, path, inputs_of(source, data, "data"), target, metric)
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


@with_known_names
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
    options = Options(
        backend,
        qconfig_mapping,
        prepare_custom_config=prepare_custom_config,
        capture=capture,
        progress=progress,
    )
    measured = data if calibration is None else calibration
    with sharing(group) as ranks:
        ready = Flow(options, ranks).calibrated(model, example_inputs, measured)
        twin = Twin(ready.prepared, ready.reference())
        with ProgressBar("sensitivity") if progress else nullcontext() as bar:
            found = sensitivities(twin, data, progress=bar, resume=resume, ranks=ranks)
    check_some(found.batches, data, "data")
    return labelled_data(found)


# ``search``: the best quantized model within a budget that is measured.


_HELD = 64  # batches


@with_known_names
@makes_graphs
def search(
    model: Model,
    data: Iterable[Any],
    backend: Backend | None = None,
    *,
    budget: Any,
    metric: Metric | None = None,
    lower_is_better: bool = False,
    example_inputs: Any = None,
    calibration: Iterable[Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    recipe: str | os.PathLike[str] | Sequence[str] = "default",
    progress: bool = False,
    resume: str | os.PathLike[str] | None = None,
    times: str | os.PathLike[str] | None = "auto",
    group: dist.ProcessGroup | None = None,
) -> SearchResult:
    """Find the best model within a budget of accuracy, time or size, from measurements on this machine.

    For each operator (with those that can only be quantized together with it) the search chooses between
    float and what the backend's description admits. Times are measured on the engine at the shapes of the
    example inputs, including conversions between float and integers; errors at the outputs, on ``data``. An
    integer programme makes a choice; that model is then built, timed and judged as a whole, and the result
    corrects the figures for the next choice.

    Args:
        model, example_inputs, backend, qconfig_mapping, prepare_custom_config, capture, recipe: as in
            ``quantize``.
        data: batches on which the outputs are compared with the float model's.
        budget: ``Budget``, or a dict of its limits: ``max_drop`` (of the metric), ``min_sqnr`` (of the
            outputs, in dB), ``max_ms``, ``max_ratio`` (of the float model's time), ``max_bytes`` (of
            weights), ``max_bitops``. With one of the first two the answer is the fastest model within all
            limits, otherwise the most accurate one.
        metric: a function that takes a model and returns a number; called for each model that is built.
        lower_is_better: whether smaller values of the metric are better.
        calibration: batches for measuring ranges. Default: ``data``.
        progress: show progress bars on standard error.
        resume: a file in which measurements are kept, to go on from after an interruption or with another
            budget. Not with ``group``.
        times: the folder in which times of kernels on this machine are kept; ``None``: nowhere. Default: the
            user's cache folder.
        group: the process group that searches together, each rank with its own batches, as in ``quantize``:
            ranks share the runs for accuracy; rank 0 measures times and the metric. All get the same answer.
            If rank r of n has every n-th batch from r on, losses equal those of one process.

    Returns:
        The model, whether it keeps to the budget, what was chosen and why, what was tried, and the Pareto
        front. A budget that cannot be kept is no error: ``met`` is then false, and ``hindrance`` says why.
        After ctrl-C, or where a combination fails after all in float and all on integers did not (its metric,
        its export), it is the best model found until then, and ``stopped`` says why.

    Raises:
        MissingExtraError: SciPy is not installed.
        UsageError: an empty budget, or one that needs a metric or times that are missing; a metric that
            fails at once, returns no number, or is the same for random outputs as for the float model's;
            ``resume`` belongs to another model.
        CaptureError, InputError, CalibrationError, EngineError: as ``quantize``.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)).eval()
    >>> found = search(model, [torch.randn(32, 64)], budget={"min_sqnr": 25}, times=None)
    >>> found.met, found.best.loss <= 10 ** -2.5, found.model.report.backend
    (True, True, 'x86')
    """
    limits = Budget.of(budget)
    check_installed()
    if limits.max_drop is not None and metric is None:
        raise UsageError(
            "max_drop needs a metric",
            where=f"budget={limits.to_dict()!r}, metric=None",
            fix='metric=lambda model: accuracy(model, loader)   # or budget={"min_sqnr": 30}',
        )
    if group is not None and resume is not None:
        raise UsageError(
            "a search of several ranks keeps no file",
            where="resume beside group",
            fix="resume=None",
        )
    model = opened_model(model)
    check_set(data, "data")
    data = kept_set(inputs_of(model, data, "data"))
    start = time.process_time()
    options = Options(
        backend,
        qconfig_mapping,
        prepare_custom_config=prepare_custom_config,
        capture=capture,
        recipe=recipe,
        progress=progress,
    )
    if options.edges is not None:
        raise UsageError(
            "a search compares models that take and give floats",
            where="prepare_custom_config: quantized inputs or outputs",
            fix="prepare_custom_config=None   # then backquant.export(found.model, path, integer_io=True)",
        )
    measured = data if calibration is None else kept_set(inputs_of(model, calibration))
    with sharing(group) as ranks:
        ready = Flow(options, ranks).calibrated(model, example_inputs, measured)
        spent = time.process_time() - start
        ready, _ = ready.corrected(options.steps)
        ready = ready.improved(options.steps, progress=progress, ranks=ranks)
        runner = _runner(ready, usual_folder() if times == "auto" else times)
        if limits.limits_time and runner.clock is None:
            raise UsageError(
                f"times of {ready.config.name} cannot be measured here",
                where=f"budget={limits.to_dict()!r}",
                fix='budget={"max_bitops": 0.5}   # half of what 8 bits everywhere take; or "max_bytes"',
            )
        named = "" if metric is None else getattr(metric, "__qualname__", type(metric).__name__)
        work = Work(ready, runner, limits, resume, f"{named} {lower_is_better}", ranks)
        held = held_by_all(ranks, data, _HELD)
        check_some(len(held), data, "data")
        bench = Bench(
            runner.floating(ready.frozen, work.floating),
            runner,
            ready.example,
            held,
            metric,
            -1.0 if lower_is_better else 1.0,
            ranks,
        )
        bench.check_metric(limits)
        with ProgressBar("search") if progress else nullcontext() as bar:
            found = work.found(bench, bar or _nobody)
    whole = {"calibration": spent, "search": time.process_time() - start - spent}
    return labelled_data(replace(found, seconds=whole))


def _nobody(_done: int, _total: int | None) -> None:
    pass


def _runner(ready: Calibrated, folder: str | os.PathLike[str] | None) -> Runner:
    engine = ready.engine
    if engine is None:
        target = running_target(ready.config.name)
        return ReferenceRunner() if target is None else TargetRunner(target, _written)
    return EngineRunner(TimesFile(folder, f"{engine.name} {engine.isa}"))


def _written(made: QuantizedModel, path: Path, example: Any) -> object:
    return export(made, path, example_inputs=example, require=0.0)
