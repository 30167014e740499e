"""The wheel: the same bytes twice, and of use where nothing is installed but what it declares."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.xdist_group("wheel")  # one worker builds it
ROOT = Path(__file__).resolve().parents[2]
TOOL = ROOT / "tools" / "build_wheel.py"
#: The README's first example, and what the commands read.
EXAMPLE = """
{code}
assert "site" in backquant.__file__, backquant.__file__
backquant.save(backquant.quantize(model, backend="onnxruntime", calibration=loader), "ort.bq")
"""
COMMANDS = """
import sys
from backquant.cli import main
for words in sys.argv[1:]:
    print("===", words, flush=True)
    sys.argv[1:] = words.split()
    try:
        main()
    except SystemExit as stop:
        print("exit", stop.code, flush=True)
"""
EXTRAS = {
    "demo": "demo",
    "export ort.bq --to onnx -o model.onnx": "onnx",
    "export ort.bq --to openvino -o model.xml": "openvino",
    "export ort.bq --to executorch -o model.pte": "executorch",
    "check model.onnx --for tensorrt": "onnx",
}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built(tmp_path_factory.mktemp("first"), "022")


def built(folder: Path, umask: str) -> Path:
    """Without the library of kernels, of which tests/native/test_install.py knows."""
    command = ["sh", "-c", f'umask {umask}; exec "$0" "$@"', sys.executable, str(TOOL), str(folder)]
    environment = {**os.environ, "BACKQUANT_BUILD_KERNELS": "off"}
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    return Path(done.stdout.split()[-1])


def test_the_same_bytes_twice(wheel: Path, tmp_path: Path) -> None:
    assert built(tmp_path, "077").read_bytes() == wheel.read_bytes()


def test_it_holds_what_the_package_holds(wheel: Path) -> None:
    files = {path.relative_to(ROOT / "src").as_posix() for path in (ROOT / "src").rglob("*.*")}
    unkept = ("__pycache__", ".egg-info", "native/libraries/")
    kept = {name for name in files if not any(part in name for part in unkept)}
    assert kept == {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of packages: the wheel, links to what it declares and what that needs, and nothing else."""
    folder = tmp_path_factory.mktemp("empty") / "site"
    ZipFile(wheel).extractall(folder)
    own = next(metadata.distributions(name="backquant", path=[str(folder)]))
    for distribution in needed(own, set()):
        tops = {file.parts[0] for file in distribution.files or () if file.parts[0] != ".."}
        for name in tops - {"__pycache__"}:
            link = folder / name
            if not link.exists():
                link.symlink_to(Path(str(distribution.locate_file(name))))
    return folder


def needed(package: metadata.Distribution, seen: set[str]) -> Iterator[metadata.Distribution]:
    for line in package.requires or ():
        requirement = Requirement(line)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in seen:
            seen.add(requirement.name)
            found = metadata.distribution(requirement.name)
            yield found
            yield from needed(found, seen)


def test_without_extras(site: Path) -> None:
    """The README's example and the commands run; what needs an extra names it."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)[0]
    code = code.replace('backend="x86",', 'backend="x86", slower="keep",')
    assert "100.0% of the multiply-adds on integers" in run(site, EXAMPLE.format(code=code))
    told = run(site, COMMANDS, "--help", "backends", "inspect model.bq", *EXTRAS)
    outcomes = re.split(r"^=== .*\n", told, flags=re.MULTILINE)[1:]
    assert [text.split()[-1] for text in outcomes] == ["0"] * 3 + ["2"] * len(EXTRAS), told
    for text, extra in zip(outcomes[3:], EXTRAS.values(), strict=True):
        assert f"pip install '.[{extra}]'" in text


def run(site: Path, code: str, *arguments: str) -> str:
    start = f"import sys; sys.path.insert(0, {str(site)!r})\n"
    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", start + code, *arguments],
        env={"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        cwd=site.parent,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout
