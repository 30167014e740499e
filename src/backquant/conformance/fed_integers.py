"""Exports whose inputs come quantized, as between two operators: what the target is asked for is the operator
alone, and not joined with the quantization before it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from backquant.deploy import ExportJob
from backquant.lower.qdq import is_quantize


@dataclass(frozen=True)
class FedIntegers:
    """``job``: the export. ``quantized``: by the position of an input, the operator and the arguments that
    quantized it in the graph."""

    job: ExportJob
    quantized: dict[int, tuple[Any, tuple[Any, ...]]]

    def quantize(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs as the export takes them."""
        made = list(inputs)
        for at, (operator, args) in self.quantized.items():
            made[at] = operator(made[at], *args)
        return tuple(made)


def fed_integers(job: ExportJob) -> FedIntegers:
    """``job``, whose graph is changed: inputs that are quantized first thing are integers.

    >>> from pathlib import Path
    >>> import torch
    >>> from backquant import convert_to_reference_fx, get_default_qconfig_mapping, prepare_fx
    >>> from backquant.deploy.job_of import export_job
    >>> from backquant.deploy.target import find_target
    >>> model, x = torch.nn.Linear(2, 2), (torch.ones(1, 2),)
    >>> mapping = get_default_qconfig_mapping("onnxruntime")
    >>> prepared = prepare_fx(model, mapping, x, backend_config="onnxruntime")
    >>> _ = prepared(*x)
    >>> reference = convert_to_reference_fx(prepared, dialect="decomposed")
    >>> fed_integers(export_job(reference, find_target("onnx", Path("m.onnx")), x)).job.args[0].dtype
    torch.uint8
    """
    graph = job.module.graph
    quantized: dict[int, tuple[Any, tuple[Any, ...]]] = {}
    for at, given in enumerate(graph.find_nodes(op="placeholder")):
        if len(given.users) != 1:
            continue
        [user] = given.users
        if not is_quantize(user) or user.kwargs:
            continue
        quantized[at] = (user.target, tuple(user.args[1:]))
        user.replace_all_uses_with(given)
        graph.erase_node(user)
    job.module.recompile()
    fed = FedIntegers(job, quantized)
    return replace(fed, job=replace(job, args=fed.quantize(job.args)))
