"""A quantized model beside its float model, operator by operator, on data.

For each batch three graphs run side by side, a node at a time: the float one, the quantized one as it is,
and the quantized one in which every value is replaced by that of the float one once it was measured. The
error of a value in the second is accumulated, that in the third is added by the operator itself. Values are
dropped after their last use, so that no graph keeps its activations.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.accuracy.comparison import Comparison, OperatorError, OutputError
from backquant.accuracy.counterparts import Point, as_float, points_of, represented
from backquant.accuracy.figures import ErrorSums, Histogram
from backquant.accuracy.nodes import last_uses, placeholders, run_node
from backquant.calibrate import Progress
from backquant.calibrate.batches import count_of
from backquant.lower.kernels.engine_setting import running
from backquant.runtime import QuantizedModel
from backquant.runtime.as_integers import as_integers
from backquant.runtime.input_guard import quantized_inputs


def compared(
    float_graph: fx.GraphModule,
    quantized: QuantizedModel,
    batches: Iterable[Any],
    progress: Progress | None = None,
) -> Comparison:
    """Every operator of ``quantized`` beside ``float_graph``, whose nodes have the names of the plan.

    Raises ``InputError`` for a batch that does not fit.
    """
    run = _Comparing(float_graph, quantized)
    measured = {one.name.lstrip("*") for one in quantized_inputs(quantized.graph_module)}
    total = count_of(batches)
    for index, batch in enumerate(batches):
        with torch.no_grad(), running():
            run.batch(placeholders(float_graph, batch, index, measured))
        if progress is not None:
            progress(index + 1, total)
    return run.result()


@dataclass
class _Sums:
    added: ErrorSums = field(default_factory=ErrorSums)
    accumulated: ErrorSums = field(default_factory=ErrorSums)
    histogram: Histogram = field(default_factory=Histogram)
    clipped: int = 0
    counted: int = 0
    bounds: tuple[float, float] | None = None


class _Floats:
    """The float graph, run as far as somebody asks."""

    def __init__(self, module: fx.GraphModule, compared: Iterable[str]) -> None:
        self.module = module
        self.nodes = list(module.graph.nodes)
        self.place = {node.name: index for index, node in enumerate(self.nodes)}
        self.last = last_uses((n.name, [r.name for r in n.all_input_nodes]) for n in self.nodes)
        self.kept = frozenset(compared)

    def start(self, inputs: dict[str, Any]) -> None:
        self.values = dict(inputs)
        self.done = 0
        self.freed: set[str] = set()

    def value(self, name: str) -> Any:
        """That of a node; all before it is computed."""
        while self.done <= self.place[name]:
            node = self.nodes[self.done]
            if node.op != "placeholder":
                self.values[node.name] = run_node(
                    self.module, node, lambda read: self.values[read.name]
                )
            for read in self.last.get(node.name, ()):
                if read not in self.kept or read in self.freed:
                    self.values.pop(read, None)
            self.done += 1
        return self.values[name]

    def free(self, name: str) -> None:
        """``name`` is compared with nothing any more."""
        self.freed.add(name)
        step = self.nodes[self.place[name]]
        if all(self.place[user.name] < self.done for user in step.users):
            self.values.pop(name, None)


class _Comparing:
    def __init__(self, float_graph: fx.GraphModule, quantized: QuantizedModel) -> None:
        self.quantized, self.gm = quantized, quantized.graph_module
        self.points = {point.node: point for point in points_of(quantized, float_graph)}
        self.last_compared = {point.value: point.node for point in self.points.values()}
        self.floats = _Floats(float_graph, self.last_compared)
        self.nodes = list(self.gm.graph.nodes)
        self.last = last_uses((n.name, [r.name for r in n.all_input_nodes]) for n in self.nodes)
        self.sums: dict[str, _Sums] = {}
        self.outputs: list[ErrorSums] = []
        self.batches = 0

    def batch(self, inputs: dict[str, Any]) -> None:
        self.floats.start(inputs)
        actual, forced = self._inputs(inputs), self._inputs(inputs)
        for node in self.nodes:
            if node.op == "placeholder":
                continue
            actual[node.name] = run_node(self.gm, node, lambda read: actual[read.name])
            if node.op == "output":
                break
            forced[node.name] = run_node(self.gm, node, lambda read: forced[read.name])
            point = self.points.get(node.name)
            if point is not None:
                self._measure(point, actual[node.name], forced)
            for read in self.last.get(node.name, ()):
                actual.pop(read, None)
                forced.pop(read, None)
        self._measure_outputs(actual["output"])
        self.batches += 1

    def _inputs(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Quantized inputs are integers; each run has its own, since kernels may write into them."""
        names = [node.name for node in self.nodes if node.op == "placeholder"]
        given = dict(inputs)
        for index, qparams in self.quantized.input_qparams.items():
            given[names[index]] = as_integers(given[names[index]], qparams)
        return given

    def _measure(self, point: Point, actual: Any, forced: dict[str, Any]) -> None:
        wanted = self.floats.value(point.value)
        if self.last_compared[point.value] == point.node:
            self.floats.free(point.value)
        if not _comparable(wanted, actual):
            return
        found = as_float(actual, point.qparams)
        alone = as_float(forced[point.node], point.qparams)
        if found is None or alone is None:
            return
        sums = self.sums.setdefault(point.node, _Sums())
        sums.accumulated.add(wanted, found)
        sums.added.add(wanted, alone)
        sums.bounds = _bounds(actual, point)
        sums.histogram.add(wanted, sums.bounds)
        if sums.bounds is not None:
            low, high = sums.bounds
            half = (high - low) / 510  # what rounds to an end is not clipped
            sums.clipped += int(((wanted < low - half) | (wanted > high + half)).sum())
            sums.counted += wanted.numel()
        forced[point.node] = represented(wanted, actual, point.qparams)

    def _measure_outputs(self, found: Any) -> None:
        integers = iter(self.quantized.output_qparams.values())
        position = 0
        wanted = tree_leaves(self.floats.value("output"))
        for one, two in zip(wanted, tree_leaves(found), strict=False):
            if not _comparable(one, two):
                continue
            qparams = None if two.is_floating_point() else next(integers, None)
            values = as_float(two, qparams)
            if values is None:
                continue
            if position == len(self.outputs):
                self.outputs.append(ErrorSums())
            self.outputs[position].add(one, values)
            position += 1

    def result(self) -> Comparison:
        record = self.quantized.record
        rows = tuple(self._row(self.points[name], sums) for name, sums in self.sums.items())
        return Comparison(
            backend=record.backend_config.name or "unnamed backend",
            model=record.model,
            batches=self.batches,
            rows=rows,
            outputs=tuple(
                OutputError(i, sums.sqnr, sums.cosine, sums.largest)
                for i, sums in enumerate(self.outputs)
            ),
            inputs=self._drawn({row.node for row in rows}),
        )

    def _row(self, point: Point, sums: _Sums) -> OperatorError:
        decision = self.quantized.plan.decisions.get(point.operators[0])
        path = "" if decision is None else decision.module_path
        operator = "" if decision is None else decision.operator
        return OperatorError(
            node=point.node,
            operators=point.operators,
            name=path or point.value,
            operator="rounding to integers" if point.rounds else operator,
            kernel=point.kernel,
            rounds=point.rounds,
            added=sums.added.sqnr,
            accumulated=sums.accumulated.sqnr,
            cosine=sums.accumulated.cosine,
            largest=sums.accumulated.largest,
            clipped=sums.clipped / sums.counted if sums.counted else None,
            unused=_unused(sums),
            bounds=sums.bounds,
            histogram=sums.histogram,
        )

    def _drawn(self, rows: set[str]) -> dict[str, tuple[str, ...]]:
        """What each row of the page reads, looking through nodes that have no row."""
        behind: dict[str, tuple[str, ...]] = {}
        found: dict[str, tuple[str, ...]] = {}
        for node in self.nodes:
            names = (name for read in node.all_input_nodes for name in behind[read.name])
            read = tuple(dict.fromkeys(names))
            behind[node.name] = (node.name,) if node.name in rows else read
            if node.name in rows:
                found[node.name] = read
        return found


def _comparable(wanted: Any, actual: Any) -> bool:
    if not isinstance(wanted, torch.Tensor) or not isinstance(actual, torch.Tensor):
        return False
    return wanted.is_floating_point() and wanted.shape == actual.shape and bool(wanted.numel())


def _bounds(actual: torch.Tensor, point: Point) -> tuple[float, float] | None:
    """What the integers can hold; ``None`` for floats."""
    if actual.is_floating_point():
        return None
    if actual.is_quantized:
        if actual.qscheme() != torch.per_tensor_affine:
            return None
        scale, zero_point = actual.q_scale(), actual.q_zero_point()
        info = torch.iinfo(actual.int_repr().dtype)
        return (info.min - zero_point) * scale, (info.max - zero_point) * scale
    qparams = point.qparams
    assert qparams is not None
    if qparams.quant_min < qparams.quant_max:
        return qparams.bounds
    info = torch.iinfo(actual.dtype)
    scale, zero_point = qparams.args
    return (info.min - zero_point) * scale, (info.max - zero_point) * scale


def _unused(sums: _Sums) -> float | None:
    if sums.bounds is None:
        return None
    low, high = sums.bounds
    covered = min(high, sums.histogram.most) - max(low, sums.histogram.least)
    return min(1.0, max(0.0, 1 - covered / (high - low))) if high > low else None
