"""The runtime of a deployment target as what runs the models of a search."""

from __future__ import annotations

import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from backquant.accuracy.search.runners import WHOLE_SECONDS, PartTimes
from backquant.deploy.session import RunningTarget, Session
from backquant.files import workspace
from backquant.graph import alike, as_arguments
from backquant.match.slower import Costs, total
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, NodeTimes, stopwatch
from backquant.speed.cost_table import Times, cost_table
from backquant.speed.race import race

_ROUNDS = 4
_KEPT = 3  # exported models
_MICRO = 1e6
_SIZES = 1 << 14, 1 << 19  # elements
_LAYER = 1.0  # microseconds of a layer, whatever its size
#: Writes a model that is called with these inputs to a file.
Write = Callable[[QuantizedModel, Path, Any], object]


def process_stopwatch(run: Callable[[], object]) -> float:
    """As ``stopwatch``, with the CPU time of all threads: a runtime has threads of its own.

    >>> 0 <= process_stopwatch(int) < 1
    True
    """
    return stopwatch(run, time.process_time if torch.get_num_threads() == 1 else time.perf_counter)


class TargetRunner:
    """Exports each model, and runs it in the target's runtime. ``write``: what exports it."""

    clock: Clock = staticmethod(process_stopwatch)

    def __init__(self, target: RunningTarget, write: Write) -> None:
        self.target, self.write = target, write
        self._last: list[TargetModel] = []

    def parts(
        self,
        prepared: PreparedModule,
        made: QuantizedModel,
        in_float: Callable[[], QuantizedModel],
        floating: nn.Module,
        example: Any,
    ) -> PartTimes:
        """From two profiles: all on integers, and all in float. Both are timed as wholes, too:
        runtimes make most conversions inside of layers."""
        args, kwargs = as_arguments(example)
        graph = unobserved(prepared)
        sizes = NodeTimes(graph, args, kwargs).sizes
        in_float_here = in_float()
        refused, quantized = self.by_node(in_float_here, example), self.by_node(made, example)
        conversions = _Conversions(self.target, process_stopwatch)
        times = Times(
            _Profile(graph, _seconds(refused), sizes),
            _Profile(made.graph_module, _seconds(quantized), sizes),
            {},
            conversions,
        )
        runs = [floating, self.runnable(in_float_here), self.runnable(made)]
        wholes = race(runs, example, self.clock, WHOLE_SECONDS)
        own, *ends = (_MICRO * wholes.seconds(place) for place in range(len(runs)))
        return as_wholes(cost_table(made, times), *ends)._replace(in_float=own)

    def by_node(self, made: QuantizedModel, example: Any, speed: float = 1.0) -> dict[str, float]:
        """From a profile, which makes short layers longer: together they take what a call takes at most."""
        runs = self.runnable(made)
        found = runs.session(example).times(runs.inputs(example), _ROUNDS)
        whole = race([runs], example, self.clock).seconds(0)
        share = speed * _at_most(whole, sum(found.values()))
        return {name: share * _MICRO * seconds for name, seconds in found.items()}

    def floating(self, model: nn.Module, in_float: Callable[[], QuantizedModel]) -> nn.Module:  # noqa: ARG002
        """The float model in the same runtime."""
        return self.runnable(in_float())

    def runnable(self, made: QuantizedModel) -> TargetModel:
        """Exported when it is called, once for each shape of inputs. The last few are kept, and run what
        computes the same, too."""
        known = next((runs for runs in self._last if runs.computes(made)), None)
        if known is None:
            known = TargetModel(made, self.target, self.write)
            self._last = [*self._last[1 - _KEPT :], known]
        return known


def as_wholes(costs: Costs, floating: float, integer: float) -> PartTimes:
    """``costs`` as a model takes ``floating`` microseconds in float, and ``integer`` on integers.

    Profiling makes short layers longer, and names layers that a runtime joins by one of them, or by none. So
    what is ``outside`` of all units is the less that either whole leaves beside its units; units share the
    rest of their whole as the profile says, and conversions what integers leave.

    >>> from backquant.match.slower import Unit, Value
    >>> parts = as_wholes(Costs((Unit((0,), 8.0, 10.0),), (Value(None, (0,), 4.0, 4.0),)), 12.0, 11.0)
    >>> parts.outside, parts.costs.values[0].quantize
    (2.0, 1.0)
    """
    in_float = sum(unit.floating for unit in costs.units)
    inside = sum(unit.integer for unit in costs.units)
    outside = max(0.0, min(floating - in_float, integer - inside))
    left = integer - outside
    expected = total(costs, frozenset()) - inside
    share = max(0.0, left - inside) / expected if expected > 0 else 1.0
    on_integers = left if expected <= 0 or left < inside else inside
    units = [
        replace(unit, floating=own, integer=other)
        for unit, own, other in zip(
            costs.units,
            _summing([unit.floating for unit in costs.units], floating - outside),
            _summing([unit.integer for unit in costs.units], on_integers),
            strict=True,
        )
    ]
    values = tuple(
        replace(value, quantize=share * value.quantize, dequantize=share * value.dequantize)
        for value in costs.values
    )
    return PartTimes(replace(costs, units=tuple(units), values=values), outside)


def _summing(parts: list[float], whole: float) -> list[float]:
    """``parts`` with the sum ``whole``, in the same proportions; equal ones where nothing is known."""
    known = sum(parts)
    if known <= 0:
        return [whole / len(parts) for _ in parts]
    return [whole * part / known for part in parts]


def _at_most(whole: float, parts: float) -> float:
    return min(1.0, whole / parts) if parts > 0 else 1.0


class _Profile(NamedTuple):
    module: fx.GraphModule
    seconds: Mapping[str, float]
    sizes: Mapping[str, int]


def _seconds(micros: Mapping[str, float]) -> dict[str, float]:
    return {name: value / _MICRO for name, value in micros.items() if name}


class _Conversions:
    """From two measurements each of a file that only quantizes, and of one that only dequantizes: what a call
    takes by itself is no part of them."""

    def __init__(self, target: RunningTarget, clock: Clock) -> None:
        self._quantize, self._dequantize = (
            _slope(target, clock, operator) for operator in ("QuantizeLinear", "DequantizeLinear")
        )

    def quantize(self, size: int) -> float:
        return _LAYER + self._quantize * size

    def dequantize(self, size: int) -> float:
        return _LAYER + self._dequantize * size


def _slope(target: RunningTarget, clock: Clock, operator: str) -> float:
    """Microseconds of one more element."""
    import onnx
    from onnx import TensorProto, helper

    is_quantize = operator == "QuantizeLinear"
    types = (TensorProto.FLOAT, TensorProto.UINT8)
    given, made = types if is_quantize else types[::-1]
    times = []
    for size in _SIZES:
        shape = (1, size // 64, 8, 8)
        graph = helper.make_graph(
            [helper.make_node(operator, ["x", "scale", "zero"], ["y"])],
            "conversion",
            [helper.make_tensor_value_info("x", given, shape)],
            [helper.make_tensor_value_info("y", made, shape)],
            [
                helper.make_tensor("scale", TensorProto.FLOAT, (), [0.1]),
                helper.make_tensor("zero", TensorProto.UINT8, (), [8]),
            ],
        )
        opset = [helper.make_opsetid("", 17)]
        with workspace() as folder:
            path = folder / "conversion.onnx"
            onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(path))
            session = target.session(path, torch.get_num_threads())
            dtype = torch.float32 if is_quantize else torch.uint8
            times.append(clock(partial(session.run, [torch.zeros(shape, dtype=dtype).numpy()])))
    return max(0.0, _MICRO * (times[1] - times[0]) / (_SIZES[1] - _SIZES[0]))


class TargetModel(nn.Module):
    """A quantized model in the runtime of its target, called like the model itself."""

    def __init__(self, made: QuantizedModel, target: RunningTarget, write: Write) -> None:
        super().__init__()
        self.made, self.target, self.write = made, target, write
        self._sessions: dict[tuple[Any, ...], tuple[Session, Any]] = {}
        self._folder = Path(tempfile.mkdtemp())  # a session reads its file as long as it lives
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    def computes(self, made: QuantizedModel) -> bool:
        """Whether it runs what ``made`` computes."""
        return self.made is made or alike(self.made.graph_module, made.graph_module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        session, spec = self._loaded(args, kwargs)
        found = session.run(self.inputs((args, kwargs)))
        return tree_unflatten([torch.from_numpy(array) for array in found], spec)

    def session(self, example: Any) -> Session:
        """The file for these inputs, loaded."""
        return self._loaded(*as_arguments(example))[0]

    def inputs(self, example: Any) -> list[Any]:
        """The tensors of the arguments, in order, as arrays."""
        leaves = tree_flatten(example if _is_call(example) else as_arguments(example))[0]
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        return [leaf.detach().contiguous().numpy() for leaf in tensors]

    def _loaded(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Session, Any]:
        leaves = tree_flatten((args, kwargs))[0]
        key = tuple(
            (tuple(leaf.shape), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf
            for leaf in leaves
        )
        if key not in self._sessions:
            with torch.no_grad():
                spec = tree_flatten(self.made(*args, **kwargs))[1]
            path = self._folder / str(len(self._sessions)) / "model.onnx"
            path.parent.mkdir()
            self.write(self.made, path, kwargs if kwargs and not args else args)
            self._sessions[key] = self.target.session(path, torch.get_num_threads()), spec
        return self._sessions[key]


def _is_call(example: Any) -> bool:
    """Whether these are positional arguments beside named ones."""
    is_pair = isinstance(example, tuple) and len(example) == 2
    return is_pair and isinstance(example[0], tuple) and isinstance(example[1], dict)
