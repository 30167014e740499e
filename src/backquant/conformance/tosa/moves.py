"""What only moves values as TOSA operators: written by which value of its input each value of a result is.

The same call, made with the places of the values, says so, whatever the operator is called:

1. nothing changes: IDENTITY; the order stays: RESHAPE;
2. a constant around a box of values: PAD;
3. each axis is picked from by itself: SLICE, REVERSE, TILE, or GATHER along it, in their order: TRANSPOSE;
4. anything else: GATHER of single values.
"""

from __future__ import annotations

import json
import math
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

# TOSA graphs as JSON, run by TOSA's reference model (``tosa-tools``, in an environment of its own).

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


Move = Callable[[Tensor], Tensor]


def moved(graph: Graph, move: Move, x: Array) -> str:
    """``move(x)``; ``move`` takes integers of any dtype."""
    count = x.size
    if not count:
        raise NoTosaError("no values")
    own = torch.arange(count).reshape(x.shape)
    places, further = move(own).numpy(), move(own + count).numpy()
    values = further - places == count
    given = graph.given(np.ascontiguousarray(x))
    if not values.all():
        return _padded(graph, given, x, places, values)
    picked = _picked(graph, given, x.shape, places, x.dtype.name)
    return picked if picked != given else graph.add("IDENTITY", [given], x.shape, x.dtype.name)


def _padded(graph: Graph, given: str, x: Array, places: Array, values: Array) -> str:
    """A box of values with one constant around them."""
    fills, dtype = np.unique(places[~values]), x.dtype.name
    if not values.any() or len(fills) != 1:
        raise NoTosaError("more than one constant around values")
    where = np.nonzero(values)
    begin, end = [int(at.min()) for at in where], [int(at.max()) + 1 for at in where]
    box = tuple(slice(low, high) for low, high in zip(begin, end, strict=True))
    if not values[box].all():
        raise NoTosaError("constants between values")
    inner = _picked(graph, given, x.shape, places[box], dtype)
    around = [
        each
        for low, high, size in zip(begin, end, places.shape, strict=True)
        for each in (low, size - high)
    ]
    fill = graph.const([int(fills[0])], dtype)
    return graph.add("PAD", [inner, graph.shape(around), fill], places.shape, dtype)


def _picked(graph: Graph, x: str, given: Sequence[int], places: Array, dtype: str) -> str:
    """The values at ``places``."""
    shape = list(given)
    if places.size == np.prod(shape) and np.array_equal(places.ravel(), np.arange(places.size)):
        return _reshaped(graph, x, shape, places.shape, dtype)
    by_axis = _by_axis(shape, places)
    if by_axis is None:
        whole = [int(np.prod(shape))]
        flat = _reshaped(graph, x, shape, whole, dtype)
        picked = _gathered(graph, flat, whole, 0, places.ravel(), dtype)
        return _reshaped(graph, picked, [places.size], places.shape, dtype)
    indices, order = by_axis
    for axis, index in enumerate(indices):
        x, shape = _along(graph, x, shape, axis, index, dtype)
    if order != sorted(order):
        shape = [shape[axis] for axis in order]
        x = graph.add("TRANSPOSE", [x], shape, dtype, perms=order)
    return _reshaped(graph, x, shape, places.shape, dtype)


def _by_axis(given: Sequence[int], places: Array) -> tuple[list[Array], list[int]] | None:
    """Of each axis the indices that are picked, and the order of axes; None: not each axis by itself."""
    coordinates = np.unravel_index(places, given)
    source: dict[int, int] = {}  # by axis of the result: the axis that it goes along
    constant = []
    for axis, coordinate in enumerate(coordinates):
        along = [out for out in range(places.ndim) if (np.diff(coordinate, axis=out) != 0).any()]
        if len(along) > 1 or any(out in source for out in along):
            return None
        if along:
            source[along[0]] = axis
        else:
            constant.append(axis)
    for out, size in enumerate(places.shape):  # an axis of one that is repeated
        if size > 1 and out not in source:
            free = [axis for axis in constant if given[axis] == 1]
            if not free:
                return None
            source[out] = min(free, key=lambda axis: abs(axis - out))
            constant.remove(source[out])
    indices = []
    for axis, coordinate in enumerate(coordinates):
        outs = [out for out, of in source.items() if of == axis]
        first = coordinate[(0,) * places.ndim]
        indices.append(
            np.moveaxis(coordinate, outs[0], 0).reshape(places.shape[outs[0]], -1)[:, 0]
            if outs
            else np.array([first])
        )
    moving = [source[out] for out in sorted(source)]
    return indices, _order(len(given), moving)


def _order(rank: int, moving: Sequence[int]) -> list[int]:
    """All axes: those that ``moving`` names in its order, the others (of one value) where they are."""
    taken = iter(moving)
    return [next(taken) if axis in moving else axis for axis in range(rank)]


def _along(
    graph: Graph, x: str, shape: list[int], axis: int, index: Array, dtype: str
) -> tuple[str, list[int]]:
    """``x`` with the values at ``index`` of one axis, and its shape."""
    size, count = shape[axis], len(index)
    made = [*shape[:axis], count, *shape[axis + 1 :]]
    if np.array_equal(index, np.arange(size)):
        return x, shape
    if np.array_equal(index, np.arange(count) + index[0]):
        begin = [int(index[0]) if each == axis else 0 for each in range(len(shape))]
        return graph.add("SLICE", [x, graph.shape(begin), graph.shape(made)], made, dtype), made
    if np.array_equal(index, np.arange(size)[::-1]):
        return graph.add("REVERSE", [x], shape, dtype, axis=axis), shape
    if count % size == 0 and np.array_equal(index, np.arange(count) % size):
        times = [count // size if each == axis else 1 for each in range(len(shape))]
        return graph.add("TILE", [x, graph.shape(times)], made, dtype), made
    return _gathered(graph, x, shape, axis, index, dtype), made


def _gathered(
    graph: Graph, x: str, shape: Sequence[int], axis: int, index: Array, dtype: str
) -> str:
    """GATHER along one axis: values ``[before, size, behind]``."""
    before, behind = int(np.prod(shape[:axis])), int(np.prod(shape[axis + 1 :]))
    whole = _reshaped(graph, x, shape, [before, shape[axis], behind], dtype)
    places = graph.const(np.tile(index, (before, 1)), "int32")
    picked = [before, len(index), behind]
    found = graph.add("GATHER", [whole, places], picked, dtype)
    return _reshaped(graph, found, picked, [*shape[:axis], len(index), *shape[axis + 1 :]], dtype)


def _reshaped(graph: Graph, x: str, shape: Sequence[int], wanted: Sequence[int], dtype: str) -> str:
    if list(shape) == list(wanted):
        return x
    return graph.add("RESHAPE", [x, graph.shape(wanted)], wanted, dtype)


# Scales as TOSA writes them, and RESCALE, which multiplies by them.
#
# A requantization with ``fixed_point`` and ``half_up`` is a RESCALE with one rounding: the same multiplier,
# and 31 less its shift. Sums of 48 bits are multiplied by 15 bits of theirs.
_WIDE = "int48"


class NoTosaError(Exception):
    """The kernel has no form in TOSA here."""


def multiplier_and_shift(real: float, bits: int = 31) -> tuple[int, int]:
    """As TOSA writes a positive scale: ``multiplier / 2**shift``, the multiplier of 31 or 15 bits.

    >>> multiplier_and_shift(0.5), multiplier_and_shift(0.5, 15)
    ((1073741824, 31), (16384, 15))
    """
    mantissa, exponent = math.frexp(real)
    multiplier = math.floor(mantissa * (1 << bits) + 0.5)
    if multiplier == 1 << bits:
        multiplier, exponent = multiplier // 2, exponent + 1
    return multiplier, bits - exponent


def rescaled(
    graph: Graph,
    x: str,
    shape: Sequence[int],
    reals: Any,
    dtype: str,
    *,
    source: str = "int32",
    zero: int = 0,
    out_zero: int = 0,
    finer: int = 0,
) -> str:
    """RESCALE of ``x``; ``reals``: one, or one for each channel; ``finer``: bits to the left before it."""
    narrow = source == _WIDE
    bits = 15 if narrow else 31
    numbers = [multiplier_and_shift(float(real), bits) for real in np.atleast_1d(np.asarray(reals))]
    inputs = [
        x,
        graph.const([multiplier for multiplier, _ in numbers], "int16" if narrow else "int32"),
        graph.const([shift - finer for _, shift in numbers], "int8"),
        graph.const([zero], source),
        graph.const([out_zero], dtype),
    ]
    return graph.add(
        "RESCALE",
        inputs,
        shape,
        dtype,
        scale32=not narrow,
        rounding_mode="SINGLE_ROUND",
        per_channel=len(numbers) > 1,
        input_unsigned=False,
        output_unsigned=False,
    )


def clamped(graph: Graph, x: str, shape: Sequence[int], dtype: str, low: int, high: int) -> str:
    """CLAMP of ``x``; itself where these are all integers of its dtype."""
    whole = np.iinfo(dtype)
    if (low, high) == (whole.min, whole.max):
        return x
    ends = [list(np.array(end, dtype).tobytes()) for end in (low, high)]
    return graph.add(
        "CLAMP", [x], shape, dtype, min_val=ends[0], max_val=ends[1], nan_mode="PROPAGATE"
    )
