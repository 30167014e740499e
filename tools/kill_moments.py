"""Processes that write, killed at random moments: old files or new ones, no litter after the next run.

    python tools/kill_moments.py --count 500 --seed 0
    python tools/kill_moments.py --count 10 --only compile inductor    # a C++ compiler each, some 20 s

``save``, ``quantize -o`` with a report, exports to every target (OpenVINO's are two files). Each kind has a
process of its own, which does it once: what is imported and made at the first time (of an export 15 seconds
of 17) is there then. Each attempt is a fork of that, killed with -9 after a random part of the time that the
whole takes. Then the files are read; the same is run to its end, and nothing may be there but its files.
Exit status 1 where something else was.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import traceback
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


def actions(folder: Path = Path()) -> dict[str, Callable[[], Any]]:
    """What writes into ``folder``, by kind. Default: where the process is then."""
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


def child(action: Callable[[], Any]) -> int:
    """A process that does ``action``."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.setpgid(0, 0)  # a compiler of it is killed with it
        action()
        status = 0
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        os._exit(status)


def whole(action: Callable[[], Any], folder: Path) -> float:
    """Seconds that a child takes for all of it."""
    start = time.monotonic()
    _, status = os.waitpid(child(action), 0)
    assert status == 0, (folder.parent / "said.txt").read_text()
    return time.monotonic() - start


def content(folder: Path) -> dict[str, bytes]:
    return {item.name: item.read_bytes() for item in folder.iterdir() if item.is_file()}


def attempt(action: Callable[[], Any], folder: Path, after: float, new: dict[str, bytes]) -> str:
    """What a kill after so many seconds left: old or new files, or a defect."""
    old = dict.fromkeys(new, b"old")
    for name, text in old.items():
        (folder / name).write_bytes(text)
    pid = child(action)
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


def warmed(action: Callable[[], Any], folder: Path) -> None:
    """Do ``action`` once in this process, which keeps its temporary files in ``folder`` and says nothing."""
    quiet = os.open(folder.parent / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    torch.set_num_threads(1)
    tempfile.tempdir = str(folder)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder.parent / "inductor")
    try:
        action()
    except SystemExit as end:
        assert not end.code, end.code


def moments(
    kind: str, action: Callable[[], Any], folder: Path, count: int, seed: int
) -> Counter[str]:
    """How often each outcome was."""
    warmed(action, folder)
    dice = random.Random(f"{kind} {seed}")
    seconds = whole(action, folder)
    new = {file: (folder / file).read_bytes() for file in FILES[kind]}
    counts: Counter[str] = Counter()
    for _ in range(count):
        for item in folder.iterdir():
            item.unlink()
        counts[attempt(action, folder, dice.uniform(0, 1.1 * seconds), new)] += 1
    return counts


def elsewhere(kind: str, action: Callable[[], Any], count: int, seed: int) -> Counter[str]:
    """``moments`` in a process of its own."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name, "files")
        folder.mkdir()
        found = Path(name, "found.json")
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                os.chdir(folder)
                found.write_text(json.dumps(moments(kind, action, folder, count, seed)))
                status = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        if status:
            return Counter({f"it ended: {(Path(name) / 'said.txt').read_text()[-500:]}": 1})
        return Counter(json.loads(found.read_text()))


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
    todo, good, total = actions(), True, 0
    for number, kind in enumerate(chosen.only):
        count = len(range(number, chosen.count, len(chosen.only)))
        counts = elsewhere(kind, todo[kind], count, chosen.seed)
        for outcome, times in sorted(counts.items()):
            print(f"{kind:12} {outcome:36} {times:5}", flush=True)
        good &= all(outcome.startswith(GOOD) for outcome in counts)
        total += counts.total()
    print(f"{total} of {chosen.count} moments")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
