"""What the demo measures of the two models."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from backquant.errors import MissingExtraError
from backquant.runtime import QuantizedModel

# The demo's data and model: handwritten digits (8×8 scans shipped inside scikit-learn), a residual CNN.
#
# Data: Alpaydin and Kaynak, "Optical Recognition of Handwritten Digits", UCI repository, 1998.


@dataclass(frozen=True)
class Digits:
    """Images as float32 ``(N, 1, 8, 8)`` in [0, 1]; labels as int64 ``(N,)``."""

    train_images: torch.Tensor
    train_labels: torch.Tensor
    test_images: torch.Tensor
    test_labels: torch.Tensor


def load_digits() -> Digits:
    """The 1,797 scans, shuffled with a fixed seed; a quarter is held out for tests."""
    try:
        from sklearn import datasets  # type: ignore[import-untyped]
    except ImportError as error:
        raise MissingExtraError(
            "the demo reads the digits that scikit-learn ships, and scikit-learn is not installed",
            extra="demo",
        ) from error
    raw = datasets.load_digits()
    images = torch.tensor(raw.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(raw.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    held_out = len(labels) // 4
    test, rest = order[:held_out], order[held_out:]
    return Digits(images[rest], labels[rest], images[test], labels[test])


class Block(nn.Module):
    """conv-bn-relu-conv-bn plus the skip, then ReLU; the first convolution may halve the image."""

    def __init__(self, channels: int, out_channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out_channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(out_channels, out_channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != out_channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, out_channels, 1, stride, bias=False),
                nn.BatchNorm2d(out_channels),
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.bn2(self.conv2(y))
        out: torch.Tensor = self.relu(y + self.shortcut(x))
        return out


class DigitsNet(nn.Module):
    """Six convolutions in two residual blocks and a stem, 64 to 128 channels, then pooling and a linear.

    Input float32 ``(N, 1, 8, 8)``, output logits ``(N, 10)``.
    """

    def __init__(self, width: int = 64, classes: int = 10) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.block1 = Block(width, width)
        self.block2 = Block(width, 2 * width, stride=2)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(2 * width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(self.block2(self.block1(self.stem(x))))
        logits: torch.Tensor = self.head(torch.flatten(x, 1))
        return logits


def train(
    model: nn.Module,
    data: Digits,
    epochs: int = 8,
    progress: Callable[[int], None] = lambda _: None,
) -> nn.Module:
    """Adam with a one-cycle schedule; leaves the model in eval mode. Seconds on one core."""
    generator = torch.Generator().manual_seed(0)
    batch = 64
    steps = epochs * -(-len(data.train_labels) // batch)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=5e-3, total_steps=steps)
    model.train()
    for epoch in range(epochs):
        for index in torch.randperm(len(data.train_labels), generator=generator).split(batch):
            loss = F.cross_entropy(model(data.train_images[index]), data.train_labels[index])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
        progress(epoch + 1)
    return model.eval()


def accuracy(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """Share of images whose largest logit is at their label."""
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


# Latency of two models side by side, on one thread: the median of alternating runs.


@dataclass(frozen=True)
class Latency:
    """Median milliseconds a batch of two models, measured in turn, and their ratio."""

    batch: int
    float_ms: float
    quantized_ms: float

    @property
    def ratio(self) -> float:
        """How many times faster the quantized model is."""
        return self.float_ms / self.quantized_ms


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _milliseconds(model: nn.Module, batch: torch.Tensor, repeats: int) -> float:
    start = time.perf_counter()
    for _ in range(repeats):
        model(batch)
    return (time.perf_counter() - start) * 1e3 / repeats


def compare_latency(
    model: nn.Module, quantized: nn.Module, batch: torch.Tensor, rounds: int = 15
) -> Latency:
    """Both models on the same batch, alternating so that a drift of the machine hits both."""
    with torch.no_grad(), _one_thread():
        repeats = max(1, int(20 / max(_milliseconds(model, batch, 2), 1e-3)))
        _milliseconds(quantized, batch, 2)
        pairs = [
            (_milliseconds(model, batch, repeats), _milliseconds(quantized, batch, repeats))
            for _ in range(rounds)
        ]
    return Latency(
        batch=len(batch),
        float_ms=statistics.median(a for a, _ in pairs),
        quantized_ms=statistics.median(b for _, b in pairs),
    )


@dataclass(frozen=True)
class Outcome:
    """Accuracy on the test images (float, quantized), latencies, and whether a loaded copy agrees.

    A reference model has no latencies: it computes in float.
    """

    accuracies: tuple[float, float]
    latencies: tuple[Latency, ...]
    same_when_loaded: bool

    def cards(self) -> list[dict[str, str]]:
        """The numbers as the report shows them.

        >>> Outcome((0.99, 0.98), (), True).cards()
        [{'title': 'accuracy', 'value': '98.0%', 'remark': 'float 99.0%'}]
        """
        before, after = self.accuracies
        cards = [{"title": "accuracy", "value": f"{after:.1%}", "remark": f"float {before:.1%}"}]
        for latency in self.latencies:
            times = f"{latency.float_ms:.2f} → {latency.quantized_ms:.2f} ms, one thread"
            title = f"speed at batch {latency.batch}"
            cards.append({"title": title, "value": f"{latency.ratio:.1f}×", "remark": times})
        return cards

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON-able data."""
        return {
            "accuracy": {"float": self.accuracies[0], "quantized": self.accuracies[1]},
            "latency": [{**asdict(item), "ratio": item.ratio} for item in self.latencies],
            "same_when_loaded": self.same_when_loaded,
        }


def measured(
    data: Digits,
    model: nn.Module,
    quantized: QuantizedModel,
    loaded: QuantizedModel,
    batches: Sequence[int],
) -> Outcome:
    """Both models on the test images; latencies at these batch sizes where an engine runs."""
    images, labels = data.test_images, data.test_labels
    sizes = batches if quantized.engine is not None else ()
    return Outcome(
        accuracies=(accuracy(model, images, labels), accuracy(quantized, images, labels)),
        latencies=tuple(compare_latency(model, quantized, images[:size]) for size in sizes),
        same_when_loaded=torch.equal(loaded(images[:64]), quantized(images[:64])),
    )
