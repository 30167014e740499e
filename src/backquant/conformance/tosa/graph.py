"""TOSA graphs as JSON, run by TOSA's reference model (``tosa-tools``, in an environment of its own)."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
_TYPES = {"int8": "INT8", "int16": "INT16", "int32": "INT32", "int48": "INT48"}
_BYTES = 6  # of a number of 48 bits


class TosaError(Exception):
    """The reference model does not run a graph; with what it says."""


@dataclass
class Graph:
    """Grows operator by operator; a value is the name of a tensor."""

    tensors: list[dict[str, Any]] = field(default_factory=list)
    shapes: list[dict[str, Any]] = field(default_factory=list)
    operators: list[dict[str, Any]] = field(default_factory=list)
    inputs: dict[str, Array] = field(default_factory=dict)

    def tensor(self, shape: Sequence[int], dtype: str, data: bytes | None = None) -> str:
        """A new tensor of this shape (``int8``, ``int16``, ``int32``, ``int48``)."""
        name = f"t{len(self.tensors)}"
        made: dict[str, Any] = {"name": name, "shape": list(shape), "type": _TYPES[dtype]}
        if data is not None:
            made["data"] = list(data)
        self.tensors.append(made)
        return name

    def given(self, value: Array) -> str:
        """An input with this value."""
        name = self.tensor(value.shape, value.dtype.name)
        self.inputs[name] = value
        return name

    def const(self, value: Any, dtype: str) -> str:
        """A constant."""
        wide = dtype == "int48"
        array = np.ascontiguousarray(value, "int64" if wide else dtype)
        data = array.tobytes()
        if wide:
            data = array.reshape(-1, 1).view(np.uint8)[:, :_BYTES].tobytes()
        name = self.tensor(array.shape, dtype, data)
        self._operator("CONST", (), name, {})
        return name

    def shape(self, numbers: Sequence[int]) -> str:
        """A shape that an operator reads."""
        name = f"s{len(self.shapes)}"
        data = list(np.asarray(numbers, np.int64).tobytes())
        self.shapes.append({"name": name, "rank": len(numbers), "data": data})
        self._operator("CONST_SHAPE", (), name, {})
        return name

    def add(
        self, op: str, inputs: Sequence[str], shape: Sequence[int], dtype: str, **attribute: Any
    ) -> str:
        """The result of one operator."""
        name = self.tensor(shape, dtype)
        self._operator(op, inputs, name, attribute)
        return name

    def _operator(
        self, op: str, inputs: Sequence[str], output: str, attribute: dict[str, Any]
    ) -> None:
        words = (f"{word[0]}{word[1:].lower()}" for word in op.split("_"))
        kind = attribute.pop("kind", "".join(words).replace("2D", "2d").replace("3D", "3d"))
        self.operators.append(
            {
                "op": op,
                "attribute_type": f"{kind}Attribute",
                "attribute": attribute,
                "inputs": list(inputs),
                "outputs": [output],
            }
        )

    def written(self) -> str:
        """Its operators but for constants: ``CONV2D + RESCALE``."""
        names = (operator["op"] for operator in self.operators)
        return " + ".join(name for name in names if not name.startswith("CONST"))

    def to_dict(self, output: str) -> dict[str, Any]:
        """The file; ``output``: the tensor that is read."""
        block = {
            "name": "main",
            "operators": self.operators,
            "tensors": self.tensors,
            "shapes": self.shapes,
            "inputs": list(self.inputs),
            "outputs": [output],
        }
        version = {"_major": 1, "_minor": 1, "_patch": 0, "_draft": True}
        return {"version": version, "regions": [{"name": "main", "blocks": [block]}]}


def run(graph: Graph, output: str, program: Path, folder: Path) -> Array:
    """What TOSA's reference model computes. Raises ``TosaError``."""
    (folder / "graph.json").write_text(json.dumps(graph.to_dict(output)), encoding="utf-8")
    for name, value in graph.inputs.items():
        np.save(folder / f"{name}.npy", value)
    command = [
        str(program),
        f"--operator_fbs={schema_of(program)}",
        "--tosa_file=graph.json",
        f"--flatbuffer_dir={folder}",
        f"--output_dir={folder}",
        f"--ifm_name={','.join(graph.inputs)}",
        f"--ifm_file={','.join(f'{name}.npy' for name in graph.inputs)}",
        f"--ofm_name={output}",
        "--ofm_file=out.npy",
        "--tosa_level=NONE",
    ]
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=folder)
    if done.returncode or not (folder / "out.npy").exists():
        raise TosaError((done.stderr or done.stdout)[-400:])
    found: Array = np.load(folder / "out.npy")
    return found


def schema_of(program: Path) -> Path:
    """The schema of files, which is installed beside the program."""
    [schema] = (program.resolve().parents[1] / "lib").glob("python3*/site-packages/bin/tosa.fbs")
    return schema


def binary(graph: Graph, output: str, program: Path, folder: Path) -> bytes:
    """The graph as a TOSA file; ``flatc`` lies beside the program. Raises ``TosaError``."""
    text = folder / "graph.json"
    text.write_text(json.dumps(graph.to_dict(output)), encoding="utf-8")
    flatc = program.resolve().parent / "flatc"
    command = [str(flatc), "--binary", "-o", str(folder), str(schema_of(program)), str(text)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    if done.returncode:
        raise TosaError((done.stderr or done.stdout)[-400:])
    return (folder / "graph.tosa").read_bytes()
