"""Where the models of a search run, and what their operators take there."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import shutil
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from backquant.deploy.session import RunningTarget, Session
from backquant.errors import BackquantError, UsageError, did_you_mean
from backquant.files import replace_file, workspace
from backquant.graph import alike, as_arguments, own_buffers
from backquant.json_text import read_json
from backquant.match.slower import Costs, total
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, NodeTimes, stopwatch
from backquant.speed.against_float import race
from backquant.speed.cost_table import TimedConversions, Times, cost_table

# Times of kernels that were measured before on this machine, in a file.


class TimesFile:
    """Seconds by kernel and shape, for one machine, number of threads and version of what runs there.

    ``folder`` ``None``: nothing is kept. A file that cannot be read or written is as if it were not there.

    >>> from backquant.files import workspace
    >>> with workspace() as folder:
    ...     TimesFile(folder, "x86").keep({"linear 1x64": 2e-6})
    ...     TimesFile(folder, "x86").known, TimesFile(folder, "onednn").known
    ({'linear 1x64': 2e-06}, {})
    """

    def __init__(self, folder: str | os.PathLike[str] | None, runs_on: str) -> None:
        self.path: Path | None = None
        self.known: dict[str, float] = {}
        if folder is not None:
            what = (runs_on, torch.__version__, torch.get_num_threads(), _machine())
            name = hashlib.sha256(repr(what).encode()).hexdigest()[:16]
            self.path = Path(folder) / f"times-{name}.json"
            self.known = _read(self.path)

    def keep(self, found: Mapping[str, float]) -> None:
        """Add what was measured."""
        if found.keys() <= self.known.keys():
            return
        self.known = {**found, **self.known}
        if self.path is None:
            return
        self.known = {**_read(self.path), **self.known}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(self.path, json.dumps(self.known).encode())
        except (OSError, BackquantError):
            self.path = None


def usual_folder() -> Path:
    """The default folder for times: the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "backquant"


def _read(path: Path) -> dict[str, float]:
    try:
        data = read_json(path.read_text(encoding="utf-8"))
        return {str(key): float(value) for key, value in data.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _machine() -> tuple[str, ...]:
    name = platform.processor()
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next((line for line in lines if line.startswith("model name")), name)
    except OSError:
        pass
    return platform.node(), platform.machine(), name, torch.backends.cpu.get_cpu_capability()


#: Of a race between the float model and another: what else the machine does meets some turns only.
WHOLE_SECONDS = 2.0
_ROUNDS = 2
_LOWERED = "_lowered"


class PartTimes(NamedTuple):
    """Microseconds of what a plan quantizes, both ways, of conversions, and of all else (``outside``).

    ``in_float``: of the float model as it came, at that time.
    """

    costs: Costs
    outside: float
    in_float: float | None = None


class Runner(Protocol):
    """What runs models. ``clock``: seconds of one call."""

    @property
    def clock(self) -> Clock | None:
        """``None`` where nothing can be measured."""

    def parts(
        self,
        prepared: PreparedModule,
        made: QuantizedModel,
        in_float: Callable[[], QuantizedModel],
        floating: nn.Module,
        example: Any,
    ) -> PartTimes:
        """What operators take, on the example inputs. ``in_float``: ``made`` with nothing on integers.
        ``floating``: the float model as it came."""

    def floating(self, model: nn.Module, in_float: Callable[[], QuantizedModel]) -> nn.Module:
        """The float ``model`` as it runs there, or what ``in_float`` gives."""

    def by_node(self, made: QuantizedModel, example: Any, speed: float = 1.0) -> dict[str, float]:
        """Microseconds of what ``made`` runs, by a node of the float graph that it computes: a kernel's by
        one of those that it runs. Conversions are in none. What is measured now is multiplied by
        ``speed``."""

    def runnable(self, made: QuantizedModel) -> nn.Module:
        """``made`` as it runs there, called like the model."""


class EngineRunner:
    """Kernels of an engine of this process. ``times``: what was measured before."""

    clock: Clock | None = staticmethod(stopwatch)

    def __init__(self, times: TimesFile) -> None:
        self.times = times

    def parts(
        self,
        prepared: PreparedModule,
        made: QuantizedModel,
        in_float: Callable[[], QuantizedModel],  # noqa: ARG002 - the prepared model has the graph
        floating: nn.Module,
        example: Any,
    ) -> PartTimes:
        """Each kernel shape is measured once, and not at all where its time is known.

        What one call of ``made`` takes beyond its operators is outside of all units: checks of the inputs,
        and caches that hold the weights of one kernel but not of all.
        """
        args, kwargs = as_arguments(example)
        known = self.times.known
        floats = NodeTimes(unobserved(prepared), args, kwargs, known)
        integers = NodeTimes(made.graph_module, args, kwargs, known)
        for _ in range(_ROUNDS):
            floats.measure(stopwatch)
            integers.measure(stopwatch)
        self.times.keep({**floats.by_kernel, **integers.by_kernel})
        counted = made.record.costs
        multiply_adds = {} if counted is None else counted.multiply_adds
        times = Times(floats, integers, multiply_adds, TimedConversions(stopwatch))
        costs = cost_table(made, times)
        inside = sum(unit.floating for unit in costs.units)
        outside = max(0.0, 1e6 * sum(floats.seconds.values()) - inside)
        wholes = race([floating, made], example, stopwatch, WHOLE_SECONDS)
        own, whole = (1e6 * wholes.seconds(place) for place in (0, 1))
        return within(PartTimes(costs, outside, own), whole)

    def by_node(self, made: QuantizedModel, example: Any, speed: float = 1.0) -> dict[str, float]:
        """Layouts that are new here are measured, others known."""
        args, kwargs = as_arguments(example)
        times = NodeTimes(made.graph_module, args, kwargs, self.times.known)
        times.measure(lambda run: speed * stopwatch(run))
        self.times.keep(times.by_kernel)
        found: dict[str, float] = {}
        for name, seconds in times.seconds.items():
            own = name.partition(_LOWERED)[0]
            found[own] = found.get(own, 0.0) + 1e6 * seconds
        return found

    def floating(self, model: nn.Module, in_float: Callable[[], QuantizedModel]) -> nn.Module:  # noqa: ARG002
        """As it came."""
        return own_buffers(model)

    def runnable(self, made: QuantizedModel) -> nn.Module:
        """As it is."""
        return made


def within(parts: PartTimes, whole: float) -> PartTimes:
    """``parts`` as all on integers takes ``whole`` microseconds. What it takes beyond its parts is outside of
    units; where its parts take more together, they were measured while the machine was slower.

    >>> from backquant.match.slower import Unit
    >>> parts = PartTimes(Costs((Unit((0,), 6.0, 8.0),), ()), 2.0)
    >>> within(parts, 9.0).outside, within(parts, 4.0).outside, within(parts, 4.0).costs.units[0].integer
    (3.0, 1.0, 3.0)
    """
    costs, inside = parts.costs, total(parts.costs, frozenset())
    if whole >= parts.outside + inside:
        return parts._replace(outside=whole - inside)
    share = whole / (parts.outside + inside)
    units = tuple(
        replace(unit, integer=share * unit.integer, floating=share * unit.floating)
        for unit in costs.units
    )
    values = tuple(
        replace(value, quantize=share * value.quantize, dequantize=share * value.dequantize)
        for value in costs.values
    )
    return parts._replace(
        costs=replace(costs, units=units, values=values), outside=share * parts.outside
    )


class _NoTime:
    """Conversions of which nothing is known."""

    def quantize(self, size: int) -> float:  # noqa: ARG002 - a protocol's
        return 0.0

    def dequantize(self, size: int) -> float:  # noqa: ARG002
        return 0.0


class ReferenceRunner:
    """No engine: the reference model says what is lost, and nothing what it takes."""

    clock: Clock | None = None

    def parts(
        self,
        prepared: PreparedModule,
        made: QuantizedModel,
        in_float: Callable[[], QuantizedModel],  # noqa: ARG002 - the prepared model has the graph
        floating: nn.Module,  # noqa: ARG002
        example: Any,
    ) -> PartTimes:
        """What passes values to what; no times."""
        args, kwargs = as_arguments(example)
        floats = NodeTimes(unobserved(prepared), args, kwargs)
        return PartTimes(cost_table(made, Times(floats, floats, {}, _NoTime())), 0.0)

    def by_node(self, made: QuantizedModel, example: Any, speed: float = 1.0) -> dict[str, float]:  # noqa: ARG002
        """Nothing is known."""
        return {}

    def floating(self, model: nn.Module, in_float: Callable[[], QuantizedModel]) -> nn.Module:  # noqa: ARG002
        """As it came."""
        return own_buffers(model)

    def runnable(self, made: QuantizedModel) -> nn.Module:
        """The reference model."""
        return made


# The runtime of a deployment target as what runs the models of a search.

_TARGET_ROUNDS = 4
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
        found = runs.session(example).times(runs.inputs(example), _TARGET_ROUNDS)
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


# What a search has to keep to.

_FIX = 'budget={"max_drop": 0.01}, or {"max_ms": 5.0}, or both'


@dataclass(frozen=True)
class Budget:
    """Limits of a search; ``None``: no limit.

    ``max_drop``: by how much the metric may fall below the float model's. ``min_sqnr``: the least SQNR of the
    outputs, in dB. If one of these two is given, the search minimises time (or bit-operations, where time is
    not measured) within all limits; otherwise it minimises the loss.
    ``max_ms``: milliseconds of one call on the example inputs. ``max_ratio``: that time divided by the float
    model's. ``max_bytes``: size of the weights. ``max_bitops``: multiply-adds, each times the bits of both
    factors.

    >>> Budget.of({"max_ratio": 0.5}).to_dict()
    {'max_ratio': 0.5}
    """

    max_drop: float | None = None
    min_sqnr: float | None = None
    max_ms: float | None = None
    max_ratio: float | None = None
    max_bytes: float | None = None
    max_bitops: float | None = None

    @classmethod
    def of(cls, given: Any) -> Budget:
        """A budget as it is, or from a mapping. Raises ``UsageError`` for anything else."""
        if isinstance(given, cls):
            found = given
        elif isinstance(given, Mapping):
            known = [field.name for field in fields(cls)]
            for name in given:
                if name not in known:
                    fix = did_you_mean(str(name), known, f"one of {', '.join(known)}")
                    raise UsageError(
                        f"there is no budget {name!r}", where=f"budget={given!r}", fix=fix
                    )
            found = cls(**given)
        else:
            raise UsageError(
                f"{type(given).__name__} is no budget", where=f"budget={given!r}", fix=_FIX
            )
        found._check()
        return found

    @property
    def limits_loss(self) -> bool:
        """Whether it limits the loss of accuracy."""
        return self.max_drop is not None or self.min_sqnr is not None

    @property
    def limits_time(self) -> bool:
        """Whether it limits the time of a call."""
        return self.max_ms is not None or self.max_ratio is not None

    def to_dict(self) -> dict[str, float]:
        """What it limits."""
        return {name: value for name, value in asdict(self).items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{name} {value:g}" for name, value in self.to_dict().items())

    def _check(self) -> None:
        said = self.to_dict()
        if not said:
            raise UsageError("the budget limits nothing", where="budget={}", fix=_FIX)
        for name, value in said.items():
            least = -math.inf if name == "min_sqnr" else 0.0
            if type(value) not in (int, float) or not least <= value < math.inf:
                raise UsageError(
                    f"{name} is a number that is not negative, got {value!r}",
                    where=f"budget={said!r}",
                    fix=_FIX,
                )


def parsed(given: Iterable[str]) -> Budget:
    """A budget in the words of a command line.

    >>> parsed(["max_drop=0.01", "max_ms=5"]).to_dict()
    {'max_drop': 0.01, 'max_ms': 5.0}
    """
    found: dict[str, float] = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError as error:
            raise UsageError(
                f"{text!r} is no limit",
                where=f"--budget {text}",
                fix="--budget max_drop=0.01 --budget max_ms=5",
            ) from error
    return Budget.of(found)
