"""OpenVINO: the model that it converts from PyTorch, and NNCF's quantization of it."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import nncf
import openvino
import torch

from benchmarks.peers import Inputs, Prepared, Task

__all__ = ["prepare_float", "prepare_int8"]


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


def prepare_int8(task: Task) -> Prepared:
    nncf.set_log_level(logging.ERROR)
    data = nncf.Dataset([_fed(batch) for batch in task.calibration])
    # As NNCF documents it: the preset for convolutions by default, and "transformer" for those.
    kind = nncf.ModelType.TRANSFORMER if task.transformer else None
    return compiled(nncf.quantize(converted(task), data, model_type=kind), task.threads)
