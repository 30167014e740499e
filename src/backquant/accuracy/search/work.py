"""One search, from a calibrated model to the answer."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from backquant.accuracy.calibrated import Calibrated
from backquant.accuracy.search.budget import Budget
from backquant.accuracy.search.loop import MOST, Loop, front_of
from backquant.accuracy.search.losses import Noise, batches_that_fit, losses_alone, pooled
from backquant.accuracy.search.programme import Picks, Problem, solve
from backquant.accuracy.search.result import (
    SearchResult,
    chosen_rows,
    hindrance_of,
    reason_of,
    told,
)
from backquant.accuracy.search.runners import Runner
from backquant.accuracy.search.space import Losses, joined_units, problem_of, values_of
from backquant.accuracy.search.state import SearchState
from backquant.accuracy.search.trials import Bench, Trial
from backquant.accuracy.twin import Twin
from backquant.calibrate.group import Ranks, by_rank_0, divided
from backquant.errors import BackquantError
from backquant.graph import alike
from backquant.match.plan import Reason
from backquant.pipeline.lower import quantized_model
from backquant.runtime import QuantizedModel

_ENDS = 2


@dataclass
class Work:
    """One search, from the calibrated model to the answer."""

    ready: Calibrated
    runner: Runner
    budget: Budget
    resume: str | os.PathLike[str] | None
    judged_by: str
    ranks: Ranks

    def __post_init__(self) -> None:
        self.reference = self.ready.reference()
        self.twin = Twin(self.ready.prepared, self.reference)
        where = self.runner.__class__.__name__
        self.state = SearchState(self.resume, self.twin, (where, self.judged_by))
        self.done = 0
        self.whole: QuantizedModel | None = None
        self.integer: QuantizedModel | None = None
        self.nothing: QuantizedModel | None = None

    def found(self, bench: Bench, told: Callable[[int, int | None], None]) -> SearchResult:
        """The answer; the best so far where the user interrupts, or where one combination fails after all in
        float and all on integers did not."""
        made = self.integer = quantized_model(self.reference, self.ready.source)
        parts = by_rank_0(
            self.ranks,
            "timing operators",
            lambda: self.runner.parts(
                self.ready.prepared, made, self.refused, bench.floating, self.ready.example
            ),
        )
        units = joined_units(self.twin, parts.costs.units)
        groups = [unit.groups for unit in units]
        values = [name for name, _ in values_of(parts, units)]
        problem = problem_of(
            self.twin, parts, units, Losses([0.0] * len(units), [0.0] * len(values))
        )
        held = bench.batches
        count = batches_that_fit(len(groups) + len(values), len(held), len(held))
        total = count * (len(groups) + len(values)) + MOST + _ENDS

        def step() -> None:
            self.done += 1
            told(min(self.done, total), total)

        def trial(problem: Problem, picks: Picks) -> Trial:
            step()
            return bench.trial(problem, picks, self.made(problem, picks))

        def solved(problem: Problem, least: str, limits: Mapping[str, float]) -> Picks | None:
            return by_rank_0(self.ranks, "solving", lambda: solve(problem, least, limits))

        trials = list(self.state.trials)
        loop = Loop(problem, self.budget, trial, self.state.keep_trials, solved, trials)
        stopped = ""
        try:
            loop.run_ends()
            losses = self._losses(groups, values, held[:count], step)
            loop.problem = problem_of(self.twin, parts, units, losses)
            loop.run()
        except KeyboardInterrupt:
            if not loop.trials or self.ranks.size > 1:
                raise
            stopped = "ctrl-C"
        except BackquantError as error:  # of a metric, say, or of an export, for one combination
            if len(loop.trials) < _ENDS or self.ranks.size > 1:
                raise
            stopped = str(error)
        return self._result(loop, bench.in_float, stopped)

    def _losses(
        self,
        groups: list[tuple[int, ...]],
        values: list[str],
        batches: Sequence[Any],
        step: Callable[[], None],
    ) -> Losses:
        known = self.state.losses.get("integers", [])

        def of(batch: Any) -> Noise:
            return losses_alone(self.twin, groups, values, batch, step)

        for found in divided(self.ranks, "comparing outputs", batches[len(known) :], of):
            self.state.keep_losses("integers", found)
        return Losses(*pooled(self.state.losses["integers"]))

    def refused(self) -> QuantizedModel:
        """The model with all that the plan quantizes in float, by the names of the plan."""
        if self.nothing is not None:
            return self.nothing
        plan, reason = self.twin.record.plan, reason_of("", self.budget)
        by_match = {
            index: replace(reason, node=match.anchor)
            for index, match in enumerate(plan.matches)
            if plan.decisions[match.anchor].quantized
        }
        self.nothing = quantized_model(self.ready.reference(by_match), self.ready.source)
        return self.nothing

    def floating(self) -> QuantizedModel:
        """The model as it came, by the names of the plan where it computes the same by these."""
        refused, whole = self.refused(), self.in_float()
        return refused if alike(refused.graph_module, whole.graph_module) else whole

    def in_float(self) -> QuantizedModel:
        """The model as it came, where it can be captured so."""
        if self.whole is None:
            found = self.ready.in_float(reason_of("", self.budget))
            self.whole = self.refused() if found is None else found
        return self.whole

    def made(self, problem: Problem, picks: Picks) -> QuantizedModel:
        """The model with these options."""
        reasons = self._reasons(problem, picks)
        plan = self.twin.record.plan
        by_match: dict[int, Reason] = {}
        quantized = 0
        for unit, pick in zip(problem.units, picks, strict=True):
            for name in unit.nodes:
                match = plan.decisions[name].match
                if match is not None and pick == 0:
                    by_match[match] = replace(reasons[unit.name], node=name)
                quantized += pick != 0
        if not quantized:
            return self.in_float()
        if not by_match and self.integer is not None:
            return self.integer
        return quantized_model(self.ready.reference(by_match), self.ready.source)

    def _reasons(self, problem: Problem, picks: Picks) -> dict[str, Reason]:
        rows = chosen_rows(problem, Trial(picks, 0.0, 0.0, 0.0, 0.0))
        return {row.name: reason_of(row.why, self.budget) for row in rows if row.option == "float"}

    def _result(self, loop: Loop, in_float: float | None, stopped: str) -> SearchResult:
        best = loop.best()
        assert best is not None
        problem = loop.current()
        made = self.made(problem, best.picks)
        rows = chosen_rows(problem, best)
        note = told(self.budget, best, loop.trials, in_float)
        record = made.record
        kept = {"budget": self.budget.to_dict(), "best": best.to_dict()}
        kept["chosen"] = {row.name: row.option for row in rows}
        made.record = replace(
            record, plan=record.plan.noted(note), recipe={**record.recipe, "search": kept}
        )
        return SearchResult(
            made,
            self.budget,
            not best.misses(self.budget),
            best,
            tuple(loop.trials),
            by_rank_0(
                self.ranks,
                "solving",
                lambda: front_of(problem, loop.goal if self.budget.limits_loss else "time"),
            ),
            rows,
            hindrance_of(loop, best),
            in_float,
            stopped,
        )
