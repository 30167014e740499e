"""Processes that write, killed at random moments: old files or new ones, no litter after the next run.

    python tools/kill_moments.py --count 500 --seed 0
    python tools/kill_moments.py --count 10 --only compile inductor    # a C++ compiler each, some 20 s

Everything of ``writers.py``: models, reports, descriptions, checkpoints, exports (OpenVINO's are two files).
Each kind has a process of its own, which does it once: what is imported and made at the first time (of an
export 15 seconds of 17) is there then. Each attempt is a fork of that, killed with -9 after a random part of
the time that the whole takes. Then the files are read; the same is run to its end, and nothing may be there
but its files. Exit status 1 where something else was.
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
sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from tools.writers import OLD, SLOW, SUFFIXES, writer

FILES = {kind: ["model" + suffix for suffix in suffixes] for kind, suffixes in SUFFIXES.items()}
GOOD = ("old", "new")  # outcomes begin with one of them


def action_of(kind: str) -> Callable[[], object]:
    """What writes into the folder that the process is in then."""
    write, name = writer(kind), FILES[kind][0] if FILES[kind] else "model"
    return lambda: write(Path.cwd() / name)


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


def filled(kind: str, folder: Path) -> dict[str, bytes]:
    """The old files."""
    text = OLD.get(kind, b"old")
    old = {} if text is None else dict.fromkeys(FILES[kind], text)
    for name, content in old.items():
        (folder / name).write_bytes(content)
    return old


def attempt(
    kind: str, action: Callable[[], Any], folder: Path, after: float, new: dict[str, bytes]
) -> str:
    """What a kill after so many seconds left: old or new files, or a defect."""
    old = filled(kind, folder)
    pid = child(action)
    time.sleep(after)
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        os.kill(pid, signal.SIGKILL)  # before it had a group of its own
    os.waitpid(pid, 0)
    found = content(folder)
    litter = any(item.is_dir() for item in folder.iterdir())
    if kind == "checkpoint":  # it is there until all is done, whole or not at all
        found = {name: text for name, text in found.items() if not name.endswith(".checkpoint")}
    if any(text not in (old.get(name), new.get(name)) for name, text in found.items()):
        return "half a file"
    if "model.xml" in new:
        together = {found[name] == new[name] for name in found}
        if len(together) > 1 or (len(found) == 1 and "model.xml" in found):
            return "files that do not belong together"
    elif not set(old) <= set(found):
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
    filled(kind, folder)
    warmed(action, folder)
    dice = random.Random(f"{kind} {seed}")
    for item in folder.iterdir():
        item.unlink()
    filled(kind, folder)
    seconds = whole(action, folder)
    new = {file: (folder / file).read_bytes() for file in FILES[kind]}
    counts: Counter[str] = Counter()
    for _ in range(count):
        for item in folder.iterdir():
            item.unlink()
        counts[attempt(kind, action, folder, dice.uniform(0, 1.1 * seconds), new)] += 1
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
    good, total = True, 0
    for number, kind in enumerate(chosen.only):
        count = len(range(number, chosen.count, len(chosen.only)))
        counts = elsewhere(kind, action_of(kind), count, chosen.seed)
        for outcome, times in sorted(counts.items()):
            print(f"{kind:12} {outcome:36} {times:5}", flush=True)
        good &= all(outcome.startswith(GOOD) for outcome in counts)
        total += counts.total()
    print(f"{total} of {chosen.count} moments")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
