"""What does not pay: operators that are slower on integers here than in float are left in float.

The kernels of a lowered model and the operators of its float graph are timed on the example inputs, each
kernel shape once; ``match`` decides (``slower_than_float``). Where that promises enough, the model is
converted again. At last the whole of both is timed beside the float model (``against_float``): the second
stands only if it is clearly faster.

1. Off where a mapping was passed, unless ``slower="float"`` asks for it; operators that the mapping names
   stay as it says.
2. Off without an engine, and for models whose work is too small to time (``LEAST``).
3. Where less than is required would stay on integers, the model stays as it was, with a note.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from backquant.errors import CoverageError, UsageError
from backquant.graph import as_arguments
from backquant.match.plan import Reason
from backquant.match.slower import Costs, slower_than_float, total
from backquant.prepare import PreparedModule, unobserved
from backquant.runtime import QuantizedModel
from backquant.runtime.replay.timed import NodeTimes
from backquant.speed.against_float import Chosen, ModelFactories, Timing, not_slower, noted
from backquant.speed.cost_table import TimedConversions, Times, cost_table

_CHOICES = ("float", "keep")
_PROMISED = 0.015  # of the model's time: what promises less is not converted again
_MUCH = 0.1  # of the time of a model with long calls: what promises more is faster as a whole, too
_ROUNDS = 2  # in each of which an operator runs up to six times
_LONG = 0.25  # seconds of both graphs after which one round is enough
_TOO_MUCH = (
    "measured on the example inputs, less than required is faster on integers than in float: "
    "what is slower stays on integers, too"
)


def slower_choice(slower: Any, has_mapping: bool) -> bool:
    """Whether what is slower than float is to be left in float. Raises ``UsageError``.

    >>> slower_choice(None, has_mapping=False), slower_choice(None, has_mapping=True)
    (True, False)
    """
    if slower is None:
        return not has_mapping
    if slower not in _CHOICES:
        raise UsageError(
            f"slower={slower!r} is no choice",
            where="slower",
            fix='slower="float" leaves in float what is slower on integers; slower="keep" does not',
        )
    return bool(slower == "float")


TIMING = Timing()


def the_faster(
    made: QuantizedModel,
    ways: ModelFactories,
    prepared: PreparedModule,
    original: nn.Module,
    example: Any,
    timing: Timing,
) -> QuantizedModel:
    """``made``, or what ``ways`` make without what is slower on integers, if that is faster.

    ``original``: the float model in evaluation mode, than which the result as a whole is not slower, unless
    something is required.
    """
    costs, seconds, is_long = _measured(prepared, made, example, timing)
    chosen = None
    reasons = _reasons(made, costs)
    promised = _promised(costs, reasons) / (1e6 * seconds) if seconds else 0.0
    if promised > _PROMISED:
        try:
            after = ways.without(reasons)
        except CoverageError:
            return noted(made, _TOO_MUCH)
        chosen = Chosen(after, reasons, is_faster=is_long and promised > _MUCH)
    return not_slower(made, chosen, ways, costs, original, example, timing)


def _measured(
    prepared: PreparedModule, made: QuantizedModel, example: Any, timing: Timing
) -> tuple[Costs, float, bool]:
    """The costs of all that is quantized, the seconds of the lowered graph, and whether calls are long."""
    args, kwargs = as_arguments(example)
    counted = made.record.costs
    assert counted is not None
    integers = NodeTimes(made.graph_module, args, kwargs, walks=None)
    walks = integers.is_walked
    floats = NodeTimes(unobserved(prepared), args, kwargs, packs=False, walks=walks)
    conversions = TimedConversions(timing.clock)
    for _ in range(_ROUNDS):
        floats.measure(timing.clock)
        integers.measure(timing.clock)
        if sum(floats.seconds.values()) + sum(integers.seconds.values()) > _LONG:
            break
    times = Times(floats, integers, counted.multiply_adds, conversions)
    costs = cost_table(made, times, keep=timing.keep, keep_named=timing.keep_named)
    return costs, sum(integers.seconds.values()), walks


def _promised(costs: Costs, reasons: Mapping[int, Reason]) -> float:
    """Microseconds that the matches of ``reasons`` take less in float."""
    units = enumerate(costs.units)
    floats = frozenset(i for i, unit in units if not reasons.keys().isdisjoint(unit.matches))
    return total(costs, frozenset()) - total(costs, floats)


def _reasons(quantized: QuantizedModel, costs: Costs) -> dict[int, Reason]:
    """The reasons of what is slower on integers, by position of the match; where the engine has no kernel
    for it, that is the reason."""
    plan = quantized.plan
    run = {name for use in quantized.kernels for name in use.nodes}
    left = {reason.node: reason for reason in quantized.left_in_float}
    found = slower_than_float(plan, costs)
    for match, reason in found.items():
        nodes = plan.matches[match].nodes
        refused = [left[name] for name in nodes if name in left]
        if refused and run.isdisjoint(nodes):
            found[match] = replace(refused[0], node=reason.node)
    return found
