"""The target ``pt2e``: a ``torch.export`` program in the form that PyTorch's ``convert_pt2e`` gives.

1. Operators of ``quantized_decomposed`` stand around float operators; weights are integers behind a
   dequantize node; each reader of a quantized value has a dequantize node of its own.
2. What these operators have no word for is arithmetic: 8-bit floats, blocks along two axes, roundings and
   requantizations that a description names. With the option ``standard_quantize`` these are quantize nodes,
   too, with the described arithmetic in ``node.meta["custom"]``.
3. Nodes carry the path of the module that they come from as their module stack, and no names of files.

No runtime is asked: what counts is what stands between quantize and dequantize nodes.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload
from torch.export import ExportedProgram

from backquant.deploy.exported import Written
from backquant.deploy.job import ExportJob, spell_groups
from backquant.deploy.portable import (
    BETWEEN,
    Computed,
    Read,
    dequantize_per_user,
    written_operators,
)
from backquant.deploy.program import Program, origins_of_stacks, stored_names
from backquant.deploy.roundings import (
    STANDARD,
    arithmetic_words,
    described_quantizes,
    with_standard_quantize,
)
from backquant.deploy.target import Requirement
from backquant.graph.dialect_ops import (
    dequantize_blocks,
    dequantize_float8,
    quantize_float8,
    quantize_rounded,
    requantize,
)
from backquant.graph.silence import quiet
from backquant.match.plan import Reason

# positions of what a product multiplies; constants elsewhere are biases, which need no scale
_PRODUCTS = {
    "conv1d": (0, 1),
    "conv2d": (0, 1),
    "conv3d": (0, 1),
    "convolution": (0, 1),
    "conv_transpose1d": (0, 1),
    "conv_transpose2d": (0, 1),
    "conv_transpose3d": (0, 1),
    "linear": (0, 1),
    "matmul": (0, 1),
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "embedding": (0,),
}


class PT2ETarget:
    """See ``backquant.deploy.target.Target``. Options: ``dequantize_per_user`` (default true),
    ``standard_quantize`` (default false)."""

    name = "pt2e"
    backend = "executorch"
    suffixes = (".pt2",)
    extra = ""
    requires: tuple[Requirement, ...] = ()
    options = ("dequantize_per_user", STANDARD)

    def check(self, job: ExportJob) -> Sequence[Reason]:  # noqa: ARG002 - the protocol's
        """Nothing: what is captured is written."""
        return ()

    def write(self, job: ExportJob, path: Path) -> Written:
        """Write the program, and report which operators of the plan are quantized in it."""
        described = described_quantizes(job)
        if described and job.options.get(STANDARD, False):
            job = with_standard_quantize(job)
        program = _decomposed(job.program)
        exported = program.exported
        spell_groups(exported)
        if job.options.get("dequantize_per_user", True):
            dequantize_per_user(exported.graph_module)
        kernels, left = written_operators(job, _computed(exported, program.origins))
        _mark(exported, program.origins, job)
        if job.options.get(STANDARD, False):
            _note(exported, program.origins, described)
        held = io.BytesIO()  # what writes a file ends the process where the disk is full
        with quiet():
            torch.export.save(exported, held)
        path.write_bytes(held.getbuffer())
        version = torch.__version__.split("+")[0]
        return Written(f"torch.export {version}", kernels, left, means=BETWEEN)


def _arithmetic() -> dict[Any, Any]:
    """What ``quantized_decomposed`` has no operator for, as functions."""
    own = torch.ops.backquant
    table = {}
    for function in (
        dequantize_blocks,
        dequantize_float8,
        quantize_float8,
        quantize_rounded,
        requantize,
    ):
        if hasattr(own, function.__name__):
            table[getattr(own, function.__name__).default] = function
    return table


def _decomposed(program: Program) -> Program:
    """``program`` as its own copy; rule 2."""
    spell_groups(program.exported)
    if not any(_namespace(node) == "backquant" for node in program.exported.graph.nodes):
        return program
    with quiet(), torch.no_grad():
        exported = program.exported.run_decompositions(_arithmetic())
    return Program(exported, origins_of_stacks(exported.graph))


def _namespace(node: fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, OpOverload) else ""


def _computed(exported: ExportedProgram, origins: Any) -> Iterator[Computed]:
    constants = stored_names(exported)
    for node in exported.graph.nodes:
        if _namespace(node) in ("", "quantized_decomposed"):
            continue
        products = _PRODUCTS.get(node.target._schema.name.partition("::")[2], ())
        reads = []
        for position, argument in enumerate(node.args):
            nodes = argument if isinstance(argument, (list, tuple)) else [argument]
            for value in nodes:
                if isinstance(value, fx.Node):
                    is_bias = value.name in constants and position not in products
                    reads.append(_read(value, origins, is_bias))
        name = f"{_namespace(node)}.{node.target._schema.name.partition('::')[2]}"
        yield Computed(origins.get(node.name, ""), name, tuple(reads))


def _read(node: fx.Node, origins: Any, is_bias: bool) -> Read:
    dtype = ""
    if _namespace(node) == "quantized_decomposed" and "dequantize" in str(node.target):
        source = node.args[0]
        assert isinstance(source, fx.Node)
        dtype = str(source.meta["val"].dtype).removeprefix("torch.")
    value = node.meta.get("val")
    is_free = not isinstance(value, torch.Tensor) or not value.is_floating_point()
    return Read(origins.get(node.name, ""), dtype, is_bias or is_free)


def _mark(exported: ExportedProgram, origins: Any, job: ExportJob) -> None:
    """Rule 3, in place."""
    for node in exported.graph.nodes:
        for key in ("stack_trace", "from_node", "source_fn_stack", "torch_fn"):
            node.meta.pop(key, None)
        decision = job.plan.decisions.get(origins.get(node.name, ""))
        if node.op == "call_function":
            path = decision.module_path if decision is not None else ""
            node.meta["nn_module_stack"] = {path: (path, decision.operator)} if decision else {}


def _note(exported: ExportedProgram, origins: Any, described: Mapping[str, fx.Node]) -> None:
    """What the hardware computes in the place of a quantize node, at the node, in place."""
    for node in exported.graph.nodes:
        made_for = described.get(origins.get(node.name, ""))
        if made_for is not None and "quantize_per_tensor" in str(node.target):
            node.meta["custom"] = arithmetic_words(made_for)


TARGET = PT2ETarget()
