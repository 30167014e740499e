"""The engines that run in this process: those of ``backquant.engines`` and of other packages."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from backquant.conformance.engine_protocol import Ran, RefusedByEngineError
from backquant.convert import convert_to_reference
from backquant.errors import BackquantError
from backquant.lower import engine_info
from backquant.pipeline.lower import quantized_model
from backquant.runtime import QuantizedModel
from backquant.version import __version__

REFERENCE = "integer_reference"


@dataclass(frozen=True)
class TorchEngine:
    """An engine by its name: ``x86``, ``qnnpack``, or that of another package.

    >>> TorchEngine("x86").versions()["torch"] == torch.__version__
    True
    """

    name: str
    takes_sizes: bool = True

    def versions(self) -> dict[str, str]:
        info = engine_info(self.name)
        return {
            "backquant": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            self.name: info.describe(),
        }

    def build(self, prepared: fx.GraphModule, example: tuple[Tensor, ...]) -> BuiltHere:
        del example
        try:
            reference = convert_to_reference(prepared)
            return BuiltHere(quantized_model(reference, prepared, self.name))
        except (BackquantError, RuntimeError) as error:
            raise RefusedByEngineError(said(error)) from error


@dataclass(frozen=True)
class BuiltHere:
    """A lowered model. Called twice, it runs its recording the second time: both must agree."""

    model: QuantizedModel

    @property
    def ran(self) -> Ran:
        return Ran(tuple(use.kernel for use in self.model.kernels), self.model.left_in_float)

    def run(self, inputs: tuple[Tensor, ...]) -> Tensor:
        with torch.no_grad():
            try:
                first = single(self.model(*inputs))
                again = single(self.model(*inputs))
            except (BackquantError, RuntimeError) as error:
                raise RefusedByEngineError(said(error)) from error
        if not torch.equal(first, again):
            raise RefusedByEngineError("two calls with one input differ")
        return first


def single(value: Any) -> Tensor:
    """The first tensor of a result."""
    while isinstance(value, (tuple, list)):
        value = value[0]
    found: Tensor = value
    return found


def said(error: Exception) -> str:
    """The first line of a message."""
    text = (str(error).splitlines() or [""])[0]
    return f"{type(error).__name__}: {text}"[:300]
