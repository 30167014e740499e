"""The reference model in the form that targets read, after the rules of its backend."""

from __future__ import annotations

from torch import fx

from backquant.backend_config import QDQRules
from backquant.deploy.described_rounding import state_half_even
from backquant.deploy.epilogues import fuse_epilogues
from backquant.deploy.weights import with_weight_nodes
from backquant.lower.padded import pad_before
from backquant.lower.qdq import is_dequantize, is_weight_dequantize

__all__ = ["dequantize_per_user", "portable"]


def portable(reference: fx.GraphModule, rules: QDQRules) -> fx.GraphModule:
    """A copy of ``reference`` with weights as integers and dequantize nodes; names of nodes are kept.

    >>> import backquant, torch
    >>> x, mapping = torch.ones(1, 3), backquant.get_default_qconfig_mapping("x86")
    >>> prepared = backquant.prepare_fx(torch.nn.Sequential(torch.nn.Linear(3, 2)).eval(), mapping, (x,))
    >>> _ = prepared(x)
    >>> reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    >>> made = portable(reference, QDQRules(weights="quantized_float"))
    >>> made.state_dict().keys() - reference.state_dict().keys()
    {'0.weight_float'}
    """
    made = with_weight_nodes(reference, rules.weights)
    assert isinstance(made, fx.GraphModule)
    state_half_even(made)
    pad_before(made)
    if rules.epilogues:
        fuse_epilogues(made, rules.epilogues)
    if rules.dequantize_per_user:
        dequantize_per_user(made)
    return made


def dequantize_per_user(module: fx.GraphModule) -> None:
    """Give every reader of a quantized value a dequantize node of its own, in place.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> graph = fx.Graph()
    >>> q = graph.placeholder("q")
    >>> op = torch.ops.quantized_decomposed.dequantize_per_tensor.default
    >>> x = graph.call_function(op, (q, 0.1, 0, 0, 255, torch.uint8))
    >>> _ = graph.output((graph.call_function(torch.relu, (x,)), graph.call_function(torch.neg, (x,))))
    >>> module = fx.GraphModule({}, graph)
    >>> dequantize_per_user(module)
    >>> sum(node.target is op for node in module.graph.nodes)
    2
    """
    for node in list(module.graph.nodes):
        if not (is_dequantize(node) or is_weight_dequantize(node)):
            continue
        for user in sorted(node.users, key=lambda user: user.op != "output")[1:]:
            with module.graph.inserting_before(user):
                own = module.graph.call_function(node.target, node.args, node.kwargs)
            own.meta = dict(node.meta)
            user.replace_input_with(node, own)
    module.recompile()
