"""Ranges of activations, chosen by the error of the operators that read them."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping
from dataclasses import replace
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn

from backquant.accuracy.figures import ErrorSums
from backquant.accuracy.recipes.bench import Bench
from backquant.accuracy.recipes.draft import Change, Draft
from backquant.accuracy.reference_run import run_node
from backquant.accuracy.twin import Twin, Walk
from backquant.dtypes import ObservedQParams, QParams, quantize_tensor
from backquant.graph import get_module
from backquant.observe import HistogramObserver
from backquant.observe.histogram_grid import Array, Spread

_BATCHES = 2  # each range is one more run of every operator
_SHARES = (1.25, 1.6, 2.5, 0.85, 0.7, 0.5)  # of a range
_PERCENTILES = (99.9, 99.99, 99.999)
_LEAST = 1e-12  # of a scale


def ranges(draft: Draft, bench: Bench) -> Iterator[Change]:
    """For each activation, the range with which the operators that read it have the least error at their own
    outputs. (Of an operator that only moves values, the error of the value itself counts.)

    Candidates: shares of the measured range (of a histogram: of the range of the least squared error),
    percentiles, and the range of least entropy.
    """
    twin = draft.twin()
    chosen = {
        head: [qparams, *_candidates(get_module(draft.prepared, head), qparams)]
        for head, qparams in observed_ranges(twin).items()
    }
    losses: dict[str, list[list[ErrorSums]]] = {
        head: [[] for _ in tried] for head, tried in chosen.items()
    }
    heads = heads_by_value(twin, chosen)
    for walk in islice(bench.walks(twin, lambda _: False), _BATCHES if chosen else 0):
        for position, node in enumerate(twin.nodes):
            walk.to(position)
            for head, read in _read_by(node, heads).items():
                _try_ranges(twin, walk, node, read, chosen[head], losses[head])
    for head, tried in chosen.items():
        found = [sum(sums.loss for sums in each) for each in losses[head]]
        best = min(range(len(found)), key=found.__getitem__) if any(found) else 0
        if best and found[best] < 0.98 * found[0]:
            yield Change(head, activation=tried[best])


def _candidates(observer: nn.Module, qparams: ObservedQParams) -> Iterator[ObservedQParams]:
    assert qparams.scale is not None
    for share in _SHARES:
        yield replace(qparams, scale=qparams.scale * share)
    if not isinstance(observer, HistogramObserver) or not observer.min_val < observer.max_val:
        return
    low, high = observer.min_val.item(), observer.max_val.item()
    values = observer.state.spread(observer.mantissa_bits, low, high)
    for percent in _PERCENTILES:
        yield over_range(qparams, *percentile_range(values, percent))
    levels = qparams.quant_max - qparams.quant_min + 1
    yield over_range(qparams, *entropy_range(values, levels))


def over_range(qparams: ObservedQParams, low: float, high: float) -> ObservedQParams:
    """The same integers, for the range from ``low`` to ``high``, extended to hold zero."""
    low, high = min(low, 0.0), max(high, 0.0)
    steps = qparams.quant_max - qparams.quant_min
    assert qparams.scale is not None and qparams.zero_point is not None
    if qparams.qscheme in (torch.per_tensor_symmetric, torch.per_channel_symmetric):
        scale = max(2 * max(-low, high) / steps, _LEAST)
        return replace(qparams, scale=torch.full_like(qparams.scale, scale))
    scale = max((high - low) / steps, _LEAST)
    zero_point = torch.full_like(qparams.zero_point, round(qparams.quant_min - low / scale))
    return replace(qparams, scale=torch.full_like(qparams.scale, scale), zero_point=zero_point)


def observed_ranges(twin: Twin) -> dict[str, ObservedQParams]:
    """The activations with one measured scale, by their observer. Where several values share qparams, all
    that read one of them are its readers.
    """
    found: dict[str, ObservedQParams] = {}
    sites = twin.record.sites
    known = {site.name for site in sites.sites}
    for site in sites.sites:
        qparams = twin.record.qparams.get(site.name)
        if qparams is None or qparams.scale is None or qparams.scale.numel() != 1:
            continue
        if site.role.value in ("weight", "bias") or site.group not in known:
            continue
        found.setdefault(site.group, qparams)
    return found


def _try_ranges(
    twin: Twin,
    walk: Walk,
    node: fx.Node,
    read: list[fx.Node],
    tried: list[ObservedQParams],
    losses: list[list[ErrorSums]],
) -> None:
    """Run ``node`` for each range, with the values in ``read``, which have one observer, rounded to it."""
    if node.name not in twin.of:
        return
    wanted = run_node(twin.float_graph, node, lambda source: walk.values[source.name])
    if not isinstance(wanted, Tensor) or not wanted.is_floating_point():
        return
    for place, qparams in enumerate(tried):

        def value(source: fx.Node, qparams: ObservedQParams = qparams) -> Any:
            found = walk.values[source.name]
            return rounded(found, qparams) if source in read else found

        sums = ErrorSums()
        sums.add(wanted, run_node(twin.float_graph, node, value))
        losses[place].append(sums)


def heads_by_value(twin: Twin, heads: Container[str]) -> dict[str, list[str]]:
    """The observers of each value, by their heads."""
    found: dict[str, dict[str, None]] = {}
    for site in twin.record.sites.sites:
        if site.group in heads:
            found.setdefault(site.value, {})[site.group] = None
    return {value: list(of) for value, of in found.items()}


def _read_by(node: fx.Node, heads: Mapping[str, list[str]]) -> dict[str, list[fx.Node]]:
    """What ``node`` reads, by the head of its observer."""
    found: dict[str, list[fx.Node]] = {}
    for source in node.all_input_nodes:
        for head in heads.get(source.name, ()):
            found.setdefault(head, []).append(source)
    return found


def rounded(x: Any, qparams: ObservedQParams) -> Any:
    """``x`` quantized and dequantized; anything but a float tensor is returned as it is.

    >>> one = torch.tensor([0.5]), torch.tensor([0])
    >>> rounded(torch.tensor([0.6]), ObservedQParams(*one, -128, 127, torch.qint8))
    tensor([0.5000])
    """
    if not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    assert qparams.scale is not None and qparams.zero_point is not None
    scale, zero_point = (
        part.to(x.device).reshape(()) for part in (qparams.scale, qparams.zero_point)
    )
    bounds = qparams.quant_min, qparams.quant_max
    made = quantize_tensor(x, QParams(scale, zero_point, *bounds, qparams.dtype))
    return (made.float() - zero_point) * scale


# Ranges that are read off a histogram of values: percentiles, and the least loss of information.

_BINS = 2048  # of absolute values, for the entropy
_STEP = 16


def percentile_range(values: Spread, percent: float) -> tuple[float, float]:
    """The range that holds ``percent`` of the values, half of the others beyond each end; zero is in it.

    >>> points = np.arange(-50.0, 51.0)
    >>> percentile_range(Spread(points, points, np.ones(101)), 90.0)
    (-45.0, 45.0)
    """
    below = np.cumsum(values.number) / values.number.sum()
    tail = (100 - percent) / 200
    low = values.lower[np.searchsorted(below, tail, side="right")]
    high = values.upper[np.searchsorted(below, 1 - tail, side="left")]
    return min(float(low), 0.0), max(float(high), 0.0)


def entropy_range(values: Spread, levels: int) -> tuple[float, float]:
    """The range, up to one absolute value on both sides, whose rounded form has the least Kullback-Leibler
    divergence from the values. ``levels``: of the integers.

    Source: S. Migacz, "8-bit Inference with TensorRT", GTC 2017.
    """
    low, high = float(values.lower[0]), float(values.upper[-1])
    counts, width = _absolute(values)
    if low < 0 < high:
        levels = max(2, levels // 2)
    ends = range(min(levels, _BINS), _BINS + 1, _STEP)
    end = min(ends, key=lambda end: divergence(counts, end, levels)) * width
    return max(low, -end) if low < 0 else 0.0, min(high, end) if high > 0 else 0.0


def divergence(counts: Array, end: int, levels: int) -> float:
    """The divergence of ``counts``, clipped at bin ``end``, from the same in ``levels`` equal parts.

    >>> divergence(np.array([2.0, 2.0, 1.0, 1.0]), 4, 2), divergence(np.array([3.0, 1.0]), 2, 2)
    (0.0, 0.0)
    """
    wanted = counts[:end].copy()
    filled = wanted > 0
    part = np.arange(end) * levels // end
    total = np.bincount(part, wanted, levels)
    members = np.maximum(np.bincount(part, filled, levels), 1)
    made = (total / members)[part] * filled
    wanted[-1] += counts[end:].sum()
    held = (wanted > 0) & (made > 0)
    if wanted[-1] > 0 and not held[-1]:
        return float("inf")  # what is clipped would be in a part that nothing is in
    p, q = wanted[held] / wanted.sum(), made[held] / made.sum()
    return float((p * np.log(p / q)).sum())


def _absolute(values: Spread) -> tuple[Array, float]:
    """Counts of absolute values in equal bins up to the largest, and the width of one."""
    most = max(abs(float(values.lower[0])), abs(float(values.upper[-1])))
    edges = np.linspace(0, most, _BINS + 1)
    ends = np.concatenate(([values.lower[0]], np.maximum.accumulate(values.upper)))
    sums = np.concatenate(([0.0], np.cumsum(values.number)))
    above = np.interp(edges, ends, sums)
    below = np.interp(-edges, ends, sums)
    inner = np.maximum(np.diff(above - below), 0)
    return inner, most / _BINS
