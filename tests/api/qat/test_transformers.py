"""Models of transformers as they are, whose ``forward`` is decorated, in training."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import backquant
from backquant.errors import CaptureError

SMALL = {
    **{"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4},
    **{"intermediate_size": 128, "vocab_size": 100},
}


def model_of(name: str) -> tuple[torch.nn.Module, torch.Tensor]:
    transformers = pytest.importorskip("transformers")
    if name == "ViT":
        config = transformers.ViTConfig(**SMALL, image_size=32, patch_size=8)
        return transformers.ViTModel(config), torch.randn(2, 3, 32, 32)
    config = getattr(transformers, f"{name}Config")(**SMALL, use_cache=False)
    return getattr(transformers, f"{name}Model")(config), torch.randint(3, 100, (2, 16))


@pytest.mark.filterwarnings("ignore")  # what stays float, and how it was traced
@pytest.mark.parametrize("name", ["Bert", "Roberta", "ViT", "Llama"])
def test_they_train_and_convert(name: str) -> None:
    torch.manual_seed(0)
    model, x = model_of(name)
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    prepared = backquant.prepare_qat_fx(model.train(), mapping, (x,), backend_config="x86")
    prepared(x)["last_hidden_state"].square().mean().backward()
    trained = [each.grad for each in prepared.parameters() if each.grad is not None]
    assert len(trained) >= 20
    prepared.apply(backquant.disable_fake_quant).eval()
    with torch.no_grad():
        expected = model.eval()(x)["last_hidden_state"]
        torch.testing.assert_close(prepared(x)["last_hidden_state"], expected)
    prepared.apply(backquant.enable_fake_quant)
    assert len(backquant.convert_fx(prepared).kernels) > 10


def test_a_cache_in_the_result_is_told(snapshot: Any) -> None:
    transformers = pytest.importorskip("transformers")
    model = transformers.LlamaModel(transformers.LlamaConfig(**SMALL)).train()
    mapping: Any = backquant.get_default_qat_qconfig_mapping("x86")
    with pytest.raises(CaptureError) as told:
        backquant.prepare_qat_fx(model, mapping, (torch.randint(3, 100, (2, 16)),))
    snapshot("a_cache_in_the_result", told.value)
