from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
from torch import nn

from backquant.artifact.labels import (
    class_path,
    find_class,
    find_module_class,
    storable_path,
)
from backquant.errors import ArtifactError
from backquant.lower.kernels.linear import OnednnLinear


def torch_modules() -> Iterator[type[nn.Module]]:
    for name in dir(nn):
        cls = getattr(nn, name)
        if (
            isinstance(cls, type)
            and issubclass(cls, nn.Module)
            and cls.__module__.startswith("torch.nn.mod")
        ):
            yield cls


@pytest.mark.parametrize("cls", [*torch_modules(), OnednnLinear], ids=lambda cls: cls.__name__)
def test_module_classes_are_found_again(cls: type) -> None:
    assert find_class(storable_path(cls, "here")) is cls


@pytest.mark.parametrize(
    "path",
    [
        "os._wrap_close",
        "subprocess.Popen",
        "torch.nn.parallel.distributed.DistributedDataParallel",
        "torch.jit._script.RecursiveScriptModule",
        "torch.fx.graph_module.GraphModule",
        "torch.nn.modules.linear.Tensor",  # imported there, not defined
        "torch.nn.modules.linear.torch",
        "torch.nn.modules.module._WrappedHook",  # defined there, no module
        "torch.nn.modules.nothing.Here",
        "torch.nn.modules",
        "torch.nn.modulesque.X",
        "backquant.nn.stubs.nn.Linear",
    ],
)
def test_anything_else_is_refused(path: str) -> None:
    with pytest.raises(ArtifactError):
        find_class(path)


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], ModuleType]:
    (tmp_path / "bq_layers.py").write_text(
        "from torch import nn\n"
        "class Leaf(nn.Module):\n    class Inner(nn.Module):\n        pass\n"
        "class Plain:\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)

    def load() -> ModuleType:
        import bq_layers  # type: ignore[import-not-found]

        return bq_layers  # type: ignore[no-any-return]

    return load


def test_a_users_class_needs_to_be_allowed(
    package: Callable[[], ModuleType], snapshot: Callable[..., None]
) -> None:
    leaf = package().Leaf
    with pytest.raises(ArtifactError) as caught:
        storable_path(leaf, "encoder.leaf")
    snapshot("class-user", caught.value)
    path = storable_path(leaf.Inner, "x", ("bq_layers",))
    assert find_module_class(path, ("bq_layers",)) is leaf.Inner
    assert find_class("bq_layers.Plain", ("bq_layers",)) is package().Plain
    with pytest.raises(ArtifactError) as caught:
        find_module_class("bq_layers.Plain", ("bq_layers",))
    snapshot("class-plain", caught.value)


def test_messages(snapshot: Callable[..., None]) -> None:
    class Local(nn.Module):
        pass

    with pytest.raises(ArtifactError) as caught:
        storable_path(Local, "head")
    snapshot("class-local", caught.value, {Local.__module__: "<module>"})
    parametrized = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with pytest.raises(ArtifactError) as caught:
        storable_path(type(parametrized), "fc")
    snapshot("class-parametrized", caught.value)
    for path in ("subprocess.Popen", "mylib.layers.Leaf", "torch.nn.modules.linear.Linearr"):
        with pytest.raises(ArtifactError) as caught:
            find_class(path)
        snapshot(f"class-{path}", caught.value)


def test_class_path_of_an_inner_class() -> None:
    class Local:
        pass

    assert class_path(Local).endswith("test_class_path_of_an_inner_class.<locals>.Local")


BY_HAND = {
    "let the tracer go": lambda *_: storable_path(nn.ReLU, "head"),
    "torch.nn.utils.parametrize": lambda _, n: nn.utils.parametrize.remove_parametrizations(
        n["parametrized"], "weight"
    ),
    'allow=("mylib",)': lambda *_: find_class("pathlib.Path", ("pathlib",)),
}
