"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from backquant.deploy.tensorrt.view import GraphView

Severity = Literal["error", "advice"]


@dataclass(frozen=True)
class Hit:
    """One place that breaks a rule. ``node``: the node's name, or its first output's."""

    node: str
    what: str
    expected: str
    found: str


@dataclass(frozen=True)
class Rule:
    """One documented rule.

    ``severity``: ``"error"``: TensorRT refuses the file; ``"advice"``: it takes the file and runs some of
    it in a higher precision, or slower. ``source``: where the rule is documented; ``basis``: what of
    it is read there. ``check`` yields the places of one graph that break it, in linear time.
    """

    id: str
    title: str
    severity: Severity
    source: str
    basis: str
    check: Callable[[GraphView], Iterable[Hit]]


@dataclass(frozen=True)
class Finding:
    """One place of a file that breaks a rule.

    ``rule``: its id; ``severity``: ``"error"`` or ``"advice"``; ``citation``: the address of the
    documentation.

    >>> print(Finding("zero-point", "error", "q", "the zero point is not 0", "0", "128", "https://…"))
    error   zero-point  q: the zero point is not 0 (expected 0, found 128)
    """

    rule: str
    severity: Severity
    node: str
    what: str
    expected: str
    found: str
    citation: str

    def __str__(self) -> str:
        return (
            f"{self.severity:6s}  {self.rule}  {self.node}: {self.what} "
            f"(expected {self.expected}, found {self.found})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name.

        >>> Finding("opset", "error", "file", "too old", "13", "11", "https://…").to_dict()["rule"]
        'opset'
        """
        return dict(vars(self))
