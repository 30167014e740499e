"""The layout of patterns, and of the ports of graph patterns, in a spec file."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field, StringConstraints, Tag
from typing_extensions import TypeAliasType

from backquant.backend_config.files.model_parts import (
    WORD,
    Count,
    Finite,
    ImportPath,
    Model,
    Operator,
    Scalar,
    kind_by_key,
    kind_of,
    union,
)

__all__ = [
    "ExtraInputs",
    "OperatorName",
    "OperatorNames",
    "Pattern",
    "PatternOrName",
    "PortName",
    "is_operator_name",
]


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
