"""Eight threads that call models while a ninth quantizes others: every answer has the bits of the first.

    python tools/threads.py                      # 2,000 rounds of a quarter of a second
    python tools/threads.py --rounds 100 --seed 7

A round takes one of the models below, as a copy that has packed and recorded nothing. Its callers take inputs
of three sizes, among them zeros and a constant, in an order of their own; the ninth thread quantizes small
models for changing engines and calls them. Answers are compared with those of the graph, run operator by
operator before the rounds. Exit status 1: an answer had other bits, or a call failed; each outcome is printed
with its round.
"""

from __future__ import annotations

import argparse
import copy
import os
import random
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

import benchmarks.stock  # noqa: E402, F401 - makes torchvision importable
import torch  # noqa: E402
from torch import nn  # noqa: E402
from torchvision.models import resnet18, shufflenet_v2_x0_5  # noqa: E402
from torchvision.models.mobilenetv3 import mobilenet_v3_small  # noqa: E402
from tqdm import tqdm  # noqa: E402

import backquant  # noqa: E402

ENGINES = ("x86", "onednn", "fbgemm", "qnnpack")
THREADS, ROUND = 8, 0.25
SIZES = (1, 2, 5)


class Case(NamedTuple):
    """``wanted``: what the graph gives for each of ``inputs``."""

    name: str
    model: Any
    inputs: list[torch.Tensor]
    wanted: list[torch.Tensor]


def made(name: str, model: nn.Module, engine: str) -> Case:
    torch.manual_seed(0)
    shapes = [(size, 3, 32, 32) for size in SIZES]
    inputs = [torch.randn(shape) for shape in shapes]
    calibration = list(inputs)
    inputs += [torch.zeros(shapes[1]), torch.full(shapes[1], 0.5)]
    quantized = backquant.quantize(
        model.eval(), backend=engine, calibration=calibration, slower="keep"
    )
    with torch.no_grad():
        return Case(
            f"{name} on {engine}",
            quantized,
            inputs,
            [quantized.graph_module(x) for x in inputs],
        )


def cases() -> Iterator[Case]:
    models = {"mobilenet": mobilenet_v3_small, "shufflenet": shufflenet_v2_x0_5, "resnet": resnet18}
    for name, build in models.items():
        for engine in ENGINES:
            torch.manual_seed(1)
            yield made(name, build(weights=None), engine)


def quantizing(stop: threading.Event, engines: random.Random) -> None:
    while not stop.is_set():
        model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Hardswish(), nn.Flatten(), nn.Linear(144, 4))
        x = torch.randn(2, 3, 8, 8)
        engine = engines.choice(ENGINES)
        backquant.quantize(model.eval(), backend=engine, calibration=[x], slower="keep")(x)


def calling(case: Case, model: Any, stop: threading.Event, seed: int, found: Counter[str]) -> None:
    order = random.Random(seed)
    with torch.no_grad():
        while not stop.is_set():
            place = order.randrange(len(case.inputs))
            try:
                same = torch.equal(model(case.inputs[place]), case.wanted[place])
                found["calls" if same else f"other bits for input {place}"] += 1
            except Exception as error:
                found[f"{type(error).__name__}: {error}"] += 1


def run(case: Case, number: int) -> Counter[str]:
    """One round: how often each outcome came."""
    stop, found, model = threading.Event(), Counter[str](), copy.deepcopy(case.model)
    workers = [
        threading.Thread(target=calling, args=(case, model, stop, THREADS * number + i, found))
        for i in range(THREADS)
    ]
    workers.append(threading.Thread(target=quantizing, args=(stop, random.Random(number))))
    for worker in workers:
        worker.start()
    time.sleep(ROUND)
    stop.set()
    for worker in workers:
        worker.join()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0, help="of the first round")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    known, calls, wrong = list(cases()), 0, 0
    for number in tqdm(range(options.seed, options.seed + options.rounds), unit="round"):
        case = known[number % len(known)]
        found = run(case, number)
        calls += found.pop("calls", 0)
        wrong += sum(found.values())
        for outcome, count in found.items():
            tqdm.write(f"round {number}, {case.name}: {outcome}, {count} times")
    print(f"{options.rounds} rounds, {calls} right answers, {wrong} others")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
