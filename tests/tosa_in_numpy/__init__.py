"""TOSA operators as their specification has them, in numpy: what a graph computes where no tosa-tools are."""

from __future__ import annotations

from typing import Any

import numpy as np

from backquant.conformance.tosa.moves import Array, Graph


def evaluated(graph: Graph, output: str) -> Array:
    """The value of ``output``; integers are kept in 64 bits, and each fits into its tensor's dtype."""
    bits = {each["name"]: int(each["type"][3:]) for each in graph.tensors}
    known: dict[str, Array] = {name: x.astype(np.int64) for name, x in graph.inputs.items()}
    for each in graph.shapes:
        known[each["name"]] = np.frombuffer(bytes(each["data"]), np.int64)
    for each in graph.tensors:
        if "data" in each:
            known[each["name"]] = _constant(each)
    for operator in graph.operators:
        if operator["op"].startswith("CONST"):
            continue
        inputs = [known[name] for name in operator["inputs"]]
        [name] = operator["outputs"]
        attribute = {
            **operator["attribute"],
            "bits": bits[name],
            "from": bits.get(operator["inputs"][0]),
        }
        found = _OPERATORS[operator["op"]](attribute, *inputs)
        [shape] = (each["shape"] for each in graph.tensors if each["name"] == name)
        assert list(found.shape) == list(shape), operator["op"]
        assert np.abs(found.astype(float)).max() <= 2.0 ** (bits[name] - 1), operator["op"]
        known[name] = found
    return known[output]


def _constant(tensor: dict[str, Any]) -> Array:
    size = int(tensor["type"][3:]) // 8
    data = np.array(tensor["data"], np.uint8).reshape(-1, size)
    wide = np.zeros((len(data), 8), np.uint8)
    wide[:, :size] = data
    wide[data[:, -1] > 127, size:] = 255
    return wide.view(np.int64).reshape(tensor["shape"])


def _halves_up(x: Array, bits: Any) -> Array:
    bits = np.asarray(bits)
    return (x + np.where(bits > 0, np.int64(1) << np.maximum(bits - 1, 0), 0)) >> bits


def _rescale(
    a: dict[str, Any], x: Array, by: Array, shift: Array, zero: Array, out: Array
) -> Array:
    top = 1 << (a["bits"] - 1)
    return (_halves_up((x - zero) * by, shift) + out).clip(-top, top - 1)


def _table(a: dict[str, Any], x: Array, table: Array) -> Array:
    if a["from"] == 8:
        return table[x + 128]
    place, part = (x + 32768) >> 7, x & 127
    return (table[place] << 7) + (table[place + 1] - table[place]) * part


def _resize(a: dict[str, Any], x: Array, scale: Array, offset: Array, border: Array) -> Array:
    for axis, (n, d, first, more) in enumerate(
        zip(scale[::2], scale[1::2], offset, border, strict=True), 1
    ):
        size = x.shape[axis]
        place = np.arange(((size - 1) * n - first + more) // d + 1) * d + first
        below, part = place // n, place % n
        ends = [x.take((below + more).clip(0, size - 1), axis) for more in (0, 1)]
        shape = [-1, *[1] * (x.ndim - 1 - axis)]
        part = part.reshape(shape)
        near = np.where(2 * part >= n, ends[1], ends[0])
        x = near if a["mode"] == "NEAREST" else ends[0] * (n - part) + ends[1] * part
    return x


def _limited(a: dict[str, Any], x: Array) -> Array:
    dtype = f"int{a['bits']}"
    return x.clip(*(np.frombuffer(bytes(a[end]), dtype)[0] for end in ("min_val", "max_val")))


def _left(a: dict[str, Any], x: Array, bits: Array) -> Array:
    return (x << bits).astype(np.int32).astype(np.int64)


def _leading_zeros(a: dict[str, Any], x: Array) -> Array:
    return 32 - np.ceil(np.log2(x + 1.0)).astype(np.int64)


def _gather(a: dict[str, Any], x: Array, at: Array) -> Array:
    return np.take_along_axis(x, at[..., None], 1)


_OPERATORS: dict[str, Any] = {
    "IDENTITY": lambda a, x: x,
    "RESHAPE": lambda a, x, shape: x.reshape(shape),
    "TRANSPOSE": lambda a, x: x.transpose(a["perms"]),
    "SLICE": lambda a, x, at, size: x[
        tuple(slice(i, i + n) for i, n in zip(at, size, strict=True))
    ],
    "TILE": lambda a, x, times: np.tile(x, times),
    "PAD": lambda a, x, pad, fill: np.pad(x, pad.reshape(-1, 2), constant_values=fill[0]),
    "REVERSE": lambda a, x: np.flip(x, a["axis"]),
    "GATHER": _gather,
    "CONCAT": lambda a, *x: np.concatenate(x, a["axis"]),
    "RESIZE": _resize,
    "RESCALE": _rescale,
    "TABLE": _table,
    "CLAMP": _limited,
    "ADD": lambda a, x, y: x + y,
    "SUB": lambda a, x, y: x - y,
    "MUL": lambda a, x, y, bits: _halves_up(x * y, bits),
    "MAXIMUM": lambda a, x, y: np.maximum(x, y),
    "MINIMUM": lambda a, x, y: np.minimum(x, y),
    "REDUCE_SUM": lambda a, x: x.sum(a["axis"], keepdims=True),
    "REDUCE_MAX": lambda a, x: x.max(a["axis"], keepdims=True),
    "CLZ": _leading_zeros,
    "LOGICAL_LEFT_SHIFT": _left,
    "ARITHMETIC_RIGHT_SHIFT": lambda a, x, bits: _halves_up(x, bits) if a["round"] else x >> bits,
}
