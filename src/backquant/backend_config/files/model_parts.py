"""Kinds of values that the layout of a spec file is made of: names, numbers, unions told apart by kind."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Discriminator, Field, StringConstraints, Tag
from typing_extensions import TypeAliasType

WORD = r"[A-Za-z_][A-Za-z0-9_]*"
DOTTED = rf"{WORD}(\.{WORD})+"


# Tags stand in angle brackets: they appear in the location of an error, where fields do not.
def union(choose: Any, expected: str) -> Discriminator:
    """Choose a union's member by the kind of value, so that an error names what was expected."""
    return Discriminator(
        choose, custom_error_type="kind", custom_error_message=f"expected {expected}"
    )


Operator = TypeAliasType(
    "Operator",
    Annotated[
        str,
        StringConstraints(pattern=rf"^(\.{WORD}|{DOTTED}|MatchAllNode)$"),
        Field(
            description="An import path (torch.nn.Conv2d, operator.add, torch.ops.aten.add.Tensor), "
            "or a method with a dot (.view)",
            examples=["torch.nn.Conv2d", ".view"],
        ),
    ],
)
ImportPath = TypeAliasType(
    "ImportPath",
    Annotated[
        str,
        StringConstraints(pattern=f"^{DOTTED}$"),
        Field(description="The import path of a class or function.", examples=["torch.nn.Linear"]),
    ],
)
DTypeName = TypeAliasType(
    "DTypeName",
    Annotated[
        str,
        StringConstraints(pattern=r"^(torch\.)?[a-z][a-z0-9_]*$"),
        Field(
            description="A torch dtype, without or with the prefix torch.",
            examples=["quint8", "qint8", "uint8", "int8", "float16", "float32"],
        ),
    ],
)
QSchemeName = TypeAliasType(
    "QSchemeName",
    Annotated[
        str,
        StringConstraints(pattern=r"^(torch\.)?per_[a-z_]+$"),
        Field(
            description="A torch qscheme, without or with the prefix torch.",
            examples=["per_tensor_affine", "per_channel_symmetric"],
        ),
    ],
)
GranularityText = TypeAliasType(
    "GranularityText",
    Annotated[
        str,
        StringConstraints(pattern=r"^per_[a-z]+(\([a-z0-9=, \[\]-]*\))?$"),
        Field(
            description="What one scale is for; without arguments, any.",
            examples=[
                "per_tensor",
                "per_channel",
                "per_group(size=128)",
                "per_block(shape=[64, 128])",
                "per_token",
            ],
        ),
    ],
)
PowerOfTwo = TypeAliasType(
    "PowerOfTwo",
    Annotated[
        str,
        StringConstraints(pattern=r"^2\*\*-?[0-9]{1,4}$"),
        Field(description="A power of two, written as in Python.", examples=["2**-12"]),
    ],
)
Finite = Annotated[float, Field(allow_inf_nan=False)]
Scalar = Annotated[bool | int | Finite | None, Tag("<scalar>")]
ObservationName = Literal[
    "OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT",
    "OUTPUT_SHARE_OBSERVER_WITH_INPUT",
    "INPUT_OUTPUT_NOT_OBSERVED",
]
Count = Annotated[int, Field(ge=0)]


class Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


def kind_of(value: Any) -> str | None:
    if isinstance(value, str):
        return "<text>"
    if isinstance(value, list):
        return "<list>"
    if isinstance(value, dict):
        return "<mapping>"
    return "<scalar>"


def _number_kind(value: Any) -> str:
    if isinstance(value, str):
        return "<text>"
    return "<float>" if isinstance(value, float) else "<int>"


def kind_by_key(*keys: str) -> Any:
    """The kind, with a mapping told apart by which of ``keys`` it has (the first if none)."""

    def choose(value: Any) -> str | None:
        kind = kind_of(value)
        if kind == "<mapping>":
            return f"<{next((key for key in keys if key in value), keys[0])}>"
        return kind

    return choose


Number = TypeAliasType(
    "Number",
    Annotated[
        Annotated[int, Tag("<int>")]
        | Annotated[Finite, Tag("<float>")]
        | Annotated[PowerOfTwo, Tag("<text>")],
        Discriminator(_number_kind),
    ],
)
