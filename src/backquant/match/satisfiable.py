"""Can a request satisfy each dtype config? One is made for each, from its own demands, and judged.

``unsatisfiable``: no observer gives the dtype, the observer that the demands ask for is refused by them, or
the plan leaves the operator in float although it is asked for so (``backquant.match.tried``).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from backquant.backend_config import BackendConfig, BackendPatternConfig, DTypeConfig
from backquant.backend_config.validate import Finding
from backquant.backend_config.validate.finding import Place
from backquant.dtypes import dtype_name, find_dtype
from backquant.errors import BackquantError
from backquant.match.fixes import qconfig_fix, unconditional
from backquant.match.qconfig_reader import QConfigReader
from backquant.match.tried import plan_refusal
from backquant.match.verdict import QConfigRequest, Roles, judge


def unsatisfiable(backend: BackendConfig) -> list[Finding]:
    """An error for each dtype config that no request satisfies.

    >>> entry = BackendPatternConfig(torch.add).add_dtype_config(DTypeConfig(torch.float8_e8m0fnu))
    >>> [finding] = unsatisfiable(BackendConfig("b").set_backend_pattern_config(entry))
    >>> finding.rule, finding.message
    ('unsatisfiable', 'no request satisfies it: input float8_e8m0fnu, which nothing here quantizes to')
    """
    found: list[Finding] = []
    known: dict[str, str] = {}
    for index, (pattern, entry) in enumerate(backend.entries.items()):
        for position, config in enumerate(entry.dtype_configs):
            key = repr(config)
            if key not in known:
                known[key] = next(_refused(config), "")
            refused = known[key] or _in_a_plan(entry, config)
            if refused:
                place = Place(index, str(pattern)).at(f"dtype_configs[{position}]")
                message = f"no request satisfies it: {refused}"
                dtypes = "a dtype of backquant.dtypes.known_dtypes()"
                fix = dtypes if known[key] else "remove the combination, or what contradicts it"
                found.append(place.find("error", "unsatisfiable", message, fix))
    return found


def _refused(config: DTypeConfig) -> Iterator[str]:
    """Why the request that ``config`` asks for is refused by it."""
    for role in ("input", "output", "weight"):
        dtype = getattr(config, f"{role}_dtype")
        if dtype not in (None, torch.float32, torch.float64) and find_dtype(dtype) is None:
            yield f"{role} {dtype_name(dtype)}, which nothing here quantizes to"
        row = None if dtype is None or role == "weight" else find_dtype(dtype)
        shared = getattr(config, f"{role}_dtype_with_constraints").granularity or ""
        in_blocks = config.is_dynamic and shared.startswith(("per_group", "per_block"))
        if row is not None and row.packed and not in_blocks:
            yield f"{role} {dtype_name(dtype)}, which only weights are quantized to"
    weighted = config.weight_dtype is not None
    roles = Roles(activation=True, weight=weighted, bias=weighted)
    entry = BackendPatternConfig(torch.add).set_dtype_configs([unconditional(config)])
    try:
        requests = _request(config, roles)
    except (BackquantError, TypeError, ValueError, RuntimeError, NotImplementedError) as error:
        yield str(error).splitlines()[0]
        return
    ruling = judge(entry, requests, roles)
    for role, refusal in ruling.refused[0] if ruling.refused else ():
        yield f"{role} {refusal.asked} is not {refusal.admitted}"


def _in_a_plan(entry: BackendPatternConfig, config: DTypeConfig) -> str:
    """Why the plan refuses what ``config`` asks for; empty where it does not."""
    weighted = config.weight_dtype is not None
    roles = Roles(activation=True, weight=weighted, bias=weighted)
    plain = unconditional(config)
    return plan_refusal(entry, plain, qconfig_fix(plain, QConfigRequest(None, None), roles).make())


def _request(config: DTypeConfig, roles: Roles) -> QConfigRequest:
    """What the fix of a refusal would ask for."""
    qconfig = qconfig_fix(config, QConfigRequest(None, None), roles).make()
    reader = QConfigReader()
    weight = reader.weight(qconfig, "check") if roles.weight else None
    output = reader.output(qconfig, "check")
    return QConfigRequest(reader.activation(qconfig, "check"), weight, output)
