"""Objects of ``torch.ao`` here, and ours there."""

from __future__ import annotations

import functools
import importlib
import re
import subprocess
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
import torch.ao.quantization.backend_config.utils  # PyTorch's own getters fail without it
from torch import nn
from torch.ao.nn import intrinsic as torch_intrinsic
from torch.ao.nn import quantizable as torch_quantizable
from torch.ao.nn import quantized as torch_quantized
from torch.ao.quantization import backend_config as torch_backends
from torch.ao.quantization.fx import custom_config as torch_custom
from torch.ao.quantization.quant_type import QuantType as TorchQuantType
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

import backquant
from backquant import from_torch_ao, to_torch_ao
from backquant.backend_config import (
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    ForwardFuser,
    GraphPattern,
    KnownSlower,
    ObservationType,
    SequentialFuser,
)
from backquant.errors import SpecError, UsageError
from backquant.graph.grouped import grouped_linear
from backquant.nn import intrinsic, quantizable
from backquant.nn import quantized as own_quantized
from backquant.operators import find, find_root
from unkept import SYMMETRIC, as_kept

SRC = Path(backquant.__file__).parent

NAMES = ("native", "fbgemm", "qnnpack", "x86", "onednn", "tensorrt", "executorch", "qnnpack_pt2e")
ROOM = "torch.ao.quantization.backend_config"
# entries to which PyTorch gives a weight dtype although no operator in them has a weight
WITH_WEIGHTLESS = {"x86": 30, "tensorrt": 17, "executorch": 24, "qnnpack_pt2e": 8}


def theirs(name: str) -> Any:
    hidden = "_" if name == "qnnpack_pt2e" else ""
    module = importlib.import_module(f"{ROOM}.{hidden}{name}")
    return getattr(module, f"get_{name}_backend_config")()


def plain(value: Any) -> Any:
    """A dict of PyTorch's in which functions that it makes anew each time compare by what they are."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(plain, value))
    made = getattr(value, "__qualname__", "").partition(".<locals>")
    if made[1] and not isinstance(value, type):
        return (*made, [plain(cell.cell_contents) for cell in value.__closure__ or ()])
    return value


def _has_weight(entry: BackendPatternConfig) -> bool:
    ops = [node.op for node in entry.normal_pattern.nodes]
    records = [find_root(op) if isinstance(op, type) else find(op) for op in ops]
    return any(r is not None and (r.is_weighted or r.name == "layer_norm") for r in records)


def _any_scheme(config: DTypeConfig) -> DTypeConfig:
    made = config.to_dict()
    for role in ("input_dtype", "output_dtype", "weight_dtype"):
        demand = getattr(config, f"{role}_with_constraints")
        assert demand.symmetric or demand.dtype is None
        made[role] = replace(demand, symmetric=None)
    return DTypeConfig.from_dict(made)


# -- backends --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_backends_of_torch_are_ours(name: str) -> None:
    ours = backquant.get_backend_config(name).set_engine(None).set_defaults(None).set_qdq(None)
    found = from_torch_ao(as_kept(name, theirs(name)))
    for own in ours.configs:  # PyTorch's say nothing of tolerances, of rounded biases, of schemes
        configs = map(_any_scheme, own.dtype_configs) if name in SYMMETRIC else own.dtype_configs
        bare = {"tolerance": None, "bias_step_upper_bound": None}
        own.set_where(None).set_dtype_configs([{**c.to_dict(), **bare} for c in configs])
    theirs_too = [own for own in ours.configs if own.pattern is not grouped_linear]
    pairs = list(zip(found.configs, theirs_too, strict=True))
    different = [entry for entry, own in pairs if entry != own]
    assert len(different) == WITH_WEIGHTLESS.get(name, 0)
    assert not any(map(_has_weight, different))
    for entry, own in pairs:
        if entry in different:
            bare = [DTypeConfig(c.input_dtype_with_constraints, c.output_dtype_with_constraints)
                    for c in entry.dtype_configs]  # fmt: skip
            assert entry.set_dtype_configs(bare) == own


@pytest.mark.parametrize("name", NAMES)
def test_backends_of_torch_come_back(name: str) -> None:
    before = theirs(name)
    found = from_torch_ao(before)
    again = to_torch_ao(found).to_dict()
    expected = before.to_dict()
    if name == "qnnpack_pt2e":  # its getter is made inside of a function: ours finds the same node
        [entry] = [e for e in again["configs"] if "root_node_getter" in e]
        assert entry["root_node_getter"](("item", "pool", 0)) == "pool"
        for config in (again, expected):
            for e in config["configs"]:
                e.pop("root_node_getter", None)
    assert plain(again) == plain(expected)
    assert from_torch_ao(to_torch_ao(found)) == found
    assert BackendConfig.from_dict(from_torch_ao(before.to_dict())) == found
    assert plain(before.to_dict()) == plain(theirs(name).to_dict())  # not changed


def test_ours_in_torchs_flow() -> None:
    """A backend of ours drives PyTorch's prepare and convert, with PyTorch's modules."""
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Flatten()).eval()
    x = torch.randn(2, 1, 6, 6)
    without = ("engine", "defaults", "tolerance", "where")
    backend = to_torch_ao(backquant.get_backend_config("x86"), without=without)
    mapping = to_torch_ao(backquant.get_default_qconfig_mapping("x86"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        prepared = prepare_fx(model, mapping, (x,), backend_config=backend)
        assert type(prepared.get_submodule("0")) is torch_intrinsic.ConvReLU2d
        prepared(x)
        torch.testing.assert_close(convert_fx(prepared)(x), model(x), rtol=0, atol=0.1)


def test_what_torch_cannot_say_is_named() -> None:
    constraint = DTypeWithConstraints(torch.qint8, symmetric=True, ch_axis=0)
    entry = BackendPatternConfig(nn.Linear).add_dtype_config(
        DTypeConfig(torch.qint8, weight_dtype=constraint, bias_scale="input_times_weight")
    )
    backend = BackendConfig("mine").set_engine("x86").set_backend_pattern_config(entry)
    with pytest.raises(SpecError) as caught:
        to_torch_ao(backend)
    assert caught.value.what.endswith(": engine, bias_scale, symmetric, ch_axis")
    assert "entry Linear.dtype_configs[0].weight_dtype.symmetric" in caught.value.where
    assert "without=(" in caught.value.fix
    names = ("engine", "bias_scale", "symmetric", "ch_axis")
    [found] = to_torch_ao(backend, without=names).configs
    assert found.dtype_configs == [torch_backends.DTypeConfig(torch.qint8, None, torch.qint8)]
    slow = KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "32 values, 20 steps", 20.0, 18.0)
    with pytest.raises(SpecError, match=r": slower\n"):
        to_torch_ao(BackendConfig("mine").set_slower([slow]), without=("where",))
    with pytest.raises(SpecError, match="no patterns with named ports"):
        pattern = GraphPattern(["x"], {"out": (torch.mul, "x", "x")})
        to_torch_ao(BackendPatternConfig(pattern))


# -- requests --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fbgemm", "qnnpack", "x86", "onednn"])
@pytest.mark.parametrize("qat", ["", "qat_"])
def test_default_mappings(name: str, qat: str) -> None:
    own = getattr(backquant, f"get_default_{qat}qconfig_mapping")(name)
    other = getattr(tq, f"get_default_{qat}qconfig_mapping")(name)
    assert from_torch_ao(other) == own
    assert from_torch_ao(to_torch_ao(own)) == own
    assert backquant.QConfigMapping.from_dict(from_torch_ao(other.to_dict())) == own
    mine, back = to_torch_ao(own).global_qconfig, other.global_qconfig
    assert type(mine) is tq.QConfig
    assert mine.activation.p.func is back.activation.p.func
    assert mine.activation.p.keywords == back.activation.p.keywords


def test_named_qconfigs_and_factories() -> None:
    named = [n for n in dir(tq) if n.startswith("default_") or n.endswith("_qconfig")]
    compared = 0
    for name in named:
        rooms = [
            vars(room) for room in (backquant.observe, backquant.qconfig) if name in room.__all__
        ]
        if not rooms or name.startswith("get_"):
            continue
        other, own = getattr(tq, name), rooms[0][name]
        assert backquant.qconfig.qconfig_equals(from_torch_ao(other), own), name
        assert backquant.qconfig.qconfig_equals(from_torch_ao(to_torch_ao(own)), own), name
        compared += 1
    assert compared > 40


def test_factories_of_factories() -> None:
    inner = tq.FakeQuantize.with_args(observer=tq.MinMaxObserver, quant_min=0)
    other = inner.with_args(quant_max=100).with_callable_args(averaging_constant=lambda: 0.5)
    own = from_torch_ao(other)
    assert own.p.func is backquant.FakeQuantize
    assert own.p.keywords == {
        "observer": backquant.MinMaxObserver,
        "quant_min": 0,
        "quant_max": 100,
    }
    assert own.callable_args == other.callable_args
    partial = from_torch_ao(functools.partial(tq.HistogramObserver, reduce_range=True))
    assert partial().reduce_range
    assert isinstance(partial(), backquant.HistogramObserver)


def test_custom_configs() -> None:
    class Observed(nn.Module):
        @classmethod
        def from_float(cls, module: nn.Module) -> nn.Module:
            return cls()

    inner = tq.QConfigMapping().set_global(tq.default_qconfig)
    inputs = ({"x": torch.ones(1)},)
    prepare = (
        torch_custom.PrepareCustomConfig()
        .set_standalone_module_name("block", inner, inputs, None, theirs("fbgemm"))
        .set_standalone_module_class(nn.Linear, None, inputs, None, None)
        .set_float_to_observed_mapping(nn.LSTM, torch_quantizable.LSTM)
        .set_float_to_observed_mapping(nn.GRU, Observed)
        .set_non_traceable_module_classes([torch_quantizable.LSTM])
        .set_output_quantized_indexes([0])
    )
    own = from_torch_ao(prepare)
    entry = own.standalone_module_names["block"]
    assert entry.qconfig_mapping.global_qconfig == backquant.default_qconfig
    assert entry.example_inputs is inputs
    assert entry.backend_config == from_torch_ao(theirs("fbgemm"))
    static = backquant.qconfig.QuantType.STATIC
    assert own.float_to_observed_mapping[static] == {nn.LSTM: quantizable.LSTM, nn.GRU: Observed}
    assert own.non_traceable_module_classes == [quantizable.LSTM]
    back = to_torch_ao(own)
    assert plain(back.to_dict().pop("float_to_observed_custom_module_class")) == plain(
        prepare.to_dict().pop("float_to_observed_custom_module_class")
    )
    own.set_float_to_observed_mapping(nn.GRU, Observed, backquant.qconfig.QuantType.DYNAMIC)
    with pytest.raises(SpecError, match="only supported for static") as caught:
        to_torch_ao(own)
    assert caught.value.where == "PrepareCustomConfig"
    convert = torch_custom.ConvertCustomConfig().set_observed_to_quantized_mapping(
        torch_quantizable.LSTM, torch_quantized.LSTM
    )
    converted = from_torch_ao(convert)
    assert converted.observed_to_quantized_mapping[static] == {quantizable.LSTM: own_quantized.LSTM}
    assert to_torch_ao(converted).to_dict() == convert.to_dict()
    fuse = torch_custom.FuseCustomConfig().set_preserved_attributes(["tag"])
    assert to_torch_ao(from_torch_ao(fuse)).to_dict() == fuse.to_dict()


# -- single things ---------------------------------------------------------------------------------------


def test_classes_enumerations_fusers() -> None:
    assert from_torch_ao(torch_intrinsic.ConvReLU2d) is intrinsic.ConvReLU2d
    assert to_torch_ao(intrinsic.ConvReLU2d) is torch_intrinsic.ConvReLU2d
    assert from_torch_ao(nn.Linear) is nn.Linear
    kind = torch_backends.ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    assert from_torch_ao(kind) is ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    assert to_torch_ao(from_torch_ao(kind)) is kind
    assert from_torch_ao(TorchQuantType.DYNAMIC) is backquant.qconfig.QuantType.DYNAMIC
    assert type(to_torch_ao(backquant.qconfig.QuantType.DYNAMIC)) is TorchQuantType
    bounded = torch_backends.DTypeWithConstraints(torch.qint8, scale_min_lower_bound=2**-12)
    assert to_torch_ao(from_torch_ao(bounded)) == bounded
    fuser = to_torch_ao(SequentialFuser(intrinsic.LinearReLU))
    assert type(fuser(False, nn.Linear(1, 1), nn.ReLU())) is torch_intrinsic.LinearReLU
    assert from_torch_ao(fuser) == SequentialFuser(intrinsic.LinearReLU)
    turned = to_torch_ao(ForwardFuser(SequentialFuser(intrinsic.LinearReLU)))
    assert type(turned(False, nn.ReLU(), nn.Linear(1, 1))) is torch_intrinsic.LinearReLU
    assert from_torch_ao(backquant.default_qconfig) == backquant.default_qconfig  # ours already


@pytest.mark.parametrize(
    ("thing", "message"),
    [
        (torch_quantized.Linear, "torch.ao.nn.quantized.modules.linear.Linear has no counterpart"),
        (tq.get_default_qconfig, "has no counterpart in backquant"),
        (tq.MinMaxObserver(), "classes and factories are converted"),
        (torch.fx.symbolic_trace(nn.ReLU()), "a model is not converted, its calibration is"),
    ],
)
def test_what_has_no_counterpart(thing: Any, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)):
        from_torch_ao(thing)


def test_own_classes_without_counterpart() -> None:
    with pytest.raises(UsageError, match="FusedModule has no counterpart") as caught:
        to_torch_ao(BackendPatternConfig(nn.Linear).set_fused_module(intrinsic.FusedModule))
    assert caught.value.where == "BackendPatternConfig, entry Linear.fused_module"


# -- the boundary ----------------------------------------------------------------------------------------


def test_one_file_of_the_package_imports_torch_ao() -> None:
    imports = re.compile(
        r"^\s*(import torch\.ao|from torch\.ao|from torch import ao)"
        r"|import_module\(f?[\"']torch\.ao",
        re.M,
    )
    found = {
        path.relative_to(SRC).as_posix()
        for path in SRC.rglob("*.py")
        if imports.search(re.sub(r"^\s*(>>>|\.\.\.).*$", "", path.read_text("utf-8"), flags=re.M))
    }
    assert found == {"interop/torch_ao.py"}
    code = (
        "import sys, torch; before = set(sys.modules); import backquant.interop; "
        "assert not [m for m in set(sys.modules) - before if m.startswith('torch.ao')]"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
