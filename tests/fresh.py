"""Code as the first that a process runs of backquant. Importing torch is what costs, so that one process
imports it, and a fork of it runs each piece."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import backquant

_PROGRAM = """
import json, os, sys, traceback
import torch

told = {}
for code in json.load(sys.stdin):
    reading, writing = os.pipe()
    if not os.fork():
        try:
            exec(code, {})
        except BaseException:
            os.write(writing, traceback.format_exc()[-4000:].encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as stream:
        told[code] = stream.read().decode()
    os.wait()
assert not any(name.startswith("backquant") for name in sys.modules)
print(json.dumps(told))
"""


def failures(pieces: Iterable[str]) -> dict[str, str]:
    """What each piece of code raised, of those that did."""
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM],
        input=json.dumps(list(pieces)),
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(backquant.__file__).parents[1])},
    )
    assert done.returncode == 0, done.stderr
    return {code: error for code, error in json.loads(done.stdout).items() if error}
