"""What one ``quantize`` of a small model takes: calls, functions, files and modules of this package, by room.

    python tools/traced_call.py               # the second call of Conv-BN-ReLU-Flatten-Linear
    python tools/traced_call.py --functions   # and each function, with how often it is called

A room is entered where one of its functions is called by a function of another room, directly or through
code of other packages.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

import backquant

HOME = f"{Path(backquant.__file__).parent}/"
Function = tuple[str, int, str]


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 6 * 6, 10)).eval()


def room(function: Function) -> str:
    return function[0].partition("/")[0]


class Trace:
    """Counts the calls of functions of this package while it is the profiler."""

    def __init__(self) -> None:
        self.calls: Counter[Function] = Counter()
        self.entries: Counter[str] = Counter()
        self._stack: list[Function | None] = []

    def __call__(self, frame: FrameType, event: str, _: Any) -> None:
        if event == "return" and self._stack:
            self._stack.pop()
        elif event == "call":
            self._stack.append(self._called(frame))

    def _called(self, frame: FrameType) -> Function | None:
        """The function of this package that is called, else the one that it is called by."""
        caller = self._stack[-1] if self._stack else None
        code = frame.f_code
        if not code.co_filename.startswith(HOME):
            return caller
        called = (code.co_filename.removeprefix(HOME), code.co_firstlineno, code.co_qualname)
        self.calls[called] += 1
        if caller is None or room(caller) != room(called):
            self.entries[room(called)] += 1
        return called


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--functions", action="store_true", help="list them, by file")
    arguments = parser.parse_args()
    batches = [torch.randn(2, 3, 8, 8) for _ in range(2)]
    backquant.quantize(model(), backend="x86", calibration=batches)
    second, trace = model(), Trace()
    sys.setprofile(trace)
    backquant.quantize(second, backend="x86", calibration=batches)
    sys.setprofile(None)
    files = {name for name, _, _ in trace.calls}
    modules = sum(name.partition(".")[0] == "backquant" for name in sys.modules)
    print(
        f"{sum(trace.calls.values())} calls, {len(trace.calls)} functions, {len(files)} files, "
        f"{len(trace.entries)} rooms; {modules} modules loaded"
    )
    functions = Counter(map(room, trace.calls))
    for name, count in functions.most_common():
        calls = sum(n for function, n in trace.calls.items() if room(function) == name)
        print(f"  {name:16} {count:5} functions {calls:6} calls {trace.entries[name]:5} entries")
    if arguments.functions:
        for (name, line, function), count in sorted(trace.calls.items()):
            print(f"{count:6}  {name}:{line}  {function}")


if __name__ == "__main__":
    main()
