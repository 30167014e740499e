"""Comparing one case with the reference model, in every layout of its inputs."""

from __future__ import annotations

import random
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.fx import GraphModule, Tracer

from backquant.graph.dialect_ops import register_quantized_decomposed
from backquant.lower import engine_info, find_engine, lower
from backquant.lower.kernels import views
from backquant.lower.qdq import dequantize_target, quantize_target
from backquant.nn.intrinsic import FusedModule
from backquant.nn.quantized.reference import ReferenceModule
from backquant.runtime.replay import Replays
from kernel_audit import plain_cases, weighted_cases
from kernel_audit.case import Case, integers
from kernel_audit.layouts import LAYOUTS

__all__ = ["ENGINES", "FAMILIES", "Finding", "Outcome", "check", "drawn"]

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
FAMILIES = {**weighted_cases.FAMILIES, **plain_cases.FAMILIES}


@dataclass(frozen=True)
class Finding:
    """What is wrong: ``kind`` is ``value``, ``shape``, ``error`` or ``input``."""

    family: str
    label: str
    engine: str
    kind: str
    where: str
    detail: str

    def __str__(self) -> str:
        return f"[{self.engine}] {self.label}\n    {self.where}\n    {self.kind}: {self.detail}"


@dataclass(frozen=True)
class Outcome:
    """``kernels``: the names of what ran; ``compared``: how many results; ``refused``: why the operator
    stays in float, in which case nothing was compared."""

    kernels: tuple[str, ...]
    refused: tuple[str, ...]
    compared: int
    findings: tuple[Finding, ...]


class _Tracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        leaf = isinstance(m, (ReferenceModule, FusedModule))
        return leaf or super().is_leaf_module(m, module_qualified_name)


def drawn(family: str, seed: int) -> tuple[Case, random.Random]:
    """The case of ``family`` with the number ``seed``, and the generator to go on with."""
    choice = random.Random(zlib.crc32(family.encode()) + seed * 65_537)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return FAMILIES[family](choice), choice


def reference_of(case: Case) -> GraphModule:
    """Integers in; dequantize, the operator, quantize."""
    register_quantized_decomposed()

    class Written(nn.Module):
        pass

    names = [f"x{i}" for i in range(len(case.qparams))]
    space: dict[str, Any] = {"case": case, "dq": dequantize_target(), "q": quantize_target()}
    inside = ", ".join(f"dq({n}, *case.qparams[{i}].literals)" for i, n in enumerate(names))
    result = f"case.operator(self, {inside})"
    result = result if case.out is None else f"q({result}, *case.out.literals)"
    exec(f"def forward(self, {', '.join(names)}):\n    return {result}", space)
    Written.forward = space["forward"]  # type: ignore[attr-defined]
    module = Written()
    for name, child in case.children.items():
        module.add_module(name, child)
    module.eval()
    return GraphModule(module, _Tracer().trace(module))


def check(family: str, seed: int, engine: str, layouts: int = 3) -> Outcome:
    """Lower the case with the number ``seed`` for ``engine``, call it in turn with inputs of several
    shapes and layouts, as it is and by replay, and compare each result."""
    case, choice = drawn(family, seed)
    reference = reference_of(case)
    lowered = lower(reference, find_engine(engine).rules(), engine_info(engine))
    refused = tuple(f"{reason.rule}: {reason.asked}" for reason in lowered.left_in_float)
    kernels = tuple(use.kernel for use in lowered.kernels)
    if refused or not kernels:
        return Outcome(kernels, refused, 0, ())
    found: list[Finding] = []
    compared = 0
    replays = Replays(lowered.graph_module)
    for shapes in case.shapes:
        for names, inputs in _inputs(case, shapes, choice, layouts):
            where = ", ".join(
                f"{n} {tuple(x.shape)} {x.stride()}" for n, x in zip(names, inputs, strict=True)
            )
            limit = choice.choice((0, 1 << 17))
            with mock.patch.object(views, "_COPY_BELOW", limit):
                for run in (lowered.graph_module, replays, replays, replays):
                    problem = _compare(case, reference, run, inputs)
                    compared += 1
                    if problem:
                        way = "replay" if run is replays else "call"
                        where = f"{where} ({way}, {'views' if not limit else 'copies'})"
                        found.append(
                            Finding(family, case.label, engine, *problem[:1], where, problem[1])
                        )
                        break
    return Outcome(kernels, (), compared, tuple(found))


def _inputs(
    case: Case, shapes: tuple[tuple[int, ...], ...], choice: random.Random, layouts: int
) -> Iterator[tuple[list[str], list[torch.Tensor]]]:
    picks = ["contiguous", *choice.sample(list(LAYOUTS)[1:], min(layouts, len(LAYOUTS) - 1))]
    for pick in picks:
        names = [pick if not i else choice.choice(list(LAYOUTS)) for i in range(len(shapes))]
        yield (
            names,
            [
                LAYOUTS[name](integers(shape, qparams, choice), choice)
                for name, shape, qparams in zip(names, shapes, case.qparams, strict=True)
            ],
        )


def _compare(
    case: Case, reference: GraphModule, run: Any, inputs: list[torch.Tensor]
) -> tuple[str, str] | None:
    """What is wrong with one call."""
    plain = [x.clone(memory_format=torch.contiguous_format) for x in inputs]
    with torch.no_grad():
        try:
            expected = reference(*[x.clone() for x in plain])
        except Exception:  # the float operator takes no such input
            return None
        try:
            actual = run(*inputs)
        except Exception as error:
            return "error", f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"
    if any(not torch.equal(x, y) for x, y in zip(inputs, plain, strict=True)):
        return "input", "an input was overwritten"
    if actual.shape != expected.shape or actual.dtype != expected.dtype:
        return (
            "shape",
            f"{tuple(actual.shape)} {actual.dtype}, not {tuple(expected.shape)} {expected.dtype}",
        )
    return _distance(case, actual, expected)


def _distance(case: Case, actual: torch.Tensor, expected: torch.Tensor) -> tuple[str, str] | None:
    if not expected.numel():
        return None
    if case.out is None:
        far = (actual - expected).abs() / expected.abs().amax().clamp_min(1e-6)
        wrong, limit = far > 1e-4, 1e-4
    else:
        far = (actual.int() - expected.int()).abs().float()
        limit = 0.0 if case.exact else float(case.steps)
        wrong = far > limit
    if not bool(wrong.any()):
        return None
    share = wrong.float().mean().item()
    return "value", f"up to {far.max().item():.4g} (limit {limit:g}) in {share:.1%} of the results"
