"""Graphs: capture, queries, edits, verification. The only room that knows how ``torch.fx`` works."""

from __future__ import annotations

from backquant.graph.any_layout import move_rank_reads, reshape_views
from backquant.graph.assemble import (
    DeferredGraphModule,
    alike,
    assemble,
    call_before,
    copied_graph,
    rebuilt,
    returning,
    take_graph,
)
from backquant.graph.by_mode import ModeValue
from backquant.graph.capture import Captured, called_whole, capture, preserve
from backquant.graph.clone import (
    own_buffers,
    own_shared_tensors,
    own_tensors,
    shallow_copy,
    without_parametrizations,
)
from backquant.graph.dialect_ops import (
    register_quantized_decomposed,
)
from backquant.graph.edit import (
    GraphEditor,
    NamePool,
    free_path,
    get_module,
    remove_unused_modules,
    set_module,
)
from backquant.graph.example import as_arguments, check_inputs, with_distinct_tensors
from backquant.graph.folding import fold_constants, inline_call, inline_wrapped
from backquant.graph.modes import (
    CapturedForTraining,
    capture_for_training,
    inline_custom_gradients,
    settle_mode_values,
)
from backquant.graph.objects import part
from backquant.graph.passes import (
    Breach,
    complaints,
    contract,
    graph_pass,
    released,
    run_pass,
    verify,
)
from backquant.graph.provenance import Provenance, Scope
from backquant.graph.queries import (
    GraphIndex,
    NodeInfo,
    OperatorKey,
    known_types,
    node_arguments,
    nodes_in,
    operator_key,
)
from backquant.graph.rewrite import GraphRewriter
from backquant.graph.total import is_of_tensors
from backquant.graph.tracer import is_leaf

__all__ = [
    "GraphRewriter",
    "Breach",
    "inline_call",
    "inline_wrapped",
    "Captured",
    "CapturedForTraining",
    "DeferredGraphModule",
    "GraphEditor",
    "GraphIndex",
    "ModeValue",
    "NamePool",
    "NodeInfo",
    "OperatorKey",
    "Provenance",
    "Scope",
    "alike",
    "as_arguments",
    "assemble",
    "call_before",
    "called_whole",
    "capture",
    "capture_for_training",
    "check_inputs",
    "complaints",
    "copied_graph",
    "returning",
    "fold_constants",
    "free_path",
    "get_module",
    "contract",
    "graph_pass",
    "is_leaf",
    "is_of_tensors",
    "known_types",
    "move_rank_reads",
    "node_arguments",
    "nodes_in",
    "operator_key",
    "own_buffers",
    "own_shared_tensors",
    "own_tensors",
    "part",
    "preserve",
    "rebuilt",
    "register_quantized_decomposed",
    "released",
    "remove_unused_modules",
    "set_module",
    "reshape_views",
    "run_pass",
    "inline_custom_gradients",
    "settle_mode_values",
    "shallow_copy",
    "take_graph",
    "verify",
    "with_distinct_tensors",
    "without_parametrizations",
]
