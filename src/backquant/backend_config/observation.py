"""How the inputs and outputs of a pattern are observed."""

from __future__ import annotations

from enum import Enum

__all__ = ["ObservationType"]


class ObservationType(Enum):
    """Where observers (later: quantize/dequantize pairs) stand around a pattern.

    Values are those of ``torch.ao.quantization.backend_config.ObservationType`` (PyTorch 2.x).

    >>> ObservationType(2)
    ObservationType.INPUT_OUTPUT_NOT_OBSERVED
    """

    #: Input and output have observers of their own: convolution, linear, softmax.
    OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT = 0

    #: The output is observed by the observer of the input: cat, max pooling, reshape.
    OUTPUT_SHARE_OBSERVER_WITH_INPUT = 1

    #: Neither input nor output is observed: ``x.shape``, ``x.size()``.
    INPUT_OUTPUT_NOT_OBSERVED = 2

    def __repr__(self) -> str:
        return f"ObservationType.{self.name}"
