"""The room without libcst."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import sys
sys.modules["libcst"] = None
import backquant
try:
    backquant.migrate
except backquant.MissingExtraError as error:
    print(error.fix)
"""


def test_the_missing_extra_is_named() -> None:
    done = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=False)
    assert done.stdout == "pip install 'backquant[migrate]'\n", done.stderr
