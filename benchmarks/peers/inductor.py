"""AOTInductor on x86: floats, torchao's X86InductorQuantizer, backquant's export."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import backquant
from backquant.graph.silence import quiet
from benchmarks.peers import Prepared, Task
from benchmarks.peers.exported import captured, with_facts

__all__ = ["prepare_float", "prepare_own", "prepare_ours"]


def _package(exported: Any, task: Task, name: str) -> Prepared:
    path = Path(task.workspace, f"{name}.pt2")
    with quiet(), torch.no_grad():
        torch._inductor.aoti_compile_and_package(
            exported, package_path=str(path), inductor_configs={"freezing": True}
        )
    return _prepared(path)


def _prepared(path: Path) -> Prepared:
    with quiet():
        run = torch._inductor.aoti_load_package(str(path))
    return Prepared(lambda x: x, lambda x: run(*x), lambda y: y.numpy(), {})


def prepare_float(task: Task) -> Prepared:
    """The float model, compiled and frozen."""
    with quiet(), torch.no_grad():
        return _package(torch.export.export(task.model, task.calibration[0]), task, "float")


def prepare_own(task: Task) -> Prepared:
    """X86InductorQuantizer with its default configuration."""
    with quiet(), torch.no_grad():
        from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e
        from torchao.quantization.pt2e.quantizer import x86_inductor_quantizer as own

        x = task.calibration[0]
        quantizer = own.X86InductorQuantizer()
        quantizer.set_global(own.get_default_x86_inductor_quantization_config())
        prepared = prepare_pt2e(captured(task), quantizer)
        for batch in task.calibration:
            prepared(*batch)
        return _package(torch.export.export(convert_pt2e(prepared), x), task, "own")


def prepare_ours(task: Task) -> Prepared:
    """backquant for inductor_x86."""
    quantized = backquant.quantize(
        task.model, task.calibration[0], backend="inductor_x86", calibration=task.calibration
    )
    path = Path(task.workspace, "ours.pt2")
    exported = backquant.export(quantized, path, require=0.0, overwrite=True)
    return with_facts(_prepared(path), exported)
