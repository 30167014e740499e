"""The packages of ``examples/extensions``: built, installed into a folder of their own by pip, and run.

Each example runs in a process that has imported torch and backquant and nothing else of it was called: forks
of one, as importing torch for each takes most of the time.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.xdist_group("extensions")  # one worker pays for what they share
ROOT = Path(__file__).resolve().parents[2]
EXTENSIONS = ROOT / "examples" / "extensions"
NAMES = sorted(path.name for path in EXTENSIONS.iterdir() if (path / "pyproject.toml").is_file())
PRINTED = {
    "backend": """\
acme_npu 1.000 {'avgpool': 'float', 'fc': 'quantized'}
acme_npu2 0.997 {'avgpool': 'quantized', 'fc': 'float'}
""",
    "custom_op": "quantized acme.gate\nloaded True\n",
    "dtype": "quantized flatten 127\n",
    "engine": "acme ['fc: acme.linear_int8 (int8)']\nclose True\nloaded True\n",
    "observer": "quantized True\n",
    "operator": "sinc quantized torch.sinc\n",
    "reference_module": "TransposedLinear\nloaded True\n",
    "target": "acme 1.0 32 32 1.000\nsame True\n",
}
BUILD = """
import os, sys
from setuptools import build_meta
for folder in sys.argv[2:]:
    if os.fork() == 0:
        os.chdir(folder)
        build_meta.build_wheel(sys.argv[1])
        os._exit(0)
    assert os.wait()[1] == 0, folder
"""
RUN = """
import os, runpy, sys, warnings
import benchmarks.stock, torch, torchvision, torch.export
import backquant.api, backquant.artifact
torch.set_num_threads(1)
for path in sys.argv[1:]:
    print("=== ", path, flush=True)
    if os.fork() == 0:
        sys.path.insert(0, os.path.dirname(path))
        runpy.run_path(path)
        sys.stdout.flush()
        os._exit(0)
    assert os.wait()[1] == 0, path
"""


def run(*arguments: object, **environment: str) -> str:
    told = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env={**os.environ, **environment},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    return told.stdout


@pytest.fixture(scope="module")
def printed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What each example prints, by its name."""
    folder = tmp_path_factory.mktemp("extensions")
    copies, wheels, site = folder / "copies", folder / "wheels", folder / "site"
    shutil.copytree(EXTENSIONS, copies)
    wheels.mkdir()
    run("-c", BUILD, wheels, *(copies / name for name in NAMES))
    install = ["install", "--quiet", "--no-index", "--no-deps", "--target", site]
    run("-m", "pip", *install, *sorted(wheels.iterdir()), PIP_DISABLE_PIP_VERSION_CHECK="1")
    examples = [folder / f"{name}" / "example.py" for name in NAMES]
    for name, example in zip(NAMES, examples, strict=True):  # without the package beside them
        example.parent.mkdir()
        for file in (EXTENSIONS / name).glob("*"):
            if file.name == "example.py" or file.suffix == ".yaml":
                shutil.copy(file, example.parent)
    path = os.pathsep.join([str(site), str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])
    told = run("-c", RUN, *examples, PYTHONPATH=path, OMP_NUM_THREADS="1")
    parts = re.split(r"^===  .*/(\w+)/example.py\n", told, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


@pytest.mark.parametrize("name", NAMES)
def test_an_extension(name: str, printed: dict[str, str]) -> None:
    assert printed[name] == PRINTED[name]


@pytest.mark.parametrize("name", NAMES)
def test_the_page_shows_the_code(name: str) -> None:
    page = (ROOT / "docs" / "extending.md").read_text(encoding="utf-8")
    files = [p for s in ("py", "yaml") for p in (EXTENSIONS / name).rglob(f"*.{s}")]
    for path in (path for path in files if path.name != "example.py"):
        assert path.read_text(encoding="utf-8").strip() in page, path
