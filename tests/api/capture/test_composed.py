"""Modules of several layers (``nn.TransformerEncoder``, …), which a trace keeps whole."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import backquant
from backquant.qconfig import PrepareCustomConfig


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
        self.embedding = nn.Embedding(50, 16)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(16, 3)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(tokens)))


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 50, (2, 12))


def test_they_are_decomposed_for_runtimes(tokens: torch.Tensor) -> None:
    report = backquant.explain(Tagger(), tokens)
    assert report.coverage > 0.8
    assert not any("captured by" in note for note in report.notes)


def test_one_that_is_named_stays_whole(tokens: torch.Tensor) -> None:
    custom = PrepareCustomConfig().set_non_traceable_module_names(["encoder"])
    report = backquant.explain(Tagger(), tokens, prepare_custom_config=custom)
    assert not any("captured by" in note for note in report.notes)
    assert [row.outcome for row in report.rows if row.operator == "TransformerEncoder"] == ["float"]


def test_a_trace_that_is_asked_for(tokens: torch.Tensor) -> None:
    report = backquant.explain(Tagger(), tokens, capture="trace")
    assert "encoder" not in [row.name for row in report.rows]
    assert report.coverage > 0.8


def test_hooks_are_reason_enough_for_an_export(tokens: torch.Tensor) -> None:
    model = Tagger()
    model.encoder.layers[0].self_attn.register_forward_hook(lambda *_: None)
    model.encoder.register_forward_hook(lambda *_: None)
    report = backquant.explain(model, tokens)
    assert report.notes[0] == (
        "captured by torch.export; a symbolic trace keeps 'encoder' (TransformerEncoder) whole, in float"
    )


def test_an_entry_for_the_class_keeps_it_whole(tokens: torch.Tensor) -> None:
    config = backquant.get_backend_config("x86")
    config.set_backend_pattern_config(backquant.BackendPatternConfig(nn.TransformerEncoder))
    report = backquant.explain(Tagger(), tokens, backend=config, capture="trace")
    assert "encoder" in [row.name for row in report.rows]


def test_pytorchs_steps_keep_it_whole(tokens: torch.Tensor) -> None:
    mapping = backquant.get_default_qconfig_mapping("x86")
    with pytest.warns(UserWarning, match="stay float"):
        prepared = backquant.prepare_fx(Tagger().eval(), mapping, tokens)
    assert isinstance(prepared.get_submodule("encoder"), nn.TransformerEncoder)


class Padded(Tagger):
    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        padding = tokens == 0
        return self.head(self.encoder(self.embedding(tokens), src_key_padding_mask=padding))


def test_with_a_padding_mask() -> None:
    tokens = torch.randint(1, 50, (2, 12))
    tokens[0, 9:] = 0
    model = Padded().eval()
    quantized = backquant.quantize(model, tokens, calibration=[tokens])
    assert quantized.report.coverage > 0.8
    seen = (tokens != 0).unsqueeze(-1)
    with torch.no_grad():
        error = ((quantized(tokens) - model(tokens)) * seen).norm() / (model(tokens) * seen).norm()
    assert error < 0.1
