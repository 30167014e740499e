"""Dynamic and float16 linear layers: what a kernel takes, and what stays as it is, with the reason."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import backquant.qconfig as bq
from backquant.backend_config import BackendConfig, DTypeConfig, get_backend_config
from backquant.engines import onednn
from backquant.lower import MachineFacts, engine_info, lower
from backquant.observe import MinMaxObserver, PlaceholderObserver
from backquant.operators import conv, linear

WEIGHT = bq.default_dynamic_qconfig.weight
HALF = PlaceholderObserver.with_args(dtype=torch.float16)


def _dynamic(**options):
    defaults = {"dtype": torch.quint8, "quant_min": 0, "quant_max": 255, "is_dynamic": True}
    return PlaceholderObserver.with_args(**{**defaults, **options})


def _ask(activation, weight=WEIGHT):
    return bq.QConfigMapping().set_global(bq.QConfig(activation, weight))


def _backend(*dtype_configs: DTypeConfig) -> BackendConfig:
    entries = [*linear.entries(list(dtype_configs)), *conv.entries(list(dtype_configs))]
    return BackendConfig("custom").set_backend_pattern_configs(entries)


INT8 = DTypeConfig(torch.quint8, torch.float, torch.qint8, torch.float, is_dynamic=True)


def _only(lowered):
    [reason] = lowered.left_in_float
    return reason.rule, reason.asked, reason.admitted


REFUSED = {
    "signed": (
        DTypeConfig(torch.qint8, torch.float, torch.qint8, torch.float, is_dynamic=True),
        _ask(_dynamic(dtype=torch.qint8, quant_min=-128, quant_max=127)),
        ("input-dtype", "input int8, affine", "uint8, affine"),
    ),
    "symmetric": (
        INT8,
        _ask(_dynamic(qscheme=torch.per_tensor_symmetric)),
        ("input-dtype", "input uint8, symmetric", "uint8, affine"),
    ),
    "range": (
        INT8,
        _ask(_dynamic(quant_max=63)),
        ("quant-range", "[0, 63]", "[0, 255] or [0, 127]"),
    ),
    "eps": (
        INT8,
        _ask(_dynamic(eps=2**-12)),
        ("eps", "scales of at least 0.000244141", "scales of at least 2**-14"),
    ),
    "bfloat16": (
        DTypeConfig(torch.bfloat16, torch.float, torch.bfloat16, torch.float, is_dynamic=True),
        _ask(_dynamic(dtype=torch.bfloat16), PlaceholderObserver.with_args(dtype=torch.bfloat16)),
        ("dtypes", "weight bfloat16, input bfloat16", "int8 with uint8, float16 with float16"),
    ),
    "mixed": (
        DTypeConfig(torch.float16, torch.float, torch.qint8, torch.float, is_dynamic=True),
        _ask(_dynamic(dtype=torch.float16)),
        ("dtypes", "weight int8, input float16", "int8 with uint8, float16 with float16"),
    ),
    "mixed the other way": (
        DTypeConfig(torch.quint8, torch.float, torch.float16, torch.float, is_dynamic=True),
        _ask(_dynamic(), HALF),
        ("dtypes", "weight float16, input uint8", "int8 with uint8, float16 with float16"),
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_takes_stays_as_it_is(flow, name):
    config, mapping, expected = REFUSED[name]
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    reference, lowered = flow(model, (x,), mapping, "fbgemm", _backend(config))
    assert _only(lowered) == expected
    assert lowered.kernels == ()
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_dynamic_convolutions_have_no_kernel(flow):
    model, x = nn.Sequential(nn.Conv2d(3, 4, 3)), torch.randn(2, 3, 6, 6)
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    reference, lowered = flow(model, (x,), mapping, "fbgemm", _backend(INT8))
    assert _only(lowered) == (
        "no-kernel",
        "dynamic quantization with a weight of torch.int8",
        "engine fbgemm has no such kernel",
    )
    assert torch.equal(lowered.graph_module(x), reference(x))


def test_a_range_of_seven_bits(flow):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    for engine in ("fbgemm", "onednn", "x86"):
        _, lowered = flow(model, (x,), _ask(_dynamic(quant_max=127)), engine)
        assert lowered.kernels[0].kernel == f"quantized.linear_dynamic({engine}, 7 bits)"
    reference, lowered = flow(model, (x,), _ask(_dynamic(quant_max=127)), "fbgemm")
    assert torch.allclose(lowered.graph_module(x), reference(x), atol=1e-5)
    _, lowered = flow(model, (x,), _ask(_dynamic(quant_max=127)), "qnnpack")
    assert _only(lowered) == ("quant-range", "[0, 127]", "[0, 255]")


def test_functions_keep_eight_bits_on_onednn(flow):
    class Function(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self, x):
            return F.linear(x, self.weight)

    mapping, x = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig), torch.randn(2, 4)
    with torch.no_grad():
        reference, lowered = flow(Function(), (x,), mapping, "onednn")
        assert lowered.kernels[0].kernel == "quantized.linear_dynamic(onednn)"
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=1e-5)


@pytest.mark.parametrize("engine", ["fbgemm", "x86", "qnnpack", "onednn"])
def test_affine_weights(flow, engine):
    model, x = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4)
    model[0].weight.data += 1
    affine = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_affine)
    with torch.no_grad():
        reference, lowered = flow(model, (x,), _ask(_dynamic(), affine), engine)
        if engine == "onednn":
            assert _only(lowered)[0] == "weight-zero-point"
            return
        assert int(reference.get_submodule("0").weight_zero_point) != 0
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=0.05)
    assert lowered.left_in_float == ()


HALVES = DTypeConfig(torch.float16, torch.float16, torch.float16, torch.float16)


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.weight = nn.Parameter(torch.randn(4, 8))
        self.bias = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return F.linear(F.relu(self.first(x)), self.weight, self.bias)


@pytest.mark.parametrize("engine", ["fbgemm", "x86"])
def test_static_float16_keeps_its_casts(flow, engine):
    model, x = Mixed(), torch.randn(3, 4)
    with torch.no_grad():
        reference, lowered = flow(model, (x,), _ask(HALF, HALF), engine, _backend(HALVES))
        graph = lowered.graph_module
        casts = torch.ops.quantized_decomposed.convert_element_type.no_fuse
        count = [node.target for node in graph.graph.nodes].count(casts)
        assert count == 6  # input, between, output; each there and back
        assert torch.allclose(graph(x), reference(x), atol=2e-3)
        assert torch.equal(graph(x), graph(x).half().float())
    assert [use.kernel for use in lowered.kernels] == [
        f"quantized.linear_relu_dynamic_fp16({engine})",
        f"quantized.linear_dynamic_fp16({engine})",
    ]
    assert lowered.left_in_float == ()


def test_static_float16_without_a_kernel(flow):
    model, x = Mixed(), torch.randn(3, 4)
    with torch.no_grad():
        reference, lowered = flow(model, (x,), _ask(HALF, HALF), "qnnpack", _backend(HALVES))
        assert torch.equal(lowered.graph_module(x), reference(x))
    assert {reason.rule for reason in lowered.left_in_float} >= {"no-kernel"}
    assert {reason.node for reason in lowered.left_in_float} >= {"first", "linear"}


def test_float16_weights_alone(flow):
    config = DTypeConfig(torch.float, torch.float, torch.float16, torch.float)
    mapping = _ask(PlaceholderObserver, HALF)
    model, x = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)), torch.randn(3, 4)
    with torch.no_grad():
        reference, lowered = flow(model, (x,), mapping, "fbgemm", _backend(config))
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=1e-5)
    assert len(lowered.kernels) == 2


def test_activations_of_fused_modules_follow_in_float(flow):
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    model = nn.Sequential(nn.Linear(4, 8), nn.LeakyReLU(0.2), nn.Linear(8, 4), nn.Tanh())
    x = torch.randn(3, 4)
    with torch.no_grad():
        _, lowered = flow(model, (x,), mapping, "onednn")
        graph = lowered.graph_module
        assert lowered.left_in_float == ()
        first, second = graph.get_submodule("0"), graph.get_submodule("2")
        assert (first.config.post_op, second.config.post_op) == ("leaky_relu", "tanh")
        y = torch.tanh(_without(second)(F.leaky_relu(_without(first)(x), 0.2)))
        assert torch.equal(graph(x), y)
        # On fbgemm they are operators of their own, and are listed as such.
        _, lowered = flow(model, (x,), mapping, "fbgemm")
        assert [reason.node for reason in lowered.left_in_float] == ["_1", "_3"]


def _without(kernel):
    config = type(kernel.config)(kernel.config.engine, torch.int8, kernel.config.reduce_range)
    return type(kernel)(config, dict(kernel.named_buffers()))


def test_one_dynamic_input_of_several_readers(flow):
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.three = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, x):
            return self.one(x) + self.two(x), self.three(x)

    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    x, model = torch.randn(2, 4), Fan()
    with torch.no_grad():
        reference, lowered = flow(model, (x,), mapping, "qnnpack")
        chosen = [n for n in reference.graph.nodes if "choose_qparams" in str(n.target)]
        assert len(chosen) == 1
        assert not any(
            "quantized_decomposed" in str(n.target) for n in lowered.graph_module.graph.nodes
        )
        pairs = zip(lowered.graph_module(x), reference(x), strict=True)
        assert all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


def test_a_refused_reader_keeps_the_quantization_of_its_input(flow):
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return self.one(x) + self.two(x)

    affine = MinMaxObserver.with_args(dtype=torch.qint8)
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    mapping.set_module_name("two", bq.QConfig(_dynamic(), affine))
    model, x = Pair(), torch.randn(2, 4)
    model.two.weight.data += 1
    with torch.no_grad():
        reference, lowered = flow(model, (x,), mapping, "onednn")
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=0.1)
    assert [r.node for r in lowered.left_in_float] == ["two", "add", "add"]
    assert len(lowered.kernels) == 1


def test_an_engine_without_the_kernel(tools, flow):
    mapping = bq.QConfigMapping().set_global(bq.default_dynamic_qconfig)
    reference, _ = flow(nn.Sequential(nn.Linear(4, 4)), (torch.randn(2, 4),), mapping, "fbgemm")
    facts = MachineFacts("x86_64", {}, True, (), "2.13.0")
    lowered = lower(reference, onednn.X86.rules(), engine_info("x86", facts))
    assert _only(lowered) == ("no-kernel", "a dynamic linear kernel", "not in this build")


def test_static_neighbours(flow):
    """A dynamic layer between static ones: floats between them, and nothing else."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    mapping = bq.get_default_qconfig_mapping("qnnpack")
    mapping.set_module_name("1", bq.default_dynamic_qconfig)
    x = torch.randn(8, 4)
    with torch.no_grad():
        reference, lowered = flow(model, (x,), mapping, "qnnpack")
        assert lowered.left_in_float == ()
        assert [use.kernel for use in lowered.kernels] == [
            "quantized.linear(qnnpack)",
            "quantized.linear_dynamic(qnnpack)",
            "quantized.linear(qnnpack)",
        ]
        assert torch.allclose(lowered.graph_module(x), reference(x), atol=0.05)


def test_the_rules_are_in_the_tables_of_all_engines():
    from backquant.lower import find_engine

    for name in ("x86", "onednn", "fbgemm", "qnnpack"):
        names = {rule.name for rule in find_engine(name).rules()}
        assert names >= {"dynamic linear", "recurrent layer", "recurrent cell", "embedding"}
        assert get_backend_config(name).engine == name
