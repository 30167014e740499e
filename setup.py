"""What pyproject.toml cannot say: where a C++ compiler is, the library of kernels goes into the package.

Without one, or where it fails, the package is installed without the library and runs on PyTorch's kernels.
``$BACKQUANT_BUILD_KERNELS`` chooses what is compiled (``src/backquant/native/build.py``).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

NATIVE = Path("src", "backquant", "native")


def _builder() -> Any:
    spec = importlib.util.spec_from_file_location("native_build", NATIVE / "build.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look themselves up
    spec.loader.exec_module(module)
    return module


class BuildWithKernels(build_py):
    """``libraries``: those that were compiled."""

    libraries: tuple[Path, ...] = ()

    def run(self) -> None:
        super().run()
        native = _builder()
        package = NATIVE if self.editable_mode else Path(self.build_lib, "backquant", "native")
        sets = native.chosen_sets(os.environ.get(native.CHOICE, ""), own_only=self.editable_mode)
        try:
            self.libraries = tuple(native.build_all(package / "libraries", sets))
        except Exception as error:  # whatever a compiler does, the package is complete without it
            sys.stderr.write(f"warning: installed without the library of kernels: {error}\n")
        else:
            names = ", ".join(sets) or "none"
            sys.stderr.write(f"library of kernels: {names} in {package / 'libraries'}\n")


class WheelWithKernels(bdist_wheel):
    """With the library in it a wheel is for a machine, and for any Python."""

    def run(self) -> None:
        self.run_command("build_py")
        if self.get_finalized_command("build_py").libraries:
            self.root_is_pure = False
            self.distribution.has_ext_modules = lambda: True
        super().run()

    def get_tag(self) -> tuple[str, str, str]:
        python, abi, platform = super().get_tag()
        return (python, abi, platform) if self.root_is_pure else ("py3", "none", platform)


setup(cmdclass={"build_py": BuildWithKernels, "bdist_wheel": WheelWithKernels})
