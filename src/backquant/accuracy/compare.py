"""A quantized model beside its float model, operator by operator, on data.

For each batch three graphs run side by side, a node at a time: the float one, the quantized one as it is,
and the quantized one in which every value is replaced by that of the float one once it was measured. The
error of a value in the second is accumulated, that in the third is added by the operator itself. Values are
dropped after their last use, so that no graph keeps its activations.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from backquant.accuracy.comparison import Comparison, OperatorError, OutputError
from backquant.accuracy.figures import ErrorSums, Histogram
from backquant.accuracy.reference_run import last_uses, placeholders, run_node
from backquant.calibrate import Progress
from backquant.calibrate.batches import count_of
from backquant.dtypes import QParams, TensorQParams, quantize_tensor
from backquant.graph import register_quantized_decomposed
from backquant.graph.example import call
from backquant.lower.kernels.boundary import quantize, requantize
from backquant.lower.kernels.engine_setting import running
from backquant.operators.joined_outputs import JoinedOutput, joined_outputs
from backquant.runtime import QuantizedModel
from backquant.runtime.boundary import as_integers, quantized_inputs
from backquant.runtime.kernel_facts import kernel_qparams


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
            run.joins = joined_outputs(float_graph, lambda module: call(module, batch))  # noqa: B023
            run.batch(placeholders(float_graph, batch, index, measured))
        if progress is not None:
            progress(index + 1, total)
    return run.result()


@dataclass
class _OutputSums:
    """Of one tensor of the result, and of each part of a join."""

    whole: ErrorSums = field(default_factory=ErrorSums)
    join: str = ""
    parts: list[ErrorSums] = field(default_factory=list)

    def add(self, wanted: torch.Tensor, found: torch.Tensor, join: JoinedOutput | None) -> None:
        self.whole.add(wanted, found)
        if join is None:
            return
        self.join, self.parts = join.node, self.parts or [ErrorSums() for _ in join.sizes]
        for sums, *pair in zip(self.parts, join.parts(wanted), join.parts(found), strict=True):
            sums.add(*pair)

    def error(self, position: int) -> OutputError:
        parts = tuple(_output_error(place, sums) for place, sums in enumerate(self.parts))
        return replace(_output_error(position, self.whole), join=self.join, parts=parts)


def _output_error(position: int, sums: ErrorSums) -> OutputError:
    return OutputError(position, sums.sqnr, sums.cosine, sums.largest)


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
        self.outputs: list[_OutputSums] = []
        self.joins: Mapping[int, JoinedOutput] = {}
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
        for place, (one, two) in enumerate(zip(wanted, tree_leaves(found), strict=False)):
            if not _comparable(one, two):
                continue
            qparams = None if two.is_floating_point() else next(integers, None)
            values = as_float(two, qparams)
            if values is None:
                continue
            if position == len(self.outputs):
                self.outputs.append(_OutputSums())
            self.outputs[position].add(one, values, self.joins.get(place))
            position += 1

    def result(self) -> Comparison:
        record = self.quantized.record
        rows = tuple(self._row(self.points[name], sums) for name, sums in self.sums.items())
        return Comparison(
            backend=record.backend_config.name or "unnamed backend",
            model=record.model,
            batches=self.batches,
            rows=rows,
            outputs=tuple(sums.error(position) for position, sums in enumerate(self.outputs)),
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


# Which value of the float graph each value of a quantized graph stands for, and as which integers.

_LOWERED = "_lowered"


@dataclass(frozen=True)
class Point:
    """A value of the quantized graph that can be compared.

    ``node``: of the quantized graph. ``value``: the node of the float graph that it stands for.
    ``qparams``: of its integers; ``None`` where it is a float, or the tensor itself says it.
    ``operators``: what was computed by this node, by name. ``rounds``: it only makes integers of a float.
    """

    node: str
    value: str
    qparams: QParams | None
    operators: tuple[str, ...]
    kernel: str = ""
    rounds: bool = False


def points_of(quantized: QuantizedModel, float_graph: fx.GraphModule) -> tuple[Point, ...]:
    """Where the two graphs can be compared, in the order of the quantized one.

    1. A kernel stands for the last of the operators that it replaced; a node that was not replaced for the
       node of its name.
    2. What makes integers of a value stands for that value.
    3. Integers have the qparams of their kernel; what has none of its own keeps those of what it reads.
    """
    return tuple(_Points(quantized, float_graph).found())


class _Points:
    def __init__(self, quantized: QuantizedModel, float_graph: fx.GraphModule) -> None:
        register_quantized_decomposed()
        self.gm = quantized.graph_module
        self.known = {node.name for node in float_graph.graph.nodes}
        self.uses = {name: use for use in quantized.kernels for name in use.nodes}
        record = quantized.record
        self.sites = {
            site.producer: record.qparams[site.name]
            for site in record.sites.sites
            if site.producer and site.name in record.qparams
        }
        # With the number of arguments before the qparams of what they give.
        self.rounding: dict[Any, int] = {
            quantize: 1,
            torch.ops.quantized_decomposed.quantize_per_tensor.default: 1,
            requantize: 3,
        }
        self.qparams: dict[fx.Node, QParams | None] = {}
        self.stands_for: dict[fx.Node, str] = {}

    def found(self) -> Iterator[Point]:
        for node in self.gm.graph.nodes:
            if node.op in ("get_attr", "output"):
                continue
            point = self._point(node)
            if point is None:
                self.qparams[node] = self._inherited(node)
                continue
            self.qparams[node], self.stands_for[node] = point.qparams, point.value
            if node.op != "placeholder":
                yield point

    def _point(self, node: fx.Node) -> Point | None:
        if node.op == "call_function" and node.target in self.rounding:
            return self._rounded(node)
        name = node.name.removesuffix(_LOWERED)
        use = self.uses.get(name)
        value = use.nodes[-1] if use is not None else name
        if value not in self.known:
            return None
        operators = use.nodes if use is not None else (name,)
        kernel = "" if use is None else use.kernel
        return Point(node.name, value, self._own(node, value), operators, kernel)

    def _rounded(self, node: fx.Node) -> Point | None:
        source = node.args[0]
        value = self.stands_for.get(source, "") if isinstance(source, fx.Node) else ""
        literals: Any = node.args[self.rounding[node.target] :]
        qparams = QParams(*literals)
        self.qparams[node] = qparams
        return Point(node.name, value, qparams, (value,), rounds=True) if value else None

    def _own(self, node: fx.Node, value: str) -> QParams | None:
        """The qparams as measured; a loaded model does not have these, but its kernels have them."""
        site = self.sites.get(value)
        if site is not None and site.scale is not None and site.scale.numel() == 1:
            return site.number
        found = kernel_qparams(self.gm, node)
        if found is None:
            is_table = node.name.endswith(_LOWERED) and node.op == "call_module"
            return None if is_table else self._inherited(node)
        pair = found.output or (found.inputs[0] if found.inputs else None)
        return None if pair is None else QParams(float(pair[0]), int(pair[1]), 0, 0, torch.uint8)

    def _inherited(self, node: fx.Node) -> QParams | None:
        known = (self.qparams.get(source) for source in node.all_input_nodes)
        return self.qparams.get(node) or next((q for q in known if q is not None), None)


def as_float(x: torch.Tensor, qparams: QParams | None) -> torch.Tensor | None:
    """A value of the quantized graph as the floats that it stands for; ``None`` where that is not known.

    >>> as_float(torch.tensor([3], dtype=torch.uint8), QParams(0.5, 1, 0, 255, torch.uint8))
    tensor([1.])
    """
    if x.is_quantized:
        return x.dequantize()
    if x.is_floating_point():
        return x
    if qparams is None or x.dtype == torch.bool:
        return None
    return (x.float() - qparams.zero_point) * qparams.scale


def represented(x: torch.Tensor, like: torch.Tensor, qparams: QParams | None) -> torch.Tensor:
    """The float ``x`` in the form that ``like`` has: a float, plain integers, a quantized tensor.

    >>> qparams = QParams(0.5, 1, 0, 255, torch.uint8)
    >>> represented(torch.tensor([1.0]), torch.tensor([0], dtype=torch.uint8), qparams)
    tensor([3], dtype=torch.uint8)
    """
    if like.is_quantized:
        if like.qscheme() != torch.per_tensor_affine:
            return like
        return torch.quantize_per_tensor(x, like.q_scale(), like.q_zero_point(), like.dtype)
    if like.is_floating_point():
        made = x.to(like.dtype)
    else:
        assert qparams is not None
        made = quantize_tensor(x.float(), _for(like, qparams))
    return torch.empty_like(like).copy_(made)


def _for(x: torch.Tensor, qparams: QParams) -> TensorQParams:
    """``qparams`` in the dtype that the integers have; its whole range where none is known."""
    low, high = qparams.quant_min, qparams.quant_max
    info = torch.iinfo(x.dtype)
    if low >= high or low < info.min or high > info.max:
        low, high = info.min, info.max
    scale = torch.tensor(qparams.scale, device=x.device)
    zero_point = torch.tensor(qparams.zero_point, device=x.device)
    return QParams(scale, zero_point, low, high, x.dtype)
