"""Trials side by side: what they ask the engine to build is built together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from backquant.conformance.at_bounds import at_bounds
from backquant.conformance.attempt import Setting, Steps, attempt
from backquant.conformance.case import Outcome, Side, Trial, Verdict, trial_data
from backquant.conformance.combinations import together
from backquant.conformance.measured import at_measured_bounds
from backquant.conformance.refused import beyond
from backquant.conformance.seam import Answer, Build, GroupingEngine, RefusedByEngineError


def outcomes_of(
    trials: Sequence[Trial], setting: Setting
) -> Iterator[tuple[Trial, Outcome | None]]:
    """The outcomes of each trial as they come, ``(trial, None)`` when one is done."""
    steps: dict[int, Steps] = {at: _steps(trial, setting) for at, trial in enumerate(trials)}
    answers: dict[int, Answer] = {}
    while steps:
        asked: dict[int, Build] = {}
        for at, each in list(steps.items()):
            try:
                item = each.send(answers.pop(at)) if at in answers else next(each)
                while not isinstance(item, Build):
                    yield trials[at], item
                    item = next(each)
            except StopIteration:
                del steps[at]
                yield trials[at], None
            else:
                asked[at] = item
        answers = dict(zip(asked, _built(setting, list(asked.values())), strict=True))


def size_of_groups(setting: Setting) -> int:
    """How many trials go side by side."""
    return setting.engine.group if isinstance(setting.engine, GroupingEngine) else 1


def _steps(trial: Trial, setting: Setting) -> Steps:
    """The steps of one trial; an error that nobody expected is an outcome, too."""
    try:
        if trial.claim.together:
            yield from together(trial, setting)
            return
        if trial.side is Side.ACCEPTED:
            yield from attempt(trial, setting)
            return
        yield from beyond(trial, setting)
        yield from at_bounds(trial, setting)
        yield from at_measured_bounds(trial, setting)
    except Exception as error:
        claim = trial.claim
        yield Outcome(
            trial.key, claim.pattern, claim.dtypes, Side(trial.side), setting.engine.name,
            Verdict.UNPREDICTABLE, detail=f"{type(error).__name__}: {error}"[:300], trial=trial_data(trial),
        )  # fmt: skip


def _built(setting: Setting, builds: Sequence[Build]) -> list[Answer]:
    engine = setting.engine
    if isinstance(engine, GroupingEngine) and len(builds) > 1:
        return engine.build_all(builds)
    return [_one(setting, each) for each in builds]


def _one(setting: Setting, builds: Build) -> Answer:
    try:
        return setting.engine.build(builds.prepared, builds.example)
    except RefusedByEngineError as error:
        return error
