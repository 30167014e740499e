"""What a model makes for its layers in an export only is left out where they do not take it."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
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


class Told(nn.Module):
    """As transformers' LongT5 and Switch Transformers: without a mask in an export only, and it needs one."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        if mask is None and not torch.compiler.is_compiling():
            mask = torch.ones(x.shape[0], 1)
        return x * mask[:, :1]  # type: ignore[index]


class Telling(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.fc = inner, nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.inner(x))


class Both(Telling):
    """Its own ``forward`` fails in an export."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        half = None if torch.compiler.is_exporting() else 0.5
        return self.fc(self.inner(x * half))


def _told(kind: type[Telling]) -> Telling:
    torch.manual_seed(0)
    return kind(nn.Sequential(nn.Linear(4, 4), Told())).eval()


@pytest.mark.parametrize("kind", [Telling, Both])
def test_what_fails_since_it_knows_that_it_is_exported_is_not_told(kind: type[Telling]) -> None:
    model, x = _told(kind), torch.randn(6, 4)
    result = backquant.quantize(model, x, calibration=[x], capture="export", slower="keep")
    assert result.report.coverage == 1.0
    assert any("exported as if it were called" in note for note in result.report.notes)
    assert torch.compiler.is_exporting() is False
    with torch.no_grad():
        assert (result(x) - model(x)).norm() / model(x).norm() < 0.02


def test_what_fails_either_way_stays_whole_with_the_first_reason() -> None:
    class Never(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 1e9 else x * 2

    torch.manual_seed(0)
    model, x = Telling(Never()).eval(), torch.randn(6, 4)
    result = backquant.quantize(model, x, calibration=[x], capture="export", slower="keep")
    assert not any("exported as if it were called" in note for note in result.report.notes)
    assert any("'inner' stays float as a whole" in note for note in result.report.notes)


class Counting(nn.Module):
    """What it computes depends on values, whether it is exported or not."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 0 else x + 1


def test_an_export_that_fails_for_the_same_reason_is_given_up() -> None:
    layers = [nn.Linear(4, 4), Counting(), nn.Linear(4, 4), Counting(), Counting(), nn.Linear(4, 4)]
    model, x, made = nn.Sequential(*layers).eval(), torch.randn(6, 4), []
    export = torch.export.export

    def noted(*args: Any, **kwargs: Any) -> Any:
        made.append(args)
        return export(*args, **kwargs)

    with mock.patch.object(torch.export, "export", noted):
        result = backquant.quantize(model, x, calibration=[x], capture="export", slower="keep")
    # the first fails, the second tries the others of the class, the third has them whole; one that is untold
    assert len(made) == 4
    assert result.report.coverage == 1.0
