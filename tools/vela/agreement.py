"""Our plans for ``examples/backends/ethos_u*.yaml`` beside Vela's verdicts.

    python -m tools.vela.agreement            # with the recorded verdicts
    python -m tools.vela.agreement --ask      # asks Vela (pip install ethos-u-vela) and records what it says

Prints the agreement by kind of operator, and each disagreement with our reason.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tools.vela.more_cases import all_cases
from tools.vela.plans import planned

from backquant import BackendConfig

__all__ = ["BACKENDS", "RECORDED", "compared", "recorded"]

RECORDED = Path(__file__).with_name("verdicts.json")
BACKENDS = {"EthosU55": "ethos_u55.yaml", "EthosU85": "ethos_u85.yaml"}
_EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "backends"


def recorded() -> dict[str, dict[str, bool]]:
    """Vela's verdicts by accelerator and case; those that it takes, and those that it does not."""
    data = json.loads(RECORDED.read_text(encoding="utf-8"))
    return {
        accelerator: {name: taken == "taken" for taken, names in kinds.items() for name in names}
        for accelerator, kinds in data["verdicts"].items()
    }


def ask() -> None:
    """Ask Vela about every case, and write what it says."""
    from importlib.metadata import version

    from tools.vela.judge import on_the_npu

    verdicts: dict[str, dict[str, list[str]]] = {}
    for accelerator in BACKENDS:
        kinds: dict[str, list[str]] = {"taken": [], "left": []}
        for case in all_cases():
            kinds["taken" if on_the_npu(case.call, accelerator) else "left"].append(case.name)
        verdicts[accelerator] = kinds
    data = {"vela": version("ethos-u-vela"), "verdicts": verdicts}
    RECORDED.write_text(json.dumps(data, indent=0) + "\n", encoding="utf-8")


def compared(step: int = 1) -> Iterator[tuple[str, str, bool, bool, str]]:
    """Of each ``step``-th case: accelerator, case, Vela's verdict, ours, and our reasons."""
    verdicts = recorded()
    backends = [BackendConfig.load(_EXAMPLES / name) for name in BACKENDS.values()]
    for case in all_cases()[::step]:
        plans = planned(case, backends)
        for accelerator, (taken, reasons) in zip(BACKENDS, plans, strict=True):
            yield accelerator, case.name, verdicts[accelerator][case.name], taken, reasons


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ask", action="store_true", help="ask Vela anew")
    if parser.parse_args().ask:
        ask()
    counts: Counter[tuple[str, str, bool, bool]] = Counter()
    wrong = []
    for accelerator, name, theirs, ours, reasons in compared():
        counts[accelerator, name.split(" ")[0], theirs, ours] += 1
        if theirs is not ours:
            wrong.append(f"{accelerator} {name}: Vela {theirs}, we {ours} {reasons}")
    kinds = sorted({(accelerator, kind) for accelerator, kind, *_ in counts})
    print(f"{'':24}{'both take':>10}{'both leave':>11}{'Vela only':>10}{'we only':>8}")
    for accelerator, kind in kinds:
        row = [counts[accelerator, kind, a, b] for a, b in _PAIRS]
        print(f"{accelerator} {kind:15}{row[0]:10}{row[1]:11}{row[2]:10}{row[3]:8}")
    total = counts.total()
    print(f"{total - len(wrong)} of {total} agree")
    print("\n".join(wrong))


_PAIRS = ((True, True), (False, False), (True, False), (False, True))

if __name__ == "__main__":
    main()
