"""Mutated artifacts that follow what the code of the package runs through, with atheris (libFuzzer).

    pip install atheris
    python tools/fuzz_coverage.py FOLDER -max_total_time=900    # what it found stays in FOLDER
    python tools/fuzz_coverage.py FOLDER FOLDER/crash-…         # one input again

The mutations are those of ``fuzz_artifact.py``; what that draws from random numbers is read from the input
here, so an input that reaches new lines of ``backquant`` is kept and changed further. Further options are
libFuzzer's. It ends at the first defect (``fuzz_artifact.py`` says what one is; memory of ``load`` is that
tool's alone, since instrumented code takes more).
"""

from __future__ import annotations

import importlib
import os
import random
import resource
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MALLOC_PERTURB_", "170")
sys.path.insert(0, str(Path(__file__).parent))

FIRST = 64  # inputs of random bytes to begin with
LENGTH = 512
TRIES = 1 << 12


class Dice(random.Random):
    """Random numbers that are read from bytes; zeros behind their end."""

    def __init__(self, data: bytes) -> None:
        super().__init__(0)
        self._data, self._at = data, 0

    def getrandbits(self, k: int) -> int:
        size = (k + 7) // 8
        part = self._data[self._at : self._at + size]
        self._at += size
        return int.from_bytes(part, "big") & ((1 << k) - 1)

    def random(self) -> float:
        return self.getrandbits(16) / (1 << 16)

    def seed(self, *_: Any, **__: Any) -> None:
        """The bytes are all."""


class DefectError(Exception):
    """An outcome that is none of ``OUTCOMES``."""


def target(folder: Path, counts: Counter[str]) -> Callable[[bytes], None]:
    """What libFuzzer calls with each input."""
    import fuzz_artifact

    from backquant.artifact import store

    functions = sorted(
        {
            *fuzz_artifact._functions(),
            *fuzz_artifact._all_torch_functions(),
            *fuzz_artifact._known_holes(),
        }
    )
    store._config = fuzz_artifact.cache_by_text(store._config)
    seeds = list(fuzz_artifact.seeds(folder))
    path = folder / "mutant.bq"

    def run(data: bytes) -> None:
        dice = Dice(data)
        seed = dice.choice(seeds)
        payload, is_signed = fuzz_artifact.mutant(seed, dice, functions)
        path.write_bytes(payload)
        outcome = fuzz_artifact.tried(seed, path, told=False)
        counts[outcome] += 1
        if outcome == "memory of load":
            return
        fine = fuzz_artifact.OUTCOMES if is_signed else ("equal", "refused")
        if outcome not in fine:
            raise DefectError(outcome)

    return run


def main() -> int:
    import atheris

    kept = Path(sys.argv[1])
    kept.mkdir(exist_ok=True)
    dice = random.Random(0)
    for number in range(FIRST if not any(kept.iterdir()) else 0):
        (kept / f"first-{number}").write_bytes(dice.randbytes(LENGTH))
    with atheris.instrument_imports(include=["backquant"], enable_loader_override=False):
        importlib.import_module("backquant.artifact")

    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as name:
        run = target(Path(name), counts)
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (16 << 30, hard))
        usual = [
            f"-max_len={LENGTH * 4}",
            "-timeout=120",
            "-rss_limit_mb=6000",
            f"-artifact_prefix={kept}/",
        ]

        def told(data: bytes) -> None:
            run(data)
            if counts.total() % TRIES == 0:
                print(dict(counts), flush=True)

        atheris.Setup([sys.argv[0], *usual, *sys.argv[1:]], told)
        atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
