"""ExecuTorch on the XNNPACK delegate: floats, its own quantizer, backquant's export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import backquant
from backquant.deploy.executorch import ExecuTorchModel
from backquant.graph.silence import quiet
from benchmarks.peers import Inputs, Prepared, Task
from benchmarks.peers.exported import captured, with_facts

__all__ = [
    "prepare_float",
    "prepare_ours",
    "prepare_ours_dynamic",
    "prepare_own",
    "prepare_own_dynamic",
]


def _program(exported: Any, task: Task, name: str) -> Prepared:
    with quiet():
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower

        lowered = to_edge_transform_and_lower(exported, partitioner=[XnnpackPartitioner()])
        path = Path(task.workspace, f"{name}.pte")
        path.write_bytes(lowered.to_executorch().buffer)
    return _prepared(path)


def _prepared(path: Path) -> Prepared:
    model = ExecuTorchModel(path)

    def run(inputs: Inputs) -> torch.Tensor:
        output: torch.Tensor = model(*inputs)
        return output

    return Prepared(lambda x: x, run, lambda y: y.numpy(), {})


def prepare_float(task: Task) -> Prepared:
    """The float model in the delegate."""
    with quiet(), torch.no_grad():
        return _program(torch.export.export(task.model, task.calibration[0]), task, "float")


def prepare_own(task: Task) -> Prepared:
    """XNNPACKQuantizer, per channel, by torchao's prepare_pt2e and convert_pt2e."""
    return _own(task, dynamic=False)


def prepare_own_dynamic(task: Task) -> Prepared:
    """The same with its dynamic configuration."""
    return _own(task, dynamic=True)


def _own(task: Task, dynamic: bool) -> Prepared:
    with quiet(), torch.no_grad():
        from executorch.backends.xnnpack.quantizer.xnnpack_quantizer import (
            XNNPACKQuantizer,
            get_symmetric_quantization_config,
        )
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

        x = task.calibration[0]
        quantizer = XNNPACKQuantizer()
        config = get_symmetric_quantization_config(is_per_channel=True, is_dynamic=dynamic)
        quantizer.set_global(config)
        prepared = prepare_pt2e(captured(task), quantizer)
        for batch in task.calibration:
            prepared(*batch)
        return _program(torch.export.export(convert_pt2e(prepared), x), task, "own")


def prepare_ours(task: Task) -> Prepared:
    """backquant for xnnpack."""
    return _ours(task, None)


def prepare_ours_dynamic(task: Task) -> Prepared:
    """Linear layers and convolutions, whose activations are quantized at each call."""
    return _ours(
        task, backquant.QConfigMapping().set_global(backquant.qconfig.per_channel_dynamic_qconfig)
    )


def _ours(task: Task, mapping: backquant.QConfigMapping | None) -> Prepared:
    quantized = backquant.quantize(
        task.model,
        task.calibration[0],
        backend="xnnpack",
        calibration=task.calibration,
        qconfig_mapping=mapping,
    )
    path = Path(task.workspace, "ours.pte")
    exported = backquant.export(quantized, path, require=0.0, overwrite=True)
    return with_facts(_prepared(path), exported)
