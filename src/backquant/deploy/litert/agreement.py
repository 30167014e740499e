"""A written file beside the quantized model, on the example inputs, output by output."""

from __future__ import annotations

from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch.utils import _pytree as pytree

from backquant.deploy.job import ExportJob
from backquant.deploy.litert.network import Network
from backquant.deploy.litert.readback import run_file
from backquant.deploy.roundings import computed, dithered, ratio
from backquant.errors import ExportError

__all__ = ["check_agreement", "file_inputs", "file_outputs"]

_LEAST_SQNR = 3.0  # dB: a wrong operator moves values by their own size
_MORE = 3.0  # dB: twice the noise that roundings make is no rounding


def file_inputs(job: ExportJob, network: Network) -> list[Any]:
    """The example inputs as the file takes them."""
    names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
    given = dict(zip(names, job.args, strict=False)) | dict(job.kwargs)
    leaves = [t for t in pytree.tree_leaves(list(given.values())) if isinstance(t, torch.Tensor)]
    made = []
    for tensor, value in zip(network.inputs, leaves, strict=True):
        array = value.detach().numpy()
        if job.options.get("channels_last") and array.ndim == 4:
            array = array.transpose(0, 2, 3, 1)
        if tensor.dtype in ("INT8", "INT16") and array.dtype == np.float32:
            array = _quantized(array, tensor)
        made.append(array)
    return made


def _quantized(array: Any, tensor: Any) -> Any:
    low, high = (-128, 127) if tensor.dtype == "INT8" else (-32768, 32767)
    [scale], [zero_point] = tensor.scales.scale, tensor.scales.zero_point
    steps = np.rint(array.astype(np.float64) / scale) + zero_point
    return np.clip(steps, low, high).astype(tensor.dtype.lower())


def file_outputs(job: ExportJob, network: Network, arrays: list[Any]) -> list[torch.Tensor]:
    """What the file gives, as the model gives it: floats, in PyTorch's order."""
    made = []
    for tensor, array in zip(network.outputs, arrays, strict=True):
        value = array
        if tensor.is_integer:
            [scale], [zero_point] = tensor.scales.scale, tensor.scales.zero_point  # type: ignore[union-attr]
            value = ((array.astype(np.int64) - zero_point) * np.float64(scale)).astype(np.float32)
        if job.options.get("channels_last") and value.ndim == 4:
            value = value.transpose(0, 3, 1, 2)
        made.append(torch.from_numpy(np.ascontiguousarray(value)))
    return made


def check_agreement(job: ExportJob, network: Network, content: bytes) -> None:
    """Raise ``ExportError`` where the runtime computes something else than the model."""
    arrays = run_file(content, file_inputs(job, network))
    made = [t for t in file_outputs(job, network, arrays) if t.is_floating_point()]
    expected = computed(job)
    for place, (one, other) in enumerate(zip(expected, made, strict=True)):
        near = ratio([one], [other])
        if near >= _LEAST_SQNR:
            continue
        rounding = ratio([one], [dithered(job)[place]])
        if near < rounding - _MORE:
            raise ExportError(
                f"LiteRT computes something else than the reference model: output {place} differs with "
                f"an SQNR of {near:.1f} dB, where noise of half a step at every rounding leaves "
                f"{rounding:.1f} dB",
                where=f"ai-edge-litert {metadata.version('ai-edge-litert')}, on the example inputs",
                fix="leave parts out of the quantization until it agrees, and report it",
            )
