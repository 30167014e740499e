"""OpenVINO: the model that it converts from PyTorch, and NNCF's quantization of it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import nncf
import openvino
import torch

from benchmarks.peers import Inputs, Prepared, Task

__all__ = ["prepare_controlled", "prepare_float", "prepare_int8", "quantized"]


def converted(task: Task) -> Any:
    warnings.simplefilter("ignore")
    example = task.calibration[0]
    try:
        with torch.no_grad():
            shapes = [x.shape for x in example]
            return openvino.convert_model(task.model, example_input=example, input=shapes)
    except openvino.frontend.OpConversionFailure:  # operators that it knows only from ONNX
        from benchmarks.peers import onnx_runtime

        return openvino.Core().read_model(str(onnx_runtime.exported(task)))


def compiled(model: Any, threads: int) -> Prepared:
    settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
    if threads == 1:
        settings["ENABLE_CPU_PINNING"] = False  # the whole process is pinned
    core = openvino.Core()
    made = core.compile_model(model, "CPU", settings)
    request = made.create_infer_request()
    facts = {
        "openvino": openvino.__version__,
        "precision": made.get_property("INFERENCE_PRECISION_HINT").to_string(),
    }
    return Prepared(
        lambda inputs: {i: x.numpy() for i, x in enumerate(inputs)},
        lambda feed: request.infer(feed, share_inputs=True, share_outputs=True),
        lambda outputs: outputs[0].copy(),
        facts,
    )


def _fed(inputs: Inputs) -> Any:
    arrays = [x.numpy() for x in inputs]
    return arrays[0] if len(arrays) == 1 else arrays


def prepare_float(task: Task) -> Prepared:
    """As OpenVINO runs a float model by default: in bf16 where the CPU has it."""
    return compiled(converted(task), task.threads)


def quantized(task: Task) -> Any:
    """The model that NNCF makes."""
    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([_fed(batch) for batch in task.calibration])
    return nncf.quantize(converted(task), data, model_type=_kind(task))


def prepare_int8(task: Task) -> Prepared:
    return compiled(quantized(task), task.threads)


def _kind(task: Task) -> Any:
    """As NNCF documents it: the preset for convolutions by default, and "transformer" for those."""
    return nncf.ModelType.TRANSFORMER if task.transformer else None


def prepare_controlled(task: Task, max_drop: float) -> Prepared:
    """NNCF's accuracy control: operators become float until the metric on held data drops by less."""
    nncf.set_log_level(logging.ERROR)

    def judged(model: Any, _: Any) -> tuple[float, None]:
        def run(batch: Inputs) -> torch.Tensor:
            return torch.from_numpy(model(_fed(batch))[0].copy())

        return task.judged(run), None

    made = nncf.quantize_with_accuracy_control(
        converted(task),
        nncf.Dataset([_fed(batch) for batch in task.calibration]),
        nncf.Dataset([_fed(batch) for batch in task.held]),
        judged,
        max_drop=max_drop,
        drop_type=nncf.DropType.ABSOLUTE,
        model_type=_kind(task),
    )
    return compiled(made, task.threads)
