"""ExecuTorch on the XNNPACK delegate: floats, its own quantizer, backquant's export."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch

import backquant
from backquant.deploy.executorch import ExecuTorchModel
from backquant.deploy.program import quiet
from benchmarks.peers import Prepared, Task
from benchmarks.peers.exported import with_facts

__all__ = ["prepare_float", "prepare_own", "prepare_ours"]


def _program(exported: Any, task: Task, name: str) -> Prepared:
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        path = Path(task.workspace, f"{name}.pte")
        path.write_bytes(lowered.to_executorch().buffer)
    return _prepared(path)


def _prepared(path: Path) -> Prepared:
    return Prepared(lambda x: x, ExecuTorchModel(path), lambda y: y.numpy(), {})


def prepare_float(task: Task) -> Prepared:
    """The float model in the delegate."""
    with quiet(), torch.no_grad():
        return _program(torch.export.export(task.model, (task.calibration[0],)), task, "float")


def prepare_own(task: Task) -> Prepared:
    """XNNPACKQuantizer, per channel, by torchao's prepare_pt2e and convert_pt2e."""
    with quiet(), torch.no_grad():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        x = task.calibration[0]
        quantizer = XNNPACKQuantizer()
        quantizer.set_global(get_symmetric_quantization_config(is_per_channel=True))
        captured = torch.export.export(copy.deepcopy(task.model), (x,), strict=True).module()
        prepared = prepare_pt2e(captured, quantizer)
        for batch in task.calibration:
            prepared(batch)
        return _program(torch.export.export(convert_pt2e(prepared), (x,)), task, "own")


def prepare_ours(task: Task) -> Prepared:
    """backquant for xnnpack."""
    quantized = backquant.quantize(
        task.model, task.calibration[0], backend="xnnpack", calibration=task.calibration
    )
    path = Path(task.workspace, "ours.pte")
    exported = backquant.export(quantized, path, require=0.0, overwrite=True)
    return with_facts(_prepared(path), exported)
