"""How the inputs and the output of a graph pattern are observed, by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, TypeAlias

from backquant.backend_config.checks import within
from backquant.backend_config.declared import Record, declared
from backquant.backend_config.graph_pattern import GraphPattern
from backquant.backend_config.kinds import ByName
from backquant.backend_config.layout import Layout, one_of, ref
from backquant.errors import SpecError

Role: TypeAlias = Literal["activation", "weight", "bias", "float"]


@dataclass(frozen=True, repr=False)
class Port(Record):
    """One input, or the output, of a graph pattern.

    ``role``: ``activation``, ``weight`` or ``bias``: observed as such; ``float``: not observed.
    ``shares_with``: an earlier port whose observer this one uses (the output is the last port).

    >>> Port("weight")
    Port('weight')
    """

    role: Role = "activation"
    shares_with: Annotated[str | None, "An earlier port whose observer this one uses."] = None
    shown_bare: ClassVar[int] = 1

    def _check(self) -> None:
        if self.shares_with is not None and self.role != "activation":
            raise SpecError(f"a {self.role} shares no observer", where="shares_with")

    @classmethod
    def of(cls, value: Any) -> Port:
        """A port as it is, from a role, or from a dict of its fields.

        >>> Port.of("float") == Port.of({"role": "float"})
        True
        """
        if isinstance(value, Port):
            return value
        if isinstance(value, Mapping):
            return cls.from_dict({key: item for key, item in value.items() if item is not None})
        return cls(value)

    def __str__(self) -> str:
        return self.role if self.shares_with is None else f"shares with {self.shares_with}"


def checked_ports(pattern: Any, ports: Mapping[str, Any]) -> dict[str, Port]:
    """``ports`` as ``Port`` objects, in the order of the pattern.

    Raises ``SpecError`` for a pattern without names, a port that is not there, a role that it cannot
    have, and sharing with a port that is not earlier or has no observer.

    >>> import torch
    >>> checked_ports(GraphPattern(["x"], {"out": (torch.relu, "x")}), {"out": "float"})
    {'out': Port('float')}
    """
    if not isinstance(pattern, GraphPattern):
        raise SpecError(
            "only a GraphPattern has ports",
            where="ports",
            fix="BackendPatternConfig(GraphPattern(...)).set_ports(...)",
        )
    given: dict[str, Port] = {}
    for name, value in ports.items():
        pattern.check_has(name, pattern.ports, "ports")
        with within(f"ports[{name!r}]"):
            given[name] = Port.of(value)
            if name == pattern.output and given[name].role in ("weight", "bias"):
                role = given[name].role
                raise SpecError(f"an output is no {role}", where="role", fix="activation or float")
    roles = {name: given.get(name, Port()) for name in pattern.ports}
    for name, port in given.items():
        _check_sharing(roles, name, port)
    return {name: given[name] for name in pattern.ports if name in given}


def _check_sharing(roles: Mapping[str, Port], name: str, port: Port) -> None:
    other = port.shares_with
    if other is None:
        return
    order, where = list(roles), f"ports[{name!r}].shares_with"
    earlier = order[: order.index(name)]
    if other not in earlier:
        raise SpecError(
            f"{name!r} shares with {other!r}, which is no earlier port",
            where=where,
            fix=f"one of {', '.join(map(repr, earlier))}" if earlier else "",
        )
    if roles[other].role != "activation":
        raise SpecError(f"{other!r} is observed as {roles[other].role}", where=where)


class Ports(ByName):
    """Ports by name; in a file, a role stands for a port that shares nothing."""

    of_pattern: ClassVar[bool] = True

    @property
    def layout(self) -> Layout:
        expected = "a role (activation, weight, bias, float), or {role: …, shares_with: …}"
        port = one_of(expected, declared(Port)[0].kind.layout, Port.layout())
        return {
            "propertyNames": ref("NodeName"),
            "additionalProperties": port,
            "type": "object",
        }

    def write(self, value: Any) -> Any:
        return {
            name: port.role if port.shares_with is None else {"shares_with": port.shares_with}
            for name, port in value.items()
        }
