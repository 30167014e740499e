"""ONNX Runtime: the exported float model, and its own static quantization of it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime
import torch
from onnxruntime.quantization import (
    CalibrationDataReader,
    CalibrationMethod,
    QuantFormat,
    QuantType,
    quantize_static,
)
from onnxruntime.quantization.shape_inference import quant_pre_process

from backquant.graph.silence import without_log_records
from benchmarks.peers import Inputs, Prepared, Task

__all__ = ["prepare_float", "prepare_int8", "prepare_percentile"]


def exported(task: Task) -> Path:
    path = task.workspace / "float.onnx"
    if not path.exists():
        warnings.simplefilter("ignore")
        options = {"dynamo": True, "verbose": False, "external_data": False}
        torch.onnx.export(task.model, task.calibration[0], str(path), **options)
    return path


def _named(names: Sequence[str], inputs: Inputs) -> dict[str, Any]:
    return {name: x.numpy() for name, x in zip(names, inputs, strict=True)}


def session(path: Path, threads: int) -> Prepared:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    made = onnxruntime.InferenceSession(str(path), options, ["CPUExecutionProvider"])
    names = [item.name for item in made.get_inputs()]
    return Prepared(
        lambda inputs: _named(names, inputs),
        lambda feed: made.run(None, feed),
        lambda outputs: outputs[0],
        {"onnxruntime": onnxruntime.__version__},
    )


def prepare_float(task: Task) -> Prepared:
    return session(exported(task), task.threads)


class Reader(CalibrationDataReader):  # type: ignore[misc]
    def __init__(self, names: Sequence[str], batches: list[Inputs]) -> None:
        self.rows: Iterator[dict[str, Any]] = iter([_named(names, batch) for batch in batches])

    def get_next(self) -> dict[str, Any] | None:
        return next(self.rows, None)


def prepare_int8(task: Task) -> Prepared:
    """QDQ, uint8 activations, int8 weights per channel; the rest as ONNX Runtime chooses."""
    return _quantized(task, CalibrationMethod.MinMax)


def prepare_percentile(task: Task) -> Prepared:
    """The same with ranges that hold 99.999 % of the values, ONNX Runtime's default for that method."""
    return _quantized(task, CalibrationMethod.Percentile)


def _quantized(task: Task, method: CalibrationMethod) -> Prepared:
    source, quantized = exported(task), task.workspace / "int8.onnx"
    with without_log_records():
        _quantize(task, method, source, quantized)
    return session(quantized, task.threads)


@contextmanager
def _working_in(folder: Path) -> Iterator[None]:
    """Where symbolic shapes fail, ONNX Runtime leaves files in the folder that the process works in."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def _quantize(task: Task, method: CalibrationMethod, source: Path, quantized: Path) -> None:
    source, ready = source.resolve(), (task.workspace / "ready.onnx").resolve()
    with _working_in(task.workspace):
        try:
            quant_pre_process(str(source), str(ready))
        except Exception:  # its symbolic shapes fail on the mask of some models
            quant_pre_process(str(source), str(ready), skip_symbolic_shape=True)
    made = onnxruntime.InferenceSession(str(ready), providers=["CPUExecutionProvider"])
    quantize_static(
        str(ready),
        str(quantized),
        Reader([item.name for item in made.get_inputs()], task.calibration),
        quant_format=QuantFormat.QDQ,
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
        calibrate_method=method,
    )
