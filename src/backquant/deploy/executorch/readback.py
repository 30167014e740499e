"""What a finished ``.pte`` file runs: the nodes of its XNNPACK delegates, and its portable kernels.

The file is a flatbuffer; each delegate is another one, behind a header. Both are read with the tools
and schemas of the installed ExecuTorch.
"""

from __future__ import annotations

import importlib.resources
import json
import re
from dataclasses import dataclass
from typing import Any

from backquant.deploy.program import quiet
from backquant.files import workspace

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
