"""Which nodes of the captured graph a node of an edited graph stands for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


class Provenance:
    """A table from names of new nodes to names of the nodes they come from.

    Names that were never recorded stand for themselves. Kept outside the graph, so that it
    survives every copy and rewrite of nodes.

    >>> table = Provenance()
    >>> table.record("conv", ["conv", "bn", "relu"])
    >>> table.record("conv_quantized", ["conv"])
    >>> table.origins("conv_quantized"), table.origins("fc")
    (('conv', 'bn', 'relu'), ('fc',))
    """

    def __init__(self, table: Mapping[str, Iterable[str]] | None = None) -> None:
        self._table: dict[str, tuple[str, ...]] = {
            name: tuple(origins) for name, origins in (table or {}).items()
        }

    def record(self, new: str, origins: Iterable[str]) -> None:
        """``new`` stands for ``origins``, each of which may itself be a recorded name."""
        expanded = [source for origin in origins for source in self.origins(origin)]
        self._table[new] = tuple(dict.fromkeys(expanded))

    def origins(self, name: str) -> tuple[str, ...]:
        """Names of the captured nodes that ``name`` stands for."""
        return self._table.get(name, (name,))

    def to_dict(self) -> dict[str, list[str]]:
        """The recorded names with their origins; the inverse of ``Provenance(table)``."""
        return {name: list(origins) for name, origins in self._table.items()}

    def copy(self) -> Provenance:
        """A table of its own with the same entries."""
        return Provenance(self._table)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Provenance) and self._table == other._table

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"Provenance({self._table!r})"


# Where in the module tree a node of a captured graph comes from.


@dataclass(frozen=True)
class Scope:
    """The module that a node calls (``call_module``) or whose ``forward`` made it.

    ``path`` is the dotted path (``""`` for the model itself); ``module_type`` its class, ``None``
    for the model itself, as in PyTorch.

    >>> Scope("encoder.fc", None).parent
    'encoder'
    """

    path: str
    module_type: type | None

    @property
    def parent(self) -> str:
        """Path of the module that contains this one; ``""`` at the top."""
        return self.path.rpartition(".")[0]
