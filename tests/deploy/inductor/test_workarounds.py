"""1-d convolutions as 2-d ones: the same integers, and the activation and rounding stay behind the kernel."""

from __future__ import annotations

import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.inductor.fusible import made_fusible
from backquant.deploy.inductor.workarounds import keep_transposed, with_height
from backquant.deploy.portable import portable
from backquant.deploy.program import Program, export_program


def _program(model: nn.Module, x: torch.Tensor) -> Program:
    made = backquant.quantize(model.eval(), backend="inductor_x86", calibration=[x])
    return export_program(portable(made.graph_module, QDQRules()), (x,), {}, None)


def test_a_convolution_its_activation_and_its_rounding_are_widened_together() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, 40)
    first, grouped = nn.Conv1d(4, 8, 5, 3, dilation=2), nn.Conv1d(8, 8, 3, padding="same", groups=2)
    program = _program(nn.Sequential(first, nn.ReLU(), grouped, nn.GroupNorm(4, 8)), x)
    wanted = program.exported.module()(x)
    with_height(program)
    assert torch.equal(program.exported.module()(x), wanted)
    targets = [
        str(node.target) for node in program.exported.graph.nodes if node.op != "placeholder"
    ]
    assert not any("conv1d" in target for target in targets)
    [squeeze, _] = [i for i, target in enumerate(targets) if "squeeze.dim" in target]
    assert "quantize_per_tensor" in targets[squeeze - 1]


def test_a_layer_that_is_called_twice_keeps_both_calls_on_integers() -> None:
    """Found by ``conform``: Inductor merged what the calls made of their weight, and took neither."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8)
    program = _program(Twice(), x)
    wanted = program.exported.module()(x)
    with_height(program)
    program = made_fusible(program)
    assert torch.equal(program.exported.module()(x), wanted)
    weights = [n for n in program.exported.graph.nodes if "per_channel" in str(n.target)]
    [one, other] = [tuple(n.args) for n in weights]
    assert one[0] is other[0] and one != other  # equal ones would be merged


def test_no_constant_reaches_a_transposed_convolution() -> None:
    """A batch norm by hand: Inductor would fold it along the axis of the inputs."""
    program = _program(nn.Sequential(nn.Conv2d(4, 4, 1), Scaled()), torch.randn(1, 4, 4, 4))
    keep_transposed(program)
    [layer] = (n for n in program.exported.graph.nodes if "conv_transpose" in str(n.target))
    assert [str(user.target) for user in layer.users] == ["aten.clamp_min.default"]


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv1d(4, 6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.layer(x.flip(0).relu())


class Scaled(nn.Module):
    """Channels of their own size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.ConvTranspose2d(4, 4, 4, 2, 1)
        self.scale = nn.Parameter(torch.arange(1.0, 5.0).reshape(1, 4, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale
