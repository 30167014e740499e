"""Every module can be imported where nothing is installed but what the package declares."""

from __future__ import annotations

import subprocess
import sys

#: Loaded by one call, or by pytest, which says so.
LOADED_BY_A_CALL = {"backquant.interop.annotating", "backquant.conformance_plugin"}
IMPORTS = """
import importlib, pkgutil, re, sys, warnings
from importlib import metadata
from importlib.machinery import PathFinder

def needed(name, known):
    for line in metadata.requires(name) or ():
        other = re.match(r"[A-Za-z0-9._-]+", line)[0]
        if "extra ==" not in line and other.lower() not in known:
            known.add(other.lower())
            try:
                needed(other, known)
            except metadata.PackageNotFoundError:
                pass  # of another system
    return known

allowed = {name.replace("_", "-") for name in needed("backquant", {"backquant", "numpy"})}
owners = metadata.packages_distributions()
extras = {top for top, found in owners.items()
          if not {name.lower().replace("_", "-") for name in found} & allowed}

class Visible(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        hidden = name.partition(".")[0] in extras
        return None if hidden else PathFinder.find_spec(name, path, target)

place = sys.meta_path.index(PathFinder)
sys.meta_path[place] = Visible
warnings.simplefilter("ignore")
import backquant
assert {"torchao", "onnxruntime", "pytest"} <= extras and "torch" not in extras
for found in pkgutil.walk_packages(backquant.__path__, "backquant."):
    if found.name in sys.argv[1:] or found.name.endswith(".__main__"):
        continue
    try:
        importlib.import_module(found.name)
    except ImportError as error:
        print(found.name, error)
"""


def test_no_module_needs_an_extra_to_be_imported() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORTS, *LOADED_BY_A_CALL],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.returncode) == ("", 0), done.stderr
