"""Kinds of values that fields of a description take: how a value is checked, shown, and held in dicts.

``kind_of`` tells the kind from a field's type. The forms of the kinds in files stand in ``files/forms``.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

import torch

from backquant.backend_config.checks import (
    check_bool,
    check_choice,
    check_module_class,
    check_number,
    dtype_fix,
    number_text,
    short_text,
    within,
)
from backquant.backend_config.conditions.condition import (
    Condition,
    condition_data,
    condition_from,
)
from backquant.backend_config.naming import operator_label, operator_name
from backquant.backend_config.pattern import normal_form
from backquant.dtypes import Granularity, dtype_name
from backquant.errors import SpecError


class Kind:
    """What a field may hold besides ``None``."""

    @property
    def default(self) -> Any:
        """What a field of an entry holds where nothing is set (copied); None: what its class says."""
        return None

    def check(self, value: Any, field: str) -> Any:  # noqa: ARG002 - of those that check
        """``value``, or what stands for it in a dict, in its one form. Raises ``SpecError`` at ``field``."""
        return value

    def to_data(self, value: Any) -> Any:
        """``value`` as it stands in a dict."""
        return value

    def source(self, value: Any) -> str:
        """``value`` as one would write it in Python."""
        return repr(value)

    def words(self, value: Any) -> str:
        """``value`` in a sentence."""
        return self.source(value)


class Flag(Kind):
    """True or False."""

    def check(self, value: Any, field: str) -> Any:
        check_bool(value, field)
        return value


@dataclass(frozen=True)
class Number(Kind):
    """A number; ``whole``: an integer."""

    whole: bool = False
    least: int | None = None

    def check(self, value: Any, field: str) -> Any:
        check_number(value, field, (int,) if self.whole else (int, float))
        if self.least is not None and not value >= self.least:
            raise SpecError(f"{field} must be {self.least} or more, got {value!r}", where=field)
        return value

    def source(self, value: Any) -> str:
        return number_text(value)

    def words(self, value: Any) -> str:
        return str(value) if self.whole else short_text(float(value))


@dataclass(frozen=True)
class Numbers(Kind):
    """Several numbers; ``ends``: two, the smallest and the largest, of which each may be open."""

    ends: bool = False

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, (tuple, list)) or (self.ends and len(value) != 2):
            wanted = "two numbers, smallest and largest" if self.ends else "a list of numbers"
            raise SpecError(f"{field} must be {wanted}, got {value!r}", where=field)
        for index, one in enumerate(value):
            check_number(one, f"{field}[{index}]")
        return tuple(None if one is None else float(one) for one in value)

    def words(self, value: Any) -> str:
        if not self.ends:
            return f"one of {', '.join(map(short_text, value))}"
        return f"in [{', '.join('…' if end is None else short_text(end) for end in value)}]"


@dataclass(frozen=True)
class Choice(Kind):
    """One of some words."""

    choices: tuple[str, ...]

    def check(self, value: Any, field: str) -> Any:
        check_choice(value, field, self.choices)
        return value

    def words(self, value: Any) -> str:
        return str(value).replace("_times_", " × ").replace("_", " ")


@dataclass(frozen=True)
class WordOrEnds(Kind):
    """One word, or two numbers of which each may be open."""

    word: str

    def check(self, value: Any, field: str) -> Any:
        if value == self.word:
            return value
        if not isinstance(value, (tuple, list)) or len(value) != 2:
            message = f"{field} must be {self.word}, or two numbers, got {value!r}"
            raise SpecError(message, where=field, fix="[2**-31, 1]")
        return _ENDS.check(value, field)

    def words(self, value: Any) -> str:
        return f"a {self.word.replace('_', ' ')}" if value == self.word else _ENDS.words(value)


class AnyText(Kind):
    """A text, which may be empty."""

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, str):
            raise SpecError(f"{field} must be a str, got {value!r}", where=field)
        return value

    def words(self, value: Any) -> str:
        return str(value)


class Text(AnyText):
    """A text that says something."""

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, str) or not value.strip():
            raise SpecError(f"{field} is a text, got {value!r}", where=field)
        return value


@dataclass(frozen=True)
class TorchConstant(Kind):
    """A ``torch.dtype``, a ``torch.qscheme``."""

    type: Any

    @property
    def holds_dtypes(self) -> bool:
        """Whether it is a dtype."""
        return bool(self.type is torch.dtype)

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, self.type):
            what = f"{field} must be a torch.{self.type.__name__}, got {value!r}"
            raise SpecError(what, where=field, fix=dtype_fix(value))
        return value

    def words(self, value: Any) -> str:
        if isinstance(value, torch.dtype):
            return dtype_name(value)
        return str(value).removeprefix("torch.").replace("_", " ")


class SharedBy(Kind):
    """A granularity: which values share a scale. Its one spelling."""

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, str | Granularity):
            what = f"{field} must be a word, got {value!r}"
            raise SpecError(what, where=field, fix='"per_group(size=128)"')
        return str(Granularity.parse(str(value)))

    def words(self, value: Any) -> str:
        return Granularity.parse(value).words


class Where(Kind):
    """A condition on the use of an operator, or its mapping."""

    def check(self, value: Any, field: str) -> Any:
        with within(field):
            return condition_from(value)

    def to_data(self, value: Any) -> Any:
        return condition_data(value)

    def source(self, value: Any) -> str:
        return repr(condition_data(value))

    def words(self, value: Any) -> str:
        return str(value)


class Conditional:
    """An attribute that is set to a condition or its mapping, and is a condition."""

    def __set_name__(self, _: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, _: Any = None) -> Condition | None:
        found: Condition | None = None if record is None else record.__dict__[self.name]
        return found

    def __set__(self, record: Any, value: Condition | Mapping[str, Any] | None) -> None:
        record.__dict__[self.name] = value


@dataclass(frozen=True)
class Operators(Kind):
    """Operators: module classes, functions, names of methods. ``single``: no patterns of several."""

    single: bool = True

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, (tuple, list)):
            message = f"{field} is a tuple of operators, got {value!r}"
            raise SpecError(message, where=field, fix=f"{field}=(torch.add,)")
        for index, operator in enumerate(value):
            with within(f"{field}[{index}]"):
                if normal_form(operator).size > 1 and self.single:
                    raise SpecError("single operators are named here, not patterns")
        return tuple(value)

    def to_data(self, value: Any) -> Any:
        return list(value)

    def source(self, value: Any) -> str:
        return f"({', '.join(map(operator_name, value))}{',' if len(value) == 1 else ''})"

    def words(self, value: Any) -> str:
        return ", ".join(map(operator_label, value))


class OperatorNames(Kind):
    """Names of the records of operators."""

    def check(self, value: Any, field: str) -> Any:
        is_list = isinstance(value, (tuple, list)) and bool(value)
        if not is_list or not all(isinstance(name, str) and name for name in value):
            message = f"{field} are the names of operators, in a tuple, got {value!r}"
            raise SpecError(message, where=field, fix='("conv2d",)')
        return tuple(value)

    def to_data(self, value: Any) -> Any:
        return list(value)

    def words(self, value: Any) -> str:
        return ", ".join(value)


@dataclass(frozen=True)
class WordOrModule(Kind):
    """One of some words, or a class of modules."""

    choices: tuple[str, ...]

    def check(self, value: Any, field: str) -> Any:
        if isinstance(value, type):
            return check_module_class(value, field)
        check_choice(value, field, self.choices)
        return value

    def source(self, value: Any) -> str:
        return repr(value) if isinstance(value, str) else operator_name(value)

    def words(self, value: Any) -> str:
        return value.replace("_", " ") if isinstance(value, str) else operator_label(value)


@dataclass(frozen=True)
class Nested(Kind):
    """A record, or its dict."""

    record: Any

    @property
    def has_words(self) -> bool:
        """Whether a record is said in one sentence, and not field by field."""
        return "__str__" in vars(self.record)

    def check(self, value: Any, field: str) -> Any:
        if isinstance(value, self.record):
            return value
        if isinstance(value, Mapping):
            with within(field):
                return self.record.from_dict(value)
        name = self.record.__name__
        raise SpecError(f"{field} must be a {name} or its dict, got {value!r}", where=field)

    def to_data(self, value: Any) -> Any:
        return value.to_dict()

    def words(self, value: Any) -> str:
        return str(value)


@dataclass(frozen=True)
class Several(Kind):
    """Records, or their dicts, in a tuple; ``listed``: in a list."""

    record: Any
    listed: bool = False

    @property
    def default(self) -> Any:
        """An empty list, or what the record's dataclass says."""
        return [] if self.listed else None

    def check(self, value: Any, field: str) -> Any:
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise SpecError(f"{field} stand in a tuple, got {value!r}", where=field)
        items = []
        for index, item in enumerate(value):
            if isinstance(item, self.record):
                items.append(item)
            else:
                with within(f"{field}[{index}]"):
                    items.append(self._from_dict(item))
        return items if self.listed else tuple(items)

    def _from_dict(self, item: Any) -> Any:
        if not isinstance(item, Mapping):
            raise SpecError(f"expected a {self.record.__name__} or its dict, got {item!r}")
        return self.record.from_dict(item)

    def to_data(self, value: Any) -> Any:
        return [item.to_dict() for item in value]


_ENDS = Numbers(ends=True)
_OF_TYPES = {
    bool: Flag(),
    int: Number(whole=True),
    float: Number(),
    str: Text(),
    torch.dtype: TorchConstant(torch.dtype),
    torch.qscheme: TorchConstant(torch.qscheme),
}


def kind_of(hint: Any) -> Kind:
    """The kind of values of a type, besides ``None``.

    >>> kind_of(int | float | None), kind_of(Literal["add", "sum"])
    (Number(whole=False, least=None), Choice(choices=('add', 'sum')))
    """
    if get_origin(hint) in (Union, types.UnionType):
        parts = [part for part in get_args(hint) if part is not type(None)]
        hint = float if set(parts) == {int, float} else parts[0]
    if get_origin(hint) is Literal:
        return Choice(get_args(hint))
    if get_origin(hint) is tuple:
        return Several(get_args(hint)[0])
    return _OF_TYPES.get(hint) or Nested(hint)
