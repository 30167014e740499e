"""Kernels beside the reference model, by the thousand: generated operators, layouts and integers.

    python tools/kernel_audit.py --count 200 --engines x86,qnnpack --families conv,resize

Exit status: 0 when every result is within its limit, 1 otherwise, 2 for bad usage.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def main(given: Sequence[str] | None = None) -> int:
    for folder in ("tests", "src"):
        if str(ROOT / folder) not in sys.path:
            sys.path.insert(0, str(ROOT / folder))
    from kernel_audit.check import ENGINES, FAMILIES, check

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--count", type=int, default=50, help="cases per family and engine")
    parser.add_argument("--seed", type=int, default=0, help="the first case's")
    parser.add_argument("--engines", default=",".join(ENGINES), help="names, with commas")
    parser.add_argument("--families", default=",".join(FAMILIES), help="names, with commas")
    asked = parser.parse_args(given)
    engines, families = asked.engines.split(","), asked.families.split(",")
    unknown = [name for name in engines if name not in ENGINES]
    unknown += [name for name in families if name not in FAMILIES]
    if unknown:
        parser.error(f"unknown name {unknown[0]!r}")
    warnings.simplefilter("ignore")
    compared = wrong = 0
    for family in families:
        for seed in range(asked.seed, asked.seed + asked.count):
            for engine in engines:
                found = check(family, seed, engine)
                compared += found.compared
                wrong += len(found.findings)
                for finding in found.findings:
                    print(f"{family} {seed}: {finding}")
    print(f"{compared} results compared, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
