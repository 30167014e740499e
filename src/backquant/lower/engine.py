"""Engines: which integer kernels there are on a machine, and the rules that lower a model to them.

An engine of another package is an entry point of the group ``backquant.engines``: it names an ``Engine``.
Those of this package are named there, too; their modules are imported when they are asked for.

Source: that 8-bit products may saturate in 16 bits without VNNI: oneDNN developer guide, "Nuances of int8
computations".
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import metadata
from typing import Any, TypeVar

from backquant.entry_points import read_entry_point
from backquant.errors import (
    ArtifactError,
    BackquantError,
    EngineError,
    did_you_mean,
)
from backquant.lower.machine import EngineInfo, MachineFacts, machine_facts
from backquant.lower.rule import LowerRule

_Made = TypeVar("_Made")
_GROUP = "backquant.engines"
#: The engines of this package; they need no installed metadata and cannot be replaced.
_BUILT_IN = {
    "x86": "backquant.engines.onednn:X86",
    "onednn": "backquant.engines.onednn:ONEDNN",
    "fbgemm": "backquant.engines.quantized:FBGEMM",
    "qnnpack": "backquant.engines.quantized:QNNPACK",
    "integer_reference": "backquant.engines.integer_reference:INTEGER_REFERENCE",
}


@dataclass(frozen=True)
class Engine:
    """An engine: its name, what it is on a machine, and its table of rules.

    ``info``: what it offers on the machine of these facts; it raises ``EngineError`` where it cannot run
    there. ``rules``: how a reference model is lowered to its kernels, in order of preference. A rule refuses
    what its kernel does not take, with the reason. What no rule takes runs in float.

    >>> import torch
    >>> def info(facts: MachineFacts) -> EngineInfo:
    ...     return EngineInfo("mine", facts.isa, facts.torch_version, (), (torch.int8,), (torch.int8,))
    >>> engine = Engine("mine", info, lambda: [])
    >>> engine.info(MachineFacts("aarch64", torch_version="2.13.0")).describe()
    'mine (aarch64, torch 2.13.0)'
    """

    name: str
    info: Callable[[MachineFacts], EngineInfo]
    rules: Callable[[], Sequence[LowerRule]]

    @cached_property
    def table(self) -> tuple[LowerRule, ...]:
        """``rules()``, called once."""
        return tuple(self.rules())


def list_engines() -> list[str]:
    """Names of all engines: those of this package, then those of other packages by name.

    >>> list_engines()[:4]
    ['x86', 'onednn', 'fbgemm', 'qnnpack']
    """
    others = {point.name for point in metadata.entry_points(group=_GROUP)}
    return [*_BUILT_IN, *sorted(others - set(_BUILT_IN))]


def find_engine(name: str) -> Engine:
    """The engine ``name``, whether or not it runs here.

    Raises ``EngineError`` for a name that no engine has, with the nearest ones, and for an engine of another
    package that cannot be read.

    >>> len(find_engine("x86").rules()) > 0
    True
    """
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        ours: Engine = getattr(importlib.import_module(module), attribute)
        return ours
    points = list({p.value: p for p in metadata.entry_points(group=_GROUP, name=name)}.values())
    if not points:
        raise _unknown(name)
    if len(points) > 1:
        raise EngineError(
            f"several installed packages offer an engine {name!r}",
            where=f"entry points of {_GROUP}: {', '.join(sorted(p.value for p in points))}",
            fix="uninstall all but one",
        )
    fix = f"Engine({name!r}, info, rules)"
    found = read_entry_point(points[0], Engine, "engine", EngineError, fix)
    if found.name != name:
        raise EngineError(
            f"the engine {name!r} of an installed package is called {found.name!r}",
            where=f"entry point {name} = {points[0].value!r} of the group {_GROUP}",
            fix=fix,
        )
    return replace(
        found,
        info=_guarded(found.info, name, "info on this machine"),
        rules=_guarded(found.rules, name, "its table of rules"),
    )


def is_built_in(name: str) -> bool:
    """Whether an engine is one of this package.

    >>> is_built_in("x86"), is_built_in("acme")
    (True, False)
    """
    return name in _BUILT_IN


def _guarded(function: Callable[..., _Made], name: str, what: str) -> Callable[..., _Made]:
    """``function`` of another package, with errors that name the package."""

    def guarded(*arguments: Any) -> _Made:
        try:
            return function(*arguments)
        except BackquantError:
            raise
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            message = f"the engine {name!r} of an installed package failed: {told}"
            fix = "raise backquant.EngineError where the engine cannot run, with what to do"
            raise EngineError(message, where=f"engine {name}, {what}", fix=fix) from error

    return guarded


def _unknown(name: str) -> EngineError:
    names = list_engines()
    meant = did_you_mean(name, names, f"one of {', '.join(names)},", most=1)
    return EngineError(
        f"there is no engine {name!r}",
        where=f"engine: {name}",
        fix=f"{meant} or None: the reference model runs anywhere",
    )


def engine_info(name: str, facts: MachineFacts | None = None) -> EngineInfo:
    """The engine ``name`` on the machine that ``facts`` describe (default: this one).

    Raises ``EngineError`` for a name that is no engine, and for an engine that this build of torch
    or this CPU lacks; the message says which engine can be used instead.

    >>> engine_info("x86").activation_dtypes
    (torch.uint8,)
    >>> engine_info("onednn", MachineFacts("aarch64"))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    backquant.errors.EngineError: the engine onednn needs oneDNN's quantized kernels...
    ...
    """
    return find_engine(name).info(machine_facts() if facts is None else facts)


def engine_here(made_for: EngineInfo) -> EngineInfo:
    """The engine of this machine that runs a model made for ``made_for``.

    Raises ``ArtifactError`` where its sums may saturate and those it was made for do not, and
    ``EngineError`` where this build or CPU has no such engine.

    >>> engine_here(engine_info("qnnpack")).name
    'qnnpack'
    """
    here = engine_info(made_for.name)
    if made_for.wide_accumulation and not here.wide_accumulation:
        raise ArtifactError(
            f"the model was made for {made_for.describe()}, where 8-bit products are summed in 32 "
            f"bits; on {here.describe()} they would saturate silently",
            where="engine",
            fix="quantize again on this machine",
        )
    return here
