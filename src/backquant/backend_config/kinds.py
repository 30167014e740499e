"""Kinds of values that fields of a description take. A kind is declared once, with all of its forms.

How a value is checked, how it stands in Python, in a sentence, in a dict and in a file, and the layout of the
latter. ``kind_of`` tells the kind from a field's type.
"""

from __future__ import annotations

import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Union, get_args, get_origin

import torch

from backquant.backend_config.checks import (
    check_callable,
    check_choice,
    check_count,
    check_module_class,
    check_number,
    dtype_fix,
    number_text,
    short_text,
    within,
)
from backquant.backend_config.conditions import Condition, condition_data, condition_from
from backquant.backend_config.graph_pattern import as_getter
from backquant.backend_config.import_paths import Resolver, SpellingError, is_operator, path_of
from backquant.backend_config.layout import FLAG, INTEGER, TEXT, Layout, listed, one_of, ref
from backquant.backend_config.naming import (
    operator_label,
    operator_name,
    operator_records,
    spelled,
)
from backquant.backend_config.observation import ObservationType, check_observation_type
from backquant.backend_config.pattern import normal_form
from backquant.backend_config.spelling import (
    at_path,
    callable_data,
    callable_from,
    condition_at,
    constant_from,
    is_operator_name,
    number_data,
    number_from,
    pattern_data,
    pattern_from,
)
from backquant.dtypes import Granularity, dtype_name
from backquant.errors import SpecError


class Kind:
    """What a field may hold besides ``None``. ``write`` and ``read`` raise ``SpellingError``.

    ``of_pattern``: a value of an entry is right for some patterns, which its setter checks.
    """

    of_pattern: ClassVar[bool] = False

    @property
    def default(self) -> Any:
        """What a field of an entry holds where nothing is set (copied); None: what its class says."""
        return None

    @property
    def layout(self) -> Layout:
        """What a file holds of it."""
        raise NotImplementedError(f"{self} has no layout in a file")

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

    def write(self, value: Any) -> Any:
        """``value`` as it stands in a file: strings, numbers, lists and dicts."""
        return self.to_data(value)

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - of those that name things
        """The value that ``write`` wrote."""
        return data


class Flag(Kind):
    """True or False."""

    layout = FLAG

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, bool):
            raise SpecError(f"{field} must be a bool, got {value!r}", where=field)
        return value


class _Numeric(Kind):
    def write(self, value: Any) -> Any:
        if isinstance(value, tuple):
            return [None if one is None else number_data(one) for one in value]
        return value if isinstance(value, str) else number_data(value)

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - numbers name nothing
        if isinstance(data, list):
            return tuple(None if one is None else number_from(one) for one in data)
        return number_from(data)


@dataclass(frozen=True)
class Number(_Numeric):
    """A number; ``whole``: an integer."""

    whole: bool = False
    least: int | None = None

    @property
    def layout(self) -> Layout:
        if not self.whole:
            return ref("Number")
        return INTEGER if self.least is None else {"minimum": self.least, **INTEGER}

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
class Numbers(_Numeric):
    """Several numbers; ``ends``: two, the smallest and the largest, of which each may be open."""

    ends: bool = False

    @property
    def layout(self) -> Layout:
        return ref("Ends") if self.ends else listed(ref("Number"))

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

    @property
    def layout(self) -> Layout:
        return {"enum": list(self.choices), **TEXT}

    def check(self, value: Any, field: str) -> Any:
        check_choice(value, field, self.choices)
        return value

    def words(self, value: Any) -> str:
        return str(value).replace("_times_", " × ").replace("_", " ")


@dataclass(frozen=True)
class WordOrEnds(_Numeric):
    """One word, or two numbers of which each may be open."""

    word: str

    @property
    def layout(self) -> Layout:
        expected = f"{self.word}, or the smallest and the largest"
        return one_of(expected, {"const": self.word, **TEXT}, ref("Ends"))

    def read(self, data: Any, resolver: Resolver) -> Any:
        return data if isinstance(data, str) else super().read(data, resolver)

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

    layout = TEXT

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, str):
            raise SpecError(f"{field} must be a str, got {value!r}", where=field)
        return value

    def words(self, value: Any) -> str:
        return str(value)


class Text(AnyText):
    """A text that says something."""

    layout: Layout = {"minLength": 1, **TEXT}  # noqa: RUF012 - read only

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, str) or not value.strip():
            raise SpecError(f"{field} is a text, got {value!r}", where=field)
        return value


@dataclass(frozen=True)
class TorchConstant(Kind):
    """A ``torch.dtype``, a ``torch.qscheme``."""

    type: Any

    @property
    def layout(self) -> Layout:
        return ref("DTypeName" if self.type is torch.dtype else "QSchemeName")

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, self.type):
            what = f"{field} must be a torch.{self.type.__name__}, got {value!r}"
            raise SpecError(what, where=field, fix=dtype_fix(value))
        return value

    def words(self, value: Any) -> str:
        return (
            str(self.write(value))
            if self.type is torch.dtype
            else self.write(value).replace("_", " ")
        )

    def write(self, value: Any) -> Any:
        return dtype_name(value) if self.type is torch.dtype else str(value).removeprefix("torch.")

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - torch is always there
        return constant_from(data, self.type)


class SharedBy(Kind):
    """A granularity: which values share a scale. Its one spelling."""

    layout = ref("GranularityText")

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, str | Granularity):
            what = f"{field} must be a word, got {value!r}"
            raise SpecError(what, where=field, fix='"per_group(size=128)"')
        return str(Granularity.parse(str(value)))

    def words(self, value: Any) -> str:
        return Granularity.parse(value).words


class Where(Kind):
    """A condition on the use of an operator, or its mapping."""

    layout = ref("Where")

    def check(self, value: Any, field: str) -> Any:
        with within(field):
            return condition_from(value)

    def to_data(self, value: Any) -> Any:
        return condition_data(value)

    def source(self, value: Any) -> str:
        return repr(condition_data(value))

    def words(self, value: Any) -> str:
        return str(value)

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - quantities have no path
        return condition_at(data)


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
    layout = listed(ref("PatternOrName"))

    def check(self, value: Any, field: str) -> Any:
        if not isinstance(value, (tuple, list)):
            message = f"{field} is a tuple of operators, got {value!r}"
            raise SpecError(message, where=field, fix=f"{field}=(torch.add,)")
        with within(field) as here:
            for index, operator in enumerate(value):
                here.place = f"{field}[{index}]"
                if normal_form(operator).size > 1 and self.single:
                    raise SpecError("single operators are named here, not patterns")
        return tuple(value)

    def to_data(self, value: Any) -> Any:
        return list(value)

    def source(self, value: Any) -> str:
        return f"({', '.join(map(operator_name, value))}{',' if len(value) == 1 else ''})"

    def words(self, value: Any) -> str:
        return ", ".join(map(operator_label, value))

    def write(self, value: Any) -> Any:
        return [pattern_data(operator) for operator in value]

    def read(self, data: Any, resolver: Resolver) -> Any:
        found: list[Any] = []
        for index, item in enumerate(data):
            found += at_path((index,), _operators, item, resolver)
        return tuple(found)


def _operators(data: Any, resolver: Resolver) -> tuple[Any, ...]:
    """The pattern that is listed, or every spelling of the operator that is named."""
    if is_operator_name(data):
        spellings: tuple[Any, ...] = operator_records().spellings(data)
        return spellings
    return (pattern_from(data, resolver)[0],)


class OperatorNames(Kind):
    """Names of the records of operators."""

    layout = listed(ref("OperatorNames"), 1)

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

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - records have names
        for index, name in enumerate(data):
            at_path((index,), operator_records().named, name)
        return tuple(data)


@dataclass(frozen=True)
class WordOrModule(Kind):
    """One of some words, or a class of modules."""

    choices: tuple[str, ...]
    layout = TEXT

    def check(self, value: Any, field: str) -> Any:
        if isinstance(value, type):
            return check_module_class(value, field)
        check_choice(value, field, self.choices)
        return value

    def source(self, value: Any) -> str:
        return repr(value) if isinstance(value, str) else operator_name(value)

    def words(self, value: Any) -> str:
        return value.replace("_", " ") if isinstance(value, str) else operator_label(value)

    def write(self, value: Any) -> Any:
        return value if isinstance(value, str) else path_of(value)

    def read(self, data: Any, resolver: Resolver) -> Any:
        return resolver.resolve(data) if "." in data else data


# -- records -----------------------------------------------------------------------------------------


def record_from(record: Any, value: Any, place: str) -> Any:
    """``value``, or the record of its dict; None for anything else. Raises ``SpecError`` at ``place``."""
    if isinstance(value, record):
        return value
    if not isinstance(value, Mapping):
        return None
    with within(place):
        return record.from_dict(value)


@dataclass(frozen=True)
class Nested(Kind):
    """A record, or its dict."""

    record: Any

    @property
    def layout(self) -> Layout:
        layout: Layout = self.record.layout()
        return layout

    @property
    def has_words(self) -> bool:
        """Whether a record is said in one sentence, and not field by field."""
        return "__str__" in vars(self.record)

    def check(self, value: Any, field: str) -> Any:
        if (found := record_from(self.record, value, field)) is not None:
            return found
        name = self.record.__name__
        raise SpecError(f"{field} must be a {name} or its dict, got {value!r}", where=field)

    def to_data(self, value: Any) -> Any:
        return value.to_dict()

    def words(self, value: Any) -> str:
        return str(value)

    def write(self, value: Any) -> Any:
        return value.written()

    def read(self, data: Any, resolver: Resolver) -> Any:
        return self.record.read(data, resolver)


@dataclass(frozen=True)
class Several(Kind):
    """Records, or their dicts, in a tuple."""

    record: Any

    @property
    def layout(self) -> Layout:
        return listed(self.record.layout())

    def check(self, value: Any, field: str) -> Any:
        if isinstance(value, (str, Mapping)) or not isinstance(value, Iterable):
            raise SpecError(f"{field} stand in a tuple, got {value!r}", where=field)
        return tuple(self._item(item, f"{field}[{i}]") for i, item in enumerate(value))

    def _item(self, item: Any, place: str) -> Any:
        if (found := record_from(self.record, item, place)) is not None:
            return found
        what = f"expected a {self.record.__name__} or its dict, got {item!r}"
        raise SpecError(what, where=place)

    def to_data(self, value: Any) -> Any:
        return [item.to_dict() for item in value]

    def write(self, value: Any) -> Any:
        return [item.written() for item in value]

    def read(self, data: Any, resolver: Resolver) -> Any:
        return [at_path((i,), self.record.read, item, resolver) for i, item in enumerate(data)]


class Listed(Several):
    """Records, or their dicts, in a list; a file may name those that it has a name for."""

    @property
    def default(self) -> Any:
        return []

    @property
    def layout(self) -> Layout:
        expected = "the name of a dtype config, or a dtype config"
        return listed(one_of(expected, TEXT, self.record.layout()))

    def check(self, value: Any, field: str) -> Any:
        return list(super().check(value, field))


# -- of entries --------------------------------------------------------------------------------------


class OnePattern(Kind):
    """A pattern, in one of the two forms."""

    layout = ref("Pattern")

    def source(self, value: Any) -> str:
        return spelled(value)


class Observation(Kind):
    """An ``ObservationType``."""

    layout = ref("ObservationName")

    @property
    def default(self) -> Any:
        return ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT

    def check(self, value: Any, field: str) -> Any:
        check_observation_type(value, field)
        return value

    def words(self, value: Any) -> str:
        return str(value.name)

    def write(self, value: Any) -> Any:
        return value.name

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - a member, by its name
        return ObservationType[data]


class ModuleClass(Kind):
    """A class of modules."""

    layout = ref("ImportPath")

    def check(self, value: Any, field: str) -> Any:
        return check_module_class(value, field)

    def source(self, value: Any) -> str:
        return spelled(value)

    def words(self, value: Any) -> str:
        return operator_label(value)

    def write(self, value: Any) -> Any:
        return callable_data(value)

    def read(self, data: Any, resolver: Resolver) -> Any:
        return resolver.resolve(data)


class Function(ModuleClass):
    """A function: a fuser, a factory of observers."""

    layout = ref("Callable")

    def check(self, value: Any, field: str) -> Any:
        return check_callable(value, field)

    def words(self, value: Any) -> str:
        named = isinstance(value, type) or hasattr(value, "__qualname__")
        return operator_label(value) if named else str(value)

    def read(self, data: Any, resolver: Resolver) -> Any:
        function = callable_from(data, resolver)
        if is_operator(function):
            what = f"{data} is an operator of tensors, which is no function of modules"
            raise SpellingError(what)
        return function


@dataclass(frozen=True)
class Getter(Function):
    """A function of the matched nodes that chooses one, or ``several``; or their names."""

    several: bool
    of_pattern: ClassVar[bool] = True

    @property
    def layout(self) -> Layout:  # type: ignore[override]
        return ref("ExtraInputs" if self.several else "RootNode")

    def check(self, value: Any, field: str) -> Any:
        return as_getter(value, field, several=self.several)


class ByName(Kind):
    """A dict of values by what they belong to."""

    @property
    def default(self) -> Any:
        return {}

    def to_data(self, value: Any) -> Any:
        return dict(value)

    def words(self, value: Any) -> str:
        return ", ".join(f"{key}: {getattr(item, 'name', item)}" for key, item in value.items())


class ByCount(ByName):
    """Observation types by the number of tensor arguments."""

    layout = ref("ByCount")

    def check(self, value: Any, field: str) -> Any:
        mapping = dict(value)
        for count, observation_type in mapping.items():
            place = f"{field}[{count!r}]"
            check_count(count, place)
            check_observation_type(observation_type, place)
        return mapping

    def write(self, value: Any) -> Any:
        return {count: observation_type.name for count, observation_type in value.items()}

    def read(self, data: Any, resolver: Resolver) -> Any:  # noqa: ARG002 - members, by their names
        return {int(count): ObservationType[name] for count, name in data.items()}


class Positions(ByName):
    """Positions of tensors among the arguments of a call, by what they are."""

    layout = ref("Positions")

    def check(self, value: Any, field: str) -> Any:
        mapping = dict(value)
        for name, index in mapping.items():
            check_choice(name, field, ("input", "weight", "bias"))
            check_count(index, f"{field}[{name!r}]")
        return mapping


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
