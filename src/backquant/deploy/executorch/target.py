"""ExecuTorch: ``.pte`` programs whose operators run in the XNNPACK delegate.

Before anything is written: operators without a kernel, activations of a dtype that XNNPACK lacks, and
axes without a bound are named. Afterwards the file is read back, loaded in ExecuTorch's runtime and run
on the example inputs; a result far from the reference model's is an error.
"""

from __future__ import annotations

import copy
import importlib.resources
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from backquant.deploy.executorch.lowering import (
    ExecuTorchModel,
    LoadedProgram,
    lower_program,
    registered_kernels,
)
from backquant.deploy.exported import TargetKernel, Written
from backquant.deploy.job import ExportJob
from backquant.deploy.roundings import (
    computed,
    dithered,
    float_tensors,
    other_dtypes,
    ratio,
    unstated_rounding,
)
from backquant.deploy.target import Requirement
from backquant.errors import ExportError, literal
from backquant.files import workspace
from backquant.graph import copied_graph, get_module, set_module
from backquant.graph.silence import quiet
from backquant.match.plan import Reason
from backquant.reason_codes import ReasonCode

# What a finished ``.pte`` file runs: the nodes of its XNNPACK delegates, and its portable kernels.
#
# The file is a flatbuffer; each delegate is another one, behind a header. Both are read with the tools
# and schemas of the installed ExecuTorch.

_DELEGATE = "XnnpackBackend"
# Results on which XNNPACK computes with integers: signed 8-bit, per tensor or per channel.
_INTEGER = ("xnn_datatype_qint8", "xnn_datatype_qcint8", "xnn_datatype_quint8")
_DYNAMIC = "xnn_datatype_qdint8"
_GROUPS = "xnn_datatype_qbint4"  # of a weight
# flatc writes bounds that are not there as C does; Python reads them under other names.
_NOT_JSON = re.compile(r"(?<=: )(-?inf|nan)\b")
_AS_PYTHON = {"inf": "Infinity", "-inf": "-Infinity", "nan": "NaN"}
_FLOAT = {"xnn_datatype_fp32": "float32", "xnn_datatype_fp16": "float16"}


@dataclass(frozen=True)
class DelegatedNode:
    """One node of a delegate. ``debug_handle`` is that of the edge operator it was made of.

    ``inputs`` and ``output`` are XNNPACK's datatypes of its tensors.
    """

    kind: str
    debug_handle: int
    inputs: tuple[str, ...]
    output: str

    @property
    def is_integer(self) -> bool:
        """Whether it multiplies, adds or moves integers: a conversion between dtypes does not."""
        if self.kind == "Convert":
            return False
        return self.output in _INTEGER or _DYNAMIC in self.inputs

    @property
    def dtype(self) -> str:
        """The dtype in which it computes."""
        if self.is_integer:
            return "int4" if _GROUPS in self.inputs else "int8"
        return _FLOAT.get(self.output, self.output.removeprefix("xnn_datatype_"))


@dataclass(frozen=True)
class ReadBack:
    """The delegates' nodes, delegate by delegate, and the other kernels by name, in order of execution."""

    delegates: tuple[tuple[DelegatedNode, ...], ...]
    portable: tuple[str, ...]


def read_back(program: bytes) -> ReadBack:
    """Read the bytes of a ``.pte`` file."""
    with quiet():
        from executorch.exir._serialize._program import deserialize_pte_binary
        from executorch.exir.schema import KernelCall

        file = deserialize_pte_binary(program).program
    plan, data = file.execution_plan[0], file.backend_delegate_data
    delegates = [
        tuple(_nodes(bytes(data[delegate.processed.index].data)))
        for delegate in plan.delegates
        if delegate.id == _DELEGATE
    ]
    calls = (i.instr_args for chain in plan.chains for i in chain.instructions)
    names = (plan.operators[c.op_index] for c in calls if isinstance(c, KernelCall))
    return ReadBack(tuple(delegates), tuple(f"{n.name}.{n.overload}" for n in names))


def _nodes(payload: bytes) -> list[DelegatedNode]:
    graph = _delegate_graph(payload)
    datatypes = {}
    for value in graph["xvalues"]:
        tensor = value["xvalue_union"]
        tensor = tensor.get("tensor_value", tensor)
        datatypes[tensor.get("id_out", 0)] = tensor.get("datatype", "xnn_datatype_invalid")
    nodes = []
    for node in graph["xnodes"]:
        fields = node["xnode_union"]
        inputs = [
            v for k, v in fields.items() if k.startswith(("input", "filter")) and k.endswith("id")
        ]
        nodes.append(
            DelegatedNode(
                kind=node["xnode_union_type"].lstrip("_").removeprefix("XNN"),
                debug_handle=node.get("debug_handle", 0),
                inputs=tuple(datatypes.get(i, "") for i in inputs),
                output=datatypes.get(fields.get("output_id", fields.get("output1_id", 0)), ""),
            )
        )
    return nodes


def _delegate_graph(payload: bytes) -> dict[str, Any]:
    """The delegate's flatbuffer as JSON values."""
    with quiet():
        from executorch.backends.xnnpack import serialization
        from executorch.backends.xnnpack.serialization.xnnpack_graph_serialize import XNNHeader
        from executorch.exir._serialize._flatbuffer import _run_flatc
    header = XNNHeader.from_bytes(payload[: XNNHeader.EXPECTED_LENGTH])
    start, size = header.flatbuffer_offset, header.flatbuffer_size
    schema = importlib.resources.files(serialization).joinpath("schema.fbs").read_bytes()
    with workspace() as folder:
        schema_path, binary = folder / "schema.fbs", folder / "graph.bin"
        schema_path.write_bytes(schema)
        binary.write_bytes(payload[start : start + size])
        options = ["--json", "--strict-json", "--raw-binary", "--defaults-json"]
        _run_flatc([*options, "-o", str(folder), str(schema_path), "--", str(binary)])
        text = (folder / "graph.json").read_text(encoding="utf-8")
    graph: dict[str, Any] = json.loads(_NOT_JSON.sub(lambda found: _AS_PYTHON[found[0]], text))
    return graph


# A module of its own for each call: XNNPACK (ExecuTorch 1.5) gives other numbers where a linear layer or
# a convolution is called twice with inputs on different scales, and refuses convolutions of 1d that are.


def called_once(module: fx.GraphModule) -> fx.GraphModule:
    """``module``, or one whose modules with parameters are called once each: further calls have copies.

    >>> import torch
    >>> class Twice(torch.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.fc = torch.nn.Linear(2, 2)
    ...     def forward(self, x):
    ...         return self.fc(self.fc(x))
    >>> made = called_once(fx.symbolic_trace(Twice()))
    >>> [node.target for node in made.graph.find_nodes(op="call_module")]
    ['fc', 'fc_call1']
    """
    seen: dict[str, int] = {}
    made = fx.GraphModule(module, copied_graph(module.graph))
    for node in made.graph.find_nodes(op="call_module"):
        target = str(node.target)
        called = get_module(made, target)
        if not [*called.parameters(), *called.buffers()]:
            continue
        count = seen[target] = seen.get(target, -1) + 1
        if count:
            node.target = f"{target}_call{count}"
            set_module(made, node.target, copy.deepcopy(called))
    if not any(seen.values()):
        return module
    made.recompile()
    return made


# Rounding in another order moves values by steps; a wrong operator moves them by their own size.
_LEAST_SQNR = 3.0  # dB
_MORE = 3.0  # dB: twice the noise that roundings make is no rounding
_KNOWN_NAMESPACES = ("aten", "quantized_decomposed", "prims", "dim_order_ops", "backquant")


class ExecuTorchTarget:
    """See the module; the attributes are those of ``backquant.deploy.Target``."""

    name = "executorch"
    backend = "xnnpack"
    suffixes = (".pte",)
    extra = "executorch"
    requires = (Requirement("executorch", "executorch", "1.5", "1.5"),)
    options: tuple[str, ...] = ()

    def check(self, job: ExportJob) -> Sequence[Reason]:
        """Operators without a kernel, activations that are not int8, axes without a bound."""
        unstated = unstated_rounding(job, "XNNPACK")
        wrong = other_dtypes(job, "XNNPACK", self.backend, torch.int8)
        return [*unstated, *wrong, *_unbounded(job), *_unknown(job)]

    def write(self, job: ExportJob, path: Path) -> Written:
        """Lower, write, read back, run."""
        module = called_once(job.module)
        if module is not job.module:  # the program of ``job`` is made by now
            job = replace(job, module=module)
        lowered = lower_program(job.program)
        path.write_bytes(lowered.buffer)
        found = read_back(lowered.buffer)
        _check_kernels(found.portable)
        _run(job, lowered.buffer)
        kernels = [
            TargetKernel(f"XNNPACK {node.kind}", nodes, node.dtype, integer=node.is_integer)
            for delegate in found.delegates
            for node in delegate
            for nodes in [tuple(filter(None, [lowered.origins.get(node.debug_handle)]))]
        ]
        kernels += [TargetKernel(name, (), "float32", integer=False) for name in found.portable]
        left = [_undelegated(node, reason) for node, reason in lowered.refused.items()]
        in_float = [
            Reason(node, ReasonCode.DYNAMIC_SHAPE, "a kernel on integers", admitted=reason)
            for node, reason in lowered.in_float.items()
        ]
        runtime = f"executorch {metadata.version('executorch')}"
        return Written(runtime, tuple(kernels), (*left, *in_float), undelegated=tuple(left))

    def loaded(self, path: Path) -> LoadedProgram:
        """See ``backquant.deploy.session``."""
        return LoadedProgram(path)


def _undelegated(node: str, reason: str) -> Reason:
    return Reason(
        node,
        ReasonCode.NOT_DELEGATED,
        asked="an operator of the XNNPACK delegate",
        admitted=reason,
        place="ExecuTorch's XNNPACK partitioner",
    )


def _unbounded(job: ExportJob) -> Iterator[Reason]:
    """ExecuTorch plans its memory ahead: every axis needs an upper bound."""
    ranges = job.program.exported.range_constraints
    open_ended = {str(s) for s, bounds in ranges.items() if not bounds.upper.is_Integer}
    for node in job.program.exported.graph.nodes:
        value = node.meta.get("val")
        if node.op != "placeholder" or not isinstance(value, torch.Tensor):
            continue
        sizes: list[Any] = list(value.shape)
        for axis, size in enumerate(sizes):
            if not isinstance(size, int) and str(size) in open_ended:
                yield Reason(
                    node.name,
                    ReasonCode.DYNAMIC_SHAPE,
                    asked=f"axis {axis} of any size",
                    admitted="ExecuTorch plans its memory ahead: an upper bound for every axis",
                    fix=f'dynamic_shapes={{{literal(node.name)}: {{{axis}: "size<=64"}}}}',
                )


def _unknown(job: ExportJob) -> Iterator[Reason]:
    """Operators that neither decompose nor have a kernel in this build of ExecuTorch."""
    for node in job.program.exported.graph.nodes:
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        if node.target.namespace not in _KNOWN_NAMESPACES:
            yield Reason(
                job.program.origins.get(node.name, node.name),
                ReasonCode.NO_KERNEL,
                asked=str(node.target),
                admitted="operators of aten: ExecuTorch has no kernel for this one",
                fix="write it with operators of torch, or leave it out of the exported model",
            )


def _check_kernels(portable: Sequence[str]) -> None:
    """Raise ``ExportError`` for operators outside of the delegates that this build has no kernel for."""
    known = registered_kernels()  # some without an overload: "aten::copy_"
    used = {name for name in portable if name.rpartition(".")[0] not in known}
    missing = sorted(used - known)
    if missing:
        raise ExportError(
            f"ExecuTorch has no kernel for {', '.join(missing)}",
            where=f"executorch {metadata.version('executorch')}, outside of the delegates",
            fix="write that part of the model with other operators, or keep it outside of the exported model",
        )


def _run(job: ExportJob, program: bytes) -> None:
    """Raise ``ExportError`` when the runtime refuses the program, or computes something else."""
    made = pytree.tree_leaves(ExecuTorchModel(program)(*job.args, **job.kwargs))
    places = [i for i, one in enumerate(made) if float_tensors(one)]
    expected = computed(job)
    for place, (output, one) in enumerate(zip(places, expected, strict=True)):
        other = made[output]
        known = one.isfinite()
        if not known.any():
            raise ExportError(
                f"the reference model gives no number in output {output}, on the example inputs",
                where="export",
                fix="backquant.export(..., example_inputs=one_batch_of_real_inputs)",
            )
        near = ratio([one[known]], [other[known]])
        if near >= _LEAST_SQNR:
            continue
        rounding = ratio([one[known]], [dithered(job)[place][known]])
        if near < rounding - _MORE:
            raise ExportError(
                f"ExecuTorch's runtime computes something else than the reference model: output "
                f"{output} differs with an SQNR of {near:.1f} dB, where noise of half a step at every "
                f"rounding leaves {rounding:.1f} dB",
                where=f"executorch {metadata.version('executorch')}, on the example inputs",
                fix="leave parts out of the quantization until it agrees, and report it to ExecuTorch",
            )


TARGET = ExecuTorchTarget()
