from __future__ import annotations

import functools
import operator
import sys
import types

import pytest
import torch

from backquant.backend_config.import_paths import Resolver, SpellingError, path_of


@pytest.mark.parametrize(
    ("target", "path"),
    [
        (torch.nn.Conv2d, "torch.nn.Conv2d"),
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (torch._C._nn.avg_pool2d, "torch.nn.functional.avg_pool2d"),
        (torch.nn.functional.max_pool2d, "torch.nn.functional.max_pool2d"),
        (torch.add, "torch.add"),
        (operator.add, "operator.add"),
        (operator.getitem, "operator.getitem"),
        (getattr, "builtins.getattr"),
        (torch.ops.aten.addmm.default, "torch.ops.aten.addmm.default"),
        (torch.ops.aten.add.Tensor, "torch.ops.aten.add.Tensor"),
        (torch.ops.aten.add, "torch.ops.aten.add"),
        (torch.float16, "torch.float16"),
        (torch.channels_last, "torch.channels_last"),
        (torch.per_tensor_affine, "torch.per_tensor_affine"),
    ],
)
def test_spelling_leads_back(target, path):
    assert path_of(target) == path
    assert Resolver().resolve(path) is target


def closure():
    def inner():
        pass

    return inner


@pytest.mark.parametrize(
    "target",
    [lambda x: x, closure(), functools.partial(torch.add), 5, torch.nn.ReLU().forward, object()],
)
def test_what_has_no_path_is_refused_by_name(target):
    with pytest.raises(SpellingError, match="has no import path"):
        path_of(target)


@pytest.fixture
def package():
    """A package with a class, a module inside it, and an import of something foreign."""
    package = types.ModuleType("their_ops")
    inner = types.ModuleType("their_ops.inner")

    class Widget(torch.nn.Module):
        pass

    Widget.__module__, Widget.__qualname__ = "their_ops.inner", "Widget"
    inner.Widget = package.Widget = Widget
    package.inner = inner
    package.os = sys.modules["os"]
    package.system = sys.modules["os"].system
    sys.modules.update({"their_ops": package, "their_ops.inner": inner})
    yield package
    del sys.modules["their_ops"], sys.modules["their_ops.inner"]


def test_allow_widens(package):
    with pytest.raises(SpellingError, match="outside of the allowed packages") as caught:
        Resolver().resolve("their_ops.Widget")
    assert 'allow=("their_ops",)' in caught.value.fix
    assert Resolver(["their_ops"]).resolve("their_ops.Widget") is package.Widget


def test_a_dotted_prefix_allows_that_part_only(package):
    resolver = Resolver(["their_ops.inner"])
    assert resolver.resolve("their_ops.inner.Widget") is package.Widget
    with pytest.raises(SpellingError, match="outside"):
        resolver.resolve("their_ops.Widget")


def test_shortest_path_of_a_class(package):
    assert path_of(package.Widget) == "their_ops.Widget"


@pytest.mark.parametrize("path", ["their_ops.os.system", "their_ops.system"])
def test_foreign_objects_inside_of_an_allowed_package_are_refused(package, path):
    with pytest.raises(SpellingError, match="leads out of the allowed packages"):
        Resolver(["their_ops"]).resolve(path)


@pytest.mark.parametrize(
    "path",
    [
        "os.system",
        "torch.os.system",
        "torch.sys.modules",
        "builtins.eval",
        "builtins.exec",
        "builtins.__import__",
        "torch.nn.Module.__init__.__globals__",
        "torch.serialization.pickle.loads",
        "subprocess.run",
        "torch",
        "torch..add",
        "torch.add()",
        "",
        ".",
    ],
)
def test_what_a_file_must_not_reach(path):
    with pytest.raises(SpellingError):
        Resolver().resolve(path)


def test_unknown_names_have_a_suggestion():
    with pytest.raises(SpellingError) as caught:
        Resolver().resolve("torch.nn.Conv2D")
    assert caught.value.fix == 'did you mean "torch.nn.Conv2d"?'


def test_submodules_of_allowed_packages_are_imported(tmp_path, monkeypatch):
    (tmp_path / "lazy_pkg").mkdir()
    (tmp_path / "lazy_pkg" / "__init__.py").write_text("")
    (tmp_path / "lazy_pkg" / "deep.py").write_text("def fuse(is_qat, a, b):\n    return a\n")
    (tmp_path / "lazy_pkg" / "broken.py").write_text("raise RuntimeError('at import')\n")
    (tmp_path / "lazy_pkg" / "needs.py").write_text("import not_installed_here\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    resolver = Resolver(["lazy_pkg"])
    assert resolver.resolve("lazy_pkg.deep.fuse").__name__ == "fuse"
    with pytest.raises(SpellingError, match=r"importing lazy_pkg\.broken failed: at import"):
        resolver.resolve("lazy_pkg.broken.x")
    with pytest.raises(SpellingError, match="not_installed_here is not installed"):
        resolver.resolve("lazy_pkg.needs.x")
    with pytest.raises(SpellingError, match='has no "missing"'):
        resolver.resolve("lazy_pkg.missing")


def test_nothing_is_imported_from_packages_that_are_not_allowed(tmp_path, monkeypatch):
    (tmp_path / "evil_pkg.py").write_text("raise SystemExit('ran')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SpellingError, match="outside"):
        Resolver().resolve("evil_pkg.thing")
    assert "evil_pkg" not in sys.modules


def test_an_absent_package():
    with pytest.raises(SpellingError, match="no_such_pkg is not installed"):
        Resolver(["no_such_pkg"]).resolve("no_such_pkg.thing")
