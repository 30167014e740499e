"""One record for two kernels that were fused."""

from __future__ import annotations

import dataclasses

from torch.fx import Node

from backquant.lower.rule import KernelUse


def merge_records(
    found: list[KernelUse | None], records: dict[Node, int], pair: tuple[Node, Node], kernel: str
) -> None:
    """The first node of ``pair`` now runs for both, as ``kernel``; the entry of the second in ``found``
    becomes None. ``records``: the position of each node in ``found``.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> pair = graph.placeholder("conv"), graph.placeholder("add")
    >>> uses = [KernelUse((name,), name, torch.uint8, "x86") for name in ("conv", "add")]
    >>> merge_records(uses, dict(zip(pair, (0, 1))), pair, "conv(add)")
    >>> [str(use) for use in uses]
    ['conv+add: conv(add) (uint8)', 'None']
    """
    first, second = pair
    if first not in records or second not in records:
        return
    here, there = records[first], records.pop(second)
    before, after = found[here], found[there]
    if before is not None and after is not None:
        nodes = (*before.nodes, *after.nodes)
        found[here] = dataclasses.replace(before, nodes=nodes, kernel=kernel)
        found[there] = None
