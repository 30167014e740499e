"""A server quantizes, loads and exports models while it serves others: the answers stay bit-equal."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - makes torchvision importable
import pytest
import torch
from torch import nn
from torchvision.models import shufflenet_v2_x0_5, vit_b_16
from torchvision.models.mobilenetv3 import mobilenet_v3_small

import backquant

SIZES = (1, 2, 3)


def images(batch: int) -> torch.Tensor:
    return torch.randn(batch, 3, 32, 32, generator=torch.Generator().manual_seed(batch))


def quantized(model: nn.Module, backend: str, **options: Any) -> nn.Module:
    calibration = [images(size) for size in SIZES]
    return backquant.quantize(
        model.eval(), calibration[0], backend=backend, calibration=calibration, **options
    )


class Small(nn.Module):
    """Fast to quantize, with a residual addition and a packed linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)
        self.fc = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc((self.conv(x) + x).relu().mean((2, 3)))


@contextmanager
def serving(model: nn.Module, threads: int = 1) -> Iterator[list[str]]:
    """Threads that call ``model`` with changing shapes; the list gets what differs or fails."""
    expected = {size: model(images(size)) for size in SIZES}
    problems: list[str] = []
    calls = [0] * threads
    stop = threading.Event()

    def serve(index: int) -> None:
        while not stop.is_set():
            size = SIZES[calls[index] % len(SIZES)]
            calls[index] += 1
            try:
                if not torch.equal(model(images(size)), expected[size]):
                    problems.append("another value")
            except Exception as error:
                problems.append(f"{type(error).__name__}: {error}")

    workers = [threading.Thread(target=serve, args=(i,)) for i in range(threads)]
    for worker in workers:
        worker.start()
    try:
        yield problems
    finally:
        stop.set()
        for worker in workers:
            worker.join(60)
    assert min(calls), "the other thread did not run"


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm", "qnnpack"])
def test_models_answer_the_same_while_others_are_quantized(backend: str) -> None:
    model = quantized(mobilenet_v3_small(), backend)
    with serving(model) as problems:
        for other in ("x86", "qnnpack", "fbgemm", "onednn"):
            quantized(Small(), other)(images(1))
    assert not problems


def test_float_models_answer_the_same_while_others_are_exported() -> None:
    model = vit_b_16(image_size=32).eval()
    with torch.no_grad(), serving(model) as problems:
        quantized(Small(), "x86", capture="export")
    assert not problems


def test_models_answer_the_same_while_others_are_saved_loaded_and_exported(tmp_path: Path) -> None:
    model = quantized(mobilenet_v3_small(), "x86")
    with serving(model) as problems:
        other = quantized(Small(), "onnxruntime")
        backquant.save(other, tmp_path / "other.bq")
        loaded = backquant.load(tmp_path / "other.bq")
        backquant.export(loaded, tmp_path / "other.onnx")
    assert not problems


def test_models_are_quantized_by_several_threads_at_once() -> None:
    torch.manual_seed(0)
    small = Small()
    expected = quantized(small, "qnnpack")(images(2))
    found: list[torch.Tensor] = []

    def run() -> None:
        found.append(quantized(small, "qnnpack")(images(2)))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(found) == 4
    assert all(torch.equal(one, expected) for one in found)


class Cache:
    def __init__(self, *keys: torch.Tensor) -> None:
        self.keys = list(keys)


class Decoder(nn.Module):
    """Takes and returns a cache, and a state that depends on nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Cache) -> Any:
        keys = [torch.cat((key, self.fc(x))) for key in cache.keys]
        return sum(key.sum(0) for key in keys), Cache(*keys), torch.zeros((2,))


def step(size: int) -> tuple[torch.Tensor, Cache]:
    made = torch.randn(3, size, 4, generator=torch.Generator().manual_seed(size))
    return made[0, :1], Cache(made[1], made[1] if size % 3 == 0 else made[2])  # one twice


def test_results_of_decoders_in_threads_are_their_callers_own() -> None:
    """Caches of other lengths from six threads; results are kept, written to, and looked at again."""
    model = backquant.quantize(Decoder().eval(), step(2), calibration=[step(2), step(3)])
    # as many as recordings are kept: of more, each may go before it comes again
    sizes = range(1, 9)
    wanted = {size: [part.clone() for part in parts(model(*step(size)))] for size in sizes}
    called = copy.deepcopy(model)
    wrong: list[str] = []

    def run(first: int) -> None:
        held = []
        for number in range(60):
            size = sizes[(first + number) % len(sizes)]
            held.append((size, parts(called(*step(size)))))
            if len(held) > 12:
                size, found = held.pop(number % 12)
                if not all(map(torch.equal, found, wanted[size])):
                    wrong.append(f"of size {size}")
                for part in found:
                    part.add_(1)

    threads = [threading.Thread(target=run, args=(first,)) for first in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not wrong
    assert called.replays is not None and called.replays.programs


def parts(result: Any) -> list[torch.Tensor]:
    logits, cache, state = result
    return [logits, *cache.keys, state]


def test_the_first_calls_of_a_model_come_from_many_threads_at_once() -> None:
    model = quantized(shufflenet_v2_x0_5(), "x86")
    expected = {size: model(images(size)) for size in SIZES}
    fresh = copy.deepcopy(model)  # nothing packed, nothing recorded
    found = together(fresh, SIZES * 2)
    assert len(found) == 18
    assert all(torch.equal(value, expected[size]) for size, value in found)


def together(model: nn.Module, sizes: tuple[int, ...]) -> list[tuple[int, torch.Tensor]]:
    """Three calls for each of ``sizes``, each in a thread of its own, all at once."""
    found: list[tuple[int, torch.Tensor]] = []
    barrier = threading.Barrier(len(sizes))

    def run(size: int) -> None:
        barrier.wait(30)
        for _ in range(3):
            found.append((size, model(images(size))))

    threads = [threading.Thread(target=run, args=(size,)) for size in sizes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found
