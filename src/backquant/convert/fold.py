"""Batch norms that trained by themselves are folded: the fusions that wait for inference.

``prepare_qat_fx`` leaves a batch norm unfused when its fuser has no form for training (behind a
transposed convolution). The pair is one match all the same, with no observer between its parts, so
that after training the fuser can run as it does for calibration: the folded weight is the one that
is quantized. *Different:* PyTorch cannot train such models.
"""

from __future__ import annotations

from torch import fx, nn

from backquant.backend_config import BackendPatternConfig, is_for_inference_only
from backquant.convert.state import Conversion
from backquant.graph import get_module, set_module, shallow_copy
from backquant.match.plan import Match, MatchKind

__all__ = ["fold_after_training"]


def fold_after_training(work: Conversion) -> None:
    """Replace every such pair in ``work.module`` by the one module that its fuser gives."""
    calls: dict[str, int] = {}
    for node in work.module.graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    entries = work.prepared.backend_config.configs
    for match in work.plan.matches:
        if match.kind is MatchKind.PATTERN and len(match.nodes) > 1 and work.quantized(match.root):
            nodes = [work.nodes[name] for name in match.nodes]
            if _waits(entries[match.entry], nodes):
                _fold(work, match, nodes, shared=calls[str(nodes[0].target)] > 1)


def _waits(entry: BackendPatternConfig, nodes: list[fx.Node]) -> bool:
    return (
        is_for_inference_only(entry.fuser_method)
        and entry._pattern_complex_format is None
        and len(entry.normal_pattern.nodes) == len(nodes)
        and all(node.op == "call_module" for node in nodes)
    )


def _fold(work: Conversion, match: Match, nodes: list[fx.Node], *, shared: bool) -> None:
    root, *rest = nodes
    parts = [shallow_copy(get_module(work.module, str(node.target))).eval() for node in nodes]
    fuser = work.prepared.backend_config.configs[match.entry].fuser_method
    assert fuser is not None
    folded: nn.Module = fuser(False, *parts)
    if shared:
        root.target = work.editor.names.take(f"{root.target}_folded_")
    set_module(work.module, str(root.target), folded)
    for node in reversed(rest):
        node.replace_all_uses_with(root)
        work.editor.erase(node)
        del work.nodes[node.name]
    work.editor.provenance.record(root.name, match.nodes)
