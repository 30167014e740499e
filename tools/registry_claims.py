"""What a description claims, for comparisons with the registry of its runtime; and how these are printed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from backquant.backend_config import DTypeConfig, get_backend_config
from backquant.operators import find
from backquant.operators.operator import Operator


def claims(backend: str) -> Iterator[tuple[Operator, DTypeConfig]]:
    """Each dtype config of the entries for one operator."""
    for entry in get_backend_config(backend).configs:
        pattern = entry.normal_pattern
        operator = find(pattern.anchor.op) if pattern.size == 1 else None
        if operator is not None:
            yield from ((operator, config) for config in entry.dtype_configs)


def print_both_ways(beyond: Iterable[str], unclaimed: Iterable[str], registry: str) -> None:
    """The claims that ``registry`` lacks, and what it has beyond them."""
    print(f"claimed, and not taken by {registry}:")
    print("\n".join(f"  {line}" for line in beyond) or "  nothing")
    print(f"taken by {registry}, and not claimed:")
    print("\n".join(f"  {line}" for line in unclaimed) or "  nothing")
