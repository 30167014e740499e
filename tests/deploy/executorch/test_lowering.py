"""What the partitioner says, and what happens to operators that read integers and have no kernel."""

from __future__ import annotations

import logging

import torch
from torch import nn

import backquant
from backquant.backend_config import QDQRules
from backquant.deploy.executorch import TARGET
from backquant.deploy.executorch.lowering import ExecuTorchModel, lower_program
from backquant.deploy.executorch.target import read_back
from backquant.deploy.portable import portable
from backquant.deploy.program import export_program
from backquant.nn.quantized.reference import Linear
from experts import Experts


def weight_only() -> torch.fx.GraphModule:
    """A linear layer on a float input, as the node ``_0``."""
    qparams = {
        "qscheme": torch.per_channel_symmetric,
        "dtype": torch.qint8,
        "scale": torch.full((4,), 0.05),
        "zero_point": torch.zeros(4, dtype=torch.int64),
        "axis": 0,
    }
    torch.manual_seed(0)
    root = nn.Module()
    root.add_module("0", Linear.from_float(nn.Linear(4, 4), qparams))
    graph = torch.fx.Graph()
    graph.output(graph.call_module("0", (graph.placeholder("x"),)))
    return torch.fx.GraphModule(root, graph)


def test_weight_only_linear_runs_in_float_with_its_rounded_weight() -> None:
    logger = logging.getLogger("executorch.backends.xnnpack.partition")
    before = (logger.level, logger.propagate, list(logger.handlers))
    module, x = weight_only(), torch.randn(2, 4)
    lowered = lower_program(export_program(portable(module, QDQRules()), (x,), {}, None))
    assert (logger.level, logger.propagate, list(logger.handlers)) == before
    assert list(lowered.refused) == ["_0"]
    assert lowered.refused["_0"].startswith("Expected")
    [[linear]] = read_back(lowered.buffer).delegates
    assert linear.dtype == "float32"
    torch.testing.assert_close(ExecuTorchModel(lowered.buffer)(x), module(x))


class Biased(nn.Module):
    """Scores and a bias that is looked up and turned, as in a Swin: its channels lie last."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.bias = nn.Parameter(torch.randn(25, 2))
        self.register_buffer("positions", torch.arange(25))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bias = self.bias[self.positions].view(5, 5, 2).permute(2, 0, 1)
        y = self.linear(x).view(-1, 5, 2, 4).transpose(1, 2)
        return (torch.matmul(y, y.transpose(-2, -1)) + bias.unsqueeze(0)).softmax(-1)


def test_a_transposed_constant_is_added_in_the_delegate(tmp_path) -> None:
    """As it lies in memory, XNNPACK takes the constant for an image, and its runtime fails."""
    torch.manual_seed(0)
    x, path = torch.randn(3, 5, 8), tmp_path / "m.pte"
    model = backquant.quantize(Biased().eval(), backend="xnnpack", calibration=[x])
    backquant.export(model, path, example_inputs=x)
    # dynamic quantization, whose qparams XNNPACK rounds in its own way
    [found] = TARGET.loaded(path).run([x.numpy()])
    torch.testing.assert_close(torch.as_tensor(found), model(x), rtol=0, atol=0.02)


class Pooled(nn.Module):
    """Attention of one query that is a parameter, as in the pooling head of a SigLIP: ``[4, 1, 8]``."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.query = nn.Linear(16, 16), nn.Parameter(torch.randn(1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.query.repeat(1, 2, 1).view(1, 4, 8).transpose(0, 1)
        keys = self.linear(x).reshape(5, 4, 8).transpose(0, 1)
        return queries @ keys.transpose(1, 2)


def test_a_constant_whose_axis_of_size_one_was_moved(tmp_path) -> None:
    """XNNPACK was given ``[1, 4, 8]``: "Propagating input shapes failed"."""
    torch.manual_seed(0)
    x, path = torch.randn(5, 2, 16), tmp_path / "m.pte"
    model = backquant.quantize(Pooled().eval(), backend="xnnpack", calibration=[x])
    exported = backquant.export(model, path, example_inputs=x)
    assert exported.integer == 1
    [found] = TARGET.loaded(path).run([x.numpy()])
    torch.testing.assert_close(torch.as_tensor(found), model(x), rtol=0, atol=0.05)


class Rolled(nn.Module):
    """``roll`` comes apart into operators outside of the delegate."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.norm = nn.Conv2d(3, 8, 4, 4), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x).permute(0, 2, 3, 1)
        x = torch.roll(x + self.linear(self.norm(x)), (-1, -1), (1, 2))
        return torch.roll(x + self.linear(self.norm(x)), (1, 1), (1, 2))


def test_kernels_keep_their_names_beside_what_stays_outside(tmp_path) -> None:
    x = torch.randn(1, 3, 16, 16)
    model = backquant.quantize(Rolled().eval(), backend="xnnpack", calibration=[x])
    exported = backquant.export(model, tmp_path / "m.pte", require=0.0)
    integer = {node for kernel in exported.kernels if kernel.integer for node in kernel.nodes}
    assert {"conv", "linear", "linear_1"} <= integer


class Numbered(nn.Module):
    """Repeats a token as often as its positions say, as V-JEPA 2 does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.token = nn.Linear(8, 8), nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(x.shape[1]).unsqueeze(0).repeat(x.shape[0], 1)
        return self.linear(x) + self.token.repeat(1, positions.max() + 1, 1)


def test_a_number_that_is_read_from_a_constant_is_a_literal(tmp_path) -> None:
    """ExecuTorch would take what is asserted of it for a tensor."""
    x, path = torch.randn(2, 5, 8), tmp_path / "m.pte"
    model = backquant.quantize(Numbered().eval(), x, backend="xnnpack", calibration=[x])
    assert backquant.export(model, path, example_inputs=x).integer_share == 1.0
    torch.testing.assert_close(ExecuTorchModel(path)(x), model(x), rtol=0, atol=0.05)


def test_a_product_stays_on_integers_where_another_part_of_its_operator_is_refused(
    tmp_path,
) -> None:
    """What takes one result of those of all experts has no kernel in XNNPACK."""
    given = torch.randn(6, 8), torch.tensor([2, 3, 6], dtype=torch.int32)
    model = Experts().eval()
    quantized = backquant.quantize(
        model, given, backend="xnnpack", calibration=[given], slower="keep"
    )
    exported = backquant.export(quantized, tmp_path / "m.pte")
    assert exported.integer_share == 1.0 and exported.undelegated
    found = ExecuTorchModel(tmp_path / "m.pte")(*given)
    assert torch.allclose(found, quantized(*given), atol=0.1)
