"""Conditions of a spec file, with the place of what is wrong in one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from pydantic import ConfigDict, Field, Tag
from typing_extensions import TypeAliasType

from backquant.backend_config.conditions import Condition, condition_from
from backquant.backend_config.conditions.expressions import OPERATOR, TENSOR
from backquant.backend_config.files.import_paths import SpellingError
from backquant.backend_config.files.model_parts import Finite, Model, Scalar, kind_of, union
from backquant.errors import SpecError

Accept = Callable[[Condition | None], None]


def _anything(_: Condition | None) -> None:
    """Every condition is accepted."""


def condition_at(data: Any, accept: Accept = _anything) -> Condition | None:
    """The condition of a mapping of the file; ``accept`` raises for one that is not to be there.

    Raises ``SpellingError`` with the path to the entry of the mapping that is wrong.

    >>> print(condition_at({"stride": [1, 2]}))
    stride one of 1, 2
    """
    try:
        condition = condition_from(data)
        accept(condition)
    except SpecError as error:
        raise SpellingError(error.what, error.fix, _place(data, accept)) from error
    return condition


def _place(data: Any, accept: Accept) -> tuple[str | int, ...]:
    """The path to the first part of a condition that is wrong by itself."""
    if not isinstance(data, dict):
        return ()
    for key, value in data.items():
        if _is_sound({key: value}, accept):
            continue
        if key == "not":
            return (key, *_place(value, accept))
        if key in ("all", "any") and isinstance(value, list):
            at = next(i for i, item in enumerate(value) if not _is_sound(item, accept))
            return (key, at, *_place(value[at], accept))
        return (key,)
    return ()


def _is_sound(data: Any, accept: Accept) -> bool:
    try:
        condition = condition_from(data)
        accept(condition)
    except SpecError:
        return False
    return condition is not None


# The layout of conditions in a spec file: ``where`` of an entry or of a dtype config.

_NAMES = ", ".join((*OPERATOR, *TENSOR))

Literal = TypeAliasType(  # type: ignore[misc]  # mypy knows no recursive alias of this form
    "Literal",
    Annotated[
        Annotated[str, Tag("<text>")] | Scalar | Annotated[list["Literal"], Tag("<list>")],  # type: ignore[misc]
        union(kind_of, "a number, a word, true or false, or a list of these"),
    ],
)
Bound = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[int | Finite, Tag("<scalar>")],
    union(kind_of, "a number, or an expression such as in_channels"),
]


class Test(Model):
    """What a quantity is compared with; all of it must hold."""

    min: Bound | None = None
    max: Bound | None = None
    equals: Literal | None = Field(None, description="A value, or an expression: in_channels.")
    multiple_of: Bound | None = None
    one_of: list[Literal] | None = Field(None, min_length=1)
    not_: TestOrValue | None = Field(None, alias="not")  # type: ignore[misc]


TestOrValue = TypeAliasType(  # type: ignore[misc]
    "TestOrValue",
    Annotated[
        Annotated[str, Tag("<text>")]
        | Scalar
        | Annotated[list[Literal], Tag("<list>"), Field(min_length=1)]
        | Annotated[Test, Tag("<mapping>")],
        union(kind_of, "a value, a list of values, or a mapping such as {max: 7}"),
    ],
)


class Where(Model):
    """Quantities of an operator with what each has to be; all of it must hold."""

    model_config = ConfigDict(
        extra="allow",
        strict=True,
        json_schema_extra={"description": f"Quantity or expression → what it has to be: {_NAMES}."},
    )
    __pydantic_extra__: dict[str, TestOrValue]

    all: list[Where] | None = Field(None, min_length=1)
    any: list[Where] | None = Field(None, min_length=1, description="One of these has to hold.")
    not_: Where | None = Field(None, alias="not")


for _model in (Test, Where):
    _model.model_rebuild()
