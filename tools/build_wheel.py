"""The wheel of this checkout: the same bytes from every folder, at any time, under any umask.

    python tools/build_wheel.py dist

What git tracks of the package is copied, with the same permissions everywhere, and built without a network
by the setuptools that is installed (constraints.txt pins it, and the wheel names it). Its files have the time
of the last commit, or the one that SOURCE_DATE_EPOCH names. The library of kernels is compiled for all
instruction sets of this kind of machine, or those that BACKQUANT_BUILD_KERNELS names; "off" leaves it out.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONTENT = ("setup.py", "pyproject.toml", "README.md", "LICENSE", "src")
_BUILD = "import sys; from setuptools import build_meta; print(build_meta.build_wheel(sys.argv[1]))"


def build(folder: Path) -> Path:
    """Write the wheel into ``folder``, which must exist; its path."""
    with tempfile.TemporaryDirectory() as made:
        place = Path(made)
        for name in _git("ls-files", "--", *CONTENT).splitlines():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, place / name)
            (place / name).chmod(0o644)
        done = subprocess.run(
            [sys.executable, "-c", _BUILD, str(folder.resolve())],
            cwd=place,
            env={"BACKQUANT_BUILD_KERNELS": "all", **os.environ, "SOURCE_DATE_EPOCH": _date()},
            capture_output=True,
            text=True,
            check=False,
            umask=0o022,
        )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    if "warning: installed without" in done.stderr:
        raise SystemExit(done.stderr)
    return folder / done.stdout.splitlines()[-1]


def _date() -> str:
    return os.environ.get("SOURCE_DATE_EPOCH") or _git("log", "-1", "--format=%ct").strip()


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    """Build, and print the path with the sha-256 digest of the bytes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    wheel = build(folder)
    print(f"{hashlib.sha256(wheel.read_bytes()).hexdigest()}  {wheel}")


if __name__ == "__main__":
    main()
