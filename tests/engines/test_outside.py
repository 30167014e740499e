"""An engine of another package, that of ``examples/extensions``, named by a YAML file, on ResNet-18."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Any

import benchmarks.stock  # noqa: F401 - torchvision's operators
import pytest
import torch

import backquant
from backquant.errors import BackquantError
from backquant.lower import Engine, LowerRule, engine
from backquant.nn.quantized.reference import Linear

SOURCE = Path(__file__).parents[2] / "examples" / "extensions" / "engine" / "acme_engine.py"
SPEC = """\
schema_version: 1
name: acme_npu
engine: acme
dtype_configs:
  int8:
    input_dtype: qint8
    output_dtype: qint8
    weight_dtype: {dtype: qint8, granularity: per_channel}
    bias_dtype: float32
entries:
- operators: [linear]
  dtype_configs: [int8]
"""
Stock = tuple[torch.nn.Module, torch.Tensor]


@pytest.fixture(scope="module")
def acme() -> Iterator[ModuleType]:
    """The module of the package, as if it were installed."""
    spec = importlib.util.spec_from_file_location("acme_engine", SOURCE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["acme_engine"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["acme_engine"]


@pytest.fixture(scope="module")
def resnet18() -> Stock:
    import torchvision

    torch.manual_seed(0)
    return torchvision.models.resnet18().eval(), torch.randn(1, 3, 64, 64)


def quantized(stock: Stock, folder: Path) -> Any:
    path = folder / "acme.yaml"
    path.write_text(SPEC)
    model, x = stock
    return backquant.quantize(model, x, backend=str(path), calibration=[x], slower="keep")


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch, acme: ModuleType) -> Callable[[Engine], None]:
    """Put an engine in the place of the package's."""

    def offer(found: Engine) -> None:
        monkeypatch.setattr(acme, "ENGINE", found)

    points = lambda group="", **_: (  # noqa: E731
        [EntryPoint("acme", "acme_engine:ENGINE", group)] if group == "backquant.engines" else []
    )
    monkeypatch.setattr(engine.metadata, "entry_points", points)
    return offer


@pytest.mark.usefixtures("offered")
def test_a_description_names_the_engine(resnet18: Stock, tmp_path: Path) -> None:
    made = quantized(resnet18, tmp_path)
    assert made.engine.name == "acme" and str(made.kernels[0]) == "fc: acme.linear_int8 (int8)"
    model, x = resnet18
    assert torch.allclose(made(x), model(x), atol=0.1)
    backquant.save(made, tmp_path / "m.bq", allow=("acme_engine",))
    assert torch.equal(backquant.load(tmp_path / "m.bq", allow=("acme_engine",))(x), made(x))


def test_a_kernel_that_fails_names_the_layer(
    resnet18: Stock,
    acme: ModuleType,
    offered: Callable[[Engine], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    snapshot: Callable[..., None],
) -> None:
    """In the first calls, which run the graph, and in those that are recorded."""
    offered(acme.ENGINE)
    made = quantized(resnet18, tmp_path)
    told = []
    for before in (0, 3):
        for _ in range(before):
            made(resnet18[1])

        def fail(*_: Any) -> None:
            raise RuntimeError("DMA timeout 0x17")

        with monkeypatch.context() as patched:
            patched.setattr(acme.LinearInt8, "forward", fail)
            patched.setattr(acme.linear_int8, "_backend_fns", {"cpu": fail})
            with pytest.raises(BackquantError) as caught:
                quantized(resnet18, tmp_path)(resnet18[1]) if not before else made(resnet18[1])
        told.append(str(caught.value))
    assert told[0] == told[1]
    snapshot("kernel", told[0])


def test_rules_that_fail(
    resnet18: Stock,
    acme: ModuleType,
    offered: Callable[[Engine], None],
    tmp_path: Path,
    snapshot: Callable[..., None],
) -> None:
    def fail(*_: Any) -> Any:
        raise KeyError("no tile size for 512")

    rules = [LowerRule("linear", ((Linear,),), fail)]
    wrong = {
        "rule": Engine("acme", acme.info, lambda: rules),
        "table": Engine("acme", acme.info, fail),
        "machine": Engine("acme", fail, list),
    }
    for name, found in wrong.items():
        offered(found)
        with pytest.raises(BackquantError) as caught:
            quantized(resnet18, tmp_path)
        snapshot(name, str(caught.value), {str(tmp_path): "…"})
