"""The float weights that a conversion replaces (``convert_fx(..., keep_original_weights=True)``).

Weights of functional operators are found under PyTorch's keys: the path of the module that computes
them, ``_packed_weight_`` and a number. *Different:* PyTorch lists the qparams of the weight behind
it and its bias (and in place of a missing bias), and knows no weights of modules; here each entry is
weight and bias, and modules are found under their path.
"""

from __future__ import annotations

import torch
from torch import fx, nn

from backquant.convert.fold import Constants
from backquant.convert.state import ReferenceModel, reference_state
from backquant.convert.weights import without_training
from backquant.match.plan import Match, MatchKind
from backquant.prepare import PreparedModule, Role, prepared_state

Weights = dict[str, list[torch.Tensor | None]]


def original_weights(prepared: fx.GraphModule, reference: fx.GraphModule) -> Weights:
    """Weight and bias (or ``None``) of each quantized operator that has a weight, by key; copies.

    Args:
        prepared: from ``prepare_fx``.
        reference: what it was converted to.

    >>> import backquant
    >>> x, mapping = torch.ones(1, 3), backquant.get_default_qconfig_mapping("x86")
    >>> prepared = backquant.prepare_fx(nn.Sequential(nn.Linear(3, 2)).eval(), mapping, (x,))
    >>> _ = prepared(x)
    >>> found = original_weights(prepared, backquant.convert_to_reference_fx(prepared))
    >>> {key: [list(tensor.shape) for tensor in pair] for key, pair in found.items()}
    {'0': [[2, 3], [2]]}
    """
    state, plan = prepared_state(prepared), reference_state(reference).plan
    nodes = {node.name: node for node in prepared.graph.nodes}
    constants = Constants(prepared)
    functional = {
        reader: site.name
        for site in state.sites.sites
        if site.role is Role.WEIGHT
        for reader in site.readers
    }
    found: Weights = {}
    quantized = (m for m in plan.matches if plan.decisions[m.anchor].quantized)
    for match, root in ((m, nodes[name]) for m in quantized for name in _weighted(m)):
        if match.kind is MatchKind.STANDALONE:
            found |= _inside(prepared, reference, root)
        elif match.kind is MatchKind.PATTERN and root.op == "call_module":
            if root.name not in match.carriers:
                continue
            pair = _of_module(prepared.get_submodule(str(root.target)))
            if pair[0] is not None:
                found[str(root.target)] = pair
        elif root.name in functional:
            weight = constants.tensor(nodes[functional[root.name]])
            key = _free_key(found, state.scopes[root.name].path)
            found[key] = [_copy(weight), _bias_of(root, constants)]
    return found


def _weighted(match: Match) -> tuple[str, ...]:
    """The operators of a match that may have a weight, as a module's or as an argument."""
    return tuple(dict.fromkeys((*match.carriers, *match.readers)))


def _inside(prepared: fx.GraphModule, reference: fx.GraphModule, node: fx.Node) -> Weights:
    """The weights of a standalone module, under its path."""
    path = str(node.target)
    inner, converted = prepared.get_submodule(path), reference.get_submodule(path)
    assert isinstance(inner, PreparedModule) and isinstance(converted, ReferenceModel)
    found = original_weights(inner, converted)
    return {f"{path}.{key}": pair for key, pair in found.items()}


def _of_module(module: nn.Module) -> list[torch.Tensor | None]:
    plain = without_training(module)
    part = plain[0] if isinstance(plain, nn.Sequential) and len(plain) else plain
    return [_copy(getattr(part, "weight", None)), _copy(getattr(part, "bias", None))]


def _bias_of(node: fx.Node, constants: Constants) -> torch.Tensor | None:
    bias = node.kwargs.get("bias", node.args[2] if len(node.args) > 2 else None)
    return _copy(constants.tensor(bias)) if isinstance(bias, fx.Node) else None


def _copy(tensor: object) -> torch.Tensor | None:
    return tensor.detach().clone() if isinstance(tensor, torch.Tensor) else None


def _free_key(taken: Weights, path: str) -> str:
    prefix = f"{path}_packed_weight_".replace(".", "_").lower()
    number = 0
    while f"{prefix}{number}" in taken:
        number += 1
    return f"{prefix}{number}"
