"""``conform``: cases are made of a description, run on an engine, and judged."""

from __future__ import annotations

import copy
import json
import os
import re
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from typing import IO, Any

import torch
from torch import fx

from backquant.backend_config import BackendConfig, DTypeConfig, get_backend_config
from backquant.conformance.attempt import (
    Prepared,
    Setting,
    Steps,
    attempt,
    blank_outcome,
    calibrated,
    in_float,
    on_engine,
    prepared_module,
    refused_after_calibration,
)
from backquant.conformance.combinations import combinations, combined_model, together
from backquant.conformance.data import input_grids, output_scale
from backquant.conformance.engine_protocol import (
    Answer,
    Build,
    ConformanceEngine,
    GroupingEngine,
    RefusedByEngineError,
)
from backquant.conformance.engines import find_conformance_engine
from backquant.conformance.models import Examples, NoExampleError, float_model
from backquant.conformance.refused import at_bounds, beyond, only_claim, operator_of, too_narrow
from backquant.conformance.results import (
    Claim,
    Conformance,
    Outcome,
    Side,
    Trial,
    Verdict,
    dtypes_text,
    trial_data,
    trial_from,
)
from backquant.conformance.samples import asked_for
from backquant.conformance.workers import Pool
from backquant.convert import convert_to_reference
from backquant.errors import BackquantError, UnknownBackendError, UsageError, did_you_mean
from backquant.files import replace_file
from backquant.match.fixes import unconditional
from backquant.prepare import prepared_state
from backquant.reason_codes import ReasonCode

# Trials side by side: what they ask the engine to build is built together.


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


# Rules of a description that only measured scales can answer: ``bias_step_upper_bound``.
#
# Results get a scale by which a use lies at the bound, and has to conform, and one by which it lies just
# beyond, and has to be refused by that rule. (Drawn uses that it refuses are drawn again: ``attempt``.)
_BESIDE = 2**-10  # how far a use lies from the bound, as a part of it


def at_measured_bounds(trial: Trial, setting: Setting) -> Steps:
    """The outcomes at the bound of scales to each other, and just beyond it."""
    entry, config = trial.claim.of(setting.backend)
    bound = config.bias_step_upper_bound
    if bound is None:
        return
    operator, why = operator_of(entry, config, setting)
    if operator is None and "trained" in why:
        return  # the float modules that it is trained from are tried
    for side, where, ratio in (
        (Side.ACCEPTED, "at", bound * (1 - _BESIDE)),
        (Side.REFUSED, "beyond", bound * (1 + _BESIDE)),
    ):
        case = f"{trial.claim} {where}: bias_step_upper_bound {bound:g}"
        blank = replace(blank_outcome(trial, setting), case=case, side=side)
        setting.at(case)
        alone = only_claim(setting.backend, trial, config)
        prepared = None if operator is None else _with_ratio(trial, alone, config, ratio)
        if prepared is None:
            detail = why if operator is None else "it has no bias, or no scale of its own"
            yield replace(blank, verdict=Verdict.UNTRIED, detail=detail)
            return
        blank = replace(blank, use=prepared.model.text)
        refusal = refused_after_calibration(prepared.module)
        if side is Side.REFUSED:
            if refusal is None or refusal.rule != ReasonCode.BIAS_STEP:
                why = (
                    f"a bias beside a ratio of {ratio:g} is beyond the bound, and the plan takes it"
                )
                yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=why)
            else:
                yield (yield from _asked_past(trial, setting, ratio, blank))
        elif refusal is not None:
            detail = f"refused within the bound: {refusal.rule}: {refusal.asked}"
            yield replace(blank, verdict=Verdict.UNPREDICTABLE, detail=detail)
        else:
            yield from on_engine(trial, setting, prepared, config, blank)


def _asked_past(
    trial: Trial, setting: Setting, ratio: float, blank: Outcome
) -> Generator[Outcome | Build, Answer, Outcome]:
    """Does the engine take it, asked directly?"""
    _, config = trial.claim.of(setting.backend)
    free = unconditional(config) if config.where is not None else copy.copy(config)
    free.bias_step_upper_bound = None
    wide = only_claim(setting.backend, trial, free)
    prepared = _with_ratio(trial, wide, free, ratio)
    if prepared is None:
        return blank
    steps = on_engine(trial, replace(setting, backend=wide), prepared, free, blank)
    why = "the engine computes it rightly, beyond bias_step_upper_bound"
    return (yield from too_narrow(steps, blank, why))


def _with_ratio(
    trial: Trial, backend: BackendConfig, config: DTypeConfig, ratio: float
) -> Prepared | None:
    """The recorded use, whose results have the scale that makes input × weight / output ``ratio``."""
    model = float_model(backend.configs[0], backend, None, config=config)
    request = asked_for(config, next(iter(model.operators), None), None)
    module = prepared_module(model, request, backend, config)
    ranges = ["wide"] * len(model.inputs)
    prepared = calibrated(Prepared(model, request, ranges, module), trial)
    if in_float(prepared_state(module).plan) is not None or not _has_bias(model.module):
        return None
    given, own = input_grids(module)[0], output_scale(module)
    weight = _weight_scale(module)
    observer = _observer_of_result(module)
    if given is None or own is None or weight is None or observer is None:
        return None
    factor = float(given[0]) * weight / (ratio * own)
    for end in ("min_val", "max_val"):
        getattr(observer, end).mul_(factor)
    made = output_scale(module)
    return prepared if made is not None and abs(made / (own * factor) - 1) < _BESIDE / 2 else None


def _has_bias(module: torch.nn.Module) -> bool:
    named = dict(module.named_parameters())
    return any(name.endswith("bias") for name in named) or "tensor1" in named


def _observer_of_result(prepared: fx.GraphModule) -> torch.nn.Module | None:
    [output] = (node for node in prepared.graph.nodes if node.op == "output")
    found = prepared.get_submodule(str(output.args[0].target))
    return found if hasattr(found, "min_val") and hasattr(found, "max_val") else None


def _weight_scale(prepared: fx.GraphModule) -> float | None:
    """The one scale of the weight: a module's, or that of an observed parameter."""
    found = (getattr(m, "weight_scale", None) for m in convert_to_reference(prepared).modules())
    scales = [scale for scale in found if isinstance(scale, torch.Tensor)]
    for node in prepared.graph.nodes:
        if node.op == "call_module" and getattr(node.args[0], "op", "") == "get_attr":
            observer: Any = prepared.get_submodule(str(node.target))
            if hasattr(observer, "calculate_qparams"):
                scales.append(observer.calculate_qparams()[0])
    return float(scales[0]) if scales and scales[0].numel() == 1 else None


#: How many uses of the operator are tried for each claim: its example, then drawn ones.
ROUNDS = 3

#: Seconds that one case may take.
LIMIT = 60.0
_LOG = "outcomes.jsonl"
_SCRIPTS = 100
_UNUSUAL = r"[^\w.-]+"
Progress = Callable[[int, int | None], None]


def conform(
    backend: BackendConfig | str,
    *,
    engine: ConformanceEngine | str | None = None,
    entries: Sequence[str] = (),
    minutes: float = 10.0,
    seed: int = 0,
    rounds: int = ROUNDS,
    jobs: int | None = None,
    limit: float = LIMIT,
    output: str | Path | None = None,
    resume: bool = False,
    examples: Examples | None = None,
    progress: Progress | None = None,
) -> Conformance:
    """Test whether an engine does what a description says: each entry with each of its dtype configs.

    Each case is quantized as the entry admits it and has to run on integer kernels, whose results may differ
    from the integer reference by no more steps than the entry states. docs/conformance.md has the outcomes.

    The same seed gives the same cases. If the engine crashes or hangs, that is the outcome of the case, and
    the run goes on.

    Args:
        backend: the description, or its name.
        engine: what to test: the name of an engine or of a target of ``export``, or an object
            (``backquant.conformance.engine_protocol``). Default: the description's engine; without one, the
            target of ``export`` that is made for it; without that, the reference model.
        entries: test only entries whose pattern contains one of these strings.
        minutes: no case begins after that time.
        seed: of all random draws.
        rounds: uses of the operator that are tried for each claim: its recorded example, then random ones.
        jobs: number of processes; default: one for each core. 0: this process, which a crash of the engine
            would end.
        limit: seconds that one case may take.
        output: a folder for the outcomes, the pages and a script for each finding.
        resume: continue the run in ``output``.
        examples: for operators without a record: by spelling, a module and its inputs.
        progress: called with the number of finished trials and the number of all.

    Raises:
        EngineError: there is no such engine, or it does not run on this machine.
        UsageError: a string in ``entries`` that no pattern contains; ``resume`` of another run.

    >>> found = conform("x86", entries=["nn.ReLU(torch.add"], rounds=1, jobs=0)
    >>> found.conforms, found.cases > 5
    (True, True)
    """
    config = get_backend_config(backend) if isinstance(backend, str) else backend
    target = find_conformance_engine(config, engine)
    versions = target.versions()
    found = Conformance(config.name, target.name, versions, seed, _now())
    setting = Setting(claimed(config), target, examples)
    wanted = list(trials(claims(config, entries), rounds, seed))
    log = _Log.opened(output, resume, {"backend": config.name, "engine": target.name, "seed": seed})
    begun = time.monotonic()
    done = log.read(found)
    left = [trial for trial in wanted if trial.key not in done]
    finished = len(wanted) - len(left)
    stream = _stream(left, setting, _jobs(jobs), limit, begun + minutes * 60)
    for trial, outcome in stream:
        log.write(trial, outcome)
        if outcome is not None:
            found.add(outcome)
            continue
        finished += 1
        if progress is not None:
            progress(finished, len(wanted))
    log.close()
    found.complete = finished == len(wanted)
    found.seconds = time.monotonic() - begun
    if output is not None:
        _write(found, config, Path(output), engine if isinstance(engine, str) else "")
    return found


def _now() -> str:
    return datetime.now(tz=timezone.utc).strftime("%Y-%m-%d")


def _jobs(jobs: int | None) -> int:
    return (os.cpu_count() or 1) if jobs is None else jobs


def _stream(
    left: Sequence[Trial], setting: Setting, jobs: int, limit: float, until: float
) -> Iterator[tuple[Trial, Outcome | None]]:
    size = size_of_groups(setting)
    groups = [tuple(left[at : at + size]) for at in range(0, len(left), size)]
    if jobs:
        job = _Job(setting, until)
        yield from Pool(job, setting.engine.name, jobs, limit).run(groups, until)
        return
    for group in groups:
        if time.monotonic() >= until:
            return
        yield from outcomes_of(group, setting)


@dataclass(frozen=True)
class _Job:
    """What a worker does with trials, ``until`` that time: those that are not done then are given up."""

    setting: Setting
    until: float

    def __call__(self, trials: Sequence[Trial], tell: Callable[[str, Any], None]) -> None:
        here = replace(self.setting, at=lambda case: tell("at", case))
        position = {trial: at for at, trial in enumerate(trials)}
        for trial, outcome in outcomes_of(trials, here):
            if outcome is None:
                tell("done", position[trial])
            else:
                tell("outcome", (position[trial], outcome.to_dict()))
            if time.monotonic() >= self.until:
                return


class _Log:
    """Outcomes as lines of a file, so that a run can go on where it ended."""

    def __init__(self, path: Path | None, file: IO[str] | None) -> None:
        self._path, self._file = path, file

    @classmethod
    def opened(cls, output: str | Path | None, resume: bool, about: dict[str, Any]) -> _Log:
        if output is None:
            return cls(None, None)
        folder = Path(output)
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / _LOG
        if resume and path.exists():
            with path.open(encoding="utf-8") as lines:
                first = json.loads(next(lines, "{}"))
            if first != about:
                raise UsageError(
                    f"{path} holds another run: {first}",
                    where="resume",
                    fix="resume=False   # begins again; or another folder",
                )
            return cls(path, path.open("a", encoding="utf-8"))
        file = path.open("w", encoding="utf-8")
        file.write(json.dumps(about) + "\n")
        return cls(path, file)

    def read(self, found: Conformance) -> set[str]:
        """Count what lies in the file already; the keys of the trials that are done."""
        done: set[str] = set()
        if self._path is None:
            return done
        pending: dict[str, list[Outcome]] = {}
        with self._path.open(encoding="utf-8") as lines:
            for line in list(lines)[1:]:
                try:
                    data = json.loads(line)
                except json.JSONDecodeError:  # half a line: the run was ended there
                    continue
                if "done" in data:
                    done.add(data["done"])
                    for outcome in pending.pop(data["done"], ()):
                        found.add(outcome)
                else:
                    pending.setdefault(data["key"], []).append(Outcome.from_dict(data["outcome"]))
        return done

    def write(self, trial: Trial, outcome: Outcome | None) -> None:
        if self._file is None:
            return
        line = (
            {"done": trial.key}
            if outcome is None
            else {"key": trial.key, "outcome": outcome.to_dict()}
        )
        self._file.write(json.dumps(line) + "\n")
        if outcome is None:
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def _write(found: Conformance, backend: BackendConfig, folder: Path, engine: str) -> None:
    """The pages, and a script for the first finding of each kind of each claim. ``engine``: as given."""
    name = f"{found.backend}_{found.engine}" if found.engine != found.backend else found.backend
    name = re.sub(_UNUSUAL, "_", name)
    found.save_json(folder / f"{name}.json")
    found.save_html(folder / f"{name}.html")
    found.save_markdown(folder / f"{name}.md")
    scripts = folder / "findings"
    scripts.mkdir(exist_ok=True)
    for old in scripts.glob("[0-9][0-9][0-9].py"):  # of another run in this folder
        old.unlink()
    file = _kept(backend, scripts)
    for number, outcome in enumerate(islice(found.findings(), _SCRIPTS), 1):
        text = script(outcome, backend, found.versions, file=file, engine=engine)
        replace_file(scripts / f"{number:03d}.py", text.encode())


def _kept(backend: BackendConfig, folder: Path) -> str:
    """The file in which a description lies beside the scripts; none for one that its name stands for."""
    with suppress(UnknownBackendError):
        if get_backend_config(backend.name) == backend:
            return ""
    name = f"{re.sub(_UNUSUAL, '_', backend.name)}.yaml"
    try:
        backend.save(folder / name)
    except BackquantError:  # a function of its own has no name
        return ""
    return name


# A script for one case: what it is made of, and the call that repeats it.
_WIDTH = 100
_MOST = 12  # lines of a model and a request


def repeat(
    backend: BackendConfig | str,
    trial: Mapping[str, Any],
    case: str = "",
    engine: ConformanceEngine | str | None = None,
) -> list[Outcome]:
    """The outcomes of a trial again, in this process; of one ``case``, if it is named.

    >>> from backquant.conformance import conform
    >>> data = {"claim": {"entry": 0, "config": 0, "pattern": "torch.nn.Conv1d", "dtypes": ""}, "number": 0,
    ...         "side": "accepted", "seed": 0}
    >>> {outcome.kernel for outcome in repeat("fbgemm", data)}
    {'quantized.conv1d(fbgemm)'}
    """
    config = get_backend_config(backend) if isinstance(backend, str) else backend
    setting = Setting(claimed(config), find_conformance_engine(config, engine))
    found = (outcome for _, outcome in outcomes_of([trial_from(trial)], setting))
    return [each for each in found if each is not None and case in ("", each.case)]


def script(
    outcome: Outcome,
    backend: BackendConfig,
    versions: Mapping[str, str],
    *,
    file: str = "",
    engine: str = "",
) -> str:
    """At most 30 lines of Python that repeat ``outcome``, with the versions that it was found with.

    ``file``: where the description lies beside the script, if it has no name that is known everywhere;
    ``engine``: what it was asked for by, if that is not the engine's name.
    """
    return "\n".join(_lines(outcome, backend, versions, file, engine or outcome.engine)) + "\n"


def _lines(
    outcome: Outcome, backend: BackendConfig, versions: Mapping[str, str], file: str, engine: str
) -> Iterator[str]:
    yield f"# {outcome.verdict.value}: {backend.name} on {outcome.engine}"
    yield f"# {outcome.pattern}: {outcome.dtypes}"
    yield f"# {outcome.use}"
    if outcome.steps > outcome.limit:
        yield f"# {outcome.steps:g} steps off, {outcome.limit:g} are stated, by {outcome.kernel}"
    if outcome.detail:
        yield f"# {outcome.detail}"
    yield f"# found with {', '.join(f'{name} {version}' for name, version in versions.items())}"
    yield from (f"#   {line}"[:_WIDTH] for line in _made_of(outcome, backend)[:_MOST])
    if file:
        yield from ("from pathlib import Path", "from backquant import BackendConfig")
    yield "from backquant.conformance.run import repeat"
    yield ""
    described = f"BackendConfig.load(Path(__file__).with_name({file!r}))"
    yield f"trial = {dict(outcome.trial)!r}"
    yield f"case = {outcome.case!r}"
    yield f"for outcome in repeat({described if file else repr(backend.name)}, trial, case, {engine!r}):"
    yield '    print(f"{outcome.verdict.value}: {outcome.steps:g} steps off; {outcome.detail}")'


def _made_of(outcome: Outcome, backend: BackendConfig) -> list[str]:
    """The model and the request, as code."""
    trial = trial_from(outcome.trial)
    entry, config = trial.claim.of(backend)
    choice = trial.choice() if trial.number else None
    try:
        if trial.claim.together:
            model = combined_model(trial, backend)
        else:
            model = float_model(entry, backend, choice, config=config)
    except NoExampleError:
        return []
    operator = next(iter(model.operators), None)
    request = asked_for(config, operator, choice, trained=model.trained)
    children = [f"{name} = {child}" for name, child in model.module.named_children()]
    body = str(getattr(model.module, "code", "")).strip().splitlines()[:6]
    return [line for text in (*children, *body, str(request)) for line in text.splitlines() if line]


# Which trials a run consists of: the claims of a description, round by round.
def claimed(backend: BackendConfig) -> BackendConfig:
    """``backend`` without its rules about where integers do not pay, so that all that it claims is tried."""
    if backend.qdq is None or not backend.qdq.leave_float:
        return backend
    return copy.copy(backend).set_qdq(replace(backend.qdq, leave_float=()))


def claims(backend: BackendConfig, entries: Sequence[str] = ()) -> list[Claim]:
    """What ``backend`` claims, entry by entry, then combinations of them; with ``entries`` those with one of
    these texts in it.

    Raises ``UsageError`` for a text that no pattern has.

    >>> from backquant.backend_config import get_backend_config
    >>> [str(claim) for claim in claims(get_backend_config("x86"), ["nn.ReLU(torch.add"])]
    ['torch.nn.ReLU(torch.add) | input quint8, output quint8']
    >>> claims(get_backend_config("x86"), ["cat of two"])[0].pattern
    'cat of two torch.nn.Conv1d'
    """
    found = [
        Claim(at, position, str(entry.normal_pattern), dtypes_text(config))
        for at, entry in enumerate(backend.configs)
        for position, config in enumerate(entry.dtype_configs)
    ]
    found += combinations(backend)
    patterns = {claim.pattern for claim in found}
    for text in entries:
        if not any(text in pattern for pattern in patterns):
            near = did_you_mean(text, patterns, f"backquant show {backend.name}")
            raise UsageError(f"no entry of {backend.name} has {text!r}", where="entries", fix=near)
    return [claim for claim in found if not entries or any(t in claim.pattern for t in entries)]


def trials(found: Sequence[Claim], rounds: int, seed: int) -> Iterator[Trial]:
    """Every claim with its recorded example, then what lies beyond it, then drawn uses, one after the other.

    >>> [(t.number, t.side.value) for t in trials([Claim(0, 0, "torch.add", "int8")], 2, 0)]
    [(0, 'accepted'), (0, 'refused'), (1, 'accepted')]
    """
    for number in range(rounds):
        yield from (Trial(claim, number, seed=seed) for claim in found)
        if number == 0:
            alone = (claim for claim in found if not claim.together)
            yield from (Trial(claim, 0, Side.REFUSED, seed=seed) for claim in alone)
