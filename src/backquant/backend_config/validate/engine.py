"""The rule about what only the engine knows, which is passed in.

``engine-dtype``: a dtype that the engine has not. An error when no dtype config of the entry can run,
else a warning. Dtypes are compared by storage: an engine with uint8 runs ``quint8``. Float dtypes are
what operators compute in when nothing is quantized; every engine has float32. What activations are cast to at
each call beside integer weights is a matter of the kernel, which lowering finds or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from backquant.backend_config.dtypes import DTypeConfig
from backquant.backend_config.validate.dtype_configs import ROLES
from backquant.backend_config.validate.finding import Finding, Place
from backquant.dtypes import is_quantized, plain_dtype
from backquant.errors import SpecError


def engine_dtypes(engine: Any) -> frozenset[torch.dtype] | None:
    """The dtypes that ``engine`` names in ``dtypes``, or ``activation_dtypes`` and ``weight_dtypes``.

    Raises ``SpecError`` when it has neither.

    >>> class Engine:
    ...     dtypes = (torch.quint8,)
    >>> sorted(map(str, engine_dtypes(Engine())))
    ['torch.float32', 'torch.uint8']
    """
    if engine is None:
        return None
    named = getattr(engine, "dtypes", None)
    if named is None:
        parts = [getattr(engine, f"{role}_dtypes", None) for role in ("activation", "weight")]
        if None in parts:
            raise SpecError(
                f"an engine names its dtypes, {engine!r} does not",
                where="engine",
                fix="pass an object with the attribute dtypes",
            )
        named = [dtype for part in parts for dtype in part or ()]
    return frozenset({torch.float32, *(plain_dtype(dtype) for dtype in named)})


def engine_findings(
    configs: list[DTypeConfig], dtypes: frozenset[torch.dtype], place: Place
) -> Iterator[Finding]:
    """A finding for each dtype of ``configs`` that is not in ``dtypes``.

    >>> place = Place(0, "torch.add")
    >>> [f.severity for f in engine_findings([DTypeConfig(torch.qint8)], frozenset(), place)]
    ['error']
    """
    missing = [_missing(config, dtypes) for config in configs]
    none_runs = all(missing) if missing else False
    for index, lacks in enumerate(missing):
        for role, dtype in lacks:
            yield (
                place.at(f"dtype_configs[{index}]")
                .at(role)
                .find(
                    "error" if none_runs else "warning",
                    "engine-dtype",
                    f"the engine has no {dtype}",
                    "it has " + ", ".join(sorted(str(known) for known in dtypes)),
                )
            )


def _missing(config: DTypeConfig, dtypes: frozenset[torch.dtype]) -> list[tuple[str, torch.dtype]]:
    given = [(role, getattr(config, role)) for role in ROLES]
    return [
        (role, dtype)
        for role, dtype in given
        if dtype is not None
        and plain_dtype(dtype) not in dtypes
        and not (role == "input_dtype" and _is_cast(config))
    ]


def _is_cast(config: DTypeConfig) -> bool:
    activation, weight = config.input_dtype, config.weight_dtype
    if activation is None or weight is None or not config.is_dynamic:
        return False
    return not is_quantized(activation) and is_quantized(weight)
