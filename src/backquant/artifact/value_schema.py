"""The JSON form of values as a type that pydantic checks and publishes; ``values`` reads and writes it.

A value is a scalar, a list, or an object with one key, which says its kind.
"""

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, TypeAlias

from pydantic import Discriminator, Field, StringConstraints, Tag
from typing_extensions import TypeAliasType, TypedDict

from backquant.artifact.data_models import STRICT, DTypeName

Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
Path = Annotated[str, StringConstraints(pattern=r"^[^\s'\"\\]{1,1024}$")]
Integer = Annotated[int, Field(ge=-(2**63), lt=2**64)]


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return next(iter(value)) if len(value) == 1 else "<object of several keys>"
    return f"<{type(value).__name__}>"


def _object(key: str, content: Any) -> Any:
    made: Any = TypedDict(key, {key: content})  # type: ignore[misc]
    setattr(made, "__pydantic_config__", STRICT)  # noqa: B010
    made.__module__ = __name__
    return made


_Value: Any = ForwardRef("Value", module=__name__)
_Values: Any = list[_Value]
_Word = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_:]{0,63}$")]
_PLAIN: dict[str, Any] = {
    "<NoneType>": None,
    "<bool>": bool,
    "<int>": Integer,
    "<float>": Annotated[float, Field(allow_inf_nan=False)],
    "<str>": str,
    "<list>": _Values,
}
_OBJECTS: dict[str, Any] = {
    "node": _object("node", Name),
    "tensor": _object("tensor", Name),
    "tuple": _object("tuple", _Values),
    "size": _object("size", list[Integer]),
    "namedtuple": _object("namedtuple", _Values),
    "dict": _object("dict", list[tuple[_Value, _Value]]),
    "ordered_dict": _object("ordered_dict", list[tuple[_Value, _Value]]),
    "set": _object("set", _Values),
    "slice": _object("slice", tuple[_Value, _Value, _Value]),
    "range": _object("range", tuple[Integer, Integer, Integer]),
    "float": _object("float", Literal["nan", "inf", "-inf"]),
    "complex": _object("complex", tuple[_Value, _Value]),
    "dtype": _object("dtype", DTypeName),
    "device": _object("device", _Word),
    "layout": _object("layout", _Word),
    "memory_format": _object("memory_format", _Word),
    "qscheme": _object("qscheme", Annotated[str, StringConstraints(max_length=64)]),
    "function": _object("function", Path),
    "class": _object("class", Path),
    "partial": _object("partial", tuple[_Value, _Values, _Value]),
    "instance": _object("instance", tuple[Path, _Value]),
    "ellipsis": _object("ellipsis", Literal[True]),
}
_choice = Discriminator(
    _kind, custom_error_type="kind", custom_error_message="This is no value of a kind that is known"
)
_members = [Annotated[kind, Tag(tag)] for tag, kind in (_PLAIN | _OBJECTS).items()]
if TYPE_CHECKING:
    Value: TypeAlias = Any
    TensorReference: TypeAlias = Any
else:
    Value = TypeAliasType("Value", Annotated[reduce(or_, _members), _choice])
    TensorReference = _OBJECTS["tensor"]
