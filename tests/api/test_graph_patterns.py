"""Backends whose entries are graphs: from the description to the quantized model and its report."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import backquant
from backquant.backend_config import (
    AnyOrder,
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    GraphPattern,
    MatchAllNode,
    ObservationType,
    SequentialFuser,
    get_backend_config,
)
from backquant.nn import intrinsic
from backquant.nn.quantized import reference

VALUES = DTypeConfig(torch.quint8, torch.quint8)
WEIGHTED = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)

SWISH = GraphPattern(
    ["x"],
    {"gate": (torch.sigmoid, "x"), "out": (AnyOrder(operator.mul), "x", "gate")},
    name="swish",
)
EXCITE = GraphPattern(
    ["x"],
    {
        "mean": ("mean", "x", MatchAllNode, True),
        "down": (nn.Conv2d, "mean"),
        "relu": (nn.ReLU, "down"),
        "up": (nn.Conv2d, "relu"),
        "gate": (torch.sigmoid, "up"),
        "out": (AnyOrder(operator.mul), "x", "gate"),
    },
    name="squeeze-excite",
)
GELU = GraphPattern(
    ["x"],
    {
        "fc": (nn.Linear, "x"),
        "half": (AnyOrder(operator.mul), "fc", 0.5),
        "scaled": (operator.truediv, "fc", math.sqrt(2)),
        "erf": (torch.erf, "scaled"),
        "plus": (AnyOrder(operator.add), "erf", 1),
        "out": (AnyOrder(operator.mul), "half", "plus"),
    },
    name="linear-gelu",
)


def linear() -> BackendPatternConfig:
    return _weighted(BackendPatternConfig(nn.Linear), nn.Linear, reference.Linear)


def conv() -> BackendPatternConfig:
    return _weighted(BackendPatternConfig(nn.Conv2d), nn.Conv2d, reference.Conv2d)


def _weighted(entry: BackendPatternConfig, root: Any, made: Any) -> BackendPatternConfig:
    return (
        entry.add_dtype_config(WEIGHTED).set_root_module(root).set_reference_quantized_module(made)
    )


def backend_of(*entries: BackendPatternConfig) -> BackendConfig:
    return BackendConfig("mine").set_backend_pattern_configs(entries)


def swish_backend() -> BackendConfig:
    return backend_of(BackendPatternConfig(SWISH).add_dtype_config(VALUES), conv())


class Gates(nn.Module):
    """The gate as first and as second factor."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        x = torch.sigmoid(x) * x
        return x * torch.sigmoid(x)


class Excite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.down, self.up = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        gate = torch.sigmoid(self.up(self.relu(self.down(x.mean((2, 3), True)))))
        return x * gate


class Gelu(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.fc(x)
        return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def rows(report: Any) -> dict[str, str]:
    return {row.node: row.entry for row in report.rows}


def quantized(model: nn.Module, x: torch.Tensor, backend: Any, **options: Any) -> Any:
    return backquant.quantize(model.eval(), x, backend=backend, calibration=[x], **options)


def calls(model: Any, name: str) -> int:
    return sum(name in str(node.target) for node in model.graph_module.graph.nodes)


IMAGE = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))


def close(quantized: Any, model: nn.Module, x: torch.Tensor) -> bool:
    wanted = model(x)
    return bool((quantized(x) - wanted).abs().max() < 0.03 * wanted.abs().max())


def test_swish_in_either_order() -> None:
    model = Gates().eval()
    made = quantized(model, IMAGE, swish_backend())
    assert rows(made.report) == {
        "conv": "Conv2d",
        "sigmoid": "swish",
        "mul": "swish",
        "sigmoid_1": "swish",
        "mul_1": "swish",
    }
    assert calls(made, "dequantize_per_tensor") == 4  # x, conv, and each swish: no gate
    assert close(made, model, IMAGE)


def test_the_reference_is_the_quantized_inputs_through_the_operators() -> None:
    backend = backend_of(BackendPatternConfig(SWISH).add_dtype_config(VALUES))

    class Only(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.sigmoid(x)

    made = quantized(Only(), IMAGE, backend)
    qparams = [n.args[1:] for n in made.graph_module.graph.nodes if "quantize_per" in str(n.target)]
    assert qparams[0] == qparams[1]
    assert qparams[2] == qparams[3]

    def rounded(x: torch.Tensor, scale: float, zero: int) -> torch.Tensor:
        return ((x / scale).round() + zero).clamp(0, 255).sub(zero) * scale

    x = rounded(IMAGE, *qparams[0][:2])
    wanted = rounded(x * torch.sigmoid(x), *qparams[2][:2])
    assert torch.allclose(made(IMAGE), wanted, atol=1e-6)


def test_squeeze_excite_is_one_entry_with_two_weights() -> None:
    entry = _weighted(BackendPatternConfig(EXCITE), nn.Conv2d, reference.Conv2d)
    model = Excite().eval()
    made = quantized(model, IMAGE, backend_of(entry, conv()))
    assert set(rows(made.report).values()) == {"Conv2d", "squeeze-excite"}
    assert rows(made.report)["up"] == "squeeze-excite"
    for name in ("conv", "down", "up"):
        assert made.graph_module.get_submodule(name).weight.dtype is torch.int8
    assert calls(made, "dequantize_per_tensor") == 3
    assert close(made, model, IMAGE)
    assert "squeeze-excite" in made.report.table()
    assert "squeeze-excite" in made.report.to_html()


def test_gelu_from_its_elements() -> None:
    entry = _weighted(BackendPatternConfig(GELU), nn.Linear, reference.Linear)
    model = Gelu().eval()
    x = torch.randn(16, 4, generator=torch.Generator().manual_seed(0))
    made = quantized(model, x, backend_of(entry))
    assert set(rows(made.report).values()) == {"linear-gelu"}
    assert made.graph_module.get_submodule("fc").weight.dtype is torch.int8
    assert calls(made, "dequantize_per_tensor") == 2
    assert close(made, model, x)


class Added(nn.Module):
    """A convolution as first and as second operand of an addition."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)
        self.relu = nn.ReLU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        x = self.relu(torch.add(self.one(x), x))
        return self.relu(torch.add(x, self.two(x)))


def added(**kinds: Any) -> GraphPattern:
    return GraphPattern(
        ["x", "y"],
        {
            "conv": (nn.Conv2d, "x"),
            "sum": (AnyOrder(torch.add), "conv", "y"),
            "relu": (nn.ReLU, "sum"),
        },
        name="conv-add-relu",
    )


def fuse_added(is_qat: bool, *, conv: Any, sum: Any, relu: Any) -> nn.Module:
    assert isinstance(conv, nn.Conv2d)
    assert sum is torch.add
    assert isinstance(relu, nn.ReLU)
    return intrinsic.ConvAddReLU2d(conv, sum, relu)


def onednn_with(entry: BackendPatternConfig) -> BackendConfig:
    """onednn's description with this entry in place of its own fusions of additions."""
    onednn = get_backend_config("onednn")
    fused = (intrinsic.ConvAdd2d, intrinsic.ConvAddReLU2d)
    own = [config for config in onednn.configs if config.fused_module not in fused]
    mine = BackendConfig("mine").set_engine("onednn").set_defaults(onednn.defaults)
    return mine.set_backend_pattern_configs([entry, *own])


def test_either_order_of_an_addition_is_fused_and_lowered() -> None:
    entry = (
        BackendPatternConfig(added())
        .set_fused_module(intrinsic.ConvAddReLU2d)
        .set_fuser_method(fuse_added)
    )
    model = Added().eval()
    made = quantized(model, IMAGE, onednn_with(entry))
    plan = made.plan
    assert [(f.pattern, f.root, f.extra_inputs) for f in plan.fusions] == [
        ("conv-add-relu", "one", ("stem",)),
        ("conv-add-relu", "two", ("relu",)),
    ]
    joined = "onednn.qconv2d_pointwise.binary(add, relu)"
    assert [kernel.kernel for kernel in made.kernels].count(joined) == 2
    assert close(made, model, IMAGE)


def test_the_same_kernels_as_with_the_nested_tuples() -> None:
    entry = (
        BackendPatternConfig(added())
        .set_fused_module(intrinsic.ConvAddReLU2d)
        .set_fuser_method(fuse_added)
    )
    model = Added().eval()
    ours = quantized(model, IMAGE, onednn_with(entry))
    theirs = quantized(model, IMAGE, "onednn")
    assert [k.kernel for k in ours.kernels] == [k.kernel for k in theirs.kernels]
    assert torch.equal(ours(IMAGE), theirs(IMAGE))


def functional(forward: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    class Function(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(x)

    return Function().eval()


def used_outside(x: torch.Tensor) -> torch.Tensor:
    gate = torch.sigmoid(x)
    return torch.tanh(x * gate) + gate


MISMATCHES = {
    "the gate is used elsewhere": (
        used_outside,
        "mul",
        "'sigmoid' is also used outside of it, by 'add'",
    ),
    "another operator": (
        lambda x: x * torch.tanh(x),
        "mul",
        "'tanh' stands where it has torch.sigmoid",
    ),
    "another value": (
        lambda x: torch.relu(x) * torch.sigmoid(x),
        "mul",
        "'x' and 'relu' would have to be one value",
    ),
    "not used by a product": (
        lambda x: torch.sigmoid(x) + x,
        "sigmoid",
        'only within "swish"',
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_has_a_reason(name: str) -> None:
    forward, node, expected = MISMATCHES[name]
    backend = backend_of(BackendPatternConfig(SWISH).add_dtype_config(VALUES))
    report = backquant.explain(functional(forward), IMAGE, backend=backend)
    [row] = [row for row in report.rows if row.node == node]
    assert not row.quantized
    assert expected in row.reasons[0].admitted


def test_other_literals_are_another_pattern() -> None:
    entry = _weighted(BackendPatternConfig(GELU), nn.Linear, reference.Linear)

    class Quarter(Gelu):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.fc(x)
            return x * 0.25 * (1 + torch.erf(x / math.sqrt(2)))

    report = backquant.explain(Quarter().eval(), torch.randn(2, 4), backend=backend_of(entry))
    assert not any(row.quantized for row in report.rows)
    reasons = {row.node: row.reasons[0].admitted for row in report.rows}
    assert reasons["fc"].endswith('for "linear-gelu", 0.25 stands where it has 0.5')


# -- ports -------------------------------------------------------------------------------------


def observed(model: nn.Module, entry: BackendPatternConfig, *inputs: torch.Tensor) -> Any:
    backend = backend_of(entry)
    mapping = backquant.get_default_qconfig_mapping("x86")
    return backquant.prepare_fx(model.eval(), mapping, inputs, backend_config=backend)


def sites(prepared: Any) -> dict[str, tuple[str, str, bool]]:
    """Observed value → role, names of the readers, shared."""
    from backquant.prepare import prepared_state

    return {
        site.value: (site.role.value, " ".join(site.readers), site.shared)
        for site in prepared_state(prepared).sites.sites
    }


LINEAR = GraphPattern(
    ["x", "w", "b", "scale"],
    {"fc": (F.linear, "x", "w", "b"), "out": (AnyOrder(torch.mul), "fc", "scale")},
)


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 4))
        self.bias = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return torch.mul(scale, F.linear(x, self.weight, self.bias))


SCALED = (torch.randn(3, 4), torch.rand(3, 5))


def scaled(**ports: Any) -> BackendPatternConfig:
    return (
        BackendPatternConfig(LINEAR)
        .add_dtype_config(WEIGHTED)
        .set_ports({"w": "weight", "b": "bias", **ports})
    )


def test_ports_say_what_is_weight_and_bias() -> None:
    prepared = observed(Scaled(), scaled(), *SCALED)
    assert sites(prepared) == {
        "x": ("input", "linear", False),
        "weight": ("weight", "linear", False),
        "scale": ("input", "mul", False),
        "mul": ("output", "", False),
    }


def test_a_float_port_is_not_observed() -> None:
    prepared = observed(Scaled(), scaled(scale="float", out="float"), *SCALED)
    assert list(sites(prepared)) == ["x", "weight"]


def test_a_port_shares_with_an_earlier_one() -> None:
    from backquant.backend_config import Port

    shares = Port(shares_with="x")
    prepared = observed(Scaled(), scaled(scale=shares, out=shares), *SCALED)
    shared = {value: site[2] for value, site in sites(prepared).items()}
    assert shared == {"x": False, "weight": False, "scale": True, "mul": True}
    assert prepared.activation_post_process_0 is prepared.activation_post_process_2


def test_functional_weights_become_integers() -> None:
    model = Scaled().eval()
    made = backquant.quantize(model, SCALED, backend=backend_of(scaled()), calibration=[SCALED])
    stored = {name: buffer.dtype for name, buffer in made.graph_module.named_buffers()}
    assert stored["weight_quantized_0"] is torch.int8
    wanted = model(*SCALED)
    assert (made(*SCALED) - wanted).abs().max() < 0.05 * wanted.abs().max()


def test_the_output_shares_with_the_first_activation() -> None:
    shares = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    pattern = GraphPattern(
        ["x"], {"pooled": (F.max_pool2d, "x", 2), "out": ("flatten", "pooled", 1)}
    )
    entry = BackendPatternConfig(pattern).set_observation_type(shares).add_dtype_config(VALUES)
    model = functional(lambda x: F.max_pool2d(x, 2).flatten(1))
    assert sites(observed(model, entry, IMAGE)) == {
        "x": ("input", "max_pool2d", False),
        "flatten": ("output", "", True),
    }


def test_dynamic_ports_are_observed_where_they_stand() -> None:
    dynamic = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)
    entry = BackendPatternConfig(LINEAR).add_dtype_config(dynamic)
    entry = entry.set_ports({"w": "weight", "b": "bias", "scale": "float"})
    backend = backend_of(entry)
    mapping = backquant.QConfigMapping().set_global(backquant.default_dynamic_qconfig)
    prepared = backquant.prepare_fx(Scaled().eval(), mapping, SCALED, backend_config=backend)
    assert list(sites(prepared)) == ["x", "weight"]


# -- training, storing, fusing -------------------------------------------------------------------


def test_training_swaps_every_weighted_module_of_the_pattern() -> None:
    from backquant.nn import qat

    entry = _weighted(BackendPatternConfig(EXCITE), nn.Conv2d, reference.Conv2d)
    backend = backend_of(
        entry,
        conv().set_qat_module(qat.Conv2d),
        _weighted(BackendPatternConfig(qat.Conv2d), nn.Conv2d, reference.Conv2d),
    )
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(Excite().train(), mapping, (IMAGE,), backend_config=backend)
    assert [type(m) for m in (prepared.conv, prepared.down, prepared.up)] == [qat.Conv2d] * 3
    prepared(IMAGE).sum().backward()
    assert prepared.up.weight.grad is not None
    converted = backquant.convert_to_reference_fx(prepared.eval(), backend_config=backend)
    assert [type(m) for m in (converted.down, converted.up)] == [reference.Conv2d] * 2


def test_a_saved_model_keeps_the_ports(tmp_path: Path) -> None:
    made = quantized(Gates(), IMAGE, swish_backend())
    backquant.save(made, tmp_path / "model.bq")
    loaded = backquant.load(tmp_path / "model.bq")
    assert loaded.plan == made.plan
    assert loaded.plan.matches[1].ports[0].readers == ("sigmoid", "mul")
    assert torch.equal(loaded(IMAGE), made(IMAGE))


def fusing(pattern: GraphPattern, fuser: Any) -> BackendConfig:
    entry = BackendPatternConfig(pattern).set_fused_module(nn.Sequential).set_fuser_method(fuser)
    return backend_of(entry)


CONV_RELU = GraphPattern(["x"], {"conv": (nn.Conv2d, "x"), "relu": (nn.ReLU, "conv")})


def test_a_sequential_fuser_gets_the_modules_in_the_order_of_writing() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    fused = backquant.fuse_fx(
        model, backend_config=fusing(CONV_RELU, SequentialFuser(nn.Sequential))
    )
    assert [type(part) for part in fused.get_submodule("0")] == [nn.Conv2d, nn.ReLU]
    assert torch.equal(fused(IMAGE), model(IMAGE))


def test_a_fuser_with_other_names_is_an_error() -> None:
    def fuser(is_qat: bool, *, convolution: Any, relu: Any) -> nn.Module:
        return nn.Sequential(convolution, relu)

    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    with pytest.raises(backquant.errors.ConfigError, match="unexpected keyword argument 'conv'"):
        backquant.fuse_fx(model, backend_config=fusing(CONV_RELU, fuser))


def test_a_root_that_reads_inside_is_an_error() -> None:
    entry = (
        BackendPatternConfig(CONV_RELU)
        .set_fused_module(nn.Sequential)
        .set_fuser_method(SequentialFuser(nn.Sequential))
        ._set_root_node_getter("relu")
    )
    model = nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()).eval()
    with pytest.raises(backquant.errors.ConfigError, match="reads '_0', which lies inside of it"):
        backquant.fuse_fx(model, backend_config=backend_of(entry))


def test_extra_inputs_by_name() -> None:
    entry = (
        BackendPatternConfig(added())
        .set_fused_module(intrinsic.ConvAddReLU2d)
        .set_fuser_method(fuse_added)
        ._set_root_node_getter("conv")
        ._set_extra_inputs_getter(["y"])
    )
    model = Added().eval()
    fused = backquant.fuse_fx(model, backend_config=backend_of(entry))
    assert type(fused.one) is type(fused.two) is intrinsic.ConvAddReLU2d
    assert torch.equal(fused(IMAGE), model(IMAGE))


def test_a_constant_is_no_extra_input() -> None:
    class Constant(Added):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.relu(torch.add(self.stem(x), 1.0))

    entry = (
        BackendPatternConfig(added())
        .set_fused_module(intrinsic.ConvAddReLU2d)
        .set_fuser_method(fuse_added)
    )
    model = Constant().eval()
    fused = backquant.fuse_fx(model, backend_config=backend_of(entry))
    assert type(fused.stem) is nn.Conv2d
    assert torch.equal(fused(IMAGE), model(IMAGE))
