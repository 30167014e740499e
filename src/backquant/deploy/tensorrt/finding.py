"""What a rule is, and what it finds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

from backquant.deploy.tensorrt.view import GraphView

Severity = Literal["error", "advice"]


@dataclass(frozen=True)
class Hit:
    """One place that breaks a rule. ``node``: the node's name, or its first output's."""

    node: str
    what: str
    expected: str
    found: str


@dataclass(frozen=True)
class Rule:
    """One documented rule.

    ``severity``: ``"error"``: TensorRT refuses the file; ``"advice"``: it takes the file and runs some of
    it in a higher precision, or slower. ``source``: where the rule is documented; ``basis``: what of
    it is read there. ``check`` yields the places of one graph that break it, in linear time.
    """

    id: str
    title: str
    severity: Severity
    source: str
    basis: str
    check: Callable[[GraphView], Iterable[Hit]]


@dataclass(frozen=True)
class Finding:
    """One place of a file that breaks a rule.

    ``rule``: its id; ``severity``: ``"error"`` or ``"advice"``; ``citation``: the address of the
    documentation.

    >>> print(Finding("zero-point", "error", "q", "the zero point is not 0", "0", "128", "https://…"))
    error   zero-point  q: the zero point is not 0 (expected 0, found 128)
    """

    rule: str
    severity: Severity
    node: str
    what: str
    expected: str
    found: str
    citation: str

    def __str__(self) -> str:
        return (
            f"{self.severity:6s}  {self.rule}  {self.node}: {self.what} "
            f"(expected {self.expected}, found {self.found})"
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields by name.

        >>> Finding("opset", "error", "file", "too old", "13", "11", "https://…").to_dict()["rule"]
        'opset'
        """
        return dict(vars(self))


# Where TensorRT's rules are documented.

_DOCS = "https://docs.nvidia.com/deeplearning/tensorrt"
QUANTIZE = f"{_DOCS}/operators/docs/Quantize.html"
EXPLICIT = f"{_DOCS}/latest/inference-library/quantized-types-explicit-quantization.html"
SCHEMES = f"{_DOCS}/latest/inference-library/quantized-types-schemes.html"
CUSTOM_QDQ = f"{_DOCS}/tensorflow-quantization-toolkit/docs/docs/add_custom_qdq_cases.html"
OPERATORS = "https://github.com/onnx/onnx-tensorrt/blob/main/docs/operators.md"
PARSER_BIAS = "https://github.com/onnx/onnx-tensorrt/issues/850"
ONNX_QUANTIZE = "https://onnx.ai/onnx/operators/onnx__QuantizeLinear.html"
POOLING = f"{_DOCS}/operators/docs/Pooling.html"
DECONVOLUTION = f"{_DOCS}/operators/docs/Deconvolution.html"
