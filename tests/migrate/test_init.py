"""The room needs nothing beyond backquant's own dependencies."""

from __future__ import annotations

import subprocess
import sys


def test_no_package_is_needed_for_migration() -> None:
    code = "import sys; sys.modules['libcst'] = None; import backquant; backquant.migrate.migrate_source"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
