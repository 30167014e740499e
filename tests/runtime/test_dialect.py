"""What a converted model shows: PyTorch's modules and operators, with the bits of the call."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backquant.ao.quantization.backend_config.native import (
    get_test_only_legacy_native_backend_config,
)
from torch import fx, nn
from torch.ao.quantization import QConfigMapping, get_default_qconfig_mapping
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import backquant as bq
from backquant.nn.quantized.scaled import Weighted, limited

IMAGES, SEQUENCES, VOLUMES, ROWS = (2, 4, 8, 8), (2, 4, 8), (2, 4, 5, 5, 5), (3, 8)


def _between(layer: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(4, 4, 3), layer, nn.Conv2d(4, 4, 1))


class Calls(nn.Module):
    """Two convolutions, and a function of both."""

    def __init__(self, function: Callable[[Any, Any], Any]) -> None:
        super().__init__()
        self.left, self.right, self.function = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1), function

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.left(x), self.right(x))


class Functional(nn.Module):
    def __init__(self, *shape: int, call: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(shape[0]))
        self.call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x, self.w, self.b)


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 4, 1), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.conv(x).mean((2, 3)).view(x.shape[0], -1))


def _conv(x: Any, w: Any, b: Any) -> Any:
    return F.conv2d(x, w, b, (1, 1), (1, 1), (1, 1), 1)


def _transposed(x: Any, w: Any, b: Any) -> Any:
    return F.conv_transpose1d(x, w, b, [1], [0], [0], 1, [1])


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "Conv1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3)), SEQUENCES),
    "Conv2d": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1)), IMAGES),
    "Conv2d, reflect": (
        lambda: nn.Sequential(nn.Conv2d(4, 4, 3, padding=1, padding_mode="reflect")),
        IMAGES,
    ),
    "Conv3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3)), VOLUMES),
    "ConvReLU1d": (lambda: nn.Sequential(nn.Conv1d(4, 4, 3), nn.ReLU()), SEQUENCES),
    "ConvReLU2d": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.ReLU()), IMAGES),
    "ConvReLU3d": (lambda: nn.Sequential(nn.Conv3d(4, 4, 3), nn.ReLU()), VOLUMES),
    "ConvBn2d": (lambda: nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)), IMAGES),
    "ConvTranspose1d": (lambda: nn.Sequential(nn.ConvTranspose1d(4, 4, 3)), SEQUENCES),
    "ConvTranspose2d": (lambda: nn.Sequential(nn.ConvTranspose2d(4, 4, 3)), IMAGES),
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 8)), ROWS),
    "LinearReLU": (lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)), ROWS),
    **{
        type(layer).__name__: (lambda layer=layer: _between(layer), IMAGES)  # type: ignore[misc]
        for layer in (
            *(nn.ELU(), nn.Hardswish(), nn.LeakyReLU(), nn.PReLU(), nn.Dropout(), nn.Sigmoid()),
            *(nn.Tanh(), nn.Hardsigmoid(), nn.ReLU6(), nn.Hardtanh(), nn.Softmax(1)),
            *(nn.LayerNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True)),
            *(nn.BatchNorm2d(4), nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(1)),
            *(nn.Identity(), nn.Upsample(scale_factor=2)),
        )
    },
    "BNReLU2d": (lambda: _between(nn.Sequential(nn.BatchNorm2d(4), nn.ReLU())), IMAGES),
    "add": (lambda: Calls(lambda a, b: a + b), IMAGES),
    "add, relu": (lambda: Calls(lambda a, b: F.relu(a + b)), IMAGES),
    "mul": (lambda: Calls(lambda a, b: a * b), IMAGES),
    "mul, relu": (lambda: Calls(lambda a, b: F.relu(a * b)), IMAGES),
    "matmul": (lambda: Calls(torch.matmul), IMAGES),
    "cat": (lambda: Calls(lambda a, b: torch.cat([a, b], 1)), IMAGES),
    "interpolate": (lambda: Calls(lambda a, b: F.interpolate(a + b, scale_factor=2)), IMAGES),
    "permute": (lambda: Calls(lambda a, b: (a + b).permute(0, 2, 3, 1)), IMAGES),
    "mean, view": (Pooled, IMAGES),
    "F.linear": (lambda: Functional(8, 8, call=F.linear), ROWS),
    "F.linear, relu": (
        lambda: Functional(8, 8, call=lambda x, w, b: F.relu(F.linear(x, w, b))),
        ROWS,
    ),
    "F.conv2d": (lambda: Functional(4, 4, 3, 3, call=_conv), IMAGES),
    "F.conv_transpose1d, relu": (
        lambda: Functional(
            4, 4, 3, call=lambda x, w, b: F.relu(F.conv_transpose1d(x, w, b, [1], [0], [0], 1, [1]))
        ),
        SEQUENCES,
    ),
    "F.hardswish": (lambda: Calls(lambda a, b: F.hardswish(a + b)), IMAGES),
    "F.elu": (lambda: Calls(lambda a, b: F.elu(a + b, alpha=0.7)), IMAGES),
    "F.leaky_relu": (lambda: Calls(lambda a, b: F.leaky_relu(a + b, 0.2)), IMAGES),
    "F.layer_norm": (lambda: Calls(lambda a, b: F.layer_norm(a, [8]) + b), IMAGES),
    "F.instance_norm": (lambda: Calls(lambda a, b: F.instance_norm(a + b)), IMAGES),
    "+ number": (lambda: Calls(lambda a, b: 1.5 + (a * b)), IMAGES),
    "- number, relu": (lambda: Calls(lambda a, b: F.relu((a * b) + -0.3)), IMAGES),
    "* number": (lambda: Calls(lambda a, b: (a + b) * 3), IMAGES),
}


def _batches(shape: tuple[int, ...]) -> list[torch.Tensor]:
    return [torch.randn(shape) * 2 for _ in range(3)]


def _ours(model: nn.Module, backend: str, batches: list[torch.Tensor]) -> bq.QuantizedModel:
    mapping = bq.ao.quantization.get_default_qconfig_mapping(backend)
    prepared = bq.prepare_fx(model, mapping, (batches[0],), backend_config=backend)
    for batch in batches:
        prepared(batch)
    return bq.convert_fx(prepared)


def _torchs(model: nn.Module, backend: str, batches: list[torch.Tensor]) -> fx.GraphModule:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model, get_default_qconfig_mapping(backend), (batches[0],))
        for batch in batches:
            prepared(batch)
        return convert_fx(prepared)


def _words(model: fx.GraphModule) -> list[str]:
    """The nodes: names of modules' classes, and of operators; without what limits integers."""
    return [
        model.get_submodule(str(n.target))._get_name() if n.op == "call_module" else str(n.target)
        for n in model.graph.nodes
        if n.target is not limited and n.op not in ("placeholder", "output")
    ]


@pytest.mark.parametrize("backend", ["fbgemm", "qnnpack"])
@pytest.mark.parametrize("case", CASES)
def test_the_graph_is_that_of_torch_and_gives_the_bits_of_the_call(case: str, backend: str) -> None:
    make, shape = CASES[case]
    torch.manual_seed(0)
    model, batches = make().eval(), _batches(shape)
    quantized = _ours(model, backend, batches)
    # far outside of what was calibrated, too: limits of the integers are kept
    for x in (batches[0], 4 * batches[1]):
        assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))
    ours, theirs = _words(quantized), _words(_torchs(model, backend, batches))
    if "number" in case:  # theirs has a scale of its own, which follows from the number
        ours, theirs = ([w for w in words if "_" not in w] for words in (ours, theirs))
    assert ours == theirs


BETWEEN_FLOATS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "Linear": (lambda: nn.Sequential(nn.Linear(8, 8)), ROWS, "default_dynamic_qconfig"),
    "LinearReLU": (
        lambda: nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 3)),
        ROWS,
        "per_channel_dynamic_qconfig",
    ),
    "Linear, float16": (lambda: nn.Sequential(nn.Linear(8, 8)), ROWS, "float16_dynamic_qconfig"),
    "F.linear": (lambda: Functional(8, 8, call=F.linear), ROWS, "default_dynamic_qconfig"),
    "F.linear, relu, float16": (
        lambda: Functional(8, 8, call=lambda x, w, b: F.relu(F.linear(x, w, b))),
        ROWS,
        "float16_dynamic_qconfig",
    ),
    "Embedding": (
        lambda: nn.Sequential(nn.Embedding(9, 8)),
        torch.tensor([[1, 8], [0, 3]]),
        "float_qparams_weight_only_qconfig",
    ),
    "EmbeddingBag, 4 bits": (
        lambda: nn.Sequential(nn.EmbeddingBag(9, 8, mode="sum", include_last_offset=False)),
        torch.tensor([[1, 8], [0, 3]]),
        "float_qparams_weight_only_qconfig_4bit",
    ),
}


@pytest.mark.parametrize("case", BETWEEN_FLOATS)
def test_what_is_quantized_at_each_call_is_shown_by_its_kernel(case: str) -> None:
    make, given, qconfig = BETWEEN_FLOATS[case]
    torch.manual_seed(0)
    model, x = make().eval(), given if isinstance(given, torch.Tensor) else torch.randn(given)
    ours = bq.ao.quantization.QConfigMapping().set_global(getattr(bq.ao.quantization, qconfig))
    quantized = bq.convert_fx(bq.prepare_fx(model, ours, (x,), backend_config="fbgemm"))
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))
    assert torch.equal(copy.deepcopy(quantized)(x), quantized(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = QConfigMapping().set_global(getattr(torch.ao.quantization, qconfig))
        assert _words(quantized) == _words(convert_fx(prepare_fx(model, theirs, (x,))))
    shown = [module for module in quantized.modules() if isinstance(module, Weighted)]
    for module in shown:
        module._buffers["weight_scale"].mul_(2)  # type: ignore[union-attr]
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))


@pytest.mark.parametrize("case", ["Conv2d, reflect", "ConvReLU2d", "ConvTranspose1d", "LinearReLU"])
def test_layers_whose_sums_would_saturate_are_shown_like_others(case: str) -> None:
    """On CPUs without VNNI they compute in float, and give what float gives."""
    make, shape = CASES[case]
    model, batches = make().eval(), _batches(shape)
    qconfig = bq.QConfig(
        activation=bq.MinMaxObserver.with_args(dtype=torch.quint8),
        weight=bq.MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric),
    )
    mapping = bq.QConfigMapping().set_global(qconfig)
    prepared = bq.prepare_fx(model, mapping, (batches[0],), backend_config="fbgemm")
    prepared(batches[0])
    quantized = bq.convert_fx(prepared)
    x = 2 * batches[1]
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))
    assert "dequantize" not in _words(quantized)[:-1]


class Stacked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Conv2d(4, 4, 1), nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x))


def _converted(model: nn.Module, custom: Any, x: torch.Tensor) -> bq.QuantizedModel:
    mapping = bq.ao.quantization.get_default_qconfig_mapping("fbgemm")
    prepared = bq.prepare_fx(
        model, mapping, (x,), prepare_custom_config=custom, backend_config="fbgemm"
    )
    prepared(x)
    return bq.convert_fx(prepared)


@pytest.mark.parametrize("integers", [False, True])
def test_standalone_modules_are_shown_in_their_place(integers: bool) -> None:
    inner = bq.ao.quantization.fx.custom_config.PrepareCustomConfig()
    inner.set_input_quantized_indexes([0] if integers else [])
    inner.set_output_quantized_indexes([0] if integers else [])
    custom = bq.PrepareCustomConfig().set_standalone_module_name(
        "inner", None, (torch.randn(IMAGES),), inner, None
    )
    x = torch.randn(IMAGES)
    quantized = _converted(Stacked().eval(), custom, x)
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))
    part: Any = quantized.inner
    assert type(part.get_submodule("0"))._operator == "conv2d_relu"
    expected = quantized(x)
    assert part.code and quantized._is_unchanged()
    part.get_submodule("0").bias().zero_()
    assert not torch.equal(quantized(x), expected)
    other = _converted(Stacked().eval(), custom, x)
    changed: Any = other.inner
    [output] = changed.graph.find_nodes(op="output")
    output.args = (next(iter(changed.graph.nodes)),)
    changed.recompile()
    assert not other._is_unchanged()


def test_quantized_inputs_and_outputs_are_shown_as_quantized_tensors() -> None:
    custom = bq.PrepareCustomConfig()
    custom.set_input_quantized_indexes([0]).set_output_quantized_indexes([0])
    x = torch.quantize_per_tensor(torch.randn(IMAGES), 0.05, 64, torch.quint8)
    mapping = bq.ao.quantization.get_default_qconfig_mapping("fbgemm")
    model, real = CASES["ConvReLU2d"][0]().eval(), x.dequantize()
    prepared = bq.prepare_fx(
        model, mapping, (real,), prepare_custom_config=custom, backend_config="fbgemm"
    )
    prepared(real)
    quantized = bq.convert_fx(prepared)
    qparams = quantized.input_qparams[0]
    given = torch.quantize_per_tensor(real, *qparams.args, torch.quint8)
    result = fx.Interpreter(quantized).run(given)
    assert result.is_quantized and result.q_scale() == quantized.output_qparams[0].scale
    assert torch.equal(result.int_repr(), quantized(given))
    assert torch.equal(quantized._literally(given.int_repr()), quantized(given))


def test_a_module_that_is_called_twice_is_shown_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(4, 4, 1)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.conv(self.conv(x))

    x = torch.randn(IMAGES)
    quantized = _converted(Twice().eval(), None, x)
    first, second = (quantized.get_submodule(name) for name in ("conv", "conv_1"))
    assert first.scale != second.scale
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))


def test_casts_are_those_of_torch() -> None:
    mapping = bq.QConfigMapping().set_global(bq.ao.quantization.float16_static_qconfig)
    x = torch.randn(ROWS)
    backend = get_test_only_legacy_native_backend_config()
    model = nn.Sequential(nn.Sigmoid(), nn.Tanh())
    quantized = bq.convert_fx(bq.prepare_fx(model, mapping, (x,), backend_config=backend))
    assert [word for word in _words(quantized) if "_" not in word][:2] == ["to", "dequantize"]
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))


def _with_sine(model: bq.QuantizedModel) -> bq.QuantizedModel:
    """``model`` with a function of floats after its first layer."""
    layer = next(node for node in model.graph.nodes if node.op == "call_module")
    with model.graph.inserting_after(layer):
        sine = model.graph.call_function(torch.sin, (layer,))
    layer.replace_all_uses_with(sine, delete_user_cb=lambda user: user is not sine)
    model.recompile()
    return model


@pytest.mark.parametrize("stored", [False, True])
def test_an_operator_of_floats_that_reads_integers_is_named(tmp_path: Path, stored: bool) -> None:
    batches = _batches(IMAGES)
    model = _ours(CASES["ConvReLU2d"][0]().eval(), "qnnpack", batches)
    if stored:  # its graph has kernels, on plain integers
        bq.save(model, tmp_path / "model.bq")
        model = bq.load(tmp_path / "model.bq")
    with pytest.raises(
        bq.UsageError, match="`sin` is an operator of floats, and reads the integers"
    ):
        _with_sine(model)(batches[0])


def test_changes_of_what_is_shown_are_seen() -> None:
    """Whatever way it is changed: by an attribute, in place, in a table, by a hook."""
    batches = _batches(ROWS)
    model = _ours(CASES["LinearReLU"][0]().eval(), "qnnpack", batches)
    expected, layer = model(batches[0]), model.get_submodule("2")
    changes: list[Callable[[nn.Module], object]] = [
        lambda m: setattr(m, "scale", 9.0),
        lambda m: m.bias().add_(9.0),  # type: ignore[operator]
        lambda m: m._buffers["weight"].zero_(),  # type: ignore[union-attr]
        lambda m: m._buffers.update(scale=torch.tensor(9.0)),
        lambda m: m.register_buffer("bias", torch.full((3,), 9.0)),
        lambda m: m.register_forward_pre_hook(lambda *_: None),
    ]
    for change in changes:
        changed = copy.deepcopy(model)
        assert changed._is_unchanged()
        change(changed.get_submodule("2"))
        assert not changed._is_unchanged()
    assert model._is_unchanged() and torch.equal(model(batches[0]), expected)
    hook = layer.register_forward_hook(lambda *_: None)
    assert not model._is_unchanged()
    hook.remove()
    assert model._is_unchanged()


def test_a_model_that_was_quantized_in_inference_mode_runs() -> None:
    batches = _batches(ROWS)
    with torch.inference_mode():
        model = _ours(CASES["LinearReLU"][0]().eval(), "qnnpack", batches)
        expected = model(batches[0])
    assert torch.equal(model(batches[0]), expected)
