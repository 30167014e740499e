"""The lowered model as its user holds it: called like the original, with a record of what it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.fx import GraphModule

from backquant.lower.audit import Audit, audit
from backquant.lower.engine import EngineInfo
from backquant.lower.rule import KernelUse
from backquant.match.plan import Plan, Reason

if TYPE_CHECKING:
    from backquant.backend_config import BackendConfig

__all__ = ["QuantizedModel"]


class QuantizedModel(nn.Module):
    """A quantized model: floats in, floats out, like the model it was made from.

    ``graph_module``: what runs. ``plan``: the decision per operator. ``backend_config``: what was
    quantized for. ``engine``: what it runs on; ``None`` for a reference model. ``kernels`` and
    ``left_in_float``: what the lowering did. ``report``: set by ``backquant.quantize``.

    Inference only: there are no gradients through integers, and ``train()`` does not change it.

    >>> from backquant.backend_config import BackendConfig
    >>> graph_module = torch.fx.symbolic_trace(nn.Identity())
    >>> model = QuantizedModel(graph_module, plan=Plan("x86"), backend_config=BackendConfig("x86"))
    >>> model(torch.ones(1)), model.engine
    (tensor([1.]), None)
    """

    graph_module: GraphModule

    # size: the record of a model is what it consists of; all but the first are keywords
    def __init__(
        self,
        graph_module: GraphModule,
        *,
        plan: Plan,
        backend_config: BackendConfig,
        engine: EngineInfo | None = None,
        kernels: Sequence[KernelUse] = (),
        left_in_float: Sequence[Reason] = (),
    ) -> None:
        super().__init__()
        self.graph_module = graph_module
        self.plan = plan
        self.backend_config = backend_config
        self.engine = engine
        self.kernels = tuple(kernels)
        self.left_in_float = tuple(left_in_float)
        self.report: Any = None
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original model's arguments and result."""
        with torch.no_grad():
            return self.graph_module(*args, **kwargs)

    def train(self, mode: bool = True) -> QuantizedModel:  # noqa: ARG002 - see the class
        """Stay in evaluation mode."""
        super().train(False)
        return self

    def audit(self) -> Audit:
        """Count integer kernels, boundaries, and weighted operators left in float."""
        return audit(self.graph_module)

    def extra_repr(self) -> str:
        engine = self.engine.describe() if self.engine is not None else "reference model"
        return f"{engine}, {len(self.kernels)} kernels, {len(self.left_in_float)} left in float"
