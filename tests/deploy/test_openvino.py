"""OpenVINO: the precisions of the model that its CPU plugin compiles."""

from __future__ import annotations

from typing import Any

import openvino
import pytest
import torch
from torch import nn

import backquant
from backquant.backend_config import DTypeConfig
from backquant.conformance.run import claimed
from backquant.deploy import Exported
from backquant.errors import CoverageError


def run(path: Any, x: torch.Tensor) -> torch.Tensor:
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(str(path), "CPU", settings)
    return torch.from_numpy(compiled(x.numpy())[0].copy())


def precisions(exported: Exported, kind: str) -> set[str]:
    return {use.dtype for use in exported.kernels if use.kernel == kind}


def test_residual_network_runs_in_int8(residual, tmp_path) -> None:
    model = residual("openvino")
    path = tmp_path / "m.xml"
    exported = backquant.export(model, path, dynamic_shapes={"x": {0: "batch"}})
    assert [file.name for file in exported.files] == ["m.xml", "m.bin"]
    assert exported.integer_share == 1.0
    assert exported.integer == exported.expected == 7
    for kind in ("Convolution", "Eltwise", "Pooling", "FullyConnected"):
        assert precisions(exported, kind) == {"u8"}, kind
    for batch in (1, 5):
        x = torch.randn(batch, 3, 16, 16)
        assert torch.allclose(run(path, x), model(x), atol=3e-2)


def test_onnx_file_is_read_back_by_openvino(residual, tmp_path) -> None:
    exported = backquant.export(residual("openvino"), tmp_path / "m.onnx", to="openvino")
    assert exported.runtime.startswith("openvino")
    assert exported.integer == exported.expected


class Positions(nn.Module):
    """A constant added to activations, which is not quantized, before a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.up = nn.Conv2d(4, 8, 3, padding=1), nn.ConvTranspose2d(8, 8, 2, stride=2)
        self.position = nn.Parameter(torch.randn(1, 8, 8, 8))
        self.last = nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.up(self.conv(x) + self.position * 2))


def test_constants_stay_float_and_transposed_convolutions_run_in_int8(tmp_path) -> None:
    torch.manual_seed(0)
    model = backquant.quantize(
        Positions().eval(), backend="openvino", calibration=[torch.randn(2, 4, 8, 8)]
    )
    exported = backquant.export(model, tmp_path / "m.xml")
    assert precisions(exported, "Convolution") <= {"u8", "i8"}
    [up] = [use for use in exported.kernels if use.kernel == "Deconvolution"]
    assert up.integer
    assert "up" in up.nodes
    assert exported.integer_share == 1.0
    x = torch.randn(2, 4, 8, 8)
    assert torch.allclose(run(tmp_path / "m.xml", x), model(x), atol=5e-2)


def test_averages_with_padding_stay_float_where_it_counts(tmp_path) -> None:
    """OpenVINO 2026.4 pads integers with 0, which is not 0.0 where there is a zero point."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    kinds: dict[str, dict[str, Any]] = {
        "float": {"padding": 1},
        "quantized": {"padding": 1, "count_include_pad": False},
    }
    for outcome, padding in kinds.items():
        pool = nn.AvgPool2d(3, 2, **padding)
        model = nn.Sequential(nn.Conv2d(4, 8, 1), pool, nn.Conv2d(8, 4, 1)).eval()
        nn.init.constant_(model[0].bias, 1.0)
        quantized = backquant.quantize(model, backend="openvino", calibration=[x])
        [row] = [row for row in quantized.report.rows if row.operator == "AvgPool2d"]
        assert row.outcome == outcome
        backquant.export(quantized, tmp_path / f"{outcome}.xml")
        assert torch.allclose(run(tmp_path / f"{outcome}.xml", x), quantized(x), atol=5e-2)


def upsampled(transposed: nn.Module) -> nn.Module:
    kind = {1: nn.Conv1d, 2: nn.Conv2d}[len(transposed.kernel_size)]
    return nn.Sequential(kind(4, 8, 1), nn.ReLU(), transposed, nn.ReLU(), kind(8, 4, 1)).eval()


@pytest.mark.parametrize(
    ("transposed", "why"),
    [
        (nn.ConvTranspose1d(8, 8, 6, stride=2), ""),
        (nn.ConvTranspose1d(8, 8, 6, stride=3), "stride[-1] 3"),
        (nn.ConvTranspose2d(8, 8, 4, stride=(4, 2), padding=1, output_padding=1), ""),
        (nn.ConvTranspose2d(8, 8, 4, dilation=2), ""),
        # wrong by some 20 steps without AMX, and other values at each call
        (nn.ConvTranspose2d(8, 8, 4, stride=2, dilation=2), "dilation 2, 2, stride 2, 2"),
        (
            nn.ConvTranspose2d(8, 8, 4, stride=(4, 2), output_padding=1),
            "output_padding 1, 1, padding 0, 0",
        ),
        (nn.ConvTranspose1d(8, 8, 8, stride=4), "stride[-1] 4"),
        (nn.ConvTranspose2d(8, 8, 4, stride=(2, 4)), "stride[-1] 4"),
        (nn.ConvTranspose2d(8, 8, 2, stride=2, groups=2), "groups 2"),
        (
            nn.ConvTranspose2d(8, 8, 2, padding=2),
            "padding 2, 2, dilation * (kernel_size - 1) 1, 1",
        ),
        (nn.ConvTranspose2d(8, 8, (1, 3), stride=(2, 1)), "stride 2, 1, kernel_size 1, 3"),
    ],
    ids=str,
)
def test_which_transposed_convolutions_have_integer_kernels(transposed, why, tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4, *[8] * len(transposed.kernel_size))
    model = backquant.quantize(upsampled(transposed), x, backend="openvino", calibration=[x])
    refused = [r.asked for row in model.report.rows for r in row.reasons if row.operator != "ReLU"]
    assert refused == ([why] if why else [])
    exported = backquant.export(model, tmp_path / "m.xml")
    [up] = [use for use in exported.kernels if use.kernel == "Deconvolution"]
    assert up.integer == (not why)
    assert torch.allclose(run(tmp_path / "m.xml", x), model(x), atol=5e-2)


def test_a_transposed_convolution_whose_name_is_lost_is_found(tmp_path) -> None:
    """With one channel out OpenVINO's kernel names what follows alone, two steps on."""
    torch.manual_seed(0)
    x = torch.randn(2, 9, 5)
    config = claimed(backquant.get_backend_config("openvino"))
    layer = nn.ConvTranspose1d(9, 1, 2, stride=2, padding=1).eval()
    model = backquant.quantize(layer, x, backend=config, calibration=[x])
    exported = backquant.export(model, tmp_path / "m.xml", to="openvino")
    assert exported.integer == exported.expected == 1
    [kernel] = [use for use in exported.kernels if use.kernel == "Deconvolution"]
    assert kernel.integer and any(node in kernel.nodes for node in model.plan.decisions)


def test_bounds_of_clamps_are_rounded(tmp_path) -> None:
    """As written OpenVINO cuts them off: all that is clamped comes out a step lower."""
    x = torch.linspace(-1.0, 1.3, 64)
    config = claimed(backquant.get_backend_config("openvino"))
    model = backquant.quantize(nn.Hardtanh().eval(), x, backend=config, calibration=[x])
    backquant.export(model, tmp_path / "m.xml", to="openvino")
    torch.testing.assert_close(run(tmp_path / "m.xml", x), model(x), rtol=0, atol=1e-3)


def test_a_float_kernel_that_gives_integers_is_read_back_as_float(tmp_path) -> None:
    """The runtime model calls it i8; the name of its primitive tells."""
    torch.manual_seed(0)
    x = torch.randn(2, 4, 8, 8)
    config = backquant.get_backend_config("openvino")
    for entry in config.configs:
        entry.dtype_configs = [
            DTypeConfig.from_dict({k: v for k, v in dtypes.to_dict().items() if k != "where"})
            for dtypes in entry.dtype_configs
        ]
    wide = upsampled(nn.ConvTranspose2d(8, 8, 4, stride=4))
    model = backquant.quantize(wide, x, backend=config, calibration=[x])
    assert all(row.outcome == "quantized" for row in model.report.rows)
    with pytest.raises(CoverageError, match="Deconvolution"):
        backquant.export(model, tmp_path / "m.xml", to="openvino")


class Patches(nn.Module):
    """A convolution and linear layers of one width: their weights' zero points are the same constant."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.norm = nn.Conv2d(3, 32, 4, stride=4), nn.LayerNorm(32)
        self.wide, self.narrow, self.gelu = nn.Linear(32, 64), nn.Linear(64, 32), nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        return x + self.narrow(self.gelu(self.wide(self.norm(x))))


def test_layers_of_one_width_run_in_int8(tmp_path) -> None:
    torch.manual_seed(0)
    images = [torch.randn(1, 3, 16, 16) for _ in range(2)]
    model = backquant.quantize(Patches().eval(), backend="openvino", calibration=images)
    exported = backquant.export(model, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 3


class CalledTwice(nn.Module):
    """One convolution, and so one bias, for two inputs of an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.last = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.last(self.conv(x) + self.conv(y))


def test_a_convolution_that_is_called_twice_has_two_biases(tmp_path) -> None:
    """OpenVINO computes one that both read, and what follows, in a generated kernel on floats."""
    torch.manual_seed(0)
    pairs = [(torch.randn(1, 3, 8, 8), torch.randn(1, 3, 8, 8)) for _ in range(2)]
    model = backquant.quantize(CalledTwice().eval(), backend="openvino", calibration=pairs)
    exported = backquant.export(model, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 4


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        qkv = self.qkv(x).view(batch, length, 3, 2, 8).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(qkv[0], qkv[1], qkv[2])
        return self.out(mixed.transpose(1, 2).reshape(batch, length, 16))


def test_scores_of_attention_run_in_int8(tmp_path) -> None:
    torch.manual_seed(0)
    batch = torch.randn(2, 12, 16)
    model = backquant.quantize(Attention().eval(), backend="openvino", calibration=[batch])
    exported = backquant.export(model, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 3
    [kernel] = [
        use for use in exported.kernels if use.kernel == "Subgraph" and "matmul" in use.nodes
    ]
    assert kernel.dtype == "i8"
    assert torch.allclose(run(tmp_path / "m.xml", batch), model(batch), atol=3e-2)


def test_layers_that_openvino_joins_in_one_kernel_are_counted_as_integers(tmp_path) -> None:
    """The runtime model names the precision of the joined kernel's floats; its weights are integers."""
    torch.manual_seed(0)
    parts = [nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 1)]
    batch = torch.randn(4, 128)
    model = backquant.quantize(
        nn.Sequential(*parts).eval(), backend="openvino", calibration=[batch]
    )
    exported = backquant.export(model, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 3
    assert {use.dtype for use in exported.kernels if use.integer} <= {"i8", "u8"}
    assert torch.allclose(run(tmp_path / "m.xml", batch), model(batch), atol=3e-2)


class OneToken(nn.Module):
    """Scores over one key, as where attention reduces a small map: a transposition that moves nothing."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16, bias=bias)
        if bias:
            nn.init.zeros_(self.key.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = self.key(x[:, :1]).view(2, 1, 1, 16).transpose(1, 2)
        return self.query(x).view(2, -1, 1, 16).transpose(1, 2) @ key.transpose(-1, -2)


class Unfolded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.unfold(self.conv(x), 2, stride=2)


@pytest.mark.parametrize(
    ("model", "shape"),
    [(OneToken(False), (2, 9, 16)), (OneToken(True), (2, 9, 16)), (Unfolded(), (2, 3, 8, 8))],
    ids=["no bias", "zeros", "unfold"],
)
def test_layers_without_a_bias_before_what_moves_their_result(model, shape, tmp_path) -> None:
    """OpenVINO moves their scales on, and throws where that is ambiguous."""
    torch.manual_seed(0)
    batch = torch.randn(shape)
    quantized = backquant.quantize(model.eval(), backend="openvino", calibration=[batch])
    backquant.export(quantized, tmp_path / "m.xml")
    got = run(tmp_path / "m.xml", batch)
    assert torch.allclose(got, quantized(batch), atol=3e-2)
    assert float(got.std()) > 0.1


class ScaledTable(nn.Module):
    """Embeddings times the root of their width, as encoder-decoders scale them, and scores of attention."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(20, 16), nn.LayerNorm(16)
        self.query, self.key = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.table(ids) * 4.0 + positions)
        return self.query(x) @ self.key(x).transpose(1, 2)


def test_tables_of_embeddings_are_scaled_ahead(tmp_path) -> None:
    torch.manual_seed(0)
    batch = (torch.randint(20, (2, 6)), torch.randn(2, 6, 16))
    quantized = backquant.quantize(
        ScaledTable().eval(), batch, backend="openvino", calibration=[batch], slower="keep"
    )
    backquant.export(quantized, tmp_path / "m.xml", example_inputs=batch)
    settings = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": 1}
    compiled = openvino.Core().compile_model(str(tmp_path / "m.xml"), "CPU", settings)
    got = torch.from_numpy(compiled([value.numpy() for value in batch])[0])
    assert torch.allclose(got, quantized(*batch), atol=0.1)
    assert not [
        node
        for node in openvino.Core().read_model(tmp_path / "m.xml").get_ordered_ops()
        if node.get_type_name() == "Multiply"
        and "Gather" in {given.get_node().get_type_name() for given in node.input_values()}
    ]


class Relative(nn.Module):
    """Scores of positions: a product with a constant matrix, as of relative attention."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.register_buffer("table", torch.randn(16, 24))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.matmul(self.first(x), self.table))


def test_a_constant_in_a_product_is_its_weight(tmp_path) -> None:
    torch.manual_seed(0)
    model, x = Relative().eval(), torch.randn(4, 8, 16)
    quantized = backquant.quantize(model, backend="openvino", calibration=[x], slower="keep")
    exported = backquant.export(quantized, tmp_path / "m.xml")
    assert exported.integer == exported.expected >= 2
    assert exported.integer_share == 1.0
    wanted = model(x)
    noise = (run(tmp_path / "m.xml", x) - wanted).square().sum()
    assert 10 * torch.log10(wanted.square().sum() / noise) > 25


class Inverse(nn.Module):
    """As in Nystromformer: steps towards an inverse, products around additions of a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        key = torch.softmax(self.fc(x), -1)
        product, one = torch.matmul(key, key.transpose(-1, -2)), torch.eye(16)
        inner = torch.matmul(product, 15 * one - torch.matmul(product, 7 * one - product))
        return self.last(torch.matmul(0.25 * key, 13 * one - inner))


def test_products_whose_factor_moved_are_found_by_their_inputs(tmp_path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(2, 16, 16), Inverse().eval()
    made = backquant.quantize(model, backend="openvino", calibration=[x])
    exported = backquant.export(made, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 5
    products = [use for use in exported.kernels if use.kernel == "MatMul" and use.integer]
    assert {name for use in products for name in use.nodes if "matmul" in name} == {
        *("matmul_1", "matmul_2", "matmul_3"),
    }
    torch.testing.assert_close(run(tmp_path / "m.xml", x), made(x), atol=3e-2, rtol=0)


class InPieces(nn.Module):
    """As TabNet's batch norms: of pieces of the batch, here one."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.last = nn.Linear(16, 16, bias=False), nn.Linear(16, 16)
        self.norm = nn.BatchNorm1d(16)
        self.norm.running_mean = torch.linspace(-1, 1, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.cat([self.norm(piece) for piece in self.fc(x).chunk(1, 0)], 0)
        return self.last(torch.sigmoid(y) * y)


def test_a_product_is_named_behind_what_has_no_origin(tmp_path) -> None:
    torch.manual_seed(0)
    x, model = torch.randn(8, 16), InPieces().eval()
    made = backquant.quantize(model, backend="openvino", calibration=[x], slower="keep")
    exported = backquant.export(made, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 2


class Joined(nn.Module):
    """Floats that are joined along ``axis`` before ``last``."""

    def __init__(self, axis: int, last: nn.Module) -> None:
        super().__init__()
        self.axis, self.first, self.last = axis, nn.Linear(16, 16), last

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (torch.sin(self.first(x)), 2 * torch.tanh(self.first(2 * x)))
        return self.last(torch.cat(parts, self.axis))


@pytest.mark.parametrize(
    ("axis", "last", "shape"),
    [
        (0, nn.Linear(16, 16), (4, 8, 16)),
        (1, nn.Linear(16, 16), (4, 8, 16)),
        (-2, nn.Linear(16, 16), (2, 4, 8, 16)),
        (2, nn.Conv1d(8, 8, 3, padding=1), (2, 8, 16)),
        (1, nn.Conv1d(16, 8, 3, padding=1), (2, 8, 16)),
        (-3, nn.Conv2d(8, 4, 3, padding=1), (2, 4, 8, 16)),
        (-1, nn.Conv2d(4, 4, 3, padding=1), (2, 4, 8, 16)),
    ],
)
def test_products_of_joined_values(
    axis: int, last: nn.Module, shape: tuple[int, ...], tmp_path
) -> None:
    """OpenVINO could not compile the products, and ran the convolutions in float."""
    torch.manual_seed(0)
    x = torch.randn(shape)
    made = backquant.quantize(Joined(axis, last).eval(), backend="openvino", calibration=[x])
    exported = backquant.export(made, tmp_path / "m.xml")
    assert exported.integer == exported.expected == 3
    torch.testing.assert_close(run(tmp_path / "m.xml", x), made(x), atol=1e-2, rtol=0)


class Pooled(nn.Module):
    """A mean over tokens, then a batch norm, as LeViT ends."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.fc = nn.BatchNorm1d(width), nn.Linear(width, 4)
        generator = torch.Generator().manual_seed(0)
        self.norm.running_mean.normal_(generator=generator)
        self.norm.running_var.uniform_(0.5, 2.0, generator=generator)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.norm(x.mean(1)))


@pytest.mark.parametrize("shape", [(2, 5, 16), (1, 7, 8)])
def test_means_that_are_scaled_by_channel_before_they_are_quantized(shape, tmp_path) -> None:
    torch.manual_seed(0)
    x = torch.randn(*shape)
    model = Pooled(shape[-1]).eval()
    quantized = backquant.quantize(model, x, backend="openvino", calibration=[x])
    assert backquant.export(quantized, tmp_path / "m.xml").integer_share == 1.0
    wanted, found = quantized(x), run(tmp_path / "m.xml", x)
    assert 10 * torch.log10(wanted.square().sum() / (wanted - found).square().sum()) > 40
