"""Processes that write, killed at random moments: old files or new ones, no litter after the next run.

    python tools/kill_moments.py --count 500 --seed 0
    python tools/kill_moments.py --count 10 --only compile inductor    # a C++ compiler each, some 20 s

In turn: ``save``, ``quantize -o`` with a report, exports to every target (OpenVINO's are two files). What is
imported and quantized once is shared: each attempt is a fork, killed with -9 after a random part of the
time that the whole takes. Then the files are read; the same is run to its end, and nothing may be there but
its files. Exit status 1 where something else was.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from torch import nn

import backquant
from backquant.cli import main as command

EXAMPLE = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)
FILES = {
    "save": ("model.bq",),
    "quantize -o": ("model.bq", "report.html"),
    "onnx": ("model.onnx",),
    "openvino": ("model.xml", "model.bin"),
    "tensorrt": ("model.onnx",),
    "qdq-onnx": ("model.onnx",),
    "executorch": ("model.pte",),
    "pt2e": ("model.pt2",),
    "inductor": ("model.pt2",),
    "compile": (),
}
BACKENDS = {  # by target
    "onnx": "onnxruntime",
    "openvino": "openvino",
    "tensorrt": "tensorrt",
    "qdq-onnx": "onnxruntime",
    "executorch": "xnnpack",
    "pt2e": "executorch",
    "inductor": "inductor_x86",
}
SLOW = ("inductor", "compile")
GOOD = ("old", "new")  # outcomes begin with one of them


def factory() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)), EXAMPLE


def data() -> list[torch.Tensor]:
    return [EXAMPLE]


def actions(folder: Path) -> dict[str, Callable[[], Any]]:
    """What writes into ``folder``, by kind."""
    sys.modules["kill_moments"] = sys.modules[__name__]
    models = {
        name: backquant.quantize(factory()[0], backend=name, calibration=data(), slower="keep")
        for name in ("x86", *BACKENDS.values())
    }

    def quantize() -> None:
        words = "quantize kill_moments:factory --data kill_moments:data --slower keep -f --json"
        places = ["-o", str(folder / "model.bq"), "--html", str(folder / "report.html")]
        sys.argv = ["backquant", *words.split(), *places]
        command()

    def export(target: str) -> Callable[[], Any]:
        model, path = models[BACKENDS[target]], folder / FILES[target][0]
        return lambda: backquant.export(model, path, to=target, overwrite=True)

    return {
        "save": lambda: backquant.save(models["x86"], folder / "model.bq"),
        "quantize -o": quantize,
        **{target: export(target) for target in BACKENDS},
        "compile": lambda: models["x86"].compile(EXAMPLE),
    }


def child(action: Callable[[], Any], folder: Path) -> int:
    """A process that does ``action``, with its temporary files in ``folder``."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)  # a compiler of it is killed with it
        quiet = os.open(folder.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
        torch.set_num_threads(1)
        tempfile.tempdir = str(folder)
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
        action()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)


def whole(action: Callable[[], Any], folder: Path) -> float:
    """Seconds that a child takes for all of it."""
    start = time.monotonic()
    _, status = os.waitpid(child(action, folder), 0)
    assert status == 0, (folder.parent / "said.txt").read_text()
    return time.monotonic() - start


def content(folder: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}


def attempt(action: Callable[[], Any], folder: Path, after: float, new: dict[str, bytes]) -> str:
    """What a kill after so many seconds left: old or new files, or a defect."""
    old = dict.fromkeys(new, b"old")
    for name, text in old.items():
        (folder / name).write_bytes(text)
    pid = child(action, folder)
    time.sleep(after)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # before it had a group of its own
    os.waitpid(pid, 0)
    found = content(folder)
    litter = any(item.is_dir() for item in folder.iterdir())
    if any(found[name] not in (old[name], new[name]) for name in found):
        return "half a file"
    if "model.xml" in new:
        together = {found[name] == new[name] for name in found}
        if len(together) > 1 or (len(found) == 1 and "model.xml" in found):
            return "files that do not belong together"
    elif set(found) != set(new):
        return "no file"
    whole(action, folder)
    if {item.name: item.is_file() for item in folder.iterdir()} != dict.fromkeys(new, True):
        return "litter"
    if found == new:
        return "new, removed its litter" if litter else "new"
    return "old, removed its litter" if litter else "old"


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--only",
        nargs="+",
        choices=list(FILES),
        default=[kind for kind in FILES if kind not in SLOW],
    )
    chosen = parser.parse_args(arguments)
    dice = random.Random(chosen.seed)
    counts: Counter[tuple[str, str]] = Counter()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "files")
        folder.mkdir()
        todo = {kind: action for kind, action in actions(folder).items() if kind in chosen.only}
        reference, seconds = {}, {}
        for kind, action in todo.items():
            whole(action, folder)  # what is made at the first time
            seconds[kind] = whole(action, folder)
            reference[kind] = {file: (folder / file).read_bytes() for file in FILES[kind]}
            for file in FILES[kind]:
                (folder / file).unlink()
        try:
            for number in range(chosen.count):
                kind = list(todo)[number % len(todo)]
                after = dice.uniform(0, 1.1 * seconds[kind])
                counts[kind, attempt(todo[kind], folder, after, reference[kind])] += 1
                for item in folder.iterdir():
                    item.unlink()
        except KeyboardInterrupt:
            print("interrupted")
    for (kind, outcome), count in sorted(counts.items()):
        print(f"{kind:12} {outcome:36} {count:5}")
    print(f"{counts.total()} of {chosen.count} moments")
    return 0 if all(outcome.startswith(GOOD) for _, outcome in counts) else 1


if __name__ == "__main__":
    sys.exit(main())
