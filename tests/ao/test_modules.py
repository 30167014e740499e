"""Every module class of the mirror beside ``torch.ao``'s: made in each way that it has, run, compared."""

from __future__ import annotations

import copy
import importlib
import inspect
import pickle
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from backquant.ao.left_out import _LeftOut
from backquant.errors import ConfigError

torch.backends.quantized.engine = "fbgemm"

OURS, THEIRS = "backquant.ao", "torch.ao"
PACKAGES = (
    *(
        "nn.intrinsic",
        "nn.intrinsic.qat",
        "nn.intrinsic.quantized",
        "nn.intrinsic.quantized.dynamic",
    ),
    *("nn.qat", "nn.qat.dynamic", "nn.quantizable", "nn.quantized", "nn.quantized.dynamic"),
    "nn.quantized.reference",
)
SIZES = {1: (3, 4, 9), 2: (3, 4, 6, 6), 3: (3, 4, 4, 4, 4)}
RECURRENT = ("GRU", "LSTM", "RNNCell", "GRUCell", "LSTMCell")
#: The arguments of float modules.
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("Linear", "MultiheadAttention"), (4, 4)),
    **dict.fromkeys(("Embedding", "EmbeddingBag"), (8, 12)),
    **dict.fromkeys(RECURRENT, (4, 3)),
    **{f"Conv{kind}{n}d": (4, 4, 3) for kind in ("", "Transpose") for n in (1, 2, 3)},
    **{f"{kind}Norm{n}d": (4,) for kind in ("Batch", "Instance") for n in (1, 2, 3)},
    **{"LayerNorm": (4,), "GroupNorm": (2, 4), "Softmax": (1,), "ELU": (0.7,), "LeakyReLU": (0.1,)},
}


#: Made of observed modules, or borders without a float module: tests/nn, tests/nn/test_eager.py.
ELSEWHERE = (
    *("nn.quantized.LSTM", "nn.quantized.MultiheadAttention"),
    *("nn.quantized.DeQuantize", "nn.quantized.QFunctional", "nn.quantized.Quantize"),
)
#: What fails in PyTorch (constructors of batch norms; no operator of fbgemm), or is wrong there (PReLU halves
#: positive values): ours is compared with the float module.
BROKEN = (
    *("BNReLU2d", "BNReLU3d", "BatchNorm2d", "BatchNorm3d", "LinearLeakyReLU", "LinearTanh"),
    *("ConvAdd2d", "ConvAddReLU2d", "PReLU"),
)


def get(prefix: str, path: str) -> Any:
    package, _, name = path.rpartition(".")
    return getattr(importlib.import_module(f"{prefix}.{package}"), name)


def classes() -> Iterator[str]:
    for package in PACKAGES:
        theirs = importlib.import_module(f"{THEIRS}.{package}")
        for name in getattr(theirs, "__all__", dir(theirs)):
            path = f"{package}.{name}"
            if not inspect.isclass(get(THEIRS, path)) or not issubclass(
                get(THEIRS, path), nn.Module
            ):
                continue
            if not isinstance(get(OURS, path), _LeftOut):
                yield path


def parts(name: str) -> list[Any]:
    """The float modules that a class of this name stands for."""
    rank = name[-2:] if name.endswith("d") else ""
    pieces = re.match("(Conv|Linear|BN)(Add)?(Bn)?(ReLU|LeakyReLU|Tanh)?([123]d)?$", name)
    if pieces is None or hasattr(nn, name):
        return [getattr(nn, name)(*ARGUMENTS.get(name, ()))]
    root, add, norm, activation, _ = pieces.groups()
    names = {"Conv": f"Conv{rank}", "Linear": "Linear", "BN": f"BatchNorm{rank}"}
    made = parts(names[root])
    made += [torch.add] if add else []
    made += parts(f"BatchNorm{rank}") if norm else []
    return made + (parts(activation) if activation else [])


def float_of(prefix: str, path: str) -> Any:
    torch.manual_seed(1)
    name = path.rpartition(".")[2]
    if name == "EmbeddingBag":
        return nn.EmbeddingBag(8, 12, mode="sum")
    made = parts(name)
    for norm in (part for part in made if hasattr(part, "running_mean")):
        for tensor in (norm.running_var, norm.running_mean, norm.weight, norm.bias):
            if tensor is not None:
                tensor.detach().uniform_(0.5, 1.5)
    return made[0] if len(made) == 1 else get(prefix, f"nn.intrinsic.{name}")(*made)


def inputs(name: str) -> tuple[torch.Tensor, ...]:
    made = torch.Generator().manual_seed(2)
    if "Embedding" in name:
        indices = torch.tensor([1, 3, 7, 3, 0])
        return (indices, torch.tensor([0, 2])) if "Bag" in name else (indices,)
    if name == "MultiheadAttention":
        return tuple(torch.randn(3, 5, 2, 4, generator=made).unbind())
    sizes = SIZES.get(int(name[-2]), ()) if re.search("[123]d$", name) else SIZES[2]
    plain = {"LSTM": (5, 2, 4), "GRU": (5, 2, 4), "LayerNorm": (2, 6, 4)}
    size = (3, 4) if "Linear" in name or name.endswith("Cell") else plain.get(name, sizes)
    size = (3, 4) if name == "LinearBn1d" else size
    x = torch.randn(size, generator=made)
    return (x, torch.randn(3, 4, 4, 4, generator=made)) if "Add" in name else (x,)


def to_train(prefix: str, path: str) -> Any:
    if "Embedding" in path:
        return get(prefix, "quantization.default_embedding_qat_qconfig")
    if "dynamic" not in path:
        return get(prefix, "quantization.get_default_qat_qconfig")("qnnpack")
    observer = get(prefix, "quantization.observer.MovingAverageMinMaxObserver")
    fake = get(prefix, "quantization.FakeQuantize").with_args(
        observer=observer, averaging_constant=1
    )
    return get(prefix, "quantization.QConfig")(
        fake, get(prefix, "quantization.default_weight_fake_quant")
    )


def takes_integers(path: str) -> bool:
    """Whether inputs are PyTorch's quantized tensors."""
    package, _, name = path.rpartition(".")
    return package in ("nn.quantized", "nn.intrinsic.quantized") and "Embedding" not in name


def weight_qparams(name: str) -> dict[str, Any]:
    found: dict[str, Any] = {"qscheme": torch.per_tensor_affine, "dtype": torch.qint8}
    found |= {"scale": 0.01, "zero_point": 0, "is_decomposed": False}
    if "Embedding" in name:
        found |= {
            "qscheme": torch.per_channel_affine_float_qparams,
            "dtype": torch.quint8,
            "axis": 0,
        }
        found |= {"scale": torch.full((8,), 0.02), "zero_point": torch.full((8,), 120.0)}
    if name not in RECURRENT:
        return found
    names = [n for n, _ in getattr(nn, name)(4, 3).named_parameters() if n.startswith("weight")]
    return {n: dict(found) for n in names} | {"is_decomposed": False}


# The ways to make a module: functions of the library and the path of the class.


def constructed(prefix: str, path: str) -> Any:
    torch.manual_seed(1)
    kind, name = get(prefix, path), path.rpartition(".")[2]
    package = path.rpartition(".")[0]
    if package == "nn.intrinsic":
        return kind(*parts(name))
    first = parts(name)[0]
    arguments = ARGUMENTS[type(first).__name__]
    named: dict[str, Any] = {"mode": "sum"} if name == "EmbeddingBag" else {}
    if "qat" in package:
        named["qconfig"] = to_train(prefix, path)
    if package.endswith("reference"):
        key = "weight_qparams_dict" if name in RECURRENT else "weight_qparams"
        named[key] = weight_qparams(name)
    made = kind(*arguments, **named)
    if name == "LinearBn1d":
        nn.init.zeros_(made.bias)  # memory as it lay there, in PyTorch
    return made


def from_float(prefix: str, path: str) -> Any:
    kind, (package, _, name) = get(prefix, path), path.rpartition(".")
    module = float_of(prefix, path)
    if package.endswith("reference"):
        return kind.from_float(module, weight_qparams(name))
    if "qat" in package:
        request = to_train(prefix, path)
        for part in module.train().modules():
            part.qconfig = request
        return kind.from_float(module)
    request = "default_dynamic_qconfig" if "dynamic" in package else "default_qconfig"
    request = "float_qparams_weight_only_qconfig" if "Embedding" in name else request
    for part in module.eval().modules():
        part.qconfig = get(prefix, f"quantization.{request}")
    if takes_integers(path):
        observer = module.qconfig.activation()
        observer(run(module, inputs(name)))
        module.activation_post_process = observer
    return kind.from_float(module)


def in_float_again(prefix: str, path: str) -> Any:
    made = from_float(prefix, path)
    run(made, inputs(path.rpartition(".")[2]))
    return made.to_float().eval()


def from_reference(prefix: str, path: str) -> Any:
    kind, (package, _, name) = get(prefix, path), path.rpartition(".")
    module = float_of(prefix, path).eval()
    module.qconfig = get(prefix, "quantization.default_qconfig")
    fused = isinstance(module, nn.Sequential)
    root = module[0] if fused else module
    if hasattr(get(THEIRS, "nn.quantized.reference"), type(root).__name__):
        reference = get(prefix, f"nn.quantized.reference.{type(root).__name__}")
        integers = reference.from_float(root, weight_qparams(type(root).__name__))
        if fused:
            module[0] = integers
        else:
            module = integers
    numbers = () if "dynamic" in package or "Embedding" in name else (0.05, 64)
    return kind.from_reference(module, *numbers)


WAYS: dict[str, Callable[[str, str], Any]] = {
    "constructed": constructed,
    "from_float": from_float,
    "to_float": in_float_again,
    "from_reference": from_reference,
}


def run(module: Any, given: tuple[torch.Tensor, ...]) -> Any:
    with torch.no_grad():
        return module(*given)


def cases() -> Iterator[tuple[str, str]]:
    for path in classes():
        kind, package = get(THEIRS, path), path.rpartition(".")[0]
        by_hand = package in ("nn.intrinsic", "nn.quantizable", "nn.quantized.reference")
        for way in WAYS:
            is_made = by_hand or "qat" in package if way == "constructed" else hasattr(kind, way)
            if is_made and path not in ELSEWHERE:
                yield path, way


def result(make: Callable[[], Any], path: str) -> list[torch.Tensor]:
    given = inputs(path.rpartition(".")[2])
    if takes_integers(path):
        given = tuple(torch.quantize_per_tensor(x, 0.05, 60, torch.quint8) for x in given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's: quantized tensors, eager mode
        made = make()
        torch.manual_seed(4)
        return tree_leaves(run(made, given))


@pytest.mark.parametrize("path, way", cases())
def test_it_gives_pytorchs_numbers(path: str, way: str) -> None:
    ours = result(lambda: WAYS[way](OURS, path), path)
    if takes_integers(path) and path.rpartition(".")[2] in BROKEN:
        module = float_of(OURS, path).eval()
        theirs = result(lambda: lambda *xs: module(*(x.dequantize() for x in xs)), path)
        (mine,), (real,) = ours, theirs
        expected = torch.quantize_per_tensor(real, mine.q_scale(), mine.q_zero_point(), mine.dtype)
        off = (mine.int_repr().int() - expected.int_repr().int()).abs().max()
        assert off <= (2 if way == "from_float" else 8)  # weights in steps of 0.01
        return
    for mine, real in zip(ours, result(lambda: WAYS[way](THEIRS, path), path), strict=True):
        if real.is_quantized:
            assert mine.q_scale() == pytest.approx(real.q_scale())
            assert mine.q_zero_point() == real.q_zero_point()
            assert (mine.int_repr().int() - real.int_repr().int()).abs().max() <= 1
        else:
            torch.testing.assert_close(mine, real)


def test_a_dynamic_layer_is_copied_saved_and_changed() -> None:
    made, x = from_float(OURS, "nn.quantized.dynamic.Linear"), inputs("Linear")
    for again in (copy.deepcopy(made), pickle.loads(pickle.dumps(made))):
        assert torch.equal(run(again, x), run(made, x))
    half = nn.Linear(4, 4)
    half.qconfig = get(OURS, "quantization.float16_dynamic_qconfig")
    made = get(OURS, "nn.quantized.dynamic.Linear").from_float(half)
    assert made.weight().dtype == torch.float16
    torch.testing.assert_close(run(made, x), run(half, x), atol=1e-3, rtol=1e-3)
    with pytest.raises(ConfigError, match="has no qconfig"):
        get(OURS, "nn.quantized.Linear").from_float(nn.Linear(4, 4))
