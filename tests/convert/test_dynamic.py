"""What is quantized at each call, in its weights only, or to a narrower float: beside PyTorch's."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
import torch.nn.functional as F
from torch import fx, nn
from torch.ao.quantization.backend_config import DTypeConfig as TorchDType
from torch.ao.quantization.backend_config.x86 import get_x86_backend_config as torch_x86
from torch.ao.quantization.quantize_fx import (
    _convert_to_reference_decomposed_fx,
    convert_to_reference_fx,
    prepare_fx,
)

import backquant.qconfig as bq
from backquant.backend_config import BackendConfig, DTypeConfig, get_x86_backend_config
from backquant.convert import convert_to_reference
from backquant.observe import PlaceholderObserver

CONVERT = {
    "decomposed": _convert_to_reference_decomposed_fx,
    "quantized_tensor": convert_to_reference_fx,
}


class Layer(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return self.layer(x)


class States(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(6, 8)
        self.gru = nn.GRU(8, 8)
        self.cell = nn.LSTMCell(8, 8)

    def forward(self, x, h, c):
        y, (h, c) = self.lstm(x, (h, c))
        y, h = self.gru(y, h)
        return self.cell(y[0], (h[0], c[0]))


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(5, 6))
        self.bias = nn.Parameter(torch.randn(5))
        self.second = nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        return F.linear(F.relu(F.linear(x, self.first, self.bias)), self.second, bias=self.bias)


class Embeddings(nn.Module):
    def __init__(self, mode: str = "sum") -> None:
        super().__init__()
        self.table = nn.Embedding(20, 6)
        self.bag = nn.EmbeddingBag(20, 6, mode=mode)
        self.fc = nn.Linear(6, 4)

    def forward(self, indices, offsets):
        return self.fc(self.bag(indices, offsets)) + self.fc(self.table(indices[:3]))


STEP, SEQUENCE = (3, 6), (5, 3, 6)
MODELS: dict[str, tuple[Any, list[tuple[int, ...]]]] = {
    "linear": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)), [STEP]),
    "linear_relu": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1)),
        [STEP],
    ),
    "linear_batch_norm": (
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4)),
        [STEP],
    ),
    "functional": (Functional, [STEP]),
    "lstm": (lambda: Layer(nn.LSTM(6, 8)), [SEQUENCE]),
    "lstm_of_two_layers": (lambda: Layer(nn.LSTM(6, 8, 2)), [SEQUENCE]),
    "lstm_bidirectional": (
        lambda: Layer(nn.LSTM(6, 8, 2, bidirectional=True, batch_first=True)),
        [SEQUENCE],
    ),
    "lstm_without_bias": (lambda: Layer(nn.LSTM(6, 8, bias=False)), [SEQUENCE]),
    "gru": (lambda: Layer(nn.GRU(6, 8)), [SEQUENCE]),
    "gru_bidirectional": (
        lambda: Layer(nn.GRU(6, 8, 2, bidirectional=True, batch_first=True)),
        [SEQUENCE],
    ),
    "lstm_cell": (lambda: Layer(nn.LSTMCell(6, 8)), [STEP]),
    "gru_cell": (lambda: Layer(nn.GRUCell(6, 8)), [STEP]),
    "rnn_cell": (lambda: Layer(nn.RNNCell(6, 8)), [STEP]),
    "rnn_cell_relu": (lambda: Layer(nn.RNNCell(6, 8, nonlinearity="relu")), [STEP]),
    "states": (States, [SEQUENCE, (1, 3, 8), (1, 3, 8)]),
}


def _flat(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for part in value for tensor in _flat(part)]


def _same(one: Any, two: Any) -> bool:
    return all(torch.equal(a, b) for a, b in zip(_flat(one), _flat(two), strict=True))


def _theirs(model: nn.Module, example: tuple[Any, ...], mapping: Any, backend: Any) -> Any:
    """Their prepared model, and a function that converts it in a dialect."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(copy.deepcopy(model), mapping, example, backend_config=backend)

    def convert(dialect: str) -> fx.GraphModule:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return CONVERT[dialect](copy.deepcopy(prepared), backend_config=backend)

    return prepared, convert


def _model(name: str) -> tuple[nn.Module, tuple[torch.Tensor, ...]]:
    make, shapes = MODELS[name]
    return make().eval(), tuple(torch.randn(shape) for shape in shapes)


def _asked(qconfig: str) -> tuple[Any, Any]:
    ours = bq.QConfigMapping().set_global(getattr(bq, qconfig))
    return ours, tq.QConfigMapping().set_global(getattr(tq.qconfig, qconfig))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("qconfig", ["default_dynamic_qconfig", "per_channel_dynamic_qconfig"])
def test_dynamic_integers(flow, name, qconfig):
    model, example = _model(name)
    asked, theirs_asked = _asked(qconfig)
    prepared = flow.prepare(model, asked)
    theirs, convert = _theirs(model, example, theirs_asked, torch_x86())
    assert prepared.code == theirs.code
    for dialect in CONVERT:
        ours, expected = convert_to_reference(prepared, dialect=dialect), convert(dialect)
        if (name, dialect) != ("functional", "decomposed"):  # their weights are floats there
            assert ours.code == expected.code
        with torch.no_grad():
            assert _same(ours(*example), expected(*example))
            assert not _same(ours(*example), model(*example))


@pytest.mark.parametrize("name", MODELS)
def test_dynamic_float16(flow, name):
    """PyTorch's reference modules leave float16 weights in float32; so the model is rounded first."""
    model, example = _model(name)
    for key, parameter in model.named_parameters():
        if key.rpartition(".")[2].startswith("weight"):
            parameter.data = parameter.data.half().float()
    asked, theirs_asked = _asked("float16_dynamic_qconfig")
    prepared = flow.prepare(model, asked)
    theirs, convert = _theirs(model, example, theirs_asked, torch_x86())
    assert prepared.code == theirs.code
    ours, expected = convert_to_reference(prepared, dialect="quantized_tensor"), None
    if name != "linear_batch_norm":  # folding changes the weights after they were rounded
        expected = convert("quantized_tensor")
        assert ours.code == expected.code
    decomposed = convert_to_reference(prepared)
    with torch.no_grad():
        assert expected is None or _same(ours(*example), expected(*example))
        assert _same(decomposed(*example), ours(*example))
    with pytest.raises(AssertionError, match=r"Unsupported dtype|only uint8 and int8"):
        convert("decomposed")  # why there is nothing to compare the other dialect with


@pytest.mark.parametrize(
    "qconfig", ["float_qparams_weight_only_qconfig", "float_qparams_weight_only_qconfig_4bit"]
)
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_weights_alone(flow, qconfig, mode):
    model = Embeddings(mode).eval()
    example = (torch.randint(0, 20, (9,)), torch.tensor([0, 4, 5]))
    asked, theirs_asked = _asked(qconfig)
    prepared = flow.prepare(model, asked)
    theirs, convert = _theirs(model, example, theirs_asked, torch_x86())
    assert prepared.code == theirs.code
    ours, expected = (
        convert_to_reference(prepared, dialect="quantized_tensor"),
        convert("quantized_tensor"),
    )
    assert ours.code == expected.code
    with torch.no_grad():
        assert _same(ours(*example), expected(*example))
        # Their other dialect rounds 8-bit zero points to integers and has no 4-bit form.
        assert _same(convert_to_reference(prepared)(*example), ours(*example))
    assert ours.get_submodule("table").weight.dtype == torch.uint8
    assert type(ours.get_submodule("fc")) is nn.Linear


def test_only_the_zeroth_argument_is_observed(flow):
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = nn.GRUCell(6, 8)

        def forward(self, x, h):
            return self.cell(x, h), self.cell(input=x, hx=h)

    asked, _ = _asked("default_dynamic_qconfig")
    prepared = flow.prepare(Product().eval(), asked)
    names = [node.name for node in prepared.graph.nodes]
    assert [name for name in names if name.startswith("activation_post_process")] == [
        "activation_post_process_0"
    ]
    [observer] = [node for node in prepared.graph.nodes if node.name.startswith("activation")]
    assert observer.args[0].name == "x"


def test_a_dynamic_value_is_quantized_once_for_all_its_readers(flow):
    class Fan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(6, 4), nn.Linear(6, 4)

        def forward(self, x):
            return self.one(x) + self.two(x)

    asked, _ = _asked("default_dynamic_qconfig")
    reference = convert_to_reference(flow.prepare(Fan().eval(), asked))
    targets = [str(node.target) for node in reference.graph.nodes]
    assert targets.count("quantized_decomposed.choose_qparams.tensor") == 1
    assert targets.count("quantized_decomposed.dequantize_per_tensor.tensor") == 1


# -- narrower floats, by a description of the user's -------------------------------------------------


def _extended(config: Any, dtype_config: Any) -> Any:
    """A description whose linear layers run in one more dtype config."""
    linear = {nn.Linear, F.linear}
    for entry in config.configs:
        parts = set(entry.pattern) if isinstance(entry.pattern, tuple) else {entry.pattern}
        if linear & {entry.root_module, *parts}:
            entry.set_dtype_configs([*entry.dtype_configs, dtype_config])
    return config


def _backend(dtype: torch.dtype) -> BackendConfig:
    """x86, and linear layers in a narrower float throughout."""
    return _extended(get_x86_backend_config(), DTypeConfig(dtype, dtype, dtype, dtype))


def _torch_backend(dtype: torch.dtype) -> Any:
    return _extended(torch_x86(), TorchDType(dtype, dtype, dtype, dtype))


@pytest.mark.parametrize("name", ["linear", "linear_relu", "linear_batch_norm", "functional"])
def test_static_float16(flow, name):
    model, example = _model(name)
    asked, theirs_asked = _asked("float16_static_qconfig")
    prepared = flow.prepare(model, asked, backend=_backend(torch.float16))
    theirs, convert = _theirs(model, example, theirs_asked, _torch_backend(torch.float16))
    assert prepared.code == theirs.code
    assert "activation_post_process" in prepared.code
    rounded = copy.deepcopy(prepared)
    for module in (rounded, theirs):  # their reference modules leave weights in float32
        for key, parameter in module.named_parameters():
            if key.rpartition(".")[2] == "weight":
                parameter.data = parameter.data.half().float()
    for dialect in CONVERT:
        ours, expected = convert_to_reference(rounded, dialect=dialect), convert(dialect)
        if (name, dialect) != ("functional", "decomposed"):  # ours are stored as float16 there
            assert ours.code == expected.code
        with torch.no_grad():
            assert _same(ours(*example), expected(*example))
            if name != "linear_relu":  # it ends in a softmax, which stays float
                assert _same(ours(*example), ours(*example).half().float())


def _bfloat16(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a reference of casts computes for a sequence of linear layers and ReLUs."""

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.bfloat16).to(torch.float32)

    for layer in model:
        x = (
            cast(F.linear(cast(x), cast(layer.weight), layer.bias))
            if isinstance(layer, nn.Linear)
            else layer(x)
        )
    return x


BF16 = PlaceholderObserver.with_args(dtype=torch.bfloat16)


@pytest.mark.parametrize("dialect", list(CONVERT))
def test_static_bfloat16(flow, dialect):
    """PyTorch observes no bfloat16 and leaves such a model as it is, without a word."""
    model, x = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 4)).eval(), torch.randn(3, 6)
    asked = bq.QConfigMapping().set_global(bq.QConfig(BF16, BF16))
    prepared = flow.prepare(model, asked, backend=_backend(torch.bfloat16))
    reference = convert_to_reference(prepared, dialect=dialect)
    assert reference.get_submodule("0").weight.dtype == torch.bfloat16
    with torch.no_grad():
        assert torch.equal(reference(x), _bfloat16(model, x))
        assert not torch.equal(reference(x), model(x))
    theirs = tq.QConfigMapping().set_global(
        tq.QConfig(
            tq.PlaceholderObserver.with_args(dtype=torch.bfloat16),
            tq.PlaceholderObserver.with_args(dtype=torch.bfloat16),
        )
    )
    _, convert = _theirs(model, (x,), theirs, _torch_backend(torch.bfloat16))
    with torch.no_grad():
        assert torch.equal(convert(dialect)(x), model(x))


@pytest.mark.parametrize("dialect", list(CONVERT))
def test_bfloat16_of_functions(flow, dialect):
    model, x = Functional().eval(), torch.randn(3, 6)
    asked = bq.QConfigMapping().set_global(bq.QConfig(BF16, BF16))
    prepared = flow.prepare(model, asked, backend=_backend(torch.bfloat16))
    reference = convert_to_reference(prepared, dialect=dialect)

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(torch.bfloat16).to(torch.float32)

    with torch.no_grad():
        bias = cast(model.bias)
        y = cast(F.relu(F.linear(cast(x), cast(model.first), bias)))
        assert torch.equal(reference(x), cast(F.linear(y, cast(model.second), bias)))
    stored = {str(b.dtype) for b in reference.buffers()}
    assert stored == ({"torch.bfloat16"} if dialect == "decomposed" else set())


@pytest.mark.parametrize("dialect", list(CONVERT))
def test_dynamic_bfloat16(flow, dialect):
    dtype = torch.bfloat16
    dtype_config = DTypeConfig(dtype, torch.float, dtype, torch.float, is_dynamic=True)
    config = _extended(get_x86_backend_config(), dtype_config)
    activation = PlaceholderObserver.with_args(dtype=dtype, is_dynamic=True)
    asked = bq.QConfigMapping().set_global(bq.QConfig(activation, BF16))
    model, x = nn.Sequential(nn.Linear(6, 8)).eval(), torch.randn(3, 6)
    reference = convert_to_reference(flow.prepare(model, asked, backend=config), dialect=dialect)

    def cast(value: torch.Tensor) -> torch.Tensor:
        return value.to(dtype).to(torch.float32)

    with torch.no_grad():
        assert torch.equal(reference(x), F.linear(cast(x), cast(model[0].weight), model[0].bias))


def test_narrow_weights_of_functions_take_half_the_memory(flow):
    asked, _ = _asked("float16_dynamic_qconfig")
    model = Functional().eval()
    model.first.data[0, 0] = 1e6  # saturates, as in modules
    reference = convert_to_reference(flow.prepare(model, asked))
    weights = [b for b in reference.buffers() if b.dim() == 2]
    assert [b.dtype for b in weights] == [torch.float16] * 2
    assert not [p for p in reference.parameters() if p.dim() == 2]
    assert weights[0].max() == torch.finfo(torch.float16).max
