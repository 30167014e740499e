"""What is compared: each peer makes a callable from a float model, in a process of its own.

A peer is a function ``prepare(task) -> Prepared``. What it cannot do, it raises; the row says so.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

__all__ = ["PEERS", "Inputs", "Prepared", "Task", "load"]

Inputs = tuple[torch.Tensor, ...]  # the positional arguments of one call


@dataclass(frozen=True)
class Task:
    """``calibration``: batches of one. ``workspace``: a folder that the peers of one model share.
    ``transformer``: whether the model has attention, which some quantizers want to be told.
    ``held``, ``judge``: other batches, and a metric of the outputs on them (more is better), for what
    searches by a metric.
    """

    name: str
    model: nn.Module
    calibration: list[Inputs]
    threads: int
    workspace: Path
    transformer: bool = False
    held: list[Inputs] = field(default_factory=list)
    judge: Callable[[list[torch.Tensor]], float] | None = None

    def judged(self, run: Callable[[Inputs], torch.Tensor]) -> float:
        """The metric of a model on ``held``."""
        if self.judge is None:
            raise ValueError(f"{self.name} has no metric on held data")
        return self.judge([run(batch) for batch in self.held])


@dataclass(frozen=True)
class Prepared:
    """``feed`` turns inputs into what ``run`` takes, outside of the timing; ``read`` gives the output."""

    feed: Callable[[Inputs], Any]
    run: Callable[[Any], Any]
    read: Callable[[Any], np.ndarray[Any, Any]]
    facts: dict[str, Any] = field(default_factory=dict)


# By name: the module in this folder, its function, and the column's title.
PEERS: dict[str, tuple[str, str, str]] = {
    "fp32": ("eager", "prepare", "fp32 eager"),
    "torch_ao": ("torch_ao", "prepare", "torch.ao FX x86"),
    "ort": ("onnx_runtime", "prepare_float", "ONNX Runtime fp32"),
    "ort_int8": ("onnx_runtime", "prepare_int8", "ONNX Runtime int8"),
    "openvino": ("openvino", "prepare_float", "OpenVINO default"),
    "openvino_int8": ("openvino", "prepare_int8", "OpenVINO int8"),
    "backquant": ("ours", "prepare", "backquant x86"),
    "backquant_library": ("ours", "prepare_library", "backquant x86, library of kernels"),
    "backquant_compiled": ("ours", "prepare_compiled", "backquant x86 compiled"),
}
# Compared with itself on other sources (``benchmarks.beside``), and with no other.
KEPT = ("ours", "prepare_kept", "backquant x86, all on integers")


def load(peer: str) -> Callable[[Task], Prepared]:
    """The peer's function, its packages imported now."""
    module, function, _ = KEPT if peer == "backquant_kept" else PEERS[peer]
    found: Callable[[Task], Prepared] = getattr(
        import_module(f"benchmarks.peers.{module}"), function
    )
    return found
