"""The layout of a spec file, version 1, as pydantic models; the published JSON Schema is made from them.

They check structure only (keys, kinds of values). ``read`` resolves names and builds the config.
A record of the language has the model of its declared fields; what only files have is written here.
"""

from __future__ import annotations

from functools import cache, singledispatch
from inspect import getdoc
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, StringConstraints, Tag, create_model
from typing_extensions import TypeAliasType

from backquant.backend_config import kinds
from backquant.backend_config.declared import declared
from backquant.backend_config.description import Description
from backquant.backend_config.dtypes import DTypeConfig, DTypeWithConstraints, TensorDType
from backquant.backend_config.files import conditions
from backquant.backend_config.files.model_parts import (
    WORD,
    Count,
    DTypeName,
    Finite,
    GranularityText,
    ImportPath,
    Model,
    Number,
    ObservationName,
    Operator,
    QSchemeName,
    Scalar,
    kind_by_key,
    kind_of,
    union,
)
from backquant.backend_config.fusers import (
    ByCount,
    Function,
    Getter,
    ModuleClass,
    Observation,
    OnePattern,
    Ports,
    Positions,
)
from backquant.backend_config.graph_pattern import Port
from backquant.backend_config.pattern_config import BackendPatternConfig

__all__ = [
    "ExtraInputs",
    "OperatorName",
    "OperatorNames",
    "Pattern",
    "PatternOrName",
    "PortName",
    "is_operator_name",
    "SCHEMA_VERSION",
    "FileModel",
]


# The layout of patterns, and of the ports of graph patterns, in a spec file.


def is_operator_name(value: Any) -> bool:
    """Whether this text names an operator by its record, and not by an import path or a method.

    >>> is_operator_name("relu"), is_operator_name(".relu"), is_operator_name("torch.relu")
    (True, False, False)
    """
    return isinstance(value, str) and value.isidentifier() and value != "MatchAllNode"


def _argument_kind(value: Any) -> str | None:
    kind = kind_of(value)
    if kind == "<mapping>":
        return "<constant>" if "constant" in value else "<text value>"
    return None if kind == "<list>" else kind


Element = TypeAliasType(  # type: ignore[misc]  # mypy knows no recursive alias of this form
    "Element",
    Annotated[
        Annotated[Operator, Tag("<text>")]
        | Scalar
        | Annotated[list["Element"], Tag("<list>"), Field(min_length=1)],  # type: ignore[misc]
        union(kind_of, "an operator, MatchAllNode, a literal, or a list [operator, argument, …]"),
    ],
)


class ReversedPattern(Model):
    """The reversed nested form: [operator, argument, …], the last operator first."""

    reversed: Element


class PatternNode(Model):
    """One operator of a pattern graph, or one value that it must be called with."""

    op: Operator | None = None
    inputs: list[Count] | None = Field(None, description="Positions of earlier nodes.")
    literal: str | bool | int | Finite | None = None
    constant: ImportPath | None = Field(None, description="A literal such as torch.float16.")
    any_order: bool | None = Field(None, description="Either order of its two inputs.")


class PatternGraph(Model):
    """A pattern as a graph in dataflow order; the last node is where matching starts."""

    nodes: list[PatternNode] = Field(min_length=1)


class TextValue(Model):
    """A text that the call must carry, where a bare text is a name."""

    text: str


class ConstantValue(Model):
    """A value such as torch.float16 that the call must carry."""

    constant: ImportPath


PortName = Annotated[str, StringConstraints(pattern=f"^{WORD}$")]
GraphArgument = Annotated[
    Annotated[PortName, Tag("<text>")]
    | Scalar
    | Annotated[TextValue, Tag("<text value>")]
    | Annotated[ConstantValue, Tag("<constant>")],
    union(_argument_kind, "a name, a literal, MatchAllNode, {text: …} or {constant: …}"),
]


class NamedNode(Model):
    """One operator of a graph pattern, with a name."""

    name: PortName
    op: Operator
    arguments: list[GraphArgument] | None = Field(
        None,
        description="All arguments of the call: names of inputs and earlier nodes, literals, or "
        "MatchAllNode for anything. Left out: not constrained.",
    )
    any_order: bool | None = Field(None, description="Either order of its two arguments.")


class NamedGraph(Model):
    """A pattern as a graph with names; the last node is its output."""

    name: str | None = Field(None, description="What reports call it.")
    inputs: list[PortName] = Field(description="Names of the values that it reads from outside.")
    nodes: list[NamedNode] = Field(min_length=1)


Pattern = TypeAliasType(
    "Pattern",
    Annotated[
        Annotated[Operator, Tag("<text>")]
        | Annotated[list[Operator], Tag("<list>"), Field(min_length=2)]
        | Annotated[ReversedPattern, Tag("<reversed>")]
        | Annotated[NamedGraph, Tag("<inputs>")]
        | Annotated[PatternGraph, Tag("<nodes>")],
        union(
            kind_by_key("reversed", "inputs", "nodes"),
            "an operator, a list of operators in forward order, {reversed: […]}, "
            "{inputs: […], nodes: […]} or {nodes: […]}",
        ),
    ],
)
OperatorName = TypeAliasType(
    "OperatorName",
    Annotated[
        str,
        StringConstraints(pattern=f"^{WORD}$"),
        Field(description="The name of an operator, which stands for all of its spellings."),
    ],
)
OperatorNames = TypeAliasType(
    "OperatorNames",
    Annotated[
        str,
        StringConstraints(pattern=rf"^{WORD}(\+{WORD})*$"),
        Field(description="The name of an operator, or of several that run as one: conv2d+relu."),
    ],
)
PatternOrName = TypeAliasType(
    "PatternOrName",
    Annotated[
        Annotated[OperatorName, Tag("<name>")] | Annotated[Pattern, Tag("<pattern>")],
        union(
            lambda value: "<name>" if is_operator_name(value) else "<pattern>",
            "a pattern, or the name of an operator",
        ),
    ],
)
ExtraInputs = Annotated[
    Annotated[ImportPath, Tag("<text>")] | Annotated[list[PortName], Tag("<list>")],
    union(kind_of, "names of inputs, or the import path of a function"),
]
SCHEMA_VERSION = 1


class Sequential(Model):
    """The fuser that puts the matched modules into one container class."""

    sequential: ImportPath
    arity: Annotated[int, Field(ge=1)] = 2


class ReversedArguments(Model):
    """A fuser that is called with the modules in the order of the pattern (last, (…, first))."""

    reversed_arguments: Callable


class ForwardArguments(Model):
    """A fuser written for the order (last, (…, first)), called with the modules in forward order."""

    forward_arguments: Callable


class Factory(Model):
    """An observer class with arguments filled in: factory.with_args(…)."""

    factory: ImportPath
    with_args: dict[str, Argument] = Field(default_factory=dict)


Callable = TypeAliasType(
    "Callable",
    Annotated[
        Annotated[ImportPath, Tag("<text>")]
        | Annotated[Sequential, Tag("<sequential>")]
        | Annotated[ReversedArguments, Tag("<reversed_arguments>")]
        | Annotated[ForwardArguments, Tag("<forward_arguments>")]
        | Annotated[Factory, Tag("<factory>")],
        union(
            kind_by_key("sequential", "reversed_arguments", "forward_arguments", "factory"),
            "the import path of a function, or {sequential: <fused module>}",
        ),
    ],
)
Argument = TypeAliasType(
    "Argument",
    Annotated[
        Annotated[ImportPath, Tag("<text>")] | Scalar | Annotated[Factory, Tag("<factory>")],
        union(kind_by_key("factory"), "a number, an import path, or {factory: …}"),
    ],
)
for _model in (ReversedArguments, ForwardArguments, Factory):
    _model.model_rebuild()


# -- from the declarations ---------------------------------------------------------------------------
def _list(item: Any) -> Any:
    return list[item]


def _mapping(key: Any, value: Any) -> Any:
    return dict[key, value]


@singledispatch
def layout(kind: kinds.Kind) -> Any:
    """The type of what a file holds of a kind."""
    raise NotImplementedError(f"{kind} has no layout in a file")


_PLAIN: dict[type, Any] = {
    kinds.Flag: bool,
    kinds.AnyText: str,
    kinds.Text: Annotated[str, Field(min_length=1)],
    kinds.SharedBy: GranularityText,
    kinds.Where: conditions.Where,
    kinds.Operators: list[PatternOrName],
    kinds.OperatorNames: Annotated[list[OperatorNames], Field(min_length=1)],
    kinds.WordOrModule: str,
    OnePattern: Pattern,
    Observation: ObservationName,
    ModuleClass: ImportPath,
    Function: Callable,
    ByCount: dict[Annotated[str, StringConstraints(pattern=r"^[0-9]{1,4}$")], ObservationName],
    Positions: dict[Literal["input", "weight", "bias"], Count],
}
for _kind, _layout in _PLAIN.items():
    layout.register(_kind)(lambda _kind, plain=_layout: plain)


@layout.register
def _(kind: kinds.Number) -> Any:
    if not kind.whole:
        return Number
    return int if kind.least is None else Annotated[int, Field(ge=kind.least)]


@layout.register
def _(kind: kinds.Numbers) -> Any:
    return _ENDS if kind.ends else list[Number]


@layout.register
def _(kind: kinds.Choice) -> Any:
    return Literal[kind.choices]


@layout.register
def _(kind: kinds.WordOrEnds) -> Any:
    members = Annotated[Literal[kind.word], Tag("<text>")] | Annotated[_ENDS, Tag("<list>")]  # type: ignore[name-defined]
    return Annotated[members, union(kind_of, f"{kind.word}, or the smallest and the largest")]


@layout.register
def _(kind: kinds.TorchConstant) -> Any:
    return DTypeName if kind.holds_dtypes else QSchemeName


@layout.register
def _(kind: kinds.Nested) -> Any:
    return model_of(kind.record)


@layout.register
def _(kind: kinds.Several) -> Any:
    return _list(_DTYPE_CONFIG if kind.listed else model_of(kind.record))


@layout.register
def _(_kind: TensorDType) -> Any:
    return _TENSOR


@layout.register
def _(kind: Getter) -> Any:
    return ExtraInputs if kind.several else PortName | ImportPath


@layout.register
def _(_kind: Ports) -> Any:
    return _mapping(PortName, _PORT)


def _fields(cls: type, but: tuple[str, ...] = ()) -> dict[str, Any]:
    """The fields of the model of a class: ``null`` stands for the default."""
    fields: dict[str, Any] = {}
    for field in declared(cls):
        if field.name in but:
            continue
        said: dict[str, Any] = {"description": field.words} if field.words else {}
        kind = layout(field.kind)
        if field.required:
            fields[field.name] = (kind, Field(**said))
            continue
        fields[field.name] = (kind | None, Field(None, **said))
        if field.earlier:
            text = f"{field.name}, as files of earlier versions say."
            fields[field.earlier] = (kind | None, Field(None, deprecated=True, description=text))
    return fields


@cache
def model_of(cls: type) -> type[Model]:
    """The model of a record."""
    says = (getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").replace("``", "")
    return create_model(cls.__name__, __base__=Model, __doc__=says, **_fields(cls))


_ENDS = Annotated[list[Number | None], Field(min_length=2, max_length=2)]
_TENSOR: Any = TypeAliasType(
    "TensorDType",
    Annotated[
        Annotated[DTypeName, Tag("<text>")]
        | Annotated[model_of(DTypeWithConstraints), Tag("<mapping>")],
        union(kind_of, "a dtype name, or a mapping with the key dtype"),
    ],
)
_PORT: Any = Annotated[
    Annotated[layout(declared(Port)[0].kind), Tag("<text>")]
    | Annotated[model_of(Port), Tag("<mapping>")],
    union(kind_of, "a role (activation, weight, bias, float), or {role: …, shares_with: …}"),
]
_DTYPE_CONFIG: Any = Annotated[
    Annotated[str, Tag("<text>")] | Annotated[model_of(DTypeConfig), Tag("<mapping>")],
    union(kind_of, "the name of a dtype config, or a dtype config"),
]
Entry = create_model(
    "Entry",
    __base__=Model,
    __doc__="What the backend can do with one pattern, with several that share every other field, or with "
    "every spelling of some operators.",
    patterns=(list[Pattern] | None, Field(None, min_length=1)),
    operators=(
        list[OperatorNames] | None,
        Field(
            None,
            min_length=1,
            description="Names of operators: an entry for each module, function and method.",
            examples=[["relu", "conv2d+relu"]],
        ),
    ),
    add_dtype_configs=(
        _list(_DTYPE_CONFIG) | None,
        Field(None, description="Appended to the dtype configs that the entry inherits."),
    ),
    **_fields(BackendPatternConfig, but=("pattern_complex_format",)),
)


def _no_look_alike(version: object) -> object:
    """``true`` and ``1.0`` equal 1 in Python."""
    return version if type(version) is int else str(version)


FileModel = create_model(
    "FileModel",
    __base__=Model,
    __doc__="A backend description for backquant.",
    schema_version=(
        Annotated[Literal[1], BeforeValidator(_no_look_alike)],
        Field(description="The version of this layout."),
    ),
    name=(str, Field(description="The name of the backend.")),
    extends=(
        str | None,
        Field(None, description="A backend's name, or a file relative to this one, to start from."),
    ),
    remove=(
        list[Pattern],
        Field(default_factory=list, description="Patterns of the extended backend to leave out."),
    ),
    **_fields(Description, but=("name",)),
    dtype_configs=(
        _mapping(str, model_of(DTypeConfig)),
        Field(
            default_factory=dict, description="Dtype configs by name, for the entries to refer to."
        ),
    ),
    entries=(_list(Entry), Field(default_factory=list)),
)


def json_schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of spec files of the current ``schema_version``, as a new dict.

    It is the content of ``schema_v1.json`` in this package. It checks structure; whether names can be
    imported is checked when a file is loaded.

    >>> json_schema()["required"]
    ['schema_version', 'name']
    """
    schema: dict[str, Any] = _tidy(FileModel.model_json_schema())
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": f"urn:backquant:backend-config:schema:{SCHEMA_VERSION}",
        **schema,
        "title": "backquant backend description",
    }


def _tidy(node: Any) -> Any:
    """Without generated titles and null defaults; alternatives as ``anyOf``.

    An integer is also a number, so ``oneOf`` would refuse it.
    """
    if isinstance(node, list):
        return [_tidy(item) for item in node]
    if not isinstance(node, dict):
        return node
    tidy: dict[str, Any] = {}
    for key, value in node.items():
        if key in ("properties", "$defs"):
            tidy[key] = {name: _tidy(item) for name, item in value.items()}
        elif (key == "title" and isinstance(value, str)) or (key == "default" and value is None):
            continue
        elif key in ("oneOf", "anyOf"):
            options = tidy.setdefault("anyOf", [])
            options.extend(_tidy(option) for option in value)
        else:
            tidy[key] = _tidy(value)
    if "anyOf" in tidy:
        tidy["anyOf"] = _flat(tidy["anyOf"])
    return tidy


def _flat(options: list[Any]) -> list[Any]:
    """Alternatives that are only alternatives themselves, on one level, each once."""
    flat: list[Any] = []
    for option in options:
        inner = option["anyOf"] if list(option) == ["anyOf"] else [option]
        flat.extend(item for item in inner if item not in flat)
    return flat
