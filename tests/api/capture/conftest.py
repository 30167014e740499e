"""Small models for both captures, and small transformers from configurations (random weights)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """Convolutions with batch norm, a shared ReLU, a skip connection, pooling, linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.conv1 = nn.Conv2d(8, 8, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(8)
        self.conv2 = nn.Conv2d(8, 8, 3, padding=1)
        self.relu = nn.ReLU(inplace=True)
        self.pool = nn.MaxPool2d(2)
        self.head = nn.Linear(8 * 4 * 4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        y = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.conv2(y) + x)
        x = torch.flatten(self.pool(x), 1)
        return self.head(x)


class Functional(nn.Module):
    """Weights as parameters of the model, passed to functions."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(8, 3, 3, 3) / 5)
        self.b1 = nn.Parameter(torch.randn(8) / 5)
        self.w2 = nn.Parameter(torch.randn(4, 8) / 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(F.conv2d(x, self.w1, self.b1, stride=2, padding=1))
        x = torch.mean(x, [2, 3])
        return F.linear(x, self.w2)


class Twice(nn.Module):
    """Modules that are called twice, concatenated."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.act = nn.ReLU6()
        self.out = nn.Conv2d(6, 4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.act(self.conv(x))
        z = self.act(self.conv(y))
        return torch.sigmoid(self.out(torch.cat([y, z], 1)))


CNNS: dict[str, Callable[[], nn.Module]] = {
    "residual": Residual,
    "functional": Functional,
    "twice": Twice,
}


@pytest.fixture(params=list(CNNS))
def cnn(request: pytest.FixtureRequest) -> nn.Module:
    return trained(CNNS[request.param]())


def trained(model: nn.Module) -> nn.Module:
    """In evaluation mode, its batch norms with statistics that are not trivial."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.running_mean, -0.5, 0.5)
            nn.init.uniform_(module.running_var, 0.5, 2.0)
    return model.eval()


def images(count: int = 4, batch: int = 2) -> list[torch.Tensor]:
    return [torch.randn(batch, 3, 8, 8) for _ in range(count)]


def tokens(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 90, (batch, length))
    mask = torch.ones_like(ids)
    mask[0, length // 2 :] = 0
    return {"input_ids": ids, "attention_mask": mask}


def pixels(batch: int = 2) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, 32, 32)}


def bert(**options: Any) -> nn.Module:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        vocab_size=100,
        max_position_embeddings=64,
        **options,
    )
    return BertModel(config).eval()


def vit(**options: Any) -> nn.Module:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        **options,
    )
    return ViTModel(config).eval()


def swin() -> nn.Module:
    from transformers import SwinConfig, SwinModel

    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4
    )
    return SwinModel(config).eval()


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=128,
        vocab_size=100,
        use_cache=False,
    )
    return LlamaForCausalLM(config).eval()


def gpt2() -> nn.Module:
    """Its layers are ``Conv1D``: ``addmm`` with a weight that is not transposed."""
    from transformers import GPT2Config, GPT2Model

    config = GPT2Config(
        n_embd=64,
        n_layer=2,
        n_head=4,
        vocab_size=100,
        use_cache=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return GPT2Model(config).eval()


FAMILIES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, torch.Tensor]]]] = {
    "bert": (bert, tokens),
    "vit": (vit, pixels),
    "swin": (swin, pixels),
    "llama": (llama, tokens),
    "gpt2": (gpt2, tokens),
}


@pytest.fixture
def make_images() -> Callable[..., list[torch.Tensor]]:
    return images


@pytest.fixture
def make_tokens() -> Callable[..., dict[str, torch.Tensor]]:
    return tokens


@pytest.fixture
def make_bert() -> Callable[..., nn.Module]:
    return bert


@pytest.fixture(params=list(FAMILIES))
def family(
    request: pytest.FixtureRequest,
) -> tuple[str, nn.Module, Callable[[], dict[str, torch.Tensor]]]:
    make, inputs = FAMILIES[request.param]
    return request.param, make(), inputs


def _sqnr(wanted: torch.Tensor, got: torch.Tensor) -> float:
    noise = (wanted - got).pow(2).sum()
    return float(10 * torch.log10(wanted.pow(2).sum() / noise))


@pytest.fixture
def sqnr() -> Callable[[torch.Tensor, torch.Tensor], float]:
    """Signal to quantization noise in dB."""
    return _sqnr
