"""Observers become quantize/dequantize nodes; those with no quantized operator around them are removed.

``float_results`` says which are needed. One quantize and one dequantize node serve all users of a site.
"""

from __future__ import annotations

from collections import Counter

import torch.nn.functional as F
from torch import fx

from backquant.convert.contracts import activations_are_quantized, needed_are_measured
from backquant.convert.dialects import DIALECTS, Writer
from backquant.convert.state import Conversion
from backquant.graph import contract, get_module
from backquant.observe import is_fixed_qparams
from backquant.prepare import Site
from backquant.prepare.record import QParamsKey


@contract(requires=[needed_are_measured], ensures=[activations_are_quantized])
def convert_activations(work: Conversion, needed: frozenset[str], skipped: set[str]) -> None:
    """Replace the call of every observer, in graph order.

    ``needed``: the sites that are quantized, by name; those of ``skipped`` are already gone.
    """
    sites = {site.name: site for site in work.prepared.sites.sites if site.name not in skipped}
    for node in list(work.module.graph.nodes):
        site = sites.get(node.name)
        if site is None:
            continue
        value = node.all_input_nodes[0]
        if site.name in needed:
            _write(work, site, node, value)
        else:
            node.replace_all_uses_with(value)
        work.editor.erase(node)


def qparams_keys(work: Conversion, needed: frozenset[str]) -> dict[str, QParamsKey]:
    """Where PyTorch's reference model has the qparams of each site of ``needed`` that was measured."""
    sites = {site.name: site for site in work.prepared.sites.sites if site.name in needed}
    numbers: Counter[str] = Counter()
    found: dict[str, QParamsKey] = {}
    for node in work.module.graph.nodes:
        site = sites.get(node.name)
        if site is not None and work.qparams[site.group].scale is not None:
            stem = _buffer_prefix(work, site, node).replace(".", "_")
            fixed = is_fixed_qparams(get_module(work.module, site.name))
            found[site.name] = QParamsKey(stem, numbers[stem], site.name, fixed)
            numbers[stem] += 1
    return found


def _write(work: Conversion, site: Site, node: fx.Node, value: fx.Node) -> None:
    engine = work.prepared.backend_config
    writer = Writer(
        work.editor,
        position=node,
        buffer_prefix=_buffer_prefix(work, site, node),
        engine=engine.engine or engine.name,
    )
    before = node.prev
    dequantized = DIALECTS[work.dialect](writer, value, work.qparams[site.group])
    work.dequantized[site.name] = dequantized
    if site.name in work.keys_of_sites:
        work.keys[dequantized.all_input_nodes[0].name] = work.keys_of_sites[site.name]
    made = before.next
    while made is not node:
        if made.op != "get_attr":
            work.editor.provenance.record(made.name, (site.name,))
        made = made.next
    node.replace_all_uses_with(dequantized)


def _buffer_prefix(work: Conversion, site: Site, node: fx.Node) -> str:
    """PyTorch's names: ``<module path>[_input]``, so that a buffer tells what it belongs to.

    The path is that of the observed node, or, where only the reader asked for the observer, that of
    the first reader (the first functional linear, if there is one), marked ``_input``.
    """
    observed = site.value
    if not _requested_by_reader(work, observed):
        scope = work.prepared.scopes.get(observed)
        return scope.path if scope is not None else ""
    users = list(node.users)
    linear = next((u for u in users if u.op == "call_function" and u.target is F.linear), None)
    owner = linear if linear is not None else next(iter(users), None)
    scope = work.prepared.scopes.get(owner.name) if owner is not None else None
    return (scope.path if scope is not None else "") + "_input"


def _requested_by_reader(work: Conversion, observed: str) -> bool:
    node = work.nodes.get(observed)
    if node is not None and node.op == "placeholder":
        return True
    decision = work.plan.decisions.get(observed)
    return decision is not None and work.source.qconfig(decision.rule) is None
