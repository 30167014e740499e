"""Whatever modules and tensors are called: every flow gives the bits of the same model under plain names."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import backquant
from backquant import PrepareCustomConfig, QConfigMapping
from backquant.qconfig import get_default_qat_qconfig_mapping, get_default_qconfig_mapping

ODD = [
    "in",
    "class",
    "a b",
    'q"t',
    "it's",
    "l\nf",
    "µ",
    "μ",
    "ｆ",
    "\ud800",
    "__x",
    "bqname_x",
    "<b>",
    "0a",
]
PLAIN = [f"head{place}" for place in range(len(ODD))]
DATA = [torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) for _ in range(2)]


class Model(nn.Module):
    """A head, a factor and an offset for each name."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.names = names
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Conv2d(8, 4, 1) for name in names})
        self.factors = nn.ParameterDict({name: nn.Parameter(torch.rand(1)) for name in names})
        self.offsets = nn.Module()
        for name in names:
            self.offsets.register_buffer(name, torch.rand(1))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.stem(x)
        heads = [torch.relu(self.heads[name](x)) for name in self.names]
        return [
            head * self.factors[name] + getattr(self.offsets, name)
            for name, head in zip(self.names, heads, strict=True)
        ]


def _bits(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        values = model(DATA[0])
    return [values] if isinstance(values, torch.Tensor) else list(values)


def _same(one: nn.Module, other: nn.Module) -> bool:
    pairs = zip(_bits(one), _bits(other), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def _quantized(model: nn.Module) -> nn.Module:
    return backquant.quantize(model, calibration=DATA, slower="keep")


def _exported(model: nn.Module) -> nn.Module:
    return backquant.quantize(model, calibration=DATA, slower="keep", capture="export")


def _prepared(model: nn.Module) -> nn.Module:
    prepared = backquant.prepare_fx(model, get_default_qconfig_mapping("x86"), (DATA[0],))
    prepared(DATA[0])
    return backquant.convert_fx(prepared)


def _prepared_export(model: nn.Module) -> nn.Module:
    prepared = backquant.prepare_export(model, get_default_qconfig_mapping("x86"), (DATA[0],))
    prepared(DATA[0])
    return backquant.convert_fx(prepared)


def _trained(model: nn.Module) -> nn.Module:
    mapping = get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model.train(), mapping, (DATA[0],))
    sum(each.sum() for each in prepared(DATA[0])).backward()
    return backquant.convert_fx(prepared.eval())


def _fused(model: nn.Module) -> nn.Module:
    return backquant.fuse_fx(model)


def _parts(model: nn.Module) -> nn.Module:
    return backquant.quantize_parts(model, calibration=DATA).model


FLOWS = [
    *(_quantized, _exported, _prepared, _prepared_export),
    *(_trained, _fused, _parts),
]


@pytest.mark.parametrize("flow", FLOWS, ids=lambda flow: flow.__name__[1:])
def test_flows_give_the_bits_of_plain_names(flow) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # what prepare_fx skips
        odd, plain = flow(Model(ODD).eval()), flow(Model(PLAIN).eval())
    assert _same(odd, plain)


def test_weights_alone() -> None:
    class Named(nn.Module):
        def __init__(self, name: str) -> None:
            super().__init__()
            torch.manual_seed(3)
            self.name = name
            self.layers = nn.ModuleDict({name: nn.Linear(192, 64)})

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers[self.name](x.flatten(1))

    by_path = [
        backquant.quantize(Named(name).eval(), DATA[0], weights={f"layers.{name}": "int8"})(DATA[0])
        for name in ("class", "μ", "plain")
    ]
    assert torch.equal(by_path[0], by_path[2])
    assert torch.equal(by_path[1], by_path[2])


def test_saved_models_are_loaded(tmp_path: Path) -> None:
    quantized = _quantized(Model(ODD).eval())
    backquant.save(quantized, tmp_path / "model.bq")
    assert _same(backquant.load(tmp_path / "model.bq"), quantized)


@pytest.mark.parametrize("backend", ["onnxruntime", "openvino"])
def test_exports_are_written(backend: str, tmp_path: Path) -> None:
    suffix = {"onnxruntime": "onnx", "openvino": "xml"}[backend]
    model = nn.Sequential(One('q"t'), One("µ"), One("μ")).eval()
    quantized = backquant.quantize(model, backend=backend, calibration=DATA)
    exported = backquant.export(quantized, tmp_path / f"model.{suffix}")
    assert exported.integer_share == 1.0


@pytest.mark.parametrize("name", ODD)
def test_rules_name_modules_as_the_user_does(name: str) -> None:
    mapping = backquant.default_mapping("x86").set_module_name(f"heads.{name}", None)
    report = backquant.explain(Model(ODD).eval(), DATA[0], qconfig_mapping=mapping)
    assert not report.unused_rules
    left = [row for row in report.rows if row.rule == f'module_name "heads.{name}"']
    assert left
    assert all(row.outcome == "float" for row in left)


def test_modules_left_whole_are_named_as_the_user_does() -> None:
    custom = PrepareCustomConfig().set_non_traceable_module_names(["heads.in"])
    model = Model(["in", "out"]).eval()
    model.heads["in"] = nn.Sequential(nn.Conv2d(8, 4, 1), nn.ReLU())
    report = backquant.explain(model, DATA[0], prepare_custom_config=custom)
    assert [row.outcome for row in report.rows if row.module_path == "heads.in"] == ["float"]
    assert custom.non_traceable_module_names == ["heads.in"]


def test_reports_show_the_users_names() -> None:
    model = Model([name for name in ODD if name != "bqname_x"]).eval()
    quantized = _quantized(model)
    compared = backquant.compare(model, quantized, DATA)
    report = quantized.report
    for shown, text in ((report, f"{report}\n{report.table()}"), (compared, str(compared))):
        page = shown.to_html()
        assert "bqname" not in text + page
        assert "heads.µ" in text.replace("_", ".")
        assert "heads.<b>" not in page
        assert "\ud800" not in text + page
    assert len(str(quantized.report).splitlines()) == len(
        str(_quantized(Model(PLAIN[: len(model.names)]).eval()).report).splitlines()
    )


def test_state_dicts_have_the_users_names() -> None:
    model = Model(ODD)
    mapping = get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model, mapping, (DATA[0],))
    keys = prepared.state_dict().keys()
    assert {f"heads.{name}.weight" for name in ODD} <= keys
    again = backquant.prepare_qat_fx(Model(ODD), mapping, (DATA[0],))
    changed = {key: value + 1 for key, value in prepared.state_dict().items()}
    again.load_state_dict(changed)
    loaded = again.state_dict()
    assert all(torch.equal(loaded[f"heads.{n}.weight"], changed[f"heads.{n}.weight"]) for n in ODD)


def test_errors_show_the_users_names() -> None:
    class Decides(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if x.sum() > 0 else -x

    model = nn.Sequential(nn.ModuleDict({"in": Decides()})["in"])
    model.add_module("class", Decides())
    with pytest.raises(backquant.CaptureError) as error:
        backquant.prepare_qat_fx(model, QConfigMapping(), (DATA[0],))
    assert "bqname" not in str(error.value)


class One(nn.Module):
    """A layer under a name, which is an attribute."""

    def __init__(self, name: str) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.name = name
        setattr(self, name, nn.Conv2d(3, 3, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(getattr(self, self.name)(x))


def _is_free(name: str) -> bool:
    return "." not in name and not hasattr(One("layer"), name)


@settings(max_examples=15, deadline=None)
@given(st.text(min_size=1).filter(_is_free))
def test_any_name_of_a_module(name: str) -> None:
    assert _same(_quantized(One(name).eval()), _quantized(One("layer").eval()))
