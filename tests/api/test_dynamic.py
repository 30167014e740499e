"""The one call without data: dynamic quantization, weights alone, float16; and PyTorch's own flow."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from torch import nn
from torch.ao.quantization import quantize_fx

import backquant
from backquant import QConfigMapping, default_dynamic_qconfig, get_default_qconfig_mapping
from backquant.errors import CalibrationError, CoverageError
from backquant.qconfig import (
    float16_dynamic_qconfig,
    float_qparams_weight_only_qconfig,
    float_qparams_weight_only_qconfig_4bit,
    per_channel_dynamic_qconfig,
)

ENGINES = ("x86", "fbgemm", "qnnpack", "onednn")


class Tagger(nn.Module):
    """Words to tags: a table, a recurrent layer in both directions, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(50, 12)
        self.lstm = nn.LSTM(12, 16, bidirectional=True, batch_first=True)
        self.head = nn.Sequential(nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 5))

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        features, _ = self.lstm(self.table(words))
        return self.head(features)


class Image(nn.Module):
    """Static layers, and a classifier that is asked for dynamically."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.relu(self.conv(x)).mean([2, 3]))


WORDS = torch.randint(0, 50, (3, 7))


def _asked(table: Any = float_qparams_weight_only_qconfig) -> QConfigMapping:
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    return mapping.set_object_type(nn.Embedding, table)


@pytest.mark.parametrize("backend", ENGINES)
def test_no_data_is_needed(backend: str, unchanged: Any) -> None:
    model = Tagger()
    with unchanged(model):
        quantized = backquant.quantize(model, WORDS, backend=backend, qconfig_mapping=_asked())
    with torch.no_grad():
        expected = model.eval()(WORDS)
        assert (quantized(WORDS) - expected).abs().max() < 0.05 * expected.abs().max() + 0.05
    kernels = {use.nodes[0]: use.kernel for use in quantized.kernels}
    assert set(kernels) == {"lstm", "head_0", "head_2", "table"}
    assert quantized.report.coverage == 1.0


def test_the_report_says_what_is_dynamic_and_what_are_weights_alone() -> None:
    for report in (
        backquant.explain(Tagger(), WORDS, qconfig_mapping=_asked()),
        backquant.quantize(Tagger(), WORDS, qconfig_mapping=_asked()).report,
    ):
        found = {row.node: row.dtype_config for row in report.rows if row.quantized}
        assert found == {
            "table": "input float32, output float32, weight quint8, weight only",
            **dict.fromkeys(
                ("lstm", "head_0", "head_2"),
                "input quint8, output float32, weight qint8, bias float32, dynamic",
            ),
        }
        assert "weight only" in f"{report}\n{report.table()}"
        assert "dynamic" in f"{report}\n{report.table()}"
    assert "aten.quantized_lstm(x86, 7 bits)" in f"{report}\n{report.table()}"


@pytest.mark.parametrize("backend", ENGINES)
@pytest.mark.parametrize(
    "table", [float_qparams_weight_only_qconfig, float_qparams_weight_only_qconfig_4bit]
)
def test_files(backend: str, table: Any, tmp_path: Path) -> None:
    quantized = backquant.quantize(Tagger(), WORDS, backend=backend, qconfig_mapping=_asked(table))
    backquant.save(quantized, tmp_path / "tagger.bq")
    loaded = backquant.load(tmp_path / "tagger.bq")
    assert torch.equal(loaded(WORDS), quantized(WORDS))
    assert loaded.kernels == quantized.kernels
    assert loaded.report == quantized.report
    again = copy.deepcopy(loaded)
    assert torch.equal(again(WORDS), quantized(WORDS))


@pytest.mark.parametrize("backend", ["x86", "fbgemm"])
def test_float16(backend: str, tmp_path: Path) -> None:
    mapping = QConfigMapping().set_global(float16_dynamic_qconfig)
    model = Tagger()
    quantized = backquant.quantize(model, WORDS, backend=backend, qconfig_mapping=mapping)
    assert [use.kernel for use in quantized.kernels] == [
        f"aten.quantized_lstm({backend}, float16)",
        f"quantized.linear_relu_dynamic_fp16({backend})",
        f"quantized.linear_dynamic_fp16({backend})",
    ]
    with torch.no_grad():
        assert torch.allclose(quantized(WORDS), model.eval()(WORDS), atol=1e-3)
    backquant.save(quantized, tmp_path / "half.bq")
    assert torch.equal(backquant.load(tmp_path / "half.bq")(WORDS), quantized(WORDS))


def test_a_calibration_set_that_is_not_needed_is_fine() -> None:
    model, mapping = Tagger(), _asked()
    with_data = backquant.quantize(model, calibration=[WORDS], qconfig_mapping=mapping)
    without = backquant.quantize(model, WORDS, qconfig_mapping=mapping)
    assert torch.equal(with_data(WORDS), without(WORDS))


def test_static_values_need_data_and_are_named() -> None:
    mapping = get_default_qconfig_mapping("x86").set_module_name("fc", default_dynamic_qconfig)
    image = torch.randn(2, 3, 8, 8)
    with pytest.raises(CalibrationError, match="have to be measured") as caught:
        backquant.quantize(Image(), image, qconfig_mapping=mapping)
    assert caught.value.where == "x, conv"
    assert "default_dynamic_qconfig" in caught.value.fix
    quantized = backquant.quantize(Image(), calibration=[image], qconfig_mapping=mapping)
    assert "quantized.linear_dynamic(x86, 7 bits)" in {use.kernel for use in quantized.kernels}


def test_the_fix_of_the_refusal_works() -> None:
    model, image = Image(), torch.randn(2, 3, 8, 8)
    with pytest.raises(CalibrationError) as caught:
        backquant.quantize(model, image)
    fix = caught.value.fix.splitlines()[-1]
    names = {"quantize": backquant.quantize, "model": model, "image": image}
    names |= {"QConfigMapping": QConfigMapping, "default_dynamic_qconfig": default_dynamic_qconfig}
    quantized = eval(f"quantize(model, image, {fix})", names)
    assert [use.nodes for use in quantized.kernels] == [("fc",)]


def test_coverage_counts_recurrent_layers() -> None:
    mapping = _asked().set_object_type(nn.LSTM, None)
    quantized = backquant.quantize(Tagger(), WORDS, qconfig_mapping=mapping)
    assert 0.1 < quantized.report.coverage < 0.4
    with pytest.raises(CoverageError):
        backquant.quantize(Tagger(), WORDS, qconfig_mapping=mapping, require=0.9)


def test_a_backend_without_an_engine_gives_the_reference_model() -> None:
    config = backquant.get_backend_config("x86").set_engine(None)
    quantized = backquant.quantize(Tagger(), WORDS, backend=config, qconfig_mapping=_asked())
    assert quantized.kernels == ()
    assert quantized.graph_module.get_submodule("lstm").weight_ih_l0.dtype == torch.int8


# -- PyTorch's documented flow -----------------------------------------------------------------------


class TextModel(nn.Module):
    """The model of PyTorch's tutorial on dynamic quantization, smaller: an LSTM language model."""

    def __init__(self, tokens: int = 30, size: int = 16, hidden: int = 16, layers: int = 2) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.encoder = nn.Embedding(tokens, size)
        self.rnn = nn.LSTM(size, hidden, layers, dropout=0.5)
        self.decoder = nn.Linear(hidden, tokens)

    def forward(self, input: torch.Tensor, hidden: tuple[torch.Tensor, torch.Tensor]) -> Any:
        emb = self.drop(self.encoder(input))
        output, hidden = self.rnn(emb, hidden)
        decoded = self.decoder(self.drop(output))
        return decoded, hidden


def _backquant_flow(model: nn.Module, example_inputs: Any) -> nn.Module:
    from backquant import QConfigMapping, convert_fx, default_dynamic_qconfig, prepare_fx

    qconfig_mapping = QConfigMapping().set_object_type(nn.LSTM, default_dynamic_qconfig)
    qconfig_mapping.set_object_type(nn.Linear, default_dynamic_qconfig)
    prepared = prepare_fx(model, qconfig_mapping, example_inputs)
    # no calibration is required for dynamic quantization
    return convert_fx(prepared)


def _torch_flow(model: nn.Module, example_inputs: Any) -> nn.Module:
    from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig
    from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx

    qconfig_mapping = QConfigMapping().set_object_type(nn.LSTM, default_dynamic_qconfig)
    qconfig_mapping.set_object_type(nn.Linear, default_dynamic_qconfig)
    prepared = prepare_fx(model, qconfig_mapping, example_inputs)
    return convert_fx(prepared)


def test_the_documented_flow_gives_pytorchs_numbers() -> None:
    """Lines of PyTorch's documentation, with the import line changed and nothing else."""
    model = TextModel().eval()
    state = (torch.zeros(2, 3, 16), torch.zeros(2, 3, 16))
    tokens = torch.randint(0, 30, (5, 3))
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = "fbgemm"  # what the native backend runs on here
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            theirs = _torch_flow(copy.deepcopy(model), (tokens, state))
        ours = _backquant_flow(model, (tokens, state))
        with torch.no_grad():
            decoded, (h, c) = ours(tokens, state)
            expected, (h2, c2) = theirs(tokens, state)
    finally:
        torch.backends.quantized.engine = before
    assert torch.equal(decoded, expected)
    assert torch.equal(h, h2)
    assert torch.equal(c, c2)


@pytest.mark.parametrize(
    "name", ["default_dynamic_qconfig", "per_channel_dynamic_qconfig", "float16_dynamic_qconfig"]
)
def test_a_global_mapping(name: str) -> None:
    """Operators that have no dynamic form stay float; one warning lists them."""
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1)).eval()
    x = torch.randn(5, 8)
    mapping = QConfigMapping().set_global(getattr(backquant.qconfig, name))
    with pytest.warns(UserWarning, match="1 operators? stays? float"):
        prepared = backquant.prepare_fx(model, mapping, (x,))
    ours = backquant.convert_fx(prepared)
    theirs_mapping = tq.QConfigMapping().set_global(getattr(tq.qconfig, name))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.backends.quantized.engine = "fbgemm"
        prepared = quantize_fx.prepare_fx(copy.deepcopy(model), theirs_mapping, (x,))
        theirs = quantize_fx.convert_fx(prepared)
    with torch.no_grad():
        assert torch.equal(ours(x), theirs(x))


def test_reference_models_of_both_dialects() -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)).eval(), torch.randn(5, 8)
    mapping = QConfigMapping().set_global(per_channel_dynamic_qconfig)
    prepared = backquant.prepare_fx(model, mapping, x)
    for dialect, call in (
        ("decomposed", "quantized_decomposed.choose_qparams.tensor"),
        ("quantized_tensor", "quantize_per_tensor_dynamic"),
    ):
        reference = backquant.convert_to_reference_fx(prepared, dialect=dialect)
        assert any(call in str(node.target) for node in reference.graph.nodes)
        assert torch.allclose(reference(x), model(x), atol=0.05)
