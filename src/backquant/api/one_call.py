"""``quantize`` and ``explain``: from a model to a quantized one, or to the reasons, in one call."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import nn

from backquant.accuracy.recipes import Recipe
from backquant.api.arguments import (
    Model,
    is_language_model,
    opened_model,
    plain_model,
    refuse_unused,
    sound_backend,
    with_known_names,
)
from backquant.api.flow import Flow, Options, checked_request, planned_for
from backquant.api.outcome import Metric
from backquant.backend_config import BackendConfig
from backquant.backend_config.config import Backend, resolve_backend
from backquant.calibrate.batches import called_on_example
from backquant.calibrate.checkpoint import Checkpoint
from backquant.calibrate.group import sharing
from backquant.errors import EngineError
from backquant.garbage import makes_graphs
from backquant.lower import EngineInfo, find_engine
from backquant.pipeline.capture import Capturing
from backquant.pipeline.lower import engine_of
from backquant.pipeline.mappings import (
    DefaultedRequest,
    mapping_on_engine,
    mapping_with_weight_bits,
)
from backquant.pipeline.plan import Choices, evaluation_copy
from backquant.pipeline.prepare import prepared_for_inference
from backquant.pipeline.recurrent import rules_for_recurrent
from backquant.qconfig import PrepareCustomConfig, QConfigMapping
from backquant.report.build import build_report
from backquant.report.model import Report
from backquant.report.recorded import report_source, with_reporting
from backquant.runtime import QuantizedModel

if TYPE_CHECKING:
    from backquant.api.folders import CheckpointAnswer


@with_known_names
def quantize(
    model: Model,
    example_inputs: Any = None,
    *,
    backend: Backend | None = None,
    calibration: Iterable[Any] | None = None,
    qconfig_mapping: QConfigMapping | None = None,
    weights: str | Mapping[str, str | None] | None = None,
    group_size: int | None = None,
    require: float | str | Sequence[str] | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = None,
    slower: str | None = None,
    recipe: Recipe | str | os.PathLike[str] | Sequence[str] = "default",
    metric: Metric | None = None,
    integer_io: bool | Mapping[str | int, Any] | None = None,
    progress: bool = False,
    group: dist.ProcessGroup | None = None,
    checkpoint: Checkpoint | None = None,
) -> QuantizedModel:
    """Quantize ``model`` for ``backend``. The model is not changed.

    The default is static quantization, which needs calibration data. Dynamic quantization, weight-only
    quantization and float16 need none: pass a mapping such as
    ``QConfigMapping().set_global(default_dynamic_qconfig)``; rules by type or name may mix the kinds.

    Args:
        model: any module, an exported program, or the name of a ``.pt2`` file that holds one. A module
            is quantized as in evaluation mode; parts that cannot be captured stay float.
        example_inputs: a tensor, a tuple of positional arguments, or a dict of keyword arguments.
            Default: the first batch of the calibration set; required without one. A loader, or another
            iterable of batches, is the calibration set.
        backend: a name (``list_backends()``), a YAML or JSON file, or a ``BackendConfig``. Default: ``x86``;
            for ``weights`` ``x86_lowbit``.
        calibration: any iterable of batches; a batch has the form of ``example_inputs``. Of (inputs, labels)
            the model gets the inputs, where it takes no more. What the iterator itself raises passes
            through. Default: none, if nothing has to be measured.
        qconfig_mapping: how operators are to be quantized; default: ``default_mapping(backend)``. Operators
            that the backend leaves in float by default stay float unless a rule names them: a module by
            its path, the n-th use of an operator, or a type for which the backend has a default of its own.
            What else is chosen by default (recurrent layers at each call, ranges sample by sample) is chosen
            for all that no rule names, too, where the global rule is the default's.
        weights: ``"int4"``, ``"int8"``, …: quantize only the weights, to this dtype, without data; instead of
            a mapping. ``weight_only_mapping`` returns the mapping that it stands for. By path of the module:
            ``{"": "int8", "embeddings": "int4:64", "head": None}`` (groups of 64; in float).
        group_size: with ``weights``: how many weights of a row share a scale. Default: the backend's.
        require: the least share (0 to 1) of multiply-adds that must be quantized, or dotted paths
            of modules that must be. Default: more than nothing.
        prepare_custom_config: modules to leave untraced, attributes to keep, and the like.
        capture: ``"trace"`` (symbolic), ``"export"`` (``torch.export``), or ``"auto"``: a trace, and
            where that fails an export. The report says which, and why.
        dynamic_shapes: which sizes of the inputs may vary, as ``torch.export.export`` takes it; implies
            an export. Default: those that the model leaves free (of images: the batch only).
        slower: what to do with operators that are slower on integers than in float, as measured on this
            machine on the example inputs, or as ``BackendConfig.slower`` says: ``"float"`` leaves them in
            float (all operators, if the model is slower in every other way and nothing is required);
            ``"keep"`` keeps them on integers.
            Default: ``"float"`` without a mapping, ``"keep"`` with one.
        recipe: what reduces the loss of accuracy after calibration: ``"default"`` (biases alone, by what
            calibration shows, where that costs little), ``"none"``, ``"better"``, ``"best"``, a list of
            steps, or a YAML file. It needs data but no labels; what does not help at the outputs is undone,
            and the report says what each step gained.
        metric: a function of a model that gives a number, such as its accuracy on labelled data; the report
            has that of the result and of the float model. Default: the SQNR of the outputs alone.
        integer_io: integers in place of floats at the edges: ``True`` at all inputs and outputs, or those of
            a dict: inputs by name, outputs by position. ``{"x": True, 0: True}``: as the operators beside
            them quantize; ``{"x": torch.uint8}``: of that dtype; ``{"x": (1 / 255, 0, torch.uint8)}``: scale
            and zero point of what comes in, of images from a camera, say. ``input_qparams``,
            ``output_qparams`` and the report say what the integers stand for. Default: floats.
        progress: show a progress bar on standard error while calibrating.
        group: the process group that quantizes together: each rank passes its own batches (possibly none),
            and all get the same model. Default: this process alone. See docs/distributed.md.
        checkpoint: where to save the progress of calibration, to go on after a crash.

    Returns:
        A module that is called like the original, takes and returns floats, and shares no tensors with it.
        Its ``report`` says what each operator became, and why. Kernels run on the CPU: a model on a GPU is
        calibrated there, and what it becomes is on the CPU. A reference model stays on the model's device.

    Raises:
        CaptureError: the model can be captured neither by trace nor by export.
        InputError: example inputs or a batch do not fit the model.
        CalibrationError: the calibration set is empty or holds NaN or infinite values, or there is
            none and values have to be measured.
        EngineError: the backend's engine does not run in this build or on this CPU, or lacks a dtype.
        CoverageError: nothing, or less than required, can be quantized; lists the reasons.
        ConfigError: an input or output that ``integer_io`` names is not quantized.
        UsageError: an argument is of the wrong kind.

    >>> import torch
    >>> from torch import nn
    >>> model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
    >>> quantized = quantize(model, backend="x86", calibration=[torch.randn(4, 8)])
    >>> quantized(torch.randn(2, 8)).shape, quantized.report.coverage
    (torch.Size([2, 8]), 1.0)

    Dynamically, without data:

    >>> from backquant.qconfig import default_dynamic_qconfig
    >>> mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    >>> quantized = quantize(model, torch.randn(1, 8), backend="fbgemm", qconfig_mapping=mapping)
    >>> [kernel.kernel for kernel in quantized.kernels]
    ['quantized.linear_relu_dynamic(fbgemm, 7 bits)']

    Weights alone, in groups of 32 that share a scale:

    >>> model = nn.Sequential(nn.Linear(64, 32))
    >>> quantized = quantize(model, torch.randn(1, 64), weights="int4", group_size=32)
    >>> [kernel.kernel for kernel in quantized.kernels]
    ['aten._weight_int4pack_mm_for_cpu(bfloat16, groups of 32)']
    """
    with sharing(group) as ranks:
        options = Options(
            backend,
            qconfig_mapping,
            weights,
            group_size,
            require,
            prepare_custom_config,
            capture,
            dynamic_shapes,
            slower,
            recipe,
            metric,
            integer_io,
            progress,
            checkpoint,
        )
        return Flow(options, ranks).run(model, example_inputs, calibration)


@overload
def explain(
    model: nn.Module | torch.export.ExportedProgram,
    example_inputs: Any,
    *,
    backend: Backend = ...,
    qconfig_mapping: QConfigMapping | None = ...,
    prepare_custom_config: PrepareCustomConfig | None = ...,
    capture: str = ...,
    dynamic_shapes: Any = ...,
) -> Report: ...
@overload
def explain(
    model: str | os.PathLike[str],
    example_inputs: Any = ...,
    *,
    backend: Backend = ...,
    qconfig_mapping: QConfigMapping | None = ...,
    prepare_custom_config: PrepareCustomConfig | None = ...,
    capture: str = ...,
    dynamic_shapes: Any = ...,
) -> Report | CheckpointAnswer: ...
@with_known_names
@makes_graphs
def explain(
    model: Model,
    example_inputs: Any = None,
    *,
    backend: Backend = "x86",
    qconfig_mapping: QConfigMapping | None = None,
    prepare_custom_config: PrepareCustomConfig | None = None,
    capture: str = "auto",
    dynamic_shapes: Any = None,
) -> Report | CheckpointAnswer:
    """Report what every operator would become, and why, without data and without changing the model.

    The engine need not run on this machine. Args: as in ``quantize``. ``model`` may be the folder of a
    language model, or a GGUF file, without inputs: whether what ``backend`` describes holds it, by layers.

    Raises:
        CaptureError: the model can be captured neither by trace nor by export.
        InputError: the example inputs do not fit the model.
        UsageError: an argument is of the wrong kind.

    >>> import torch
    >>> from torch import nn
    >>> report = explain(nn.Sequential(nn.Linear(8, 8), nn.Softplus()), torch.zeros(1, 8))
    >>> [(row.operator, row.outcome) for row in report.rows]
    [('Linear', 'quantized'), ('Softplus', 'float')]
    """
    config = sound_backend(backend)
    given = checked_request(qconfig_mapping, prepare_custom_config)
    if is_language_model(model):
        from backquant.api.folders import explained_folder

        refuse_unused(
            "a language model in files",
            example_inputs=(example_inputs, None),
            prepare_custom_config=(prepare_custom_config, None),
            capture=(capture, "auto"),
            dynamic_shapes=(dynamic_shapes, None),
        )
        return explained_folder(model, config, qconfig_mapping)
    frozen = evaluation_copy(plain_model(opened_model(model), given[1], config))
    requested = DefaultedRequest.of(config, _engine_here(config), *given, frozen)
    called = called_on_example(frozen, example_inputs)
    example = called.inputs
    capturing = Capturing(
        capture, example, dynamic_shapes, requested.own, decompose=True, called=called
    )
    recurrent = partial(rules_for_recurrent, data=example)
    step = planned_for(frozen, requested, capturing, Choices((recurrent,)))
    prepared = with_reporting(prepared_for_inference(step, requested.request), frozen, example)
    engine_name = f"engine {config.engine}" if config.engine else ""
    return build_report(replace(report_source(prepared), engine=engine_name))


@with_known_names
def default_mapping(
    backend: Backend = "x86", model: Model | None = None, *, weight_bits: int | None = None
) -> QConfigMapping:
    """The mapping that ``quantize`` uses on this machine when none is passed, as a start for one's own.

    It is ``get_default_qconfig_mapping(backend)`` with activations reduced to the range that the engine sums
    without saturation on this CPU. ``model``: what is to be quantized; where only depthwise kernels saturate
    (fbgemm with VNNI), it is the weights of its depthwise convolutions that are reduced. ``weight_bits``: 2
    to 7, where all weights are to use fewer values of their dtype: with 7 no runtime's sums of 16 bits
    overflow (ONNX Runtime and OpenVINO on x86 without VNNI).

    Raises ``UsageError`` and ``UnknownBackendError`` as ``quantize`` does.

    >>> import torch
    >>> from torch import nn
    >>> mapping = default_mapping("x86").set_module_name("1", None)
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    >>> report = quantize(model, calibration=[torch.randn(8, 4)], qconfig_mapping=mapping).report
    >>> [(row.node, row.outcome) for row in report.rows]
    [('_0', 'quantized'), ('_1', 'float')]
    """
    config = resolve_backend(backend)
    if weight_bits is not None:
        return mapping_with_weight_bits(config, weight_bits)
    engine = engine_of(config)
    opened = None if model is None else opened_model(model)
    return mapping_on_engine(config, engine, opened)[0]


def _engine_here(config: BackendConfig) -> EngineInfo | None:
    """The backend's engine on this machine; ``None`` if it has none or cannot run here.

    Raises ``EngineError`` for a name that no engine has.
    """
    if config.engine is None:
        return None
    find_engine(config.engine)
    try:
        return engine_of(config)
    except EngineError:
        return None
