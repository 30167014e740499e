"""Models that a search has made: each is timed as a whole, and what it loses is measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from backquant.accuracy.figures import ErrorSums
from backquant.accuracy.metric import Metric, measured_metric
from backquant.accuracy.outputs import FloatOutputs
from backquant.accuracy.search.budget import Budget
from backquant.accuracy.search.programme import Picks, Problem
from backquant.accuracy.search.runners import WHOLE_SECONDS, Runner
from backquant.calibrate.group import ALONE, Ranks, by_rank_0
from backquant.errors import UsageError
from backquant.runtime import QuantizedModel
from backquant.speed.race import race

#: From the options of the units to the model that has them.
Make = Callable[[Picks], QuantizedModel]


@dataclass(frozen=True)
class Trial:
    """A combination: what was predicted before it was made, and what was measured.

    ``predicted_ms`` and ``ms``: of one call; ``float_ms``: of the float model beside it, by which the
    prediction is scaled; ``None`` where no times can be measured. ``loss``: relative error power of the
    outputs. ``drop``: of the metric; ``None`` without one. ``unit_us``: microseconds of each unit in this
    combination, where they are known, as if timed when the parts were.
    """

    picks: Picks
    predicted_loss: float
    loss: float
    bytes: float
    bitops: float
    predicted_ms: float | None = None
    ms: float | None = None
    float_ms: float | None = None
    metric: float | None = None
    drop: float | None = None
    unit_us: tuple[float | None, ...] = ()

    def misses(self, budget: Budget) -> dict[str, float]:
        """The limits that it does not keep to, with what it has of each.

        >>> Trial((), 0.0, 0.01, 8.0, 9.0).misses(Budget(max_bytes=4, min_sqnr=20))
        {'max_bytes': 8.0}
        """
        found: dict[str, float] = {}
        if budget.max_drop is not None and self.drop is not None and self.drop > budget.max_drop:
            found["max_drop"] = self.drop
        if budget.min_sqnr is not None and self.loss > 10 ** (-budget.min_sqnr / 10):
            found["min_sqnr"] = ErrorSums(1.0, self.loss).sqnr
        if self.ms is not None and self.float_ms is not None:
            if budget.max_ms is not None and self.ms > budget.max_ms:
                found["max_ms"] = self.ms
            if budget.max_ratio is not None and self.ms > budget.max_ratio * self.float_ms:
                found["max_ratio"] = self.ms / self.float_ms
        if budget.max_bytes is not None and self.bytes > budget.max_bytes:
            found["max_bytes"] = self.bytes
        if budget.max_bitops is not None and self.bitops > budget.max_bitops:
            found["max_bitops"] = self.bitops
        return found

    def to_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """What ``to_dict`` gave, read from JSON."""
        pairs = {name: tuple(data[name]) for name in ("picks", "unit_us")}
        return cls(**{**data, **pairs})


class Bench:
    """Where combinations are tried: the data that outputs are compared on, the metric, and what runs them.

    ``floating``: the float model as it runs beside them. ``sign``: -1 where less of the metric is better.
    ``ranks`` share the batches; rank 0 calls the metric, and measures times.
    """

    def __init__(
        self,
        floating: nn.Module,
        runner: Runner,
        example: Any,
        batches: Sequence[Any],
        metric: Metric | None,
        sign: float,
        ranks: Ranks = ALONE,
    ) -> None:
        self.floating, self.runner, self.example = floating, runner, example
        self.batches, self.metric, self.sign, self.ranks = batches, metric, sign, ranks
        self._outputs = FloatOutputs(floating, batches, ranks)
        self.in_float: float | None = None
        if metric is not None:
            self.in_float = by_rank_0(
                ranks,
                "calling the metric",
                lambda: measured_metric(metric, floating, "the float model"),
            )

    def check_metric(self, budget: Budget) -> None:
        """Raise ``UsageError`` where the metric takes random outputs for as good as the float model's."""
        if self.metric is None or self.in_float is None or budget.max_drop is None:
            return
        if self.ranks.rank != 0:
            return
        try:
            found = measured_metric(self.metric, _Shuffled(self.floating), "random outputs")
        except UsageError:  # it takes real ones only
            return
        if self._drop(found) <= budget.max_drop:
            raise UsageError(
                f"the metric says {self.in_float:.6g} of the float model and {found:.6g} of its outputs "
                "in random order: any model is within the budget",
                where=f"metric, max_drop={budget.max_drop:g}",
                fix="a metric, and data, on which the float model is better than chance;\n"
                'budget={"min_sqnr": 30} needs no metric',
            )

    def _drop(self, found: float) -> float:
        assert self.in_float is not None
        return self.sign * (self.in_float - found)

    def trial(self, problem: Problem, picks: Picks, made: QuantizedModel) -> Trial:
        """Measure ``made``, which has the options ``picks``."""
        runs = self.runner.runnable(made)

        judged = by_rank_0(self.ranks, "timing", lambda: self._judged(problem, picks, made, runs))
        return Trial(
            picks,
            problem.total(picks, "loss"),
            self._outputs.loss(runs, "trying"),
            problem.total(picks, "bytes"),
            problem.total(picks, "bitops"),
            **judged,
        )

    def _judged(
        self, problem: Problem, picks: Picks, made: QuantizedModel, runs: nn.Module
    ) -> dict[str, Any]:
        """Times, and the metric. The float model beside it shows how fast the machine is now, beside what it
        was when parts were timed."""
        found: dict[str, Any] = {}
        if self.runner.clock is not None:
            beside = race([self.floating, runs], self.example, self.runner.clock, WHOLE_SECONDS)
            found["ms"], found["float_ms"] = 1e3 * beside.seconds(1), 1e3 * beside.seconds(0)
            speed = 1.0 if problem.in_float is None else problem.in_float / 1e3 / found["float_ms"]
            found["predicted_ms"] = problem.predicted(picks) / 1e3 / speed
            found["unit_us"] = self._by_unit(problem, made, speed)
        if self.metric is not None:
            found["metric"] = measured_metric(self.metric, runs, "a quantized model")
            found["drop"] = self._drop(found["metric"])
        return found

    def _by_unit(
        self, problem: Problem, made: QuantizedModel, speed: float
    ) -> tuple[float | None, ...]:
        times = self.runner.by_node(made, self.example, speed)
        found: list[float | None] = []
        for unit in problem.units:
            known = [times[name] for name in unit.timed or unit.nodes if name in times]
            found.append(sum(known) if known else None)
        return tuple(found)


class _Shuffled(nn.Module):
    """A model whose outputs hold the right values in a random order."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.generator = torch.Generator().manual_seed(0)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return tree_map(self._shuffled, self.inner(*args, **kwargs))

    def _shuffled(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.is_floating_point():
            return leaf
        order = torch.randperm(leaf.numel(), generator=self.generator).to(leaf.device)
        return leaf.flatten()[order].reshape(leaf.shape)
