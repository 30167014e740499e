"""Dtype configs of a spec file, with the place of what is wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints
from backquant.backend_config.files.conditions import condition_at
from backquant.backend_config.files.located import Path
from backquant.backend_config.files.names import SpellingError
from backquant.backend_config.files.scalars import dtype_from, number_from
from backquant.backend_config.tolerance import tolerance_from
from backquant.errors import SpecError

Value = TypeVar("Value")
_DTYPE_ROLES = ("input_dtype", "output_dtype", "weight_dtype")


def at_path(path: Path, make: Callable[..., Value], *arguments: Any) -> Value:
    """``make(*arguments)``; a SpellingError inside gets ``path`` before its own."""
    try:
        return make(*arguments)
    except SpellingError as problem:
        problem.path = (*path, *problem.path)
        raise
    except SpecError as error:
        raise SpellingError(error.what, error.fix, path) from error


def dtype_config_from(data: dict[str, Any]) -> DTypeConfig:
    """The dtype config of a mapping of the file. Raises ``SpellingError`` with the path to what is wrong.

    >>> dtype_config_from({"input_dtype": "quint8"}).input_dtype
    torch.quint8
    """
    values = dict(data)
    for role in _DTYPE_ROLES:
        if values.get(role) is not None:
            values[role] = at_path((role,), _tensor, values[role])
    if values.get("bias_dtype") is not None:
        values["bias_dtype"] = at_path(("bias_dtype",), dtype_from, values["bias_dtype"])
    if values.get("tolerance") is not None:
        given = values["tolerance"]
        steps = at_path(("tolerance", "steps"), number_from, given.get("steps"))
        values["tolerance"] = at_path(("tolerance",), tolerance_from, {**given, "steps": steps})
    ratio = values.get("requantization_ratio")
    if isinstance(ratio, list):
        values["requantization_ratio"] = at_path(("requantization_ratio",), _number_or_word, ratio)
    if values.get("bias_step_upper_bound") is not None:
        bound = values["bias_step_upper_bound"]
        values["bias_step_upper_bound"] = at_path(("bias_step_upper_bound",), number_from, bound)
    values["where"] = at_path(("where",), condition_at, values.get("where"))
    return DTypeConfig(**values)


def _tensor(data: Any) -> DTypeWithConstraints:
    values = {"dtype": data} if isinstance(data, str) else dict(data)
    for name, value in values.items():
        convert = dtype_from if name in ("dtype", "scale_dtype") else _number_or_word
        if value is not None:
            values[name] = at_path((name,), convert, value)
    return DTypeWithConstraints(**values)


def _number_or_word(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(None if one is None else number_from(one) for one in value)
    is_word = isinstance(value, str) and value.startswith("per_")
    return value if is_word else number_from(value)
