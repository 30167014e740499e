"""Solve, make, measure, correct, and solve again: until the budget is kept, and nothing better is in sight.

1. All in float and all on integers are tried first: there is an answer from then on.
2. A budget of accuracy: the programme asks for the least time within an error of the outputs. Which error the
   metric allows is found by halving, on a logarithmic scale, between what was within the budget and what
   was not.
3. A budget of time or size: the programme asks for the least error within it.
4. What each trial measures corrects the figures of its parts (``programme.corrected``) before the next.
5. An answer was made and measured, and keeps to the budget by what was measured; where there is none, it is
   the one that misses least.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map

from backquant.accuracy.figures import ErrorSums, Metric, measured_metric
from backquant.accuracy.outputs import FloatOutputs
from backquant.accuracy.search.programme import Picks, Problem, corrected, retimed, solve
from backquant.accuracy.search.runners import WHOLE_SECONDS, Budget, Runner
from backquant.calibrate.group import ALONE, Ranks, by_rank_0
from backquant.errors import UsageError
from backquant.runtime import QuantizedModel
from backquant.speed.against_float import race

# Models that a search has made: each is timed as a whole, and what it loses is measured.


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


#: Combinations that are made, beside the two ends.
MOST = 8
_CLOSE = 1.12  # budgets of error that are this near to each other (0.5 dB) are the same
_TIGHTER = 0.97
_DOUBT = {"loss": 0.5, "time": 0.1}  # what of a trial is a matter of the combination


@dataclass
class Loop:
    """``trial``: makes and measures a combination. ``kept``: called after each. ``solve``: as ``programme``
    has it."""

    problem: Problem
    budget: Budget
    trial: Callable[[Problem, Picks], Trial]
    kept: Callable[[list[Trial]], None] = lambda _: None
    solve: Callable[[Problem, str, Mapping[str, float]], Picks | None] = solve
    trials: list[Trial] = field(default_factory=list)

    @property
    def goal(self) -> str:
        """The figure that is to be the least."""
        if not self.budget.limits_loss:
            return "loss"
        return "time" if self.is_timed else "bitops"

    @property
    def is_timed(self) -> bool:
        """Whether the trials have times."""
        return any(trial.ms is not None for trial in self.trials)

    def run_ends(self) -> None:
        """Rule 1. Resumes where ``trials`` has some already."""
        for picks in self.ends():
            self._try(picks)

    def run(self) -> None:
        """Rules 2 to 4."""
        if self.budget.limits_loss:
            self._by_error()
        else:
            self._by_limits()

    def ends(self) -> tuple[Picks, Picks]:
        """All in float, and all on integers as they are by default."""
        units = self.problem.units
        return tuple(0 for _ in units), tuple(min(1, len(u.options) - 1) for u in units)

    def best(self) -> Trial | None:
        """Rule 5."""
        if not self.trials:
            return None
        within = [trial for trial in self.trials if not trial.misses(self.budget)]
        if within:
            return min(within, key=lambda trial: (self._worth(trial), trial.loss))
        return min(self.trials, key=lambda trial: (self._excess(trial), trial.loss))

    def current(self) -> Problem:
        """The problem, corrected by all trials: rule 4."""
        losses = {trial.picks: trial.loss for trial in self.trials}
        problem = corrected(self.problem, "loss", losses, _DOUBT["loss"])
        # in float as a whole the model is given back as it came: that says nothing of its parts
        timed = {
            t.picks: 1e3 * self._ms(t) for t in self.trials if t.ms is not None and any(t.picks)
        }
        if not timed:
            return problem
        for trial in self.trials:
            if any(trial.picks):
                problem = retimed(problem, trial.picks, trial.unit_us)
        return corrected(problem, "time", timed, _DOUBT["time"])

    def _ms(self, trial: Trial) -> float:
        """Of one call, as if all trials had been timed together: the float model ran beside each, and takes
        twice as long where other programs keep the machine busy."""
        assert trial.ms is not None
        return trial.ms * self._float_ms() / trial.float_ms if trial.float_ms else trial.ms

    def _float_ms(self) -> float:
        """The float model's time beside which parts were timed; the median of all trials."""
        if self.problem.in_float is not None:
            return self.problem.in_float / 1e3
        found = sorted(trial.float_ms for trial in self.trials if trial.float_ms is not None)
        return found[len(found) // 2] if found else 0.0

    def _worth(self, trial: Trial) -> float:
        if self.goal == "time":
            return self._ms(trial)
        if self.goal == "bitops":
            return trial.bitops
        return trial.loss if trial.drop is None else trial.drop

    def _excess(self, trial: Trial) -> float:
        """How far a trial is beside the budget, by the worst of its limits."""
        said, worst = self.budget.to_dict(), 0.0
        for name, value in trial.misses(self.budget).items():
            if name == "min_sqnr":
                worst = max(worst, (said[name] - value) / 10)
            else:
                worst = max(worst, value / said[name] - 1 if said[name] else math.inf)
        return worst

    def _try(self, picks: Picks) -> Trial:
        known = self._known(picks)
        if known is not None:
            return known
        found = self.trial(self.current() if self.trials else self.problem, picks)
        self.trials.append(found)
        self.kept(self.trials)
        return found

    def _same(self, one: Picks, other: Picks) -> bool:
        """Whether two combinations are one model: a unit without operators of the plan follows others."""
        units = self.problem.units
        return all(a == b for a, b, unit in zip(one, other, units, strict=True) if unit.nodes)

    def _known(self, picks: Picks) -> Trial | None:
        return next((trial for trial in self.trials if self._same(trial.picks, picks)), None)

    def limits(self, factor: float = 1.0) -> dict[str, float]:
        """The limits of time and size as figures of the programme; ``factor`` scales that of time."""
        found: dict[str, float] = {}
        if self.is_timed:
            times = []
            if self.budget.max_ms is not None:
                times.append(self.budget.max_ms)
            if self.budget.max_ratio is not None:
                times.append(self.budget.max_ratio * self._float_ms())
            if times:
                found["time"] = 1e3 * min(times) * factor
        if self.budget.max_bytes is not None:
            found["bytes"] = self.budget.max_bytes
        if self.budget.max_bitops is not None:
            found["bitops"] = self.budget.max_bitops
        return found

    def _by_error(self) -> None:
        """Rule 2."""
        limits = self.limits()
        fastest = self.solve(self.current(), self.goal, limits)
        if fastest is None or not self._misses_loss(self._try(fastest)):
            return self._by_limits() if fastest is None else None
        for _ in range(MOST):
            allowed = self._allowed()
            if allowed is None:
                return None
            picks = self.solve(self.current(), self.goal, {**limits, "loss": allowed})
            known = None if picks is None else self._known(picks)
            if known is not None and not self._misses_loss(known) and self.budget.max_drop is None:
                return None
            if picks is None or known is not None:
                picks = self._other(limits, allowed)
            if picks is None:
                return None
            self._try(picks)
        return None

    def _misses_loss(self, trial: Trial) -> bool:
        return not trial.misses(self.budget).keys().isdisjoint(("max_drop", "min_sqnr"))

    def _allowed(self) -> float | None:
        """The error to ask for next; ``None`` where halving is done."""
        if self.budget.max_drop is None:
            assert self.budget.min_sqnr is not None
            last, target = self.trials[-1], 10 ** (-self.budget.min_sqnr / 10)
            predicted = self.current().total(last.picks, "loss")
            return float(target * min(1.0, predicted / last.loss) if last.loss else target)
        failed = [trial.loss for trial in self.trials if self._misses_loss(trial)]
        high = min((loss for loss in failed if loss > 0), default=0.0)
        if not high:
            return None
        kept = [t.loss for t in self.trials if not self._misses_loss(t) and 0 < t.loss < high]
        low = max(kept, default=0.0)
        if not low:
            return high / 8
        return math.sqrt(low * high) if high / low > _CLOSE**2 else None

    def _other(self, limits: Mapping[str, float], allowed: float) -> Picks | None:
        """What was tried comes out again: ask for less and less error."""
        problem = self.current()
        for step in range(1, 6):
            picks = self.solve(problem, self.goal, {**limits, "loss": allowed * 0.7**step})
            if picks is None or self._known(picks) is None:
                return picks
        return None

    def _by_limits(self) -> None:
        """Rule 3."""
        factor = 1.0
        for _ in range(MOST):
            problem = self.current()
            picks = self.solve(problem, "loss", self.limits(factor))
            if picks is None:  # nothing keeps to all of them: what is nearest
                hardest = "time" if "time" in self.limits() else next(iter(self.limits()), "time")
                picks = self.solve(problem, hardest, {})
            if picks is None:
                return
            known = self._known(picks)
            if known is not None:
                if not {"max_ms", "max_ratio"} & known.misses(self.budget).keys() or factor < 0.8:
                    return
                factor *= _TIGHTER
                continue
            self._try(picks)


@dataclass(frozen=True)
class FrontPoint:
    """A combination that no other beats in both: predicted, after all corrections."""

    loss: float
    ms: float | None
    bytes: float
    bitops: float


def front_of(problem: Problem, goal: str) -> tuple[FrontPoint, ...]:
    """The least ``goal`` for each of a few budgets of error, from the most to none."""
    picks = solve(problem, goal, {})
    if picks is None:
        return ()
    most = problem.total(picks, "loss")
    smallest = [option.figures["loss"] for unit in problem.units for option in unit.options]
    least = min((loss for loss in smallest if loss > 0), default=most)
    found = [picks]
    for allowed in _between(most, least):
        picks = solve(problem, goal, {"loss": allowed})
        if picks is not None and picks != found[-1]:
            found.append(picks)
    points = [_point(problem, picks) for picks in found]
    return tuple(dict.fromkeys(points))


def _between(most: float, least: float, steps: int = 10) -> Iterable[float]:
    if most <= 0:
        return
    ratio = (max(least, 1e-6 * most) / most) ** (1 / steps)
    for step in range(1, steps + 1):
        yield most * ratio**step
    yield 0.0


def _point(problem: Problem, picks: Picks) -> FrontPoint:
    time = problem.predicted(picks)
    return FrontPoint(
        problem.total(picks, "loss"),
        time / 1e3 if time else None,
        problem.total(picks, "bytes"),
        problem.total(picks, "bitops"),
    )
