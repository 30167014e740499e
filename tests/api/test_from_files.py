"""From the files of weights to the file of the artifact: the bytes of ``quantize`` in memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - makes torchvision importable
import pytest
import torch
from torch import nn
from torchvision.models import squeezenet1_1
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

import backquant
from backquant.calibrate import measure
from backquant.errors import ConfigError, UsageError
from backquant.figures import Figures

TOKENS = [{"input_ids": torch.arange(6).reshape(1, 6) * n % 50} for n in (1, 3, 7)]
IMAGES = [torch.linspace(-n, n, 3 * 32 * 32).reshape(1, 3, 32, 32) for n in (1, 3)]
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "vocab_size": 50,
}


def encoder() -> Any:
    return BertModel(BertConfig(**SIZES)).eval()


def decoder() -> Any:
    return LlamaForCausalLM(LlamaConfig(**SIZES, use_cache=False, tie_word_embeddings=True)).eval()


def images() -> Any:
    return squeezenet1_1(num_classes=10).eval()


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "encoder, static": (encoder, {"calibration": TOKENS}),
    "tied decoder, int4": (decoder, {"weights": "int4", "group_size": 32}),
    "images, static": (images, {"calibration": IMAGES}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_bytes_of_quantize(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of stock models, in shards; every module is a part of its own. Without the SQNR on a
    batch, for which the float model would have to be whole."""
    monkeypatch.setattr(measure, "PART", 1)
    make, options = KINDS[kind]
    torch.manual_seed(0)
    model, example = make(), (IMAGES if make is images else TOKENS)[0]
    one, other = tmp_path / "one.bq", tmp_path / "other.bq"
    if make is images:
        from safetensors.torch import save_file

        save_file(model.state_dict(), tmp_path / "model.safetensors")
    else:
        model.save_pretrained(tmp_path, max_shard_size="20KB")
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    plain = {"slower": "keep", "recipe": "none"}
    quantized = backquant.quantize(model, example, **plain, **options)
    quantized.record = replace(quantized.record, figures=Figures())
    backquant.save(quantized, one)
    report = backquant.quantize_files(make, tmp_path, other, example, **options)
    assert one.read_bytes() == other.read_bytes()
    assert report.coverage > 0.5
    assert not list(tmp_path.glob(".backquant*"))


def test_refusals(tmp_path: Path, snapshot: Callable[..., None]) -> None:
    from safetensors.torch import save_file

    model = nn.Sequential(nn.Linear(4, 4))
    save_file(model.state_dict(), tmp_path / "w.safetensors")
    data = [torch.ones(2, 4)]
    observer = backquant.MovingAverageMinMaxObserver.with_args(dtype=torch.quint8)
    weight = backquant.observe.default_per_channel_weight_observer
    averages = backquant.QConfigMapping().set_global(backquant.QConfig(observer, weight))
    with pytest.raises(ConfigError) as caught:
        backquant.quantize_files(
            model, tmp_path, tmp_path / "m.bq", calibration=data, qconfig_mapping=averages
        )
    snapshot("averages", caught.value)
    with pytest.raises(UsageError) as usage:
        backquant.quantize_files(dict, tmp_path, tmp_path / "m.bq", calibration=data)
    snapshot("no-module", usage.value)
    assert not (tmp_path / "m.bq").exists()


BY_HAND = {
    "calibrate with MinMaxObserver": lambda _, n: backquant.quantize_files(
        n["model"], n["tmp_path"], n["tmp_path"] / "n.bq", calibration=n["data"]
    ),
    "quantize_files(": lambda _, n: backquant.quantize_files(
        lambda: nn.Sequential(nn.Linear(4, 4)),
        n["tmp_path"],
        n["tmp_path"] / "o.bq",
        calibration=n["data"],
    ),
}
