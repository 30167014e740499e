"""How far roundings lead a reference model: what a runtime may differ from it by.

In deep networks one rounding becomes many. Noise of half a step before each quantize node shows what is left
at the end: a runtime whose results are as near computes the same, with some values rounded the other way.
"""

from __future__ import annotations

from collections.abc import Container, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.deploy.job import OUTPUT, ExportJob
from backquant.graph.silence import quiet
from backquant.lower.qdq import (
    described_arithmetic,
    is_described_quantize,
    is_quantize,
    qparams_of,
    quantize_target,
)
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

_MOST = 120.0  # dB
_DYNAMIC = tuple(  # their scale is measured at each call
    f"quantized_decomposed.{name}"
    for name in ("quantize_per_tensor.tensor", "quantize_per_token.default")
)


def computed(job: ExportJob) -> list[torch.Tensor]:
    """The floating-point outputs of the reference model on copies of the example inputs."""
    return _run(_ByName(job))


def dithered(job: ExportJob) -> list[torch.Tensor]:
    """The same with uniform noise of up to half a step at the input of each quantize node."""
    return _run(_Dithered(job))


def output_values(job: ExportJob) -> list[Any]:
    """All outputs of the reference model on copies of the example inputs, flat."""
    return _flat(_ByName(job))


def nested_output(job: ExportJob) -> Any:
    """What the reference model returns, as it returns it."""
    with quiet(), torch.no_grad():
        return _ByName(job).run()


def dithered_values(job: ExportJob) -> list[Any]:
    """The same with the noise of ``dithered``."""
    return _flat(_Dithered(job, 0))


def real_values(job: ExportJob, values: Sequence[Any]) -> list[Any]:
    """``values``, the flat outputs of a call, with floats for the integers that stand for some."""
    pending = [qparams for name, qparams in job.edges.items() if name.startswith(OUTPUT)]
    made = []
    for given in values:
        value = given
        stands_for = pending and isinstance(value, torch.Tensor) and value.dtype == pending[0].dtype
        if stands_for:
            scale, zero_point = pending.pop(0).args
            value = (value.float() - zero_point) * scale
        made.append(value)
    return made


def float_tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors in ``value``, however nested.

    >>> float_tensors((torch.ones(1), {"places": torch.ones(2, dtype=torch.int64)}))
    [tensor([1.])]
    """
    leaves = pytree.tree_leaves(value)
    return [t for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]


def ratio(wanted: Sequence[torch.Tensor], got: Sequence[torch.Tensor]) -> float:
    """The least signal-to-noise ratio of an output, in dB; outputs of other shapes or that are finite at
    other places have none.

    >>> round(ratio([torch.ones(4)], [torch.full((4,), 1.1)]), 3)
    20.0
    >>> ratio([torch.ones(4)], [torch.ones(3)])
    -120.0
    """
    if [t.shape for t in wanted] != [t.shape for t in got]:
        return -_MOST
    return min(map(_one_ratio, wanted, got), default=_MOST)


def _one_ratio(wanted: torch.Tensor, got: torch.Tensor) -> float:
    finite = wanted.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return -_MOST
    one, two = wanted[finite].double(), got[finite].double()
    signal, noise = one.square().sum().item(), (one - two).square().sum().item()
    if noise <= signal * 10 ** (-_MOST / 10):
        return _MOST
    return float(10 * torch.log10(torch.tensor(max(signal, 1e-300) / noise)))


class _ByName(fx.Interpreter):
    """Runs a reference model on the example inputs; an input that is not given has its default."""

    def __init__(self, job: ExportJob) -> None:
        super().__init__(job.module)
        names = [str(node.target) for node in job.module.graph.find_nodes(op="placeholder")]
        self.given = dict(zip(names, job.args, strict=False)) | dict(job.kwargs)

    def placeholder(self, target: Any, args: Any, kwargs: Any) -> Any:
        del kwargs
        if target not in self.given:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, torch.clone, self.given[target])


class _Dithered(_ByName):
    def __init__(self, job: ExportJob, seed: int = 0) -> None:
        super().__init__(job)
        self.generator = torch.Generator().manual_seed(seed)

    def run_node(self, n: fx.Node) -> Any:
        if not (is_quantize(n) or str(n.target) in _DYNAMIC):
            return super().run_node(n)
        value, scale, *rest = self.fetch_args_kwargs_from_env(n)[0]
        noise = torch.rand(value.shape, generator=self.generator, dtype=value.dtype) - 0.5
        noisy = value + (noise * scale).to(value.dtype)  # a scale may be a tensor of float64
        return self.call_function(n.target, (noisy, scale, *rest), {})


def _run(interpreter: _ByName) -> list[torch.Tensor]:
    return float_tensors(_flat(interpreter))


def _flat(interpreter: _ByName) -> list[Any]:
    with quiet(), torch.no_grad():
        made: list[Any] = pytree.tree_leaves(interpreter.run())
    return made


# ``rounding`` and ``requantization`` of a description in exported files, where the format can express them.
#
# 1. Results that are rounded half to even, from sums in float: every target's quantize operator does that.
# 2. All else has no operator in PyTorch or ONNX. ``qdq-onnx`` and ``pt2e`` compute it from operators that
#   there are, or, as ``STANDARD`` asks, leave it to the hardware (3). Runtimes have kernels of their own
#   arithmetic: refused, naming the fields, but where a translation of one's own computes
#   ``backquant.quantize_rounded`` and ``backquant.requantize``.
# 3. A quantize operator as it is, whose file says by its side how the hardware rounds.

#: The option of rule 3.
STANDARD = "standard_quantize"
_EVERYWHERE = ("float", "half_even")


def state_half_even(module: fx.GraphModule) -> None:
    """Rule 1, in place.

    >>> import torch
    >>> from backquant.graph import register_quantized_decomposed
    >>> register_quantized_decomposed()
    >>> graph, op = fx.Graph(), torch.ops.backquant.quantize_rounded.default
    >>> x = graph.placeholder("x")
    >>> for rounding in ("half_even", "half_up"):
    ...     _ = graph.call_function(op, (x, 0.5, 0, -128, 127, torch.int8, rounding))
    >>> module = fx.GraphModule(torch.nn.Module(), graph)
    >>> state_half_even(module)
    >>> [str(node.target) for node in module.graph.nodes if node.op == "call_function"]
    ['quantized_decomposed.quantize_per_tensor.default', 'backquant.quantize_rounded.default']
    """
    for node in module.graph.nodes:
        if is_described_quantize(node) and described_arithmetic(node) == _EVERYWHERE:
            node.target, node.args = quantize_target(), node.args[:-1]
    module.recompile()


def described_quantizes(job: ExportJob) -> dict[str, fx.Node]:
    """The quantize nodes of ``job.module`` that rule 2 is about, by name."""
    return {node.name: node for node in job.module.graph.nodes if is_described_quantize(node)}


def arithmetic_words(made_for: fx.Node) -> dict[str, str]:
    """The attributes written beside a quantize operator that only the hardware computes as described.

    ``fixed_point_twice`` rounds as it does, whatever ``rounding`` says.
    """
    requantization, rounding = described_arithmetic(made_for)
    words = {"requantization": requantization}
    return words if requantization == "fixed_point_twice" else {**words, "rounding": rounding}


def with_standard_quantize(job: ExportJob) -> ExportJob:
    """Rule 3: ``job`` with a copy of its module."""
    graph = fx.Graph()
    copied = graph.graph_copy(job.module.graph, {})
    graph.output(copied)
    for node in list(graph.nodes):
        if not is_described_quantize(node):
            continue
        value, *others = node.args
        unit = None
        if described_arithmetic(node)[0] != "float":
            unit, _, *others = others[:-1]  # the step of the sums, and its axis
        node.target, node.args = quantize_target(), (value, *others[:-1])
        if isinstance(unit, fx.Node) and not unit.users:
            graph.erase_node(unit)
    return replace(job, module=fx.GraphModule(job.module, graph))  # with what the graph reads


def unstated_rounding(
    job: ExportJob,
    stating: str,
    own: Container[Any] = (),
    arithmetic: Container[tuple[str, str]] = (),
) -> Iterator[Reason]:
    """Rule 2: the results of ``job.module`` that neither ``stating`` nor ``own`` has an operator for;
    ``arithmetic``: what the target's own kernels compute."""
    for node in job.module.graph.nodes:
        if not is_described_quantize(node) or node.target in own:
            continue
        if described_arithmetic(node) in arithmetic:
            continue
        requantization, rounding = described_arithmetic(node)
        asked = [f"rounding: {rounding}"]
        if requantization != "float":
            asked.append(f"requantization: {requantization}")
        computed = next((n for n in node.all_input_nodes[:1]), node)
        yield Reason(
            computed.name,
            ReasonCode.NO_TRANSLATION,
            asked=f"{', '.join(asked)} of {job.config.name}",
            admitted=f"{stating} rounds halves to even, and requantizes in float",
            fix="the targets qdq-onnx and pt2e, which compute it; or leave rounding and requantization\n"
            "out of the description that the file is made by",
            place=job.place_of(computed.name),
        )


def other_dtypes(
    job: ExportJob, runtime: str, backend: str, *dtypes: torch.dtype
) -> Iterator[Reason]:
    """The activations of other ``dtypes`` than ``runtime`` computes with; ``backend``: one that has these."""
    for node in job.module.graph.nodes:
        if is_quantize(node) and qparams_of(node).dtype not in dtypes:
            asked, *admitted = (
                str(d).removeprefix("torch.") for d in (qparams_of(node).dtype, *dtypes)
            )
            yield Reason(
                node.name,
                ReasonCode.DTYPE,
                asked=f"activations {asked}",
                admitted=f"{runtime} computes with {' or '.join(admitted)}",
                fix=f'backquant.quantize(model, ..., backend="{backend}")',
            )
