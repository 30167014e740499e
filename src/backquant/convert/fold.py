"""Batch norms that trained by themselves are folded: the fusions that wait for inference.

``prepare_qat_fx`` leaves a batch norm unfused when its fuser has no form for training (behind a
transposed convolution). The pair is one match all the same, with no observer between its parts, so
that after training the fuser can run as it does for calibration: the folded weight is the one that
is quantized. *Different:* PyTorch cannot train such models.

A batch norm that was planned for as plain and trained as ``nn.SyncBatchNorm`` becomes plain again.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from backquant.backend_config import BackendPatternConfig, GraphPattern, is_for_inference_only
from backquant.convert.state import Conversion
from backquant.fuse import as_plain
from backquant.graph import get_module, set_module, shallow_copy
from backquant.graph.folding import ConstantValues
from backquant.match.plan import Match, MatchKind
from backquant.observe import is_observer_or_fake_quantize


def fold_after_training(work: Conversion) -> None:
    """Replace every such pair in ``work.module`` by the one module that its fuser gives."""
    calls: dict[str, int] = {}
    for node in work.module.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    entries = work.prepared.backend_config.shared_configs
    for match in work.plan.matches:
        if match.kind is not MatchKind.PATTERN or not work.quantized(match.root):
            continue
        nodes = [work.nodes[name] for name in match.nodes]
        entry = entries[match.entry]
        if len(nodes) == 1:
            _make_plain(work, nodes[0], entry)
        elif _waits(entry, nodes) and nodes[0].name == match.root:
            _fold(work, match, nodes, shared=calls[str(nodes[0].target)] > 1)


def _make_plain(work: Conversion, node: fx.Node, entry: BackendPatternConfig) -> None:
    planned = entry.normal_pattern.anchor.op
    if node.op != "call_module" or not _is_batch_norm(planned):
        return
    trained = get_module(work.module, str(node.target))
    if isinstance(trained, nn.SyncBatchNorm):
        set_module(work.module, str(node.target), as_plain(trained, planned))


def _is_batch_norm(kind: object) -> bool:
    return isinstance(kind, type) and issubclass(kind, _BatchNorm)


def _waits(entry: BackendPatternConfig, nodes: list[fx.Node]) -> bool:
    operators = [n for n in entry.normal_pattern.nodes if n.kind not in ("any", "literal")]
    return (
        is_for_inference_only(entry.fuser_method)
        and entry._pattern_complex_format is None
        and len(operators) == len(nodes)
        and all(node.op == "call_module" for node in nodes)
        and all(node.all_input_nodes == [above] for above, node in pairwise(nodes))
    )


def _fold(work: Conversion, match: Match, nodes: list[fx.Node], *, shared: bool) -> None:
    root, *rest = nodes
    parts = [shallow_copy(get_module(work.module, str(node.target))).eval() for node in nodes]
    entry = work.prepared.backend_config.shared_configs[match.entry]
    assert entry.fuser_method is not None
    folded: nn.Module
    # a graph pattern names its operators; a chain has only its order
    if isinstance(entry.pattern, GraphPattern):
        folded = entry.fuser_method(False, **dict(zip(entry.pattern.operators, parts, strict=True)))
    else:
        folded = entry.fuser_method(False, *parts)
    if shared:
        root.target = work.editor.names.take(f"{root.target}_folded_")
    set_module(work.module, str(root.target), folded)
    for node in reversed(rest):
        node.replace_all_uses_with(root)
        work.editor.erase(node)
        del work.nodes[node.name]
    work.editor.provenance.record(root.name, match.nodes)


# Values of a graph that depend on no input.


class Constants(ConstantValues):
    """The constant tensors of one graph. Observers on the way pass their input on and measure nothing.

    >>> from torch import nn
    >>> class Twice(nn.Module):
    ...     def __init__(self):
    ...         super().__init__(); self.w = nn.Parameter(torch.ones(1))
    ...     def forward(self, x):
    ...         return x + 2 * self.w
    >>> gm = fx.symbolic_trace(Twice())
    >>> node, constants = {n.name: n for n in gm.graph.nodes}, Constants(gm)
    >>> constants.tensor(node["mul"]), constants.tensor(node["add"])
    (tensor([2.]), None)
    """

    def tensor(self, node: fx.Node) -> torch.Tensor | None:
        """The tensor that ``node`` computes, detached; None if it depends on an input."""
        value = self.value(node) if node in self else None
        return value.detach() if isinstance(value, torch.Tensor) else None

    def _computed(self, node: fx.Node) -> Any:
        if node.op == "call_module":
            called = get_module(self._module, str(node.target))
            if is_observer_or_fake_quantize(called):
                return self._values[node.all_input_nodes[0]]
        return super()._computed(node)
