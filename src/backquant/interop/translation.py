"""Objects of one library as those of another that has the same ones under other names."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ForwardFuser,
    GraphPattern,
    NormalPattern,
    ReversedFuser,
)
from backquant.backend_config.declared import declared
from backquant.errors import BackquantError, SpecError, UsageError

#: The classes of the language, by the key that tells their dicts; PyTorch has some of their fields.
_LANGUAGE = {
    "BackendConfig": BackendConfig,
    "entry": BackendPatternConfig,
    "DTypeConfig": DTypeConfig,
    "DTypeWithConstraints": DTypeWithConstraints,
}
_STANDALONE = ("standalone_module_name", "standalone_module_class")


@dataclass(frozen=True)
class Library:
    """What is translated, in one library; ``atoms`` stand at the same index in both.

    ``configs``: classes with ``to_dict`` and ``from_dict``; ``records``: other classes that hold values;
    ``factory``: the class of ``Observer.with_args(...)``; ``sequential``: makes a fuser of a fused class;
    ``special``: for a function and its entry, what makes its counterpart, if its name alone does not
    determine that.
    """

    package: str
    configs: Mapping[str, Any]
    records: Mapping[str, Any]
    atoms: tuple[Any, ...]
    factory: Any
    sequential: Callable[[Any], Any]
    special: Callable[[Any, Mapping[str, Any]], Callable[[Any], Any] | None]
    other: dict[Any, Any] = field(default_factory=dict)

    def counterpart(self, value: Any) -> Any:
        """What an atom of the other library is here; anything else as it is."""
        return self.other.get(value, value)


@dataclass
class Translation:
    """One translation. ``without``: fields to leave out; ``lost``: those that were found, with places."""

    source: Library
    target: Library
    refuse_module: Callable[[Any], None]
    without: tuple[str, ...] = ()
    lost: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.target.other:
            for one, two in zip(self.source.atoms, self.target.atoms, strict=True):
                self.target.other.setdefault(one, two)

    def checked(self, obj: Any) -> Any:
        """``value(obj)``; raises SpecError when fields were lost."""
        result = self.value(obj, type(obj).__name__)
        if self.lost:
            names = tuple(self.lost)
            spelled = ", ".join(f'"{name}"' for name in names) + ("," if len(names) == 1 else "")
            raise SpecError(
                f"PyTorch's form has no field for: {', '.join(names)}",
                where="; ".join(self.lost.values()),
                fix=f"to_torch_ao(..., without=({spelled})) leaves "
                f"{'it' if len(names) == 1 else 'them'} out",
            )
        return result

    def value(self, value: Any, place: str, entry: Mapping[str, Any] | None = None) -> Any:
        """The counterpart of any value. ``place`` is for errors; ``entry`` the dict it stands in."""
        for name, cls in self.source.configs.items():
            if type(value) is cls:
                return self._made(self.target.configs[name], self._dict(value.to_dict(), name))
        if isinstance(value, self.source.records["QConfig"]):
            parts = [self.value(getattr(value, r), f"QConfig.{r}") for r in value._fields]
            return self.target.records["QConfig"](*parts)
        if isinstance(value, self.source.records["DTypeWithConstraints"]):
            return self._constraints(value, place)
        if isinstance(value, (self.source.factory, functools.partial)):
            return self._factory(value, place)
        if isinstance(value, Mapping):
            return self._dict(dict(value), place)
        if isinstance(value, (list, tuple)):
            items = [self.value(item, f"{place}[{i}]") for i, item in enumerate(value)]
            named = hasattr(value, "_fields")
            return type(value)(*items) if named else type(value)(items)
        return self._atom(value, place, entry or {})

    def _made(self, cls: Any, values: dict[Any, Any]) -> Any:
        try:
            return cls.from_dict(values)
        except BackquantError:
            raise
        except Exception as error:
            raise SpecError(
                f"{self.target.package} refuses it: {error}",
                where=cls.__name__,
                fix="change the field, or leave it out",
            ) from error

    def _atom(self, value: Any, place: str, entry: Mapping[str, Any]) -> Any:
        if isinstance(value, nn.Module):
            self.refuse_module(value)
        if isinstance(value, (GraphPattern, NormalPattern)):
            if self.target.package == "backquant":
                return value
            raise SpecError(
                "PyTorch has no patterns with named ports, or beyond nested tuples",
                where=f"{place}: {value!r}",
                fix="leave the entry out",
            )
        if isinstance(value, (ReversedFuser, ForwardFuser)):
            return type(value)(self.value(value.fuser, place, entry))
        special = self.source.special(value, entry) if callable(value) else None
        if special is not None:
            return special(self.target)
        found = self.target.counterpart(value) if _is_name(value) else value
        if found is value and _is_name(value):
            self._check_foreign(value, place)
        return found

    def _check_foreign(self, value: Any, place: str) -> None:
        module = getattr(value, "__module__", None) or type(value).__module__
        if not f"{module}.".startswith(f"{self.source.package}."):
            return
        if any(value is own for own in self.target.other.values()):
            return  # it is of the target already
        name = getattr(value, "__qualname__", repr(value))
        raise UsageError(
            f"{module}.{name} has no counterpart in {self.target.package}",
            where=place,
            fix="name a class or function of your own, or leave the field out",
        )

    def _dict(self, values: dict[Any, Any], place: str) -> dict[Any, Any]:
        is_entry = "observation_type" in values or "dtype_configs" in values
        owner = "entry" if is_entry else "BackendConfig" if "configs" in values else "DTypeConfig"
        if is_entry:
            pattern = values.get("pattern", values.get("pattern_complex_format"))
            place = f"{place}, entry {getattr(pattern, '__name__', pattern)}"
            values.pop("input_output_observed", None)  # 1.13; observation_type says the same
        if self.target.package != "backquant":
            self._lose(values, owner, place)
        result = {}
        for key, value in values.items():
            where = f"{place}.{key}"
            if key in _STANDALONE:
                result[key] = [self._standalone(row, where) for row in value]
            else:
                result[self.value(key, place)] = self.value(value, where, values)
        return result

    def _lose(self, values: dict[Any, Any], owner: str, place: str) -> None:
        for name in (one.key for one in declared(_LANGUAGE[owner]) if not one.in_torch):
            if name in values:
                if name not in self.without and values[name] is not None:
                    self.lost.setdefault(name, f"{place}.{name}")
                del values[name]

    def _standalone(self, row: tuple[Any, ...], place: str) -> tuple[Any, ...]:
        """Example inputs are the user's, whatever they hold."""
        module, mapping, inputs, *rest = row
        return (
            self.value(module, place),
            self.value(mapping, place),
            inputs,
            *(self.value(item, place) for item in rest),
        )

    def _constraints(self, value: Any, place: str) -> Any:
        names = [f.name for f in dataclasses.fields(value)]
        values = {n: getattr(value, n) for n in names if getattr(value, n) is not None}
        if self.target.package != "backquant":
            self._lose(values, "DTypeWithConstraints", place)
        return self.target.records["DTypeWithConstraints"](**values)

    def _factory(self, value: Any, place: str) -> Any:
        """A factory with its class, and arguments that are classes, translated."""
        if isinstance(value, functools.partial):
            keywords = {k: self.value(v, f"{place}, {k}") for k, v in value.keywords.items()}
            return functools.partial(self.value(value.func, place), *value.args, **keywords)
        partial = value.p
        inner = self.value(partial.func, place)
        keywords = {k: self.value(v, f"{place}, {k}") for k, v in partial.keywords.items()}
        if isinstance(inner, self.target.factory):
            result = inner.with_args(**keywords)
        else:
            result = self.target.factory(functools.partial(inner, *partial.args, **keywords))
        return result.with_callable_args(**value.callable_args) if value.callable_args else result


def _is_name(value: Any) -> bool:
    """Whether a value stands for itself: a class, a function, a member of an enumeration."""
    return isinstance(value, type) or callable(value) or hasattr(type(value), "__members__")
