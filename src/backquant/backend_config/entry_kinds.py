"""Kinds of values that the fields of an entry take."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from backquant.backend_config.checks import (
    check_callable,
    check_choice,
    check_count,
    check_module_class,
)
from backquant.backend_config.kinds import Kind
from backquant.backend_config.naming import operator_label, spelled
from backquant.backend_config.observation import ObservationType, check_observation_type
from backquant.backend_config.ports import as_getter


class OnePattern(Kind):
    """A pattern, in one of the two forms."""

    def source(self, value: Any) -> str:
        return spelled(value)


class Observation(Kind):
    """An ``ObservationType``."""

    @property
    def default(self) -> Any:
        return ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT

    def check(self, value: Any, field: str) -> Any:
        check_observation_type(value, field)
        return value

    def words(self, value: Any) -> str:
        return str(value.name)


class ModuleClass(Kind):
    """A class of modules."""

    def check(self, value: Any, field: str) -> Any:
        return check_module_class(value, field)

    def source(self, value: Any) -> str:
        return spelled(value)

    def words(self, value: Any) -> str:
        return operator_label(value)


class Function(Kind):
    """A function: a fuser, a factory of observers."""

    def check(self, value: Any, field: str) -> Any:
        return check_callable(value, field)

    def source(self, value: Any) -> str:
        return spelled(value)

    def words(self, value: Any) -> str:
        named = isinstance(value, type) or hasattr(value, "__qualname__")
        return operator_label(value) if named else str(value)


@dataclass(frozen=True)
class Getter(Function):
    """A function of the matched nodes that chooses one, or ``several``; or their names."""

    several: bool

    def check(self, value: Any, field: str) -> Any:
        return as_getter(value, field, several=self.several)


class _Mapping(Kind):
    @property
    def default(self) -> Any:
        return {}

    def to_data(self, value: Any) -> Any:
        return dict(value)

    def words(self, value: Any) -> str:
        return ", ".join(f"{key}: {getattr(item, 'name', item)}" for key, item in value.items())


class ByCount(_Mapping):
    """Observation types by the number of tensor arguments."""

    def check(self, value: Any, field: str) -> Any:
        mapping = dict(value)
        for count, observation_type in mapping.items():
            place = f"{field}[{count!r}]"
            check_count(count, place)
            check_observation_type(observation_type, place)
        return mapping


class Positions(_Mapping):
    """Positions of tensors among the arguments of a call, by what they are."""

    def check(self, value: Any, field: str) -> Any:
        mapping = dict(value)
        for name, index in mapping.items():
            check_choice(name, field, ("input", "weight", "bias"))
            check_count(index, f"{field}[{name!r}]")
        return mapping


class Ports(_Mapping):
    """How the inputs and the output of a graph pattern are observed, by name."""
