"""Models show quantized modules, on each engine and in each flow; where nothing runs, reference modules."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

import backquant as bq
import backquant.ao
from backquant.nn.quantized import reference
from backquant.nn.quantized.scaled import Scaled

nnq, nniq = backquant.ao.nn.quantized, backquant.ao.nn.intrinsic.quantized
IMAGES, TOKENS = (4, 3, 8, 8), (4, 5, 16)


class Net(nn.Module):
    """Fused layers, a plain one, a sum, a pool, a linear layer that gives floats."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.side, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = x + self.side(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(16, 16) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = torch.softmax(self.q(x) @ self.k(x).transpose(1, 2) / 4, -1)
        return self.o(weights @ self.v(x))


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.emb, self.fc = nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.emb(ids))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.v, self.c = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.conv2d(x, self.w, self.b, (1, 1), (1, 1), (1, 1), 1))
        return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), self.v, self.c)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.fc = nn.LSTM(16, 8, batch_first=True), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.lstm(x)[0])


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(16, 8), nn.Linear(8, 3), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.relu(self.a(x))
        return self.b(x), torch.sigmoid(self.c(x))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(16, 32), nn.LayerNorm(16), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.b(F.gelu(self.a(self.norm(x))))


MODELS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(16, 8)), TOKENS),
    "mlp": (lambda: nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), TOKENS),
    "tanh": (lambda: nn.Sequential(nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 4)), TOKENS),
    "net": (Net, IMAGES),
    "attention": (Attention, TOKENS),
    "embedding": (Embedded, ()),
    "functional": (Functional, IMAGES),
    "recurrent": (Recurrent, TOKENS),
    "heads": (Heads, TOKENS),
    "residual": (Residual, TOKENS),
    "transposed": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 2)), IMAGES),
    "prelu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.PReLU(8), nn.Conv2d(8, 4, 1)), IMAGES),
    "norms": (
        lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8), nn.Conv2d(8, 4, 1)),
        IMAGES,
    ),
    "gelu": (lambda: nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4), nn.GELU()), TOKENS),
    "silu": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.SiLU()), IMAGES),
    "relu6": (lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 1), nn.ReLU6()), IMAGES),
    "encoder": (lambda: nn.TransformerEncoderLayer(16, 2, 32, batch_first=True), TOKENS),
}
# engines of PyTorch's kinds, and backends that other runtimes run: what is here is a reference model
ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
REFERENCES = ("xnnpack", "onnxruntime", "tensorrt")
FLOWS = ("quantize", "export", "convert")
FOLLOWING = {"gelu": "GELU", "silu": "SiLU", "relu6": "ReLU6"}
# a float operator beside quantized ones: its sums depend on the order of memory that it is given
ROUNDED = ("transposed",)


def _quantized(flow: str, model: str, backend: str) -> tuple[bq.QuantizedModel, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = MODELS[model]
    x = torch.randn(shape) if shape else torch.randint(0, 10, (3, 4))
    if flow != "convert":
        options: dict[str, Any] = {"capture": "export"} if flow == "export" else {}
        if model == "recurrent":
            options["slower"] = "keep"  # else the speed of this machine decides
        return bq.quantize(make().eval(), x, calibration=[x], backend=backend, **options), x
    prepared = bq.prepare_fx(
        make().eval(), bq.default_mapping(backend), (x,), backend_config=backend
    )
    prepared(x)
    return bq.convert_fx(prepared), x


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    return all(map(_same, one, other))


def _shown(model: fx.GraphModule) -> list[str]:
    """Quantized modules and calls of quantized operators."""
    modules = [name for name, module in model.named_modules() if isinstance(module, Scaled)]
    words = ("quantized.linear", "quantized.conv", "to_floats")
    calls = [n.name for n in model.graph.nodes if any(word in str(n.target) for word in words)]
    return modules + calls


@pytest.mark.filterwarnings("ignore::UserWarning")  # reports of models that stay mostly float
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("flow", FLOWS)
@pytest.mark.parametrize("backend", ENGINES)
def test_models_show_quantized_modules(backend: str, flow: str, model: str) -> None:
    """With the bits of what runs."""
    quantized, x = _quantized(flow, model, backend)
    shown = _shown(quantized)
    assert shown
    if model in ROUNDED:
        torch.testing.assert_close(quantized._literally(x), quantized(x))
    else:
        assert _same(quantized._literally(x), quantized(x))
    modules = dict(quantized.named_modules())
    for node in quantized.graph.find_nodes(op="call_module", sort=False):
        assert node.target in modules
    for name in shown:
        if name in modules and isinstance(modules[name], (nnq.Linear, nnq.Conv2d)):
            assert modules[name].weight().is_quantized  # type: ignore[operator]


@pytest.mark.parametrize("backend", REFERENCES)
def test_what_other_runtimes_run_shows_reference_modules(backend: str) -> None:
    """As ``convert_to_reference_fx`` does: here nothing computes on integers."""
    quantized, _ = _quantized("quantize", "net", backend)
    assert quantized.engine is None and isinstance(quantized.fc, reference.Linear)


@pytest.fixture(scope="module")
def net() -> tuple[bq.QuantizedModel, torch.Tensor]:
    return _quantized("quantize", "net", "x86")


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda q: pickle.loads(pickle.dumps(q))],
    ids=["deepcopy", "pickle"],
)
def test_a_layer_that_gives_floats_is_copied(
    net: tuple[bq.QuantizedModel, torch.Tensor], copied: Callable[[Any], Any]
) -> None:
    quantized, x = net
    made = copied(quantized)
    assert type(made.fc) is nnq.Linear and _same(made(x), quantized(x))
    assert _same(made._literally(x), quantized(x))


def test_a_layer_that_gives_floats_is_like_others(
    net: tuple[bq.QuantizedModel, torch.Tensor],
) -> None:
    """It has a weight, a bias, a name; no scale, since its result has none."""
    quantized, x = net
    layer: Any = dict(quantized.named_modules())["fc"]
    assert type(layer) is nnq.Linear and type(quantized.conv) is nniq.ConvReLU2d
    assert layer.weight().int_repr().shape == (4, 8) and layer.bias().shape == (4,)
    assert layer._get_name() == "QuantizedLinear" and "dtype=torch.float32" in repr(layer)
    assert not hasattr(layer, "scale") and not hasattr(layer, "zero_point")
    assert "fc.weight" in quantized.state_dict() and "fc.scale" not in quantized.state_dict()
    ShapeProp(quantized).propagate(x)
    assert torch.equal(fx.Interpreter(quantized).run(x), quantized(x))


def test_a_layer_that_gives_floats_is_edited_and_hooked() -> None:
    """The kernel is made again of what the module has, and of the scale of what it is given."""
    quantized, x = _quantized("quantize", "net", "x86")
    before, seen = quantized(x), []
    handle = quantized.fc.register_forward_hook(lambda m, a, y: seen.append((a[0].dtype, y.dtype)))  # type: ignore[operator, union-attr]
    assert torch.equal(quantized(x), before) and seen == [(torch.quint8, torch.float32)]
    handle.remove()
    layer: Any = quantized.fc
    after = before - layer.bias().detach()
    layer.set_weight_bias(layer.weight(), torch.zeros(4))
    assert torch.allclose(quantized(x), after, atol=1e-5)


def test_its_state_loads_into_a_model_that_was_prepared_anew() -> None:
    quantized, x = _quantized("quantize", "net", "x86")
    fresh, _ = _quantized("quantize", "net", "x86")
    fresh.fc.set_weight_bias(fresh.fc.weight(), torch.zeros(4))  # type: ignore[operator, union-attr]
    assert not torch.equal(fresh(x), quantized(x))
    fresh.load_state_dict(quantized.state_dict())
    assert torch.equal(fresh(x), quantized(x)) and type(fresh.fc) is nnq.Linear


@pytest.mark.parametrize("model", FOLLOWING)
def test_a_function_that_the_kernel_of_a_layer_computes_is_named(model: str) -> None:
    """The layer has its weight, and its state loads; without the form all layers were shown as kernels."""
    quantized, x = _quantized("quantize", model, "x86")
    layer: Any = quantized.get_submodule("1")
    assert f"followed_by={FOLLOWING[model]}" in repr(layer)
    fresh, _ = _quantized("quantize", model, "x86")
    fresh.get_submodule("1").set_weight_bias(layer.weight(), torch.zeros(4))  # type: ignore[operator]
    assert not torch.equal(fresh(x), quantized(x))
    fresh.load_state_dict(quantized.state_dict())
    assert torch.equal(fresh(x), quantized(x)) and torch.equal(copy.deepcopy(fresh)(x), fresh(x))
