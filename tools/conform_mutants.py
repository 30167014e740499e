"""How many random changes to a description ``conform`` notices.

    python -m tools.conform_mutants --count 200 qnnpack x86

Each mutant changes one entry: a bound is moved, a dtype config added, a shared observer unshared, an entry
added for an operator. Noticed: one of its claims fails, or is too narrow, in a way in which none of that
entry did.
"""

from __future__ import annotations

import argparse
import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

import backquant
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ObservationType,
)
from backquant.conformance.attempt import Setting
from backquant.conformance.engines import find_conformance_engine
from backquant.conformance.results import FAILURES, Side, Trial, Verdict
from backquant.conformance.run import claims, outcomes_of
from backquant.dtypes import integer_range
from backquant.errors import BackquantError
from backquant.operators import all_operators, entries_of

_DTYPES = (
    DTypeConfig(torch.int16, torch.int16),
    DTypeConfig(torch.uint16, torch.uint16),
    DTypeConfig(torch.quint8, torch.int16),
    DTypeConfig(torch.float8_e4m3fn, torch.float8_e4m3fn),
)
_BOUNDS = ("quant_min_lower_bound", "quant_max_upper_bound", "scale_min_lower_bound")


@dataclass(frozen=True)
class Mutant:
    """``entry`` takes the place of the one at ``place`` of the description; -1: it is added."""

    kind: str
    entry: BackendPatternConfig
    place: int
    what: str


def bound_moved(backend: BackendConfig, choice: random.Random) -> Mutant | None:
    """One bound of one dtype config, to a tighter or a wider value."""
    place, entry = _drawn(backend, choice, lambda e: any(_bounded(c) for c in e.dtype_configs))
    if entry is None:
        return None
    configs = list(entry.dtype_configs)
    at = choice.choice([i for i, c in enumerate(configs) if _bounded(c)])
    role, field = choice.choice(_bounded(configs[at]))
    demand = getattr(configs[at], f"{role}_with_constraints").to_dict()
    before = demand[field]
    moves = (before / 16, before * 16) if field.startswith("scale") else (before - 1, before + 1)
    demand[field] = choice.choice([to for to in moves if _says_more(configs[at], role, field, to)])
    made = {**configs[at].to_dict(), role: DTypeWithConstraints(**demand)}
    configs[at] = DTypeConfig.from_dict(made)
    return Mutant(
        "bound moved", _with(entry, configs), place, f"{role}.{field} {before} → {demand[field]}"
    )


def _bounded(config: DTypeConfig) -> list[tuple[str, str]]:
    return [
        (role, field)
        for role in ("input_dtype", "output_dtype", "weight_dtype")
        for field in _BOUNDS
        if getattr(getattr(config, f"{role}_with_constraints"), field) is not None
    ]


def _says_more(config: DTypeConfig, role: str, field: str, to: float) -> bool:
    """Whether a moved bound admits other requests: one beyond the range of its dtype, or on outputs looser
    than on inputs, which one observer serves, says what was said before."""
    demand = getattr(config, f"{role}_with_constraints")
    low, high = integer_range(demand.dtype) or (0, 0)
    if not field.startswith("scale") and not low <= to <= high:
        return False
    other = getattr(config.input_dtype_with_constraints, field)
    if role != "output_dtype" or other is None:
        return True
    return bool(to < other if field == "quant_max_upper_bound" else to > other)


def dtype_added(backend: BackendConfig, choice: random.Random) -> Mutant | None:
    """A combination of dtypes that the engine lacks."""
    place, entry = _drawn(backend, choice, lambda e: not _weighted(e))
    if entry is None:
        return None
    added = choice.choice(_DTYPES)
    return Mutant("dtype added", _with(entry, [added]), place, repr(added))


def unshared(backend: BackendConfig, choice: random.Random) -> Mutant | None:
    """An output that shared the observer of the input gets one of its own."""
    shares = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    place, entry = _drawn(backend, choice, lambda e: e.observation_type is shares)
    if entry is None:
        return None
    made = _with(entry, entry.dtype_configs)
    made.set_observation_type(ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT)
    return Mutant("unshared", made, place, "an observer of its own")


def entry_added(backend: BackendConfig, choice: random.Random) -> Mutant | None:
    """An operator that the description does not have, in the dtypes of another one."""
    known = {entry.normal_pattern.anchor.op for entry in backend.configs}
    others = [
        o for o in all_operators() if o.calls and not known & set(o.calls) and not o.is_weighted
    ]
    operator = choice.choice(others)
    _, like = _drawn(backend, choice, lambda e: not _weighted(e))
    if like is None:
        return None
    try:
        made = choice.choice(entries_of([operator.name], like.dtype_configs[:1]))
    except BackquantError:
        return None
    return Mutant("entry added", made, -1, operator.name)


def _weighted(entry: BackendPatternConfig) -> bool:
    return any(config.weight_dtype is not None for config in entry.dtype_configs)


def _drawn(
    backend: BackendConfig, choice: random.Random, suits: Callable[[BackendPatternConfig], bool]
) -> tuple[int, BackendPatternConfig | None]:
    found = [
        (i, e)
        for i, e in enumerate(backend.configs)
        if e.dtype_configs and not _uncallable(e) and suits(e)
    ]
    return choice.choice(found) if found else (-1, None)


def _uncallable(entry: BackendPatternConfig) -> bool:
    """Whether it is of a method that tensors do not have (``hardsigmoid_``, ``shape()``, of PyTorch's
    description): no program calls it, so that a change to it says nothing."""
    ops = (node.op for node in entry.normal_pattern.nodes)
    return any(isinstance(op, str) and not callable(getattr(torch.Tensor, op, None)) for op in ops)


def _with(entry: BackendPatternConfig, configs: list[DTypeConfig]) -> BackendPatternConfig:
    made = copy.copy(entry)
    return made.set_dtype_configs(configs)


def _mutated(backend: BackendConfig, mutant: Mutant) -> tuple[BackendConfig, int]:
    entries = list(backend.configs)
    place = mutant.place
    if place < 0:
        place = len(entries)
        entries.append(mutant.entry)
    else:
        entries[place] = mutant.entry
    made = BackendConfig(backend.name).set_engine(backend.engine)
    return made.set_backend_pattern_configs(entries), place


def _complaints(trial: Trial, setting: Setting) -> Counter[tuple[str, str]]:
    """What does not conform: by verdict, and by what was asked beyond the claim."""
    found: Counter[tuple[str, str]] = Counter()
    for _, outcome in outcomes_of([trial], setting):
        if outcome is not None and outcome.verdict in (*FAILURES, Verdict.TOO_NARROW):
            found[outcome.verdict.value, outcome.case.rpartition("beyond: ")[2][:40]] += 1
    return found


def noticed(backend: BackendConfig, mutant: Mutant) -> bool:
    """Whether a trial of the mutant has complaints that the same trial of the description has not.

    Only claims of its entry are tried, those first that show its kind, until one of them does.
    """
    changed, place = _mutated(backend, mutant)
    engine = find_conformance_engine(backend, None)
    own = [claim for claim in claims(changed) if claim.entry == place]
    sides = (Side.REFUSED, Side.ACCEPTED) if mutant.kind == "bound moved" else tuple(Side)
    for side, number in (*((side, 0) for side in sides), (Side.ACCEPTED, 1)):
        for claim in own:
            trial = Trial(claim, number, side)
            after = _complaints(trial, Setting(changed, engine))
            known = mutant.place >= 0 and claim.config < len(backend.configs[place].dtype_configs)
            if after and not known:
                return True
            if after:
                before = _complaints(trial, Setting(backend, engine))
                if any(after[key] > before[key] for key in after):
                    return True
    return False


def mutants(backend: BackendConfig, count: int, seed: int) -> Iterator[Mutant]:
    """``count`` of them, of each kind in turn."""
    choice = random.Random(seed)
    kinds = (bound_moved, dtype_added, unshared, entry_added)
    made = turn = 0
    while made < count:
        mutant = kinds[turn % len(kinds)](backend, choice)
        turn += 1
        if mutant is not None:
            made += 1
            yield mutant


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("backends", nargs="*", default=["qnnpack", "x86"])
    parser.add_argument("--count", type=int, default=200, help="of all backends together")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    seen: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for index, name in enumerate(options.backends):
        backend = backquant.get_backend_config(name)
        for mutant in mutants(
            backend, options.count // len(options.backends), options.seed + index
        ):
            found = noticed(backend, mutant)
            total[mutant.kind] += 1
            seen[mutant.kind] += found
            if not found:
                print(
                    f"unnoticed: {name}: {mutant.kind}: {mutant.entry.normal_pattern}: {mutant.what}"
                )
            print(f"{sum(seen.values())} of {sum(total.values())}", end="\r", flush=True)
    for kind, number in total.items():
        print(f"{kind}: {seen[kind]} of {number}")
    print(f"all: {sum(seen.values())} of {sum(total.values())}")


if __name__ == "__main__":
    main()
