"""Operators without an ONNX translation, found in the captured program before anything is written."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from backquant.deploy.job import ExportJob
from backquant.deploy.onnx.exporter import is_translated
from backquant.deploy.onnx.translate import Table, own_translations, translations
from backquant.deploy.program import quiet
from backquant.deploy.roundings import unstated_rounding
from backquant.graph import register_quantized_decomposed
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

__all__ = ["untranslated"]


def untranslated(job: ExportJob, more: Table | None = None) -> Sequence[Reason]:
    """The operators of ``job`` that neither have an ONNX translation (``more``: of the target) nor decompose,
    by node."""
    register_quantized_decomposed()
    own = {**translations(), **(more or {}), **own_translations(job)}
    if unstated := tuple(unstated_rounding(job, "ONNX", own)):
        return unstated
    with quiet():
        registered = is_translated()
        if registered is None:
            return ()
        decomposed = torch.export.default_decompositions()
    refused: dict[str, Reason] = {}
    for node in job.program.exported.graph.nodes:
        target = node.target
        if node.op != "call_function" or not isinstance(target, torch._ops.OpOverload):
            continue
        if not node.users:  # assertions, which no file holds
            continue
        if target in own or registered(target) or target in decomposed or target._can_decompose():
            continue
        origin = job.program.origins.get(node.name, node.name)
        decision = job.plan.decisions.get(origin)
        refused.setdefault(
            origin,
            Reason(
                origin,
                ReasonCode.NO_TRANSLATION,
                asked=str(target),
                admitted="the ONNX exporter has no translation of it",
                fix="write that part of the model with operators that ONNX has",
                place=decision.module_path if decision is not None else "",
            ),
        )
    return tuple(refused.values())
