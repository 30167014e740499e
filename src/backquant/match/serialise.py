"""Plans as JSON-able values."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

import torch

from backquant.errors import ConfigError
from backquant.match.plan import (
    BySample,
    Decision,
    Fusion,
    Match,
    MatchKind,
    Outcome,
    Plan,
    PortUse,
    Predicate,
    Reason,
    RuleKind,
    RuleRef,
    TensorRequest,
)

# Not written where they are empty: plans that were written before have none.
_SELDOM = ("separate_layers", "by_sample")
# Fields of plans that were written before, and their names now.
_NAMES = {"apart": "separate_layers"}


def plan_to_dict(plan: Plan) -> dict[str, Any]:
    """Dataclasses become dicts, tuples lists, dtypes and enums their names.

    >>> plan_to_dict(Plan("x86", unreached_entries=(3,)))["unreached_entries"]
    [3]
    """
    values = _plain(plan)
    values["decisions"] = list(values["decisions"].values())
    for name in _SELDOM:
        if not values[name]:
            del values[name]
    return dict(values)


def plan_from_dict(values: dict[str, Any]) -> Plan:
    """The inverse of ``plan_to_dict``. Raises ``ConfigError`` for a missing or unknown field.

    >>> plan_from_dict(plan_to_dict(Plan("x86"))).backend
    'x86'
    """
    try:
        named = {_NAMES.get(name, name): value for name, value in values.items()}
        return _plan(named)
    except (TypeError, KeyError, ValueError, AttributeError) as error:
        raise ConfigError(f"this is no plan: {error}", where="Plan.from_dict") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _plan(values: dict[str, Any]) -> Plan:
    decisions = [_decision(item) for item in values["decisions"]]
    return Plan(
        **{
            **values,
            "fusions": tuple(Fusion(**_tuples(item)) for item in values["fusions"]),
            "matches": tuple(_match(item) for item in values["matches"]),
            "decisions": {decision.node: decision for decision in decisions},
            "unused_rules": tuple(_rule(item) for item in values["unused_rules"]),
            "predicates": tuple(Predicate(**item) for item in values["predicates"]),
            "notes": tuple(values["notes"]),
            "unreached_entries": tuple(values["unreached_entries"]),
            "no_tensors": tuple(values["no_tensors"]),
            "separate_layers": tuple(values.get("separate_layers", ())),
            "by_sample": {
                name: BySample(axes, tuple(channels), *parts)
                for name, (axes, channels, *parts) in values.get("by_sample", {}).items()
            },
        }
    )


def _tuples(values: dict[str, Any]) -> dict[str, Any]:
    return {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}


def _match(values: dict[str, Any]) -> Match:
    ports = tuple(PortUse(**_tuples(port)) for port in values.get("ports", ()))
    return Match(**{**_tuples(values), "kind": MatchKind(values["kind"]), "ports": ports})


def _rule(values: dict[str, Any] | None) -> Any:
    if values is None:
        return None
    return RuleRef(**{**values, "kind": RuleKind(values["kind"])})


def _request(values: dict[str, Any] | None) -> TensorRequest | None:
    if values is None:
        return None
    return TensorRequest(**{**values, "dtype": getattr(torch, values["dtype"])})


def _decision(values: dict[str, Any]) -> Decision:
    return Decision(
        **{
            **values,
            "outcome": Outcome(values["outcome"]),
            "rule": _rule(values["rule"]),
            "asked_activation": _request(values["asked_activation"]),
            "asked_weight": _request(values["asked_weight"]),
            "asked_output": _request(values.get("asked_output")),
            "reasons": tuple(Reason(**item) for item in values["reasons"]),
        }
    )
