"""Weights that are passed to functional operators.

A weight that depends on no input is computed now: its observer sees it once more (so that it needs
no calibration, as for dynamic quantization), and in the decomposed dialect it is stored as integers
that are dequantized where they are used, or as a narrower float that is widened there. One that
depends on an input stays an activation.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from backquant.convert.dialects import check_narrow_float, without_uint16
from backquant.convert.fold import Constants
from backquant.convert.state import Conversion
from backquant.dtypes import (
    ObservedQParams,
    TensorQParams,
    block_of,
    is_narrow_float,
    is_scaled_float,
    quantize_tensor,
)
from backquant.graph import register_blocks, register_float8, register_quantized_decomposed
from backquant.observe.qparams import measure
from backquant.prepare import Role

__all__ = ["convert_functional_weights", "measure_functional_weights"]


def measure_functional_weights(
    prepared: fx.GraphModule, work: Conversion
) -> dict[str, ObservedQParams]:
    """Qparams of the weight observers whose weight is constant, by head of their group."""
    found: dict[str, ObservedQParams] = {}
    constants = Constants(work.module)
    for site in work.prepared.sites.sites:
        if site.role is not Role.WEIGHT or site.shared:
            continue
        weight = constants.tensor(work.nodes[site.name].all_input_nodes[0])
        if weight is not None:
            observer = copy.deepcopy(prepared.get_submodule(site.name))
            with torch.no_grad():
                observer(weight)
            found[site.name] = measure(observer)
    return found


def convert_functional_weights(work: Conversion, needed: frozenset[str]) -> set[str]:
    """Replace the observers of constant weights by integer buffers; returns their sites, of ``needed``."""
    if work.dialect != "decomposed":
        return set()
    constants = Constants(work.module)
    done: set[str] = set()
    for site in work.prepared.sites.sites:
        found = work.qparams[site.group]
        if site.role is not Role.WEIGHT or site.name not in needed or not _is_stored(found):
            continue
        node = work.nodes[site.name]
        source = node.all_input_nodes[0]
        weight = constants.tensor(source)
        if weight is None:
            continue
        name = str(source.target).replace(".", "_") if source.op == "get_attr" else source.name
        node.replace_all_uses_with(_stored(work, node, name, weight, found))
        work.editor.erase(node)
        done.add(site.name)
    return done


def _is_stored(found: ObservedQParams) -> bool:
    return found.scale is not None or is_narrow_float(found.dtype)


def _stored(
    work: Conversion, position: fx.Node, name: str, weight: torch.Tensor, found: ObservedQParams
) -> fx.Node:
    """Integer buffer and dequantize node, right before ``position``; or those of a narrower float."""
    register_quantized_decomposed()
    ops = torch.ops.quantized_decomposed
    if is_narrow_float(found.dtype):
        limit = torch.finfo(found.dtype).max
        narrow = weight.clamp(-limit, limit).to(found.dtype)
        stored = _buffer(work, position, f"{name}_quantized_", narrow)
        return _widened(work, position, ops.convert_element_type.no_fuse, (stored, torch.float32))
    if is_scaled_float(found.dtype) and found.axis is not None:
        found = _as_grid(found, weight)
    if found.scale is not None and found.scale.dim() > 1:
        return _in_blocks(work, position, name, weight, found)
    if is_scaled_float(found.dtype):
        check_narrow_float(found, name)
        register_float8()
        scale = found.number.scale
        kept = weight.clamp(found.quant_min * scale, found.quant_max * scale)
        narrow = torch.ops.backquant.quantize_float8.default(kept, scale, found.dtype)
        stored = _buffer(work, position, f"{name}_quantized_", narrow)
        widen = torch.ops.backquant.dequantize_float8.default
        return _widened(work, position, widen, (stored, scale))
    if found.axis is None:
        qparams: tuple[Any, ...] = found.number.literals
        integers = ops.quantize_per_tensor.default(weight, *qparams)
        dequantize = ops.dequantize_per_tensor.default
    else:
        found = without_uint16(found)
        assert found.scale is not None and found.zero_point is not None
        tensors = (found.scale, found.zero_point)
        rest = (found.axis, found.quant_min, found.quant_max, found.storage)
        integers = ops.quantize_per_channel.default(weight, *tensors, *rest)
        dequantize = ops.dequantize_per_channel.default
        qparams = (
            _buffer(work, position, f"{name}_scale_", tensors[0]),
            _buffer(work, position, f"{name}_zero_point_", tensors[1]),
            *rest,
        )
    stored = _buffer(work, position, f"{name}_quantized_", integers)
    return _widened(work, position, dequantize, (stored, *qparams))


def _as_grid(found: ObservedQParams, weight: torch.Tensor) -> ObservedQParams:
    """Scales of channels as those of blocks that are channels."""
    assert found.scale is not None and found.zero_point is not None and found.axis is not None
    shape = [1] * weight.dim()
    shape[found.axis] = -1
    grid = found.scale.reshape(shape), found.zero_point.reshape(shape)
    return replace(found, scale=grid[0], zero_point=grid[1], axis=None)


def _in_blocks(
    work: Conversion, position: fx.Node, name: str, weight: torch.Tensor, found: ObservedQParams
) -> fx.Node:
    assert found.scale is not None and found.zero_point is not None
    register_blocks()
    block = block_of(weight.shape, found.scale.shape)
    integers = quantize_tensor(weight, cast(TensorQParams, replace(found, block=block)))
    stored = _buffer(work, position, f"{name}_quantized_", integers)
    qparams = (
        _buffer(work, position, f"{name}_scale_", found.scale),
        _buffer(work, position, f"{name}_zero_point_", found.zero_point),
    )
    dequantize = torch.ops.backquant.dequantize_blocks.default
    return _widened(work, position, dequantize, (stored, *qparams))


def _widened(work: Conversion, position: fx.Node, target: Any, args: tuple[Any, ...]) -> fx.Node:
    with work.editor.graph.inserting_before(position):
        result = work.editor.graph.call_function(target, args)
    work.editor.provenance.record(result.name, (position.name,))
    return result


def _buffer(work: Conversion, position: fx.Node, prefix: str, tensor: torch.Tensor) -> fx.Node:
    return work.editor.read_buffer(position, work.editor.names.take(prefix), work.kept(tensor))
