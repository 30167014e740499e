"""``flows.py`` in a process of its own, which has a device that no other test shall see."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

FLOWS = Path(__file__).with_name("flows.py")


def test_models_on_another_device() -> None:
    command = [sys.executable, "-m", "pytest", "-n0", "-q", "-p", "no:cacheprovider", str(FLOWS)]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=FLOWS.parents[2]
    )
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
