"""The form of each kind of value in a file: how it is written, read, and laid out (for the schema).

A record is a mapping of its declared fields. What a kind does not say here stands in a file as it is.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import singledispatch
from typing import Any, TypeVar

from backquant.backend_config.conditions import check_names, condition_data
from backquant.backend_config.declared import declared, set_fields
from backquant.backend_config.description import KnownSlower
from backquant.backend_config.dtypes import DTypeWithConstraints, TensorDType
from backquant.backend_config.files.conditions import condition_at
from backquant.backend_config.files.import_paths import (
    Resolver,
    SpellingError,
    is_operator,
    path_of,
)
from backquant.backend_config.files.located import Path, constant_from, number_data, number_from
from backquant.backend_config.files.models import is_operator_name
from backquant.backend_config.files.spelling import (
    callable_data,
    callable_from,
    pattern_data,
    pattern_from,
)
from backquant.backend_config.fusers import (
    ByCount,
    Function,
    ModuleClass,
    Observation,
    OnePattern,
    Ports,
)
from backquant.backend_config.kinds import (
    Kind,
    Nested,
    Number,
    Numbers,
    OperatorNames,
    Operators,
    Several,
    TorchConstant,
    Where,
    WordOrEnds,
    WordOrModule,
)
from backquant.backend_config.naming import operator_records
from backquant.backend_config.observation import ObservationType
from backquant.dtypes import dtype_name
from backquant.errors import SpecError

Value = TypeVar("Value")
_FIRST = re.compile(r"[^.\[]+")


def at_path(path: Path, make: Callable[..., Value], *arguments: Any) -> Value:
    """``make(*arguments)``; a SpellingError inside gets ``path`` before its own."""
    try:
        return make(*arguments)
    except SpellingError as problem:
        problem.path = (*path, *problem.path)
        raise
    except SpecError as error:
        raise SpellingError(error.what, error.fix, path) from error


# -- writing -----------------------------------------------------------------------------------------


@singledispatch
def write(_kind: Kind, value: Any) -> Any:
    """``value`` as strings, numbers, lists and dicts. Raises SpellingError for what has no such form.

    >>> write(Number(), 2.0**-12), write(Numbers(ends=True), (None, 1.0))
    ('2**-12', [None, 1.0])
    """
    return value


def write_record(record: Any) -> dict[str, Any]:
    """The declared fields of an object that are set, by their names.

    >>> from backquant.backend_config import QDQRules
    >>> write_record(QDQRules(additions="sum"))
    {'additions': 'sum'}
    """
    return {field.name: write(field.kind, value) for field, value in set_fields(record)}


@write.register(Number)
@write.register(Numbers)
@write.register(WordOrEnds)
def _(_kind: Number | Numbers | WordOrEnds, value: Any) -> Any:
    if isinstance(value, tuple):
        return [None if one is None else number_data(one) for one in value]
    return value if isinstance(value, str) else number_data(value)


@write.register(TorchConstant)
def _(kind: TorchConstant, value: Any) -> Any:
    return dtype_name(value) if kind.holds_dtypes else str(value).removeprefix("torch.")


@write.register(Where)
def _(_kind: Where, value: Any) -> Any:
    return condition_data(value)


@write.register(Operators)
def _(_kind: Operators, value: Any) -> Any:
    return [pattern_data(operator) for operator in value]


@write.register(OperatorNames)
def _(_kind: OperatorNames, value: Any) -> Any:
    return list(value)


@write.register(WordOrModule)
def _(_kind: WordOrModule, value: Any) -> Any:
    return value if isinstance(value, str) else path_of(value)


@write.register(Nested)
def _(_kind: Nested, value: Any) -> Any:
    return write_record(value)


@write.register(Several)
def _(_kind: Several, value: Any) -> Any:
    return [write_record(item) for item in value]


@write.register(TensorDType)
def _(_kind: TensorDType, value: Any) -> Any:
    data = write_record(value)
    return data["dtype"] if list(data) == ["dtype"] else data


@write.register(Observation)
def _(_kind: Observation, value: Any) -> Any:
    return value.name


@write.register(ByCount)
def _(_kind: ByCount, value: Any) -> Any:
    return {count: observation_type.name for count, observation_type in value.items()}


@write.register(ModuleClass)
@write.register(Function)
def _(_kind: ModuleClass | Function, value: Any) -> Any:
    return callable_data(value)


@write.register(Ports)
def _(_kind: Ports, value: Any) -> Any:
    return {
        name: port.role if port.shares_with is None else {"shares_with": port.shares_with}
        for name, port in value.items()
    }


# -- reading -----------------------------------------------------------------------------------------


@singledispatch
def read(_kind: Kind, data: Any, _resolver: Resolver) -> Any:
    """The value that ``write`` wrote. Raises SpellingError with the path to what is wrong.

    >>> read(Number(), "2**-12", Resolver()) == 2.0**-12
    True
    """
    return data


def read_record(cls: type[Value], data: dict[str, Any], resolver: Resolver) -> Value:
    """The record of a mapping of a file; ``null`` stands for the default.

    Raises SpellingError with the path to the field that is wrong.

    >>> from backquant.backend_config import DTypeConfig
    >>> read_record(DTypeConfig, {"input_dtype": "quint8"}, Resolver()).input_dtype
    torch.quint8
    """
    values: dict[str, Any] = {field.name: None for field in declared(cls) if field.required}
    for field in declared(cls):
        if data.get(field.name) is not None:
            values[field.name] = at_path(
                (field.name,), read, field.kind, data[field.name], resolver
            )
    try:
        return cls(**values)
    except SpecError as error:
        first = _FIRST.match(error.where or "")
        path = (first[0],) if first is not None and first[0] in data else ()
        raise SpellingError(error.what, error.fix, path) from error


def _each(
    make: Callable[..., Value], items: list[Any], *arguments: Any, start: Path = ()
) -> list[Value]:
    return [at_path((*start, i), make, item, *arguments) for i, item in enumerate(items)]


@read.register(Number)
@read.register(Numbers)
@read.register(WordOrEnds)
def _(kind: Number | Numbers | WordOrEnds, data: Any, _resolver: Resolver) -> Any:
    if isinstance(data, list):
        return tuple(None if one is None else number_from(one) for one in data)
    return data if isinstance(kind, WordOrEnds) else number_from(data)


@read.register(TorchConstant)
def _(kind: TorchConstant, data: Any, _resolver: Resolver) -> Any:
    return constant_from(data, kind.type)


@read.register(Where)
def _(_kind: Where, data: Any, _resolver: Resolver) -> Any:
    return condition_at(data)


@read.register(Operators)
def _(_kind: Operators, data: Any, resolver: Resolver) -> Any:
    return tuple(op for spelled in _each(_operators, data, resolver) for op in spelled)


def _operators(data: Any, resolver: Resolver) -> tuple[Any, ...]:
    """The pattern that is listed, or every spelling of the operator that is named."""
    if is_operator_name(data):
        spellings: tuple[Any, ...] = operator_records().spellings(data)
        return spellings
    return (pattern_from(data, resolver)[0],)


@read.register(OperatorNames)
def _(_kind: OperatorNames, data: Any, _resolver: Resolver) -> Any:
    _each(operator_records().named, data)
    return tuple(data)


@read.register(WordOrModule)
def _(_kind: WordOrModule, data: Any, resolver: Resolver) -> Any:
    return resolver.resolve(data) if "." in data else data


@read.register(Nested)
def _(kind: Nested, data: Any, resolver: Resolver) -> Any:
    return read_record(kind.record, data, resolver)


@read.register(Several)
def _(kind: Several, data: Any, resolver: Resolver) -> Any:
    make = _known_slower if kind.record is KnownSlower else read_record
    return [at_path((i,), make, kind.record, item, resolver) for i, item in enumerate(data)]


def _known_slower(cls: type[KnownSlower], data: dict[str, Any], resolver: Resolver) -> KnownSlower:
    """A record whose condition names only what its operators have."""
    record = read_record(cls, data, resolver)
    for entry in operator_records().entries_of(data["operators"], []):
        at_path(
            ("where",), condition_at, data["where"], lambda where, e=entry: check_names(where, e)
        )
    return record


@read.register(TensorDType)
def _(_kind: TensorDType, data: Any, resolver: Resolver) -> Any:
    mapping = {"dtype": data} if isinstance(data, str) else data
    return read_record(DTypeWithConstraints, mapping, resolver)


@read.register(OnePattern)
def _(_kind: OnePattern, data: Any, resolver: Resolver) -> Any:
    return pattern_from(data, resolver)[0]


@read.register(Observation)
def _(_kind: Observation, data: Any, _resolver: Resolver) -> Any:
    return ObservationType[data]


@read.register(ByCount)
def _(_kind: ByCount, data: Any, _resolver: Resolver) -> Any:
    return {int(count): ObservationType[name] for count, name in data.items()}


@read.register(ModuleClass)
def _(_kind: ModuleClass, data: Any, resolver: Resolver) -> Any:
    return resolver.resolve(data)


@read.register(Function)
def _(_kind: Function, data: Any, resolver: Resolver) -> Any:
    function = callable_from(data, resolver)
    if is_operator(function):
        raise SpellingError(f"{data} is an operator of tensors, which is no function of modules")
    return function
