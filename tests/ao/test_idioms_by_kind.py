"""What people do with a converted model, on each kind of it: layers, engines, flows, loaded from a file.

A kind is made once; an idiom that changes a model gets a copy. Models are called until recordings run, so
that each idiom shows that these end with the first change.
"""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils._pytree import tree_leaves

import backquant
import backquant.ao
from backquant.errors import BackquantError
from backquant.nn.quantized.scaled import Scaled, Weighted

Made = tuple[Any, torch.Tensor]
IDIOMS: dict[str, Callable[[Any, torch.Tensor, str], None]] = {}


class Net(nn.Module):
    """Fused layers, a plain one, a sum, a pool, a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.relu = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()
        self.side, self.fc = nn.Conv2d(8, 8, 1), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.relu(self.bn(self.conv(x)))
        x = x + self.side(x)
        return self.fc(torch.flatten(F.adaptive_avg_pool2d(x, 1), 1))


class Functional(nn.Module):
    """Weights that are passed to functions."""

    def __init__(self) -> None:
        super().__init__()
        self.w, self.b = nn.Parameter(torch.randn(8, 3, 3, 3)), nn.Parameter(torch.randn(8))
        self.v, self.c = nn.Parameter(torch.randn(4, 8)), nn.Parameter(torch.randn(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.conv2d(x, self.w, self.b, (1, 1), (1, 1), (1, 1), 1))
        return F.linear(F.adaptive_avg_pool2d(x, 1).flatten(1), self.v, self.c)


class Embedded(nn.Module):
    """A table, and a bag of one."""

    def __init__(self) -> None:
        super().__init__()
        self.emb, self.bag = nn.Embedding(10, 128), nn.EmbeddingBag(10, 128, mode="sum")
        self.fc = nn.Linear(128, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.fc(self.emb(ids).sum(1) + self.bag(ids))


class Recurrent(nn.Module):
    """A layer and a cell."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.cell = nn.LSTM(16, 8, batch_first=True), nn.GRUCell(8, 8)
        self.fc = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.cell(self.lstm(x)[0][:, -1]))


class Mixed(nn.Module):
    """A layer that stays in float and a table, each before layers that are quantized."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.a = nn.EmbeddingBag(10, 16, mode="sum"), nn.Linear(16, 16)
        self.b, self.c = nn.Bilinear(16, 16, 8), nn.Linear(8, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.a(self.bag(ids))
        return self.c(self.b(x, x))


def wide() -> nn.Module:
    return nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64), nn.GELU())


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(10, 128), nn.Linear(128, 8))


def _noise(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


IMAGES, TOKENS, ROWS = _noise(4, 3, 8, 8), _noise(4, 5, 16), _noise(2, 128)
IDS = torch.randint(0, 10, (3, 4), generator=torch.Generator().manual_seed(0))
# how it is made, of which model, for which backend, with which options
KINDS: dict[str, tuple[str, Callable[[], nn.Module], torch.Tensor, str, dict[str, Any]]] = {
    "fbgemm": ("convert", Net, IMAGES, "fbgemm", {}),
    "qat": ("train", Net, IMAGES, "fbgemm", {}),
    "x86": ("quantize", Net, IMAGES, "x86", {}),
    "onednn": ("quantize", Net, IMAGES, "onednn", {}),
    "qnnpack": ("quantize", Net, IMAGES, "qnnpack", {}),
    "export": ("quantize", Net, IMAGES, "x86", {"capture": "export"}),
    "integers": ("quantize", Net, IMAGES, "x86", {"integer_io": True}),
    "functions": ("convert", Functional, IMAGES, "fbgemm", {}),
    "functions-x86": ("quantize", Functional, IMAGES, "x86", {}),
    "tables": ("convert", Embedded, IDS, "fbgemm", {}),
    "mixed": ("convert", Mixed, IDS, "fbgemm", {}),
    "file-mixed": ("file", Mixed, IDS, "x86", {}),
    "recurrent": ("convert", Recurrent, TOKENS, "fbgemm", {}),
    "recurrent-x86": ("quantize", Recurrent, TOKENS, "x86", {}),
    "dynamic": ("dynamic", wide, ROWS, "fbgemm", {}),
    "dynamic-qnnpack": ("dynamic", wide, ROWS, "qnnpack", {}),
    "half": ("half", wide, ROWS, "fbgemm", {}),
    "groups": ("quantize", wide, ROWS, "x86_lowbit", {}),
    "groups-of-a-table": ("quantize", table, IDS, "x86_lowbit", {}),
    "file": ("file", Net, IMAGES, "x86", {}),
    "file-qnnpack": ("file", Net, IMAGES, "qnnpack", {}),
    "file-functions": ("file", Functional, IMAGES, "x86", {}),
    "file-tables": ("file", Embedded, IDS, "x86", {}),
    "file-recurrent": ("file", Recurrent, TOKENS, "x86", {}),
    "file-groups": ("file", wide, ROWS, "x86_lowbit", {}),
    "file-groups-of-a-table": ("file", table, IDS, "x86_lowbit", {}),
    "file-integers": ("file", Net, IMAGES, "x86", {"integer_io": True}),
    "reference": ("quantize", Net, IMAGES, "xnnpack", {}),
}
QCONFIGS = {
    "dynamic": backquant.default_dynamic_qconfig,
    "half": backquant.ao.quantization.float16_dynamic_qconfig,
}


def _converted(how: str, model: nn.Module, x: torch.Tensor, backend: str, calibrate: bool) -> Any:
    ao = backquant.ao.quantization
    if how == "train":
        mapping = ao.get_default_qat_qconfig_mapping(backend)
        prepared = backquant.prepare_qat_fx(model.train(), mapping, (x,), backend_config=backend)
        if calibrate:
            prepared(x).square().mean().backward()
        return backquant.convert_fx(prepared.eval())
    mapping = backquant.default_mapping(backend)
    if how in QCONFIGS:
        mapping = backquant.QConfigMapping().set_global(QCONFIGS[how])
    prepared = backquant.prepare_fx(model, mapping, (x,), backend_config=backend)
    if calibrate:
        prepared(x)
    return backquant.convert_fx(prepared)


def _fresh(kind: str, folder: Path | None = None, calibrate: bool = True) -> Any:
    """A model; what is not calibrated at all, or on other data, has other scales."""
    how, make, x, backend, options = KINDS[kind]
    torch.manual_seed(0)
    if how not in ("quantize", "file"):
        return _converted(how, make().eval(), x, backend, calibrate)
    data = x * 3 if x.is_floating_point() and not calibrate else x
    options = {"backend": backend, "slower": "keep", **options}
    made = backquant.quantize(make().eval(), x, calibration=[data], **options)
    if how == "file":
        assert folder is not None
        backquant.save(made, folder / f"{kind}.bq")
        made = backquant.load(folder / f"{kind}.bq")
    return made


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Made]:
    folder = tmp_path_factory.mktemp("kinds")

    @cache
    def of(kind: str) -> Made:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model, x = _fresh(kind, folder), KINDS[kind][2]
        for _ in range(3):
            model(x)
        return model, x

    return of


def idiom(function: Callable[[Any, torch.Tensor, str], None]) -> Any:
    IDIOMS[function.__name__] = function
    return function


def same(one: Any, other: Any) -> bool:
    def plain(value: torch.Tensor) -> torch.Tensor:
        return value.int_repr() if value.is_quantized else value

    pairs = zip(tree_leaves(one), tree_leaves(other), strict=True)
    return all(torch.equal(plain(a), plain(b)) for a, b in pairs)


def layers(q: Any) -> list[Any]:
    return [module for module in q.modules() if isinstance(module, Weighted)]


def scaled(q: Any) -> list[str]:
    """Layers whose result is integers; those that are quantized at each call have a scale, too, of no effect,
    as in PyTorch."""
    return [
        name
        for name, module in q.named_modules()
        if isinstance(module, Scaled)
        and "scale" in module._buffers
        and not type(module).__module__.endswith(".dynamic")
    ]


def called(q: Any) -> list[str]:
    return [str(node.target) for node in q.graph.nodes if node.op == "call_module"]


def names(q: Any) -> list[str]:
    return [node.name for node in q.graph.nodes]


@idiom
def quantized_layers_are_shown(q: Any, x: torch.Tensor, kind: str) -> None:
    if q.engine is None:  # a reference model, as of convert_to_reference_fx
        assert isinstance(q.fc, backquant.nn.quantized.reference.Linear)
        return
    functions = [n for n in q.graph.nodes if "quantized" in str(n.target) and n.op != "call_module"]
    assert layers(q) or functions
    assert not any(type(module).__module__.startswith("backquant.lower") for module in q.modules())


@idiom
def a_module_of_a_node(q: Any, x: torch.Tensor, kind: str) -> None:
    modules = dict(q.named_modules())
    assert all(target in modules for target in called(q))


@idiom
def a_tensor_of_a_node(q: Any, x: torch.Tensor, kind: str) -> None:
    for node in q.graph.find_nodes(op="get_attr"):
        owner, _, name = node.target.rpartition(".")
        assert getattr(q.get_submodule(owner), name) is not None


@idiom
def scale_and_zero_point(q: Any, x: torch.Tensor, kind: str) -> None:
    for layer in layers(q):
        if "scale" in layer._buffers:
            assert layer.scale > 0 and type(layer.zero_point) is int
        else:
            assert not hasattr(layer, "scale") and not hasattr(layer, "zero_point")


@idiom
def weight_and_bias(q: Any, x: torch.Tensor, kind: str) -> None:
    for layer in layers(q):
        if hasattr(layer, "get_weight"):
            assert not hasattr(layer, "weight")
            found = [*layer.get_weight().values()]
            assert layer.get_bias().keys()
        else:
            found = [layer.weight()]
            assert layer.bias() is None or layer.bias().is_floating_point()
        for weight in found:
            is_of_groups = "per_group" in repr(layer)
            assert weight.is_quantized or weight.dtype == torch.float16 or is_of_groups
            assert weight.dequantize().isfinite().all()


@idiom
def names_of_classes(q: Any, x: torch.Tensor, kind: str) -> None:
    assert all("Quantized" in layer._get_name() for layer in layers(q))


@idiom
def text_of_layers(q: Any, x: torch.Tensor, kind: str) -> None:
    for layer in layers(q):
        words = repr(layer)
        assert "scale=" in words or "dtype=" in words or "LSTM" in words or "Cell" in words
    assert all(layer._get_name() in repr(q) for layer in layers(q))


@idiom
def print_the_graph(q: Any, x: torch.Tensor, kind: str) -> None:
    assert "forward" in q.print_readable(print_output=False) and "return" in q.code


@idiom
def keys_of_the_state(q: Any, x: torch.Tensor, kind: str) -> None:
    state = q.state_dict()
    for path, module in q.named_modules():
        if isinstance(module, Weighted) and "weight" in module._buffers:
            assert f"{path}.weight" in state
    assert not any("graph_module" in key for key in state)
    assert all(isinstance(value, torch.Tensor) for value in state.values())


@idiom
def run_the_graph(q: Any, x: torch.Tensor, kind: str) -> None:
    assert same(q._literally(x), q(x))


@idiom
def run_the_code(q: Any, x: torch.Tensor, kind: str) -> None:
    names = {"torch": torch, "device": torch.device, **q.graph.python_code("self").globals}
    exec(q.code, names)
    run: Any = names["forward"]
    assert same(run(q, x), q(x))


@idiom
def interpret(q: Any, x: torch.Tensor, kind: str) -> None:
    assert same(fx.Interpreter(q).run(x), q(x))


@idiom
def propagate_shapes(q: Any, x: torch.Tensor, kind: str) -> None:
    q = copy.deepcopy(q)
    ShapeProp(q).propagate(x)
    assert "tensor_meta" in q.graph.output_node().meta


@idiom
def deep_copy(q: Any, x: torch.Tensor, kind: str) -> None:
    other = copy.deepcopy(q)
    assert same(other(x), q(x)) and same(other._literally(x), q(x)) and names(other) == names(q)


@idiom
def shallow_copy(q: Any, x: torch.Tensor, kind: str) -> None:
    assert same(copy.copy(q)(x), q(x))


@idiom
def pickled(q: Any, x: torch.Tensor, kind: str) -> None:
    other = pickle.loads(pickle.dumps(q))
    assert same(other(x), q(x)) and names(other) == names(q) and called(other) == called(q)
    assert [*other.state_dict()] == [*q.state_dict()]
    assert other.load_state_dict(q.state_dict()).missing_keys == [] and same(other(x), q(x))


@idiom
def save_the_whole_model(q: Any, x: torch.Tensor, kind: str) -> None:
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    assert same(torch.load(file, weights_only=False)(x), q(x))


@idiom
def add_a_call(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before = copy.deepcopy(q), q(x)
    output = q.graph.output_node()
    with q.graph.inserting_before(output):
        output.args = (q.graph.call_function(torch.clone, output.args),)
    q.graph.lint()
    q.recompile()
    assert same(q(x), before) and not q._is_unchanged()


@idiom
def recompile(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before = copy.deepcopy(q), q(x)
    q.recompile()
    assert same(q(x), before)


@idiom
def hooks_of_children(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before, seen = copy.deepcopy(q), q(x), []
    for _ in range(3):
        q(x)
    targets = called(q)
    handles = [
        q.get_submodule(target).register_forward_hook(lambda *_: seen.append(1))
        for target in targets
    ]
    assert same(q(x), before) and len(seen) == len(targets)
    for handle in handles:
        handle.remove()
    assert same(q(x), before) and len(seen) == len(targets)


@idiom
def hook_of_the_model(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before, seen = copy.deepcopy(q), q(x), []
    q.register_forward_pre_hook(lambda module, args: seen.append(args))
    q.register_forward_hook(lambda module, args, y: seen.append(y))
    assert same(q(x), before) and len(seen) == 2


@idiom
def set_a_scale(q: Any, x: torch.Tensor, kind: str) -> None:
    """A step that is eight times finer: results saturate."""
    for name in scaled(q)[:1]:
        other = copy.deepcopy(q)
        for _ in range(3):
            other(x)
        layer = other.get_submodule(name)
        layer.scale = layer.scale / 8
        assert not same(other(x), q(x)) and other.state_dict()[f"{name}.scale"] == layer.scale


@idiom
def set_a_weight(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before = copy.deepcopy(q), q(x)
    last = [layer for layer in layers(q) if not hasattr(layer, "get_weight")][-1:]
    for layer in last:
        if layer.weight().is_quantized:
            zero = torch.zeros_like(layer.weight().dequantize())
            layer.set_weight_bias(_quantized_like(zero, layer.weight()), layer.bias())
            assert not same(q(x), before)


def _quantized_like(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    if other.qscheme() == torch.per_tensor_affine:
        return torch.quantize_per_tensor(x, other.q_scale(), other.q_zero_point(), other.dtype)
    numbers = other.q_per_channel_scales(), other.q_per_channel_zero_points()
    return torch.quantize_per_channel(x, *numbers, other.q_per_channel_axis(), other.dtype)


@idiom
def replace_a_child(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before = copy.deepcopy(q), q(x)
    for target in called(q)[-1:]:
        q.set_submodule(target, copy.deepcopy(q.get_submodule(target)))
    assert same(q(x), before)


@idiom
def a_float_operator_that_reads_integers(q: Any, x: torch.Tensor, kind: str) -> None:
    q = copy.deepcopy(q)
    integers = [node for node in q.graph.nodes if node.target in scaled(q)]
    for node in integers[:1]:
        with q.graph.inserting_after(node):
            sine = q.graph.call_function(torch.sin, (node,))
        node.replace_all_uses_with(sine)
        sine.args = (node,)
        q.recompile()
        with pytest.raises(BackquantError, match=r"`sin` is an operator of floats"):
            q(x)


@idiom
def a_part_of_a_model(q: Any, x: torch.Tensor, kind: str) -> None:
    whole = nn.Sequential(q, nn.Identity())
    assert same(whole(x), q(x)) and any(name.startswith("0.") for name in whole.state_dict())


@idiom
def modes_and_devices(q: Any, x: torch.Tensor, kind: str) -> None:
    q, before = copy.deepcopy(q), q(x)
    assert same(q.train()(x), before) and same(q.to("cpu").eval()(x), before)
    assert not q.training


@idiom
def state_through_a_file(q: Any, x: torch.Tensor, kind: str) -> None:
    file = io.BytesIO()
    torch.save(q.state_dict(), file)
    file.seek(0)
    other = copy.deepcopy(q)
    found = other.load_state_dict(torch.load(file, weights_only=True))
    assert not found.missing_keys and not found.unexpected_keys and same(other(x), q(x))


@idiom
def another_batch(q: Any, x: torch.Tensor, kind: str) -> None:
    assert tree_leaves(q(x[:1]))[0].shape[0] == 1


@pytest.fixture(autouse=True)
def engine() -> Iterator[None]:
    before = torch.backends.quantized.engine
    yield
    torch.backends.quantized.engine = before


@pytest.mark.filterwarnings("ignore")  # reports of models that stay mostly float
@pytest.mark.parametrize("name", IDIOMS)
@pytest.mark.parametrize("kind", KINDS)
def test_idioms(kind: str, name: str, made: Callable[[str], Made]) -> None:
    IDIOMS[name](*made(kind), kind)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_loads_into_a_model_with_other_scales(
    kind: str, made: Callable[[str], Made], tmp_path: Path
) -> None:
    q, x = made(kind)
    other = _fresh(kind, tmp_path, calibrate=False)
    other.load_state_dict(q.state_dict())
    assert same(other(x), q(x)) and same(other._literally(x), q(x))


def test_there_are_enough_idioms() -> None:
    assert len(IDIOMS) >= 26
