"""Which layer a runtime computes wrong: found by writing parts of the model, each a file of its own.

1. The shortest part that differs is the first nodes of the graph, as few as do, with all that they make:
   what several read has its readers.
2. A layer before the value that is wrong there is guilty if that part is right as soon as the layer reads
   floats. The nearest ones are tried.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from backquant.deploy.job import OUTPUT, ExportJob
from backquant.deploy.read_sizes import Recorder
from backquant.graph import returning
from backquant.graph.silence import quiet
from backquant.lower.qdq import is_dequantize, is_quantize

_TRIED = 5  # layers
#: The SQNR of each output of a file that differs, by ``"output 0"``; nothing of one that does not.
Sqnr = Callable[[ExportJob], Mapping[str, float]]


def guilty_layer(job: ExportJob, sqnr_if_wrong: Sqnr) -> str:
    """Its path; empty where no layer alone makes the difference."""
    part, wrong = _shortest_part(job, sqnr_if_wrong)
    for node in _layers_before(job, wrong)[:_TRIED]:
        if not _sqnr(replace(part, module=_reading_floats(part.module, node.name)), sqnr_if_wrong):
            return job.plan.decisions[node.name].module_path
    return ""


def _shortest_part(job: ExportJob, sqnr_if_wrong: Sqnr) -> tuple[ExportJob, fx.Node | None]:
    """Rule 1, and the node of ``job.module`` that is the most wrong in it."""
    nodes = [node for node in job.module.graph.nodes if node.op != "output"]
    recorder = Recorder(job.module, {node for node in nodes if node.op.startswith("call_")})
    with quiet(), torch.no_grad():
        recorder.call(job.args, dict(job.kwargs))
    floats = {node for node, value in recorder.values.items() if _is_float(value)}
    found: dict[int, tuple[ExportJob, fx.Node]] = {}

    def differs(last: int) -> bool:
        inside = nodes[: last + 1]
        ends = [node for node in inside if node in floats and node.users.keys().isdisjoint(inside)]
        part = replace(job, module=returning(job.module, ends), edges=job.input_edges)
        sqnr = _sqnr(part, sqnr_if_wrong)
        if sqnr:
            worst = min(sqnr, key=lambda place: sqnr[place])
            found[last] = part, ends[int(worst.split(",")[0].removeprefix(OUTPUT))]
        return bool(sqnr)

    return found.get(bisect_left(range(len(nodes)), True, key=differs), (job, None))


def _sqnr(part: ExportJob, sqnr_if_wrong: Sqnr) -> Mapping[str, float]:
    try:
        return sqnr_if_wrong(part)
    except Exception:  # the target does not take this part alone
        return {}


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _layers_before(job: ExportJob, node: fx.Node | None) -> list[fx.Node]:
    """The layers whose results reach ``node``, and itself, the nearest first."""
    reached = [] if node is None else [node]
    for each in reached:
        reached += [read for read in each.all_input_nodes if read not in reached]
    decisions = job.plan.decisions
    return [each for each in reached if each.name in decisions and decisions[each.name].module_path]


def _reading_floats(module: fx.GraphModule, name: str) -> fx.GraphModule:
    """``module`` with a node that reads values as they were before they were rounded."""
    made = returning(module, module.graph.output_node().args[0])
    node = next(each for each in made.graph.nodes if each.name == name)
    for read in filter(is_dequantize, node.all_input_nodes):
        if is_quantize(read.args[0]):
            node.replace_input_with(read, read.args[0].args[0])
    made.recompile()
    return made
