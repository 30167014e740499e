"""Where the models of a search run, and what their operators take there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

from torch import nn

from backquant.accuracy.search.times_file import TimesFile
from backquant.graph import as_arguments, own_buffers
from backquant.match.slower import Costs, total
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import Clock, NodeTimes, stopwatch
from backquant.speed.cost_table import TimedConversions, Times, cost_table
from backquant.speed.race import race

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
