"""The manifest of an artifact: what its JSON document holds, field by field, as pydantic checks it.

The schema is published: ``backquant schema --of artifact``, ``src/backquant/artifact/schema_v2.json``.
Beyond types, ``check_manifest`` follows references: each tensor that is named is in the file; each node
reads nodes before it, so that graphs have no cycles; a module that stands for another comes after it.
Nothing is built, and no tensor read, before a manifest has passed.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, reduce
from operator import or_
from typing import TYPE_CHECKING, Annotated, Any, ForwardRef, Literal, TypeAlias

from pydantic import (
    BaseModel,
    Discriminator,
    Field,
    StringConstraints,
    Tag,
    TypeAdapter,
    ValidationError,
    create_model,
)
from typing_extensions import TypeAliasType, TypedDict

from backquant.artifact.data_models import STRICT, DTypeName, data_model
from backquant.errors import ArtifactError
from backquant.graph.example import ExampleSpec
from backquant.json_text import read_json
from backquant.lower import EngineInfo, KernelUse
from backquant.match.plan import Decision, Plan, Reason
from backquant.report.model import Report

# The JSON form of values as a type that pydantic checks and publishes; ``json_values`` reads and writes it.
#
# A value is a scalar, a list, or an object with one key, which says its kind.

Name = Annotated[str, StringConstraints(min_length=1, max_length=1024)]
#: What names of tensors begin with, and paths of modules that these come from.
STEM = re.compile("[A-Za-z0-9_.]{0,1024}")
Stem = Annotated[str, StringConstraints(pattern=f"^{STEM.pattern}$")]
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

# Reading a manifest takes 5 times its length in memory, 70 bytes for each value, 200 for each list, at most.
LONGEST = 1 << 26  # bytes, as the header of the file spells it
_LISTS, _VALUES = 1 << 21, 1 << 23
_Plain = bool | int | float | str | None
_Size = Annotated[int, Field(ge=0, lt=2**48)]
_Digest = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
_Int32 = Annotated[int, Field(ge=-(2**31), lt=2**31)]
_Scale = Annotated[float, Field(gt=0, allow_inf_nan=False)]
_Edge = tuple[int | str, _Scale, _Int32, _Int32, _Int32, DTypeName]


class _Model(BaseModel):
    model_config = STRICT


class TensorEntry(_Model):
    """A tensor of the file; ``sha256`` is the digest of its bytes, row by row, lowest byte first."""

    dtype: DTypeName
    shape: Annotated[list[_Size], Field(max_length=64)]
    sha256: _Digest


class Packed(_Model):
    """Integers of 8 bits that fit into fewer: the tensor of the file holds several in each byte."""

    bits: Literal[2, 3, 4]
    shape: Annotated[list[_Size], Field(max_length=64)]
    dtype: Literal["int8", "uint8"]


class Node(_Model):
    """A node of a graph, which reads nodes before it."""

    op: Literal["placeholder", "get_attr", "call_function", "call_method", "call_module", "output"]
    name: Name
    target: Name
    args: list[Value] = []
    kwargs: dict[str, Value] = {}


class Same(_Model):
    """A module that stands in another place, too."""

    same_as: str


class Module(_Model):
    """A module: of a class, or of a graph."""

    training: bool
    class_: Annotated[Path | None, Field(alias="class")] = None
    graph: list[Node] | None = None
    preserved: dict[Name, Value] = {}
    parameters: dict[Name, TensorReference | None] = {}
    buffers: dict[Name, TensorReference | None] = {}
    frozen: list[Name] = []
    non_persistent: list[Name] = []
    config: Value = None
    attributes: dict[Name, Value] = {}
    children: dict[Name, Module | Same] = {}
    absent: list[Name] = []


class Argument(_Model):
    """An input of an exported graph."""

    name: Name
    shapes: list[list[_Size | str | None]]
    value: _Plain
    dtypes: list[DTypeName]
    fixed: list[tuple[str, _Plain]] = []


class RecordClass(_Model):
    """A class as an attribute of an output."""

    record_class: Path


class Structure(_Model):
    """What an exported graph returns."""

    kind: Literal["value", "tuple", "list", "dict", "record", "constant"]
    keys: list[_Plain] = []
    parts: list[Structure] = []
    name: str = ""
    made: Literal["called"] | dict[Name, RecordClass | Value] | None = None


class Interface(_Model):
    """Inputs and outputs of an exported graph."""

    arguments: list[Argument]
    output: Structure


class Backend(_Model):
    """The description of the backend as JSON text, or why there is none."""

    name: str
    spec: str | None = None
    unstored: str | None = None


class Reference(_Model):
    """The reference model of a lowered one, with the keys of its ``state_dict``: by quantize node the stem,
    the number, the observed value, the value whose observer it uses, and whether the operator fixes it."""

    model: Module
    keys: dict[Name, tuple[Stem, int, str, str, bool]]
    scopes: dict[Name, Stem]


def _report() -> type[BaseModel]:
    """The report, with what is computed from it for other readers."""
    return create_model("Report", __base__=data_model(Report), coverage=(float | None, None))


@cache
def _manifest() -> TypeAdapter[Any]:
    """All that a file holds beside the bytes of its tensors."""
    named = data_model(Plan, {"decisions": list[data_model(Decision)]})  # type: ignore[misc]
    # ``apart``: what files that were written before call ``separate_layers``
    plan = create_model("Plan", __base__=named, apart=(list[str], []))
    fields: dict[str, Any] = {
        "versions": dict[Literal["backquant", "torch"], str],
        "engine": data_model(EngineInfo, {"name": Name}) | None,
        "kernels": list[data_model(KernelUse)],  # type: ignore[misc]
        "left_in_float": list[data_model(Reason)],  # type: ignore[misc]
        "inputs": list[tuple[int, _Scale, _Int32, _Int32, _Int32, DTypeName]],
        "outputs": list[_Edge],
        "example": data_model(ExampleSpec) | None,
        "backend": Backend,
        "plan": plan,
        "interface": Interface | None,
        "report": _report() | None,
        "model": Module,
        "tensors": dict[Name, TensorEntry],
        "strides": dict[Name, list[_Size]],
    }
    required: dict[str, Any] = {name: (kind, ...) for name, kind in fields.items()}
    required["reference"] = (Reference | None, None)  # only where it is shown
    required["packed"] = (dict[Name, Packed], {})  # of files that were written before, none
    required["measured_outputs"] = (
        list[_Edge],
        [],
    )  # only where outputs that were measured are floats
    required["check_finite"] = (bool, True)  # only written where it was switched off
    return TypeAdapter(create_model("Manifest", __config__=STRICT, **required))


def json_schema() -> dict[str, Any]:
    """The JSON Schema of manifests.

    >>> sorted(json_schema()["properties"])[:4]
    ['backend', 'check_finite', 'engine', 'example']
    """
    found = _manifest().json_schema(by_alias=True)
    head = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "backquant artifact",
    }
    return {**found, **head}


def check_manifest(text: str) -> dict[str, Any]:
    """The manifest in ``text``, as plain data. Raises ``ArtifactError`` for the first thing that is wrong.

    >>> check_manifest('{"versions": 1}')
    Traceback (most recent call last):
    backquant.errors.ArtifactError: Input should be an object: 1
      where  versions
    ...
    """
    if text.count("[") + text.count("{") > _LISTS or text.count(",") > _VALUES:
        raise ArtifactError(
            f"a manifest has at most {_LISTS:,} lists and objects, and {_VALUES:,} values",
            where="manifest",
        )
    try:
        _manifest().validate_json(text)
    except ValidationError as error:
        raise _told(error) from None
    try:
        document: dict[str, Any] = read_json(text)
    except ValueError as error:
        raise ArtifactError(str(error), where="manifest") from None
    for part in filter(None, (document["model"], document.get("reference", {}).get("model"))):
        check_references(part, set(document["tensors"]))
    return document


def _told(error: ValidationError) -> ArtifactError:
    first = error.errors(include_url=False)[0]
    place = ".".join(str(part) for part in first["loc"])
    given = repr(first["input"])
    short = given if len(given) <= 60 else given[:57] + "…"
    wrong = first["msg"].removeprefix("Value error, ")
    return ArtifactError(
        "this field is missing" if first["type"] == "missing" else f"{wrong}: {short}",
        where=place[:200],
        fix="write the file again: backquant.save(quantized, path); backquant schema --of artifact shows "
        "what a manifest holds",
    )


# What a manifest refers to is there: tensors, nodes before the node that reads them, modules before.
def check_references(model: dict[str, Any], tensors: set[str]) -> None:
    """Raise ``ArtifactError`` for a reference in the modules and graphs of ``model`` to what is not there.

    Nodes read nodes before them alone, so that no graph has a cycle.

    >>> graph = [{"op": "output", "name": "output", "args": [{"node": "x"}]}]
    >>> check_references({"graph": graph}, set())
    Traceback (most recent call last):
    backquant.errors.ArtifactError: there is no node 'x' before this one
      where  node output
    """
    seen: set[str] = set()
    stack = [("", model)]
    while stack:
        path, entry = stack.pop()
        if "same_as" in entry:
            _check_named(entry["same_as"], seen, "module", path)
            continue
        seen.add(path)
        for table in ("parameters", "buffers", "attributes", "preserved"):
            values = list(entry.get(table, {}).values())
            _check_values(values, set(), tensors, f"{path} {table}".strip())
        _check_values(entry.get("config"), set(), tensors, path)
        _check_graph(entry.get("graph"), tensors, path)
        children = entry.get("children", {}).items()
        stack += [(f"{path}.{name}".lstrip("."), child) for name, child in reversed(children)]


def _check_graph(rows: list[dict[str, Any]] | None, tensors: set[str], path: str) -> None:
    if rows is None:
        return
    nodes: set[str] = set()
    for row in rows:
        where = f"{path}: node {row['name']}".removeprefix(": ")
        arguments = [row.get("args"), *row.get("kwargs", {}).values()]
        _check_values(arguments, nodes, tensors, where)
        if row["name"] in nodes:
            raise ArtifactError(f"two nodes are called {row['name']!r}", where=where)
        nodes.add(row["name"])
    outputs = [number for number, row in enumerate(rows) if row["op"] == "output"]
    if outputs != [len(rows) - 1]:
        raise ArtifactError("a graph ends with its one output", where=path or "the model")


def _check_values(value: Any, nodes: set[str], tensors: set[str], where: str) -> None:
    for kind, name in _references(value):
        _check_named(name, nodes if kind == "node" else tensors, kind, where)


def _references(value: Any) -> Iterator[tuple[str, str]]:
    """Every ``{"node": name}`` and ``{"tensor": key}`` in a value."""
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, list):
            stack += item
        elif isinstance(item, dict):
            if len(item) == 1:
                ((key, inner),) = item.items()
                if key in ("node", "tensor") and isinstance(inner, str):
                    yield key, inner
                    continue
            stack += item.values()


def _check_named(name: str, known: set[str], kind: str, where: str) -> None:
    if name not in known:
        before = "" if kind == "tensor" else " before this one"
        raise ArtifactError(f"there is no {kind} {name!r}{before}", where=where)
