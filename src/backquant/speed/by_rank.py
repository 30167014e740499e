"""What is faster is measured once: by rank 0, and all ranks take what it chose."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from backquant.calibrate.group import Ranks
from backquant.match.plan import Reason
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import ModelFactories


def chosen_on_rank_0(
    ranks: Ranks,
    made: QuantizedModel,
    ways: ModelFactories,
    choose: Callable[[ModelFactories], QuantizedModel],
) -> QuantizedModel:
    """What ``choose`` gives on rank 0; ``made``, or one of ``ways``, made anew on the others."""
    if ranks.size == 1:
        return choose(ways)
    if ranks.rank != 0:
        (name, argument), notes = ranks.exchange("measuring times", None)[0]
        model = made if name is None else getattr(ways, name)(argument)
        return _with_notes(model, notes)
    tried: list[tuple[QuantizedModel, str, object]] = []

    def without(reasons: Mapping[int, Reason]) -> QuantizedModel:
        model = ways.without(reasons)
        tried.append((model, "without", dict(reasons)))
        return model

    def in_float(reason: Reason) -> QuantizedModel | None:
        model = ways.in_float(reason)
        if model is not None:
            tried.append((model, "in_float", reason))
        return model

    chosen = choose(ModelFactories(without, in_float))
    way = next(((name, given) for model, name, given in tried if model is chosen), (None, None))
    ranks.exchange("measuring times", (way, chosen.plan.notes))
    return chosen


def _with_notes(model: QuantizedModel, notes: tuple[str, ...]) -> QuantizedModel:
    model.record = replace(model.record, plan=replace(model.plan, notes=notes))
    return model
