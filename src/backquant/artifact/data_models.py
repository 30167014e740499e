"""Dataclasses as models of pydantic, so that what a file says of plan, report and engine is checked by type.

Every field has the name and the type that the dataclass gives it, and no other is taken.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import reduce
from operator import or_
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

import torch
from pydantic import AfterValidator, BaseModel, ConfigDict, StringConstraints, create_model

STRICT = ConfigDict(extra="forbid", strict=True)


def _known_dtype(name: str) -> str:
    if not isinstance(getattr(torch, name, None), torch.dtype):
        raise ValueError(f"this build of torch has no dtype {name!r}")
    return name


DTypeName = Annotated[
    str, StringConstraints(pattern=r"^[a-z][a-z0-9_]{0,40}$"), AfterValidator(_known_dtype)
]


def data_model(kind: type, replaced: Mapping[str, Any] | None = None) -> type[BaseModel]:
    """The model of a dataclass, and of those in its fields; ``replaced`` gives fields another type.

    >>> from backquant.match.plan import Reason
    >>> model = data_model(Reason)
    >>> model.model_validate_json('{"node": "a", "rule": "", "asked": "", "admitted": ""}').node
    'a'
    >>> model.model_validate_json('{"node": 1}')
    Traceback (most recent call last):
    pydantic_core._pydantic_core.ValidationError: ...
    """
    return _Models().of(kind, replaced or {})


class _Models:
    """One model for each dataclass."""

    def __init__(self) -> None:
        self._made: dict[type, type[BaseModel]] = {}

    def of(self, kind: type, replaced: Mapping[str, Any]) -> type[BaseModel]:
        if kind not in self._made:
            hints = {**get_type_hints(kind), **replaced}
            types: dict[str, Any] = {
                field.name: (self._type(hints[field.name]), _default(field))
                for field in fields(kind)
            }
            self._made[kind] = create_model(kind.__name__, __config__=STRICT, **types)
        return self._made[kind]

    def _type(self, hint: Any) -> Any:
        if hint is torch.dtype:
            return DTypeName
        if isinstance(hint, type) and is_dataclass(hint):
            return self.of(hint, {})
        origin, inner = get_origin(hint), get_args(hint)
        if origin in (Union, UnionType):
            return reduce(or_, (self._type(part) for part in inner))
        if origin in (tuple, list, dict):
            return origin[tuple(part if part is ... else self._type(part) for part in inner)]
        return hint


def _default(field: Field[Any]) -> Any:
    return ... if field.default is MISSING and field.default_factory is MISSING else None
