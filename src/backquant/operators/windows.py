"""Windows of poolings in exported programs, no larger than what they move over. Values stay.

In ceil mode PyTorch takes a larger window, and cuts it off (EfficientNet of transformers averages windows of
2560). ONNX's runtimes refuse it; Inductor's code and ExecuTorch's kernel go through all of it each time.
"""

from __future__ import annotations

from typing import Any

from torch import fx

from backquant.operators.index import overloads

_POOLS = tuple(f"{kind}_pool{rank}d" for kind in ("avg", "max") for rank in (1, 2, 3))


def cut_windows(graph: fx.Graph) -> None:
    """Cut the windows of ``graph``, in place, where the size is known. A stride that is left out is that of
    the window as given.

    >>> import torch
    >>> pool = torch.nn.AvgPool2d(8, ceil_mode=True)
    >>> graph = torch.export.export(pool, (torch.zeros(1, 2, 3, 9),)).graph
    >>> cut_windows(graph)
    >>> [node.args[1:] for node in graph.nodes if "avg_pool2d" in str(node.target)]
    [([3, 8], [8, 8], [0, 0], True)]
    """
    for pool in overloads(*_POOLS):
        for node in graph.find_nodes(op="call_function", target=pool):
            _cut_window(node)


def _cut_window(node: fx.Node) -> None:
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    named = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    shape = named["self"].meta["val"].shape
    rank = int(str(node.target).partition("_pool")[2][0])
    given = _of_rank(named["kernel_size"], rank)
    pads, steps = (_of_rank(named.get(n, by), rank) for n, by in (("padding", 0), ("dilation", 1)))
    room = [size + 2 * pad for size, pad in zip(shape[-rank:], pads, strict=True)]
    cut = [
        min(w, r) if isinstance(r, int) and step == 1 else w
        for w, r, step in zip(given, room, steps, strict=True)
    ]
    if cut != given:
        node.args = (node.args[0], cut, named.get("stride") or given, *node.args[3:])


def _of_rank(value: Any, rank: int) -> list[int]:
    """A number, or a list of one, counts for each axis."""
    values = list(value) if isinstance(value, (list, tuple)) else [value]
    return values * rank if len(values) == 1 else values
