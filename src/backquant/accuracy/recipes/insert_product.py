"""A multiplication by a constant between a value and its observer: in float, before quantization."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch

from backquant.graph import GraphEditor, call_before
from backquant.match.plan import Decision, Outcome, Reason
from backquant.prepare import PreparedModule, SiteTable, prepared_state, with_state
from backquant.reason_codes import ReasonCode


def insert_product(prepared: PreparedModule, site: str, factors: torch.Tensor) -> None:
    """Multiply the last axis of the value that ``site`` observes by ``factors``, in place. Only the observer
    reads the product; the other readers keep the value.
    """
    state = prepared_state(prepared)
    editor = GraphEditor(prepared, state.provenance.copy())
    observer = next(node for node in prepared.graph.nodes if node.name == site)
    value = observer.all_input_nodes[0]
    constant = editor.read_buffer(observer, editor.names.take(f"{site}_factors_"), factors)
    product = call_before(observer, "call_function", operator.mul, (value, constant))
    observer.replace_input_with(value, product)
    for new in (constant, product):
        editor.provenance.record(new.name, (value.name,))
    editor.finish()
    sites = tuple(
        replace(each, value=product.name) if each.name == site else each
        for each in state.sites.sites
    )
    before = state.plan.decisions.get(value.name)
    path = "" if before is None else before.module_path
    why = Reason(
        product.name,
        ReasonCode.RECIPE,
        f"a product of {value.name} with one factor for each channel",
        "float",
        place="recipe, step products",
    )
    own = Decision(product.name, "operator.mul", path, Outcome.FLOAT, reasons=(why,))
    decisions: dict[str, Decision] = {}
    for name, decision in state.plan.decisions.items():
        decisions[name] = decision
        if name == value.name:
            decisions[product.name] = own
    plan = replace(state.plan, decisions=decisions)
    sites_of = SiteTable(sites, state.sites.refused)
    with_state(prepared, replace(state, plan=plan, sites=sites_of, provenance=editor.provenance))
