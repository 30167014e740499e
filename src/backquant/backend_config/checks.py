"""Checks of what stands in a description: keys and kinds of values, with the place in the error."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from backquant.errors import SpecError, did_you_mean


def check_keys(given: Mapping[str, Any], known: Iterable[str], what: str) -> None:
    """Raise ``SpecError`` for the first key of ``given`` that is not in ``known``.

    >>> check_keys({"nmae": "x"}, ["name", "configs"], "BackendConfig")
    Traceback (most recent call last):
    backquant.errors.SpecError: BackendConfig has no field 'nmae'
      where  nmae
      fix    did you mean 'name'?
    """
    if not isinstance(given, Mapping):
        raise SpecError(
            f"{what} is built from a dict, got {type(given).__name__}",
            fix=f"{what}.from_dict({{...}})",
        )
    known = list(known)
    for key in given:
        if key not in known:
            fix = did_you_mean(key, known, f"fields: {', '.join(known)}")
            raise SpecError(f"{what} has no field {key!r}", where=str(key), fix=fix)


def renamed(given: Mapping[str, Any], alias: str, name: str) -> dict[str, Any]:
    """A copy of ``given`` in which the key ``alias`` is called ``name``.

    Raises ``SpecError`` when both are there with different values.

    >>> renamed({"bias_type": 1}, "bias_type", "bias_dtype")
    {'bias_dtype': 1}
    """
    if not isinstance(given, Mapping) or alias not in given:
        return given  # type: ignore[return-value]  # check_keys refuses what is not a dict
    if name in given and given[name] != given[alias]:
        raise SpecError(
            f"{alias!r} and {name!r} are two names of one field and differ: "
            f"{given[alias]!r}, {given[name]!r}",
            where=alias,
            fix=f"keep {name!r} only",
        )
    return {name if key == alias else key: value for key, value in given.items()}


def check_module_class(value: Any, field: str) -> type[torch.nn.Module] | None:
    """``value`` when it is None or a subclass of ``torch.nn.Module``; else ``SpecError``.

    >>> check_module_class(torch.nn.Linear, "root_module").__name__
    'Linear'
    """
    if value is None or (isinstance(value, type) and issubclass(value, torch.nn.Module)):
        return value
    fix = f"pass the class: {type(value).__name__}" if isinstance(value, torch.nn.Module) else ""
    raise SpecError(
        f"{field} must be a subclass of torch.nn.Module, got {value!r}", where=field, fix=fix
    )


def check_callable(value: Any, field: str) -> Callable[..., Any] | None:
    """``value`` when it is None or callable; else ``SpecError``.

    >>> check_callable(len, "fuser_method")
    <built-in function len>
    """
    if value is None or callable(value):
        return value  # type: ignore[no-any-return]
    raise SpecError(f"{field} must be callable, got {value!r}", where=field)


def check_number(value: Any, field: str, kinds: tuple[type, ...] = (int, float)) -> None:
    """Raise ``SpecError`` unless ``value`` is None or a number of these kinds (bool is none)."""
    if value is None or (isinstance(value, kinds) and not isinstance(value, bool)):
        return
    names = " or ".join(kind.__name__ for kind in kinds)
    raise SpecError(f"{field} must be {names}, got {value!r}", where=field)


def check_count(value: Any, field: str) -> None:
    """Raise ``SpecError`` unless ``value`` is an int of 0 or more: a count or a position."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise SpecError(f"expected a count or a position, got {value!r}", where=field)


def check_choice(value: Any, field: str, choices: tuple[Any, ...]) -> None:
    """Raise ``SpecError`` unless ``value`` is None or one of ``choices``."""
    if value is None or value in choices:
        return
    fix = did_you_mean(value, choices, f"one of {', '.join(map(repr, choices))}")
    raise SpecError(f"{field} cannot be {value!r}", where=field, fix=fix)


class within:  # noqa: N801 - read as a word: with within(place)
    """Put ``place`` before the place of a ``SpecError`` raised inside.

    >>> with within("configs[3]"):
    ...     raise SpecError("wrong", where="root_module")
    Traceback (most recent call last):
    backquant.errors.SpecError: wrong
      where  configs[3].root_module
    """

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> within:
        return self  # its place may move on

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> None:
        if isinstance(error, SpecError):
            glue = "" if not error.where or error.where.startswith("[") else "."
            error.where = f"{self.place}{glue}{error.where}"
            error.args = (error.what, error.where, error.fix)


def dtype_fix(value: Any) -> str:
    """``torch.quint8`` for the strings ``"quint8"`` and ``"torch.quint8"``.

    >>> dtype_fix("quint8"), dtype_fix(8)
    ('torch.quint8', '')
    """
    name = value.removeprefix("torch.") if isinstance(value, str) else ""
    return f"torch.{name}" if isinstance(getattr(torch, name or "-", None), torch.dtype) else ""


# Numbers as people write them.

_SMALL = 2.0**-4


def number_text(value: Any) -> str:
    """``2**-12`` for small powers of two (scales), else the usual ``repr``.

    >>> number_text(2.0**-12), number_text(1 / 256), number_text(-127), number_text(0.1)
    ('2**-12', '2**-8', '-127', '0.1')
    """
    if isinstance(value, float) and 0 < value < _SMALL:
        mantissa, exponent = math.frexp(value)
        if mantissa == 0.5:
            return f"2**{exponent - 1}"
    return repr(value)


def short_text(value: float) -> str:
    """The number with six digits, for measured values.

    >>> short_text(2.0**-12), short_text(1 / 3), short_text(127)
    ('2**-12', '0.333333', '127')
    """
    text = number_text(value)
    return text if text.startswith("2**") or not isinstance(value, float) else f"{value:g}"
