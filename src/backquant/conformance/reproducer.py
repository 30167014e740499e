"""A script for one case: what it is made of, and the call that repeats it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from backquant.backend_config import BackendConfig, get_backend_config
from backquant.conformance.attempt import Setting
from backquant.conformance.case import Outcome, trial_from
from backquant.conformance.combinations import combined_model
from backquant.conformance.engines import find_conformance_engine
from backquant.conformance.group import outcomes_of
from backquant.conformance.models import NoExampleError, float_model
from backquant.conformance.plan import claimed
from backquant.conformance.requests import asked_for
from backquant.conformance.seam import ConformanceEngine

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
    yield "from backquant.conformance.reproducer import repeat"
    yield ""
    described = f"BackendConfig.load(Path(__file__).with_name({file!r}))"
    yield f"trial = {dict(outcome.trial)!r}"
    yield f"case = {outcome.case!r}"
    yield f"for outcome in repeat({described if file else repr(backend.name)}, trial, case, {engine!r}):"
    yield '    print(f"{outcome.verdict.value}: {outcome.steps:g} steps off; {outcome.detail}")'


def _made_of(outcome: Outcome, backend: BackendConfig) -> list[str]:
    """The model and the request, as code."""
    trial = trial_from(outcome.trial)
    entry = backend.configs[trial.claim.entry]
    choice = trial.choice() if trial.number else None
    config = entry.dtype_configs[trial.claim.config]
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
