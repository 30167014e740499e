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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from backquant.accuracy.search.budget import Budget
from backquant.accuracy.search.programme import Picks, Problem, corrected, retimed, solve
from backquant.accuracy.search.trials import Trial

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
