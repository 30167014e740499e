"""The quantities that a condition may name. ``backquant.operators.facts`` reads them off a graph.

A quantity is about the operator, or about one of its tensors: ``input.height``. Most have several values
(one for each axis, or for each tensor); a comparison then holds if it holds for each of them.

What is no name of this list is a parameter of the operator itself: ``mode``, ``align_corners``, ``eps``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

#: ``number``; ``word``: one of a few words; ``flag``; ``value``: whatever the parameter takes.
Kind = Literal["number", "word", "flag", "value"]


@dataclass(frozen=True)
class Known:
    """One name: the kind of its values, what it means, and the least number that it can be."""

    kind: Kind
    about: str
    lowest: float | None = None


def _axes(name: str, about: str, lowest: int) -> dict[str, Known]:
    of_each = {name: Known("number", f"{about}, for each axis of space", lowest)}
    for axis in ("depth", "height", "width"):
        of_each[f"{name.removesuffix('_size')}_{axis}"] = Known(
            "number", f"{about}: {axis}", lowest
        )
    return of_each


#: Of the operator.
OPERATOR: dict[str, Known] = {
    **_axes("kernel_size", "size of the kernel of a convolution or of the window of a pooling", 1),
    **_axes("stride", "step of the kernel", 1),
    **_axes("dilation", "distance between the elements of the kernel", 1),
    **_axes("padding", "what is added at each end (of 'same': at the beginning)", 0),
    **_axes("output_padding", "what a transposed convolution adds at the far end", 0),
    "groups": Known("number", "groups of a convolution; 1 of a linear layer", 1),
    "in_channels": Known("number", "channels or features that a weighted operator reads", 1),
    "out_channels": Known("number", "channels or features that a weighted operator gives", 1),
    "weight_sums": Known(
        "number",
        "for each output channel the sum of absolute quantized weights, less their zero point",
        0,
    ),
    "group_size": Known("number", "the size of the groups that the weight is asked for in", 1),
    "dim": Known(
        "value",
        "the axes that the operator works along, counted from the end where the rank is known",
    ),
}

#: Of a tensor; without a subject, of those that ``subject_of`` says.
TENSOR: dict[str, Known] = {
    "rank": Known("number", "number of axes", 0),
    "dims": Known("number", "size of each axis", 0),
    "elements": Known("number", "number of elements", 0),
    "batch": Known("number", "size of the first axis, of tensors with two or more", 0),
    "channels": Known("number", "size of the second axis", 0),
    "depth": Known("number", "size of the third axis from the end", 0),
    "height": Known("number", "size of the last axis but one", 0),
    "width": Known("number", "size of the last axis", 0),
    "shape": Known("word", "static, or dynamic where a size was declared free"),
    "dtype": Known("word", "dtype in the float model: float32, int64, …"),
    "constant": Known("flag", "whether it belongs to the model, or is a plain number"),
}

SUBJECTS: dict[str, str] = {
    "input": "the first activation that is read",
    "other": "the second one",
    "inputs": "all activations that are read",
    "output": "the result",
    "weight": "the weight",
    "bias": "the bias",
    "tensors": "all activations that are read, and the result",
}

_OF_ALL = ("rank", "dims", "elements", "shape")
_OF_INPUTS = ("batch", "dtype")


def subject_of(name: str) -> str:
    """Whose a tensor's quantity is when nobody says it.

    >>> subject_of("rank"), subject_of("batch"), subject_of("height")
    ('tensors', 'inputs', 'input')
    """
    if name in _OF_ALL:
        return "tensors"
    return "inputs" if name in _OF_INPUTS else "input"


def kind_of_quantity(name: str) -> Kind:
    """The kind of a quantity's values; ``value`` for parameters of operators.

    >>> kind_of_quantity("groups"), kind_of_quantity("shape"), kind_of_quantity("mode")
    ('number', 'word', 'value')
    """
    known = OPERATOR.get(name) or TENSOR.get(name)
    return "value" if known is None else known.kind
