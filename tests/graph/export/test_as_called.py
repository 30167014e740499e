"""What a model makes for its layers in an export only is left out where they do not take it."""

from __future__ import annotations

import torch
from torch import nn

import backquant


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(
        self, x: torch.Tensor, mask: torch.Tensor | None, *, other: torch.Tensor | None = None
    ) -> torch.Tensor:
        x = self.fc(x)
        x = x if mask is None else x + mask
        return x if other is None else x * other


class Masking(nn.Module):
    """As transformers' Nystromformer: a mask in an export only, which its layers do not take. Each of the two
    calls of a layer leaves out another argument."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.fc = Layer(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros(3) if torch.compiler.is_exporting() else None
        x = self.layer(x, mask, other=torch.full((4,), 2.0))
        return self.fc(self.layer(x, torch.ones(4), other=mask))


def test_a_mask_that_layers_do_not_take_is_left_out() -> None:
    torch.manual_seed(0)
    model, x = Masking().eval(), torch.randn(6, 4)
    hooks = [len(module._forward_pre_hooks) for module in model.modules()]
    result = backquant.quantize(model, x, calibration=[x], capture="export", slower="keep")
    assert result.report.coverage == 1.0
    assert any("were left out in the export" in note for note in result.report.notes)
    with torch.no_grad():
        error = (result(x) - model(x)).norm() / model(x).norm()
    assert error < 0.02
    assert [len(module._forward_pre_hooks) for module in model.modules()] == hooks
    assert not any(module._forward_pre_hooks for module in result.modules())
