"""Names of nested inputs."""

from __future__ import annotations

import pytest
import torch
from torch import fx

from backquant.calibrate.inputs import bound_arguments, check_values, described
from backquant.errors import CalibrationError


def test_nested_inputs_are_named():
    model = fx.symbolic_trace(lambda pair, options: pair)
    batch = (
        (torch.ones(1), torch.tensor([float("nan")])),
        {"mask": torch.ones(2, dtype=torch.bool)},
    )
    bound = bound_arguments(model, batch, 4)
    assert described(bound) == "pair[0]: float32[1], pair[1]: float32[1], options.mask: bool[2]"
    with pytest.raises(CalibrationError, match=r"input 'pair\[1\]' of batch 4"):
        check_values(bound, 4)


def test_integers_are_always_finite():
    bound = bound_arguments(fx.symbolic_trace(lambda x: x), torch.arange(3), 0)
    check_values(bound, 0)
