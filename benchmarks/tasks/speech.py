"""Recordings of speech, and tones: what networks that hear are tried on.

The recordings are those of Debian's ``klettres-data``: letters and syllables, one speaker for each
language: those of ``CALIBRATION``, ``HELD`` and ``TEST`` are different people.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.peers import Inputs

CALIBRATION = ("hu", "lt", "nl", "uk")
HELD = ("en_GB", "fr", "it", "ml")
TEST = ("cs", "da", "de", "en", "es", "he", "nds", "pt_BR", "ru", "tn")
RATE = 16000
_FRAME, _CONTEXT, _BATCH = 512, 64, 16


def sounds(folder: Path, language: str, count: int) -> list[torch.Tensor]:
    """The first ``count`` recordings of syllables of a language, at 16 kHz, of one loudness."""
    import soundfile

    found = []
    for path in sorted((folder / language / "syllab").glob("*.ogg"))[:count]:
        values, rate = soundfile.read(path, dtype="float32", always_2d=True)
        sound = torch.tensor(values).mean(1)
        length = int(len(sound) * RATE / rate)
        sound = F.interpolate(sound[None, None], size=length, mode="linear", antialias=False)[0, 0]
        found.append(0.1 * sound / sound.square().mean().sqrt().clamp(min=1e-6))
    return found


def detector_batches(
    model: nn.Module, folder: Path, languages: Sequence[str], each: int = 4
) -> list[Inputs]:
    """Each fourth frame of 16 streams side by side, with the state that the float detector has at it.

    A stream is recordings with pauses between them, under noise that differs from stream to stream.
    """
    made = torch.Generator().manual_seed(sum(map(ord, languages[0])))
    found = []
    for language in languages:
        parts = sounds(folder, language, _BATCH)
        length = 40 * _FRAME
        streams = torch.zeros(_BATCH, length + _CONTEXT)
        for i in range(_BATCH):
            sound = torch.cat([torch.zeros(4000), parts[i % len(parts)], torch.zeros(4000)])
            sound = torch.cat([sound, parts[(i + 1) % len(parts)]])[:length]
            streams[i, _CONTEXT : _CONTEXT + len(sound)] = sound
        loud = 10 ** (-1 - 2 * torch.rand(_BATCH, 1, generator=made))
        streams += 0.1 * loud * torch.randn(streams.shape, generator=made)
        h = c = torch.zeros(_BATCH, 128)
        with torch.no_grad():
            for start in range(0, length, _FRAME):
                batch = (streams[:, start : start + _CONTEXT + _FRAME].contiguous(), h, c)
                found.append(batch)
                _, h, c = model(*batch)
    return found[::each]


def spectrograms(folder: Path, languages: Sequence[str]) -> tuple[list[Inputs], list[str]]:
    """Mel spectrograms of 160 frames in batches of 16 (the last is filled up), and who speaks."""
    mels, who = [], []
    for language in languages:
        parts = sounds(folder, language, 24)
        for i in range(
            0, len(parts) - 1, 2
        ):  # a syllable is short: two follow each other, repeated
            sound = torch.cat(parts[i : i + 2])
            sound = sound.repeat(-(-26000 // len(sound)))[:26000]
            mels.append(_mel(sound)[:160])
            who.append(language)
    mels += mels[: -len(mels) % _BATCH]
    return [(batch,) for batch in torch.stack(mels).split(_BATCH)], who


def _mel(sound: torch.Tensor) -> torch.Tensor:
    """Frames of 40 mel bands, as Resemblyzer makes them with librosa: windows of 25 ms each 10 ms."""
    from transformers.audio_utils import mel_filter_bank

    bank = mel_filter_bank(201, 40, 0.0, RATE / 2, RATE, norm="slaney", mel_scale="slaney")
    window = torch.hann_window(400)
    power = torch.stft(
        sound, 400, 160, window=window, return_complex=True, pad_mode="constant"
    ).abs()
    return power.square().T @ torch.tensor(bank, dtype=torch.float32)


def frames_of_tones(seed: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    """Frames of 1024 values as torchcrepe takes them, and the pitch of each in Hz."""
    made = torch.Generator().manual_seed(seed)
    pitch = 80 * 2 ** (3 * torch.rand(count, 1, generator=made))
    time = torch.arange(1024) / RATE
    sound = torch.zeros(count, 1024)
    for overtone in range(1, 9):
        loud = torch.rand(count, 1, generator=made) / overtone
        phase = 6.28 * torch.rand(count, 1, generator=made)
        sound += loud * torch.sin(6.2832 * overtone * pitch * time + phase)
    sound += 0.02 * torch.randn(count, 1024, generator=made)
    sound = sound - sound.mean(1, keepdim=True)
    return sound / sound.std(1, keepdim=True), pitch[:, 0]
