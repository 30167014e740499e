"""What is wrong with a call is said by an error of ours with a fix, and the model stays as it was.

The texts are in ``messages``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import backquant
from backquant import (
    BackendConfig,
    BackendPatternConfig,
    BackquantError,
    DTypeConfig,
    QConfig,
    QConfigMapping,
    get_default_qconfig_mapping,
)
from backquant.errors import (
    CalibrationError,
    CaptureError,
    ConfigError,
    CoverageError,
    EngineError,
    InputError,
    SpecError,
    UnknownBackendError,
    UsageError,
)
from backquant.lower import engine_info
from backquant.nn.quantized import reference
from backquant.observe import MinMaxObserver

IMAGE = torch.randn(2, 3, 8, 8)
FIX_NAMES = {
    **{"batch": IMAGE, "calibration": [IMAGE], "example_inputs": (IMAGE,)},
    **{"dataset": [IMAGE[0]], "qconfig": backquant.get_default_qconfig("x86")},
}


def quantize(**changes: Any) -> Callable[[nn.Module], Any]:
    return lambda net: backquant.quantize(net, **{"calibration": [IMAGE], **changes})


def exhausted() -> Iterator[torch.Tensor]:
    batches = iter([IMAGE])
    list(batches)
    return batches


def poisoned(value: float) -> torch.Tensor:
    batch = IMAGE.clone()
    batch[0, 0, 0, 0] = value
    return batch


def of_int16() -> QConfigMapping:
    observer = MinMaxObserver.with_args(dtype=torch.int16)
    return QConfigMapping().set_global(QConfig(observer, observer))


def int16_everywhere() -> BackendConfig:
    """A backend that promises int16, which the x86 engine does not compute in."""
    int16 = DTypeConfig(torch.int16, torch.int16, torch.int16)
    conv = BackendPatternConfig(nn.Conv2d).add_dtype_config(int16).set_root_module(nn.Conv2d)
    conv.set_reference_quantized_module(reference.Conv2d)
    return BackendConfig("promising").set_engine("x86").set_backend_pattern_config(conv)


CASES: dict[str, tuple[type[BackquantError], Callable[[nn.Module], Any]]] = {
    # the backend
    "backend-misspelt": (UnknownBackendError, quantize(backend="x68")),
    "backend-unknown": (UnknownBackendError, quantize(backend="tpu")),
    "backend-number": (UsageError, quantize(backend=8)),
    "backend-no-file": (SpecError, quantize(backend="nothing.yaml")),
    # the calibration set
    "set-empty": (CalibrationError, quantize(calibration=[])),
    "set-empty-with-example": (CalibrationError, quantize(calibration=[], example_inputs=IMAGE)),
    "set-exhausted": (CalibrationError, quantize(calibration=exhausted())),
    "set-none": (UsageError, quantize(calibration=None)),
    "set-none-to-measure-on": (CalibrationError, quantize(calibration=None, example_inputs=IMAGE)),
    "set-number": (CalibrationError, quantize(calibration=3)),
    "set-one-batch": (CalibrationError, quantize(calibration=IMAGE)),
    "set-one-dict": (CalibrationError, quantize(calibration={"x": IMAGE})),
    "set-file-name": (CalibrationError, quantize(calibration="images.npz")),
    "set-dataset": (CalibrationError, quantize(calibration=TensorDataset(IMAGE))),
    "set-nan": (CalibrationError, quantize(calibration=[IMAGE, poisoned(float("nan"))])),
    "set-inf": (CalibrationError, quantize(calibration=[poisoned(float("inf"))])),
    "batch-shape": (InputError, quantize(calibration=[IMAGE, IMAGE[:, :2]])),
    "batch-first-shape": (InputError, quantize(calibration=[IMAGE[:, :2]])),
    "batch-values": (InputError, quantize(calibration=[(1, IMAGE, IMAGE)])),
    "batch-keyword": (InputError, quantize(calibration=[IMAGE, {"y": IMAGE}])),
    "batch-numpy": (InputError, quantize(calibration=[IMAGE.numpy()])),
    # example inputs
    "example-shape": (InputError, quantize(example_inputs=IMAGE[:, :2])),
    "example-dtype": (InputError, quantize(example_inputs=IMAGE.double())),
    "example-count": (InputError, quantize(example_inputs=(IMAGE, IMAGE))),
    "example-keyword": (InputError, quantize(example_inputs={"image": IMAGE})),
    "example-numpy": (InputError, quantize(example_inputs=np.zeros((1, 3, 8, 8), "float32"))),
    "example-text": (InputError, quantize(example_inputs="x86")),
    "example-none": (UsageError, lambda net: backquant.explain(net, None)),
    # what is asked for
    "mapping-empty": (CoverageError, quantize(qconfig_mapping=QConfigMapping())),
    "mapping-none": (CoverageError, quantize(qconfig_mapping=QConfigMapping().set_global(None))),
    "mapping-int16": (CoverageError, quantize(qconfig_mapping=of_int16())),
    "mapping-qconfig": (UsageError, quantize(qconfig_mapping=backquant.get_default_qconfig("x86"))),
    "mapping-text": (UsageError, quantize(qconfig_mapping="x86")),
    "require-module": (
        CoverageError,
        quantize(
            require="fc",
            qconfig_mapping=get_default_qconfig_mapping("x86").set_module_name("fc", None),
        ),
    ),
    "require-share": (
        CoverageError,
        quantize(
            require=0.99,
            qconfig_mapping=get_default_qconfig_mapping("x86").set_module_name("block.conv", None),
        ),
    ),
    "require-misspelt": (UsageError, quantize(require=["block.convv"])),
    "require-unknown": (UsageError, quantize(require=["transformer"])),
    "require-percent": (UsageError, quantize(require=90)),
    "require-true": (UsageError, quantize(require=True)),
    "require-nan": (UsageError, quantize(require=float("nan"))),
    "require-indexes": (UsageError, quantize(require=[0])),
    "custom-name": (
        ConfigError,
        quantize(
            prepare_custom_config=backquant.PrepareCustomConfig().set_non_traceable_module_names(
                ["blok"]
            )
        ),
    ),
    "custom-kind": (UsageError, quantize(prepare_custom_config=["blok"])),
    # the engine
    "engine-dtype": (
        EngineError,
        quantize(backend=int16_everywhere(), qconfig_mapping=of_int16()),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_an_error_of_ours_and_the_model_unchanged(
    name: str, net: nn.Module, unchanged: Any, snapshot: Callable[..., None]
) -> None:
    kind, call = CASES[name]
    with unchanged(net), pytest.raises(BackquantError) as caught:
        call(net)
    assert type(caught.value) is kind or (kind is SpecError and isinstance(caught.value, SpecError))
    assert caught.value.where and (caught.value.fix or name == "backend-no-file")
    snapshot(name, plain(caught.value), {engine_info("x86").isa: "<isa>"})


def plain(error: BackquantError) -> str:
    """The message without this machine's folders and the numbers of lines in tests."""
    text = str(error).replace(str(Path(__file__).parents[2]), "<repository>")
    return re.sub(r"\.py:\d+", ".py:<line>", text)


def test_a_broken_spec_file(
    tmp_path: Path, net: nn.Module, unchanged: Any, snapshot: Callable[..., None]
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(
        "schema_version: 1\nname: mine\nengien: x86\nentries:\n  - pattern: torch.addd\n"
    )
    with unchanged(net), pytest.raises(SpecError) as caught:
        backquant.quantize(net, backend=path, calibration=[IMAGE])
    snapshot("backend-broken-file", caught.value)


@pytest.mark.parametrize("backend", ["x86", "onednn", "fbgemm"])
def test_an_engine_that_this_machine_lacks(
    backend: str, net: nn.Module, unchanged: Any, other_machine: None, snapshot: Callable[..., None]
) -> None:
    with unchanged(net), pytest.raises(EngineError) as caught:
        backquant.quantize(net, backend=backend, calibration=[IMAGE])
    snapshot(f"engine-missing-{backend}", caught.value)


def test_an_engine_that_does_not_exist(net: nn.Module, snapshot: Callable[..., None]) -> None:
    config = backquant.get_backend_config("x86").set_engine("x68")
    with pytest.raises(EngineError) as caught:
        backquant.quantize(net, backend=config, calibration=[IMAGE])
    snapshot("engine-unknown", caught.value)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            x = -x
        return self.fc(x)


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.gate = nn.Linear(4, 4), Branching()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gate(self.fc(x))


class Masking(nn.Module):
    """Makes another mask in an export, which does not fit."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.fc = Masked(), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.gate(x, torch.zeros(4 if self.is_called(x) else 3)))

    def is_called(self, x: torch.Tensor) -> bool:
        return type(x) is torch.Tensor


class Asking(Masking):
    """As some of transformers': asks PyTorch."""

    def is_called(self, x: torch.Tensor) -> bool:
        return not torch.compiler.is_exporting()


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None) -> torch.Tensor:
        return x if mask is None else x + mask


def test_a_model_that_does_something_else_when_it_is_exported(
    snapshot: Callable[..., None],
) -> None:
    x = torch.ones(2, 4)
    with pytest.raises(CaptureError) as caught:
        backquant.quantize(Masking().eval(), x, calibration=[x], capture="export")
    snapshot("capture-another-way", caught.value)


def test_a_model_that_asks_whether_it_is_exported_is_not_told() -> None:
    x = torch.ones(2, 4)
    model = Asking().eval()
    made = backquant.quantize(model, x, calibration=[x], capture="export", slower="keep")
    assert any(note.startswith("exported as if it were called") for note in made.report.notes)
    assert torch.allclose(made(x), model(x), atol=0.05)


def test_a_model_that_cannot_be_captured(unchanged: Any, snapshot: Callable[..., None]) -> None:
    model = Branching()
    for call in (
        quantize(calibration=[torch.ones(1, 4)]),
        lambda m: backquant.explain(m, torch.ones(1, 4)),
    ):
        with unchanged(model), pytest.raises(CaptureError) as caught:
            call(model)
    snapshot("capture-at-the-top", plain(caught.value))


def test_a_model_that_cannot_be_traced(unchanged: Any, snapshot: Callable[..., None]) -> None:
    model = Holder()
    with unchanged(model), pytest.raises(CaptureError) as caught:
        backquant.explain(model, torch.ones(1, 4), capture="trace")
    snapshot("capture-inside", plain(caught.value))


class Optional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, mask: Any = None, scale: float = 1.0) -> torch.Tensor:
        y = self.fc(x) * scale
        return y if mask is None else y * mask


def test_a_model_that_is_traced_another_way_than_it_is_called(
    unchanged: Any, snapshot: Callable[..., None]
) -> None:
    model, x = Optional(), torch.ones(1, 4)
    for call in (
        quantize(calibration=[x], capture="trace"),
        lambda m: backquant.explain(m, x, capture="trace"),
    ):
        with unchanged(model), pytest.raises(CaptureError) as caught:
            call(model)
    snapshot("capture-optional", plain(caught.value))
    exported = backquant.quantize(model, calibration=[x])
    assert "the traced model fails on inputs" in exported.report.notes[0]
    assert exported(x).shape == (1, 4)

    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.model(x)

    assert backquant.quantize(Wrapped(), calibration=[x])(x).shape == (1, 4)
    assert backquant.quantize(model, calibration=[(x, x)])(x, x).shape == (1, 4)


def test_what_the_message_says_about_untraced_modules_works() -> None:
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["gate"])
    quantized = backquant.quantize(
        Holder(), calibration=[torch.ones(1, 4)], prepare_custom_config=custom
    )
    assert quantized.report.rows[0].quantized and quantized.report.rows[1].outcome == "float"


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_models_of_the_wrong_kind(unchanged: Any, snapshot: Callable[..., None]) -> None:
    linear = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    models: dict[str, Any] = {
        "function": torch.relu,
        "class": nn.Linear,
        "state-dict": linear.state_dict(),
        "script": torch.jit.script(linear),
        "parallel": nn.DataParallel(linear),
        "compiled": torch.compile(linear, backend="eager"),
        "lazy": nn.LazyLinear(3),
        "quantized": backquant.quantize(linear, calibration=[x]),
    }
    for name, model in models.items():
        for call in (
            lambda m: backquant.quantize(m, calibration=[x]),
            lambda m: backquant.explain(m, x),
            lambda m: backquant.prepare_fx(m, get_default_qconfig_mapping("x86"), x),
            backquant.fuse_fx,
        ):
            with pytest.raises((UsageError, CaptureError)) as caught:
                call(model)
        snapshot(f"model-{name}", caught.value)
    lazy = models["lazy"]
    assert nn.parameter.is_lazy(lazy.weight)  # type: ignore[attr-defined]


def test_a_model_without_operators(snapshot: Callable[..., None]) -> None:
    class Empty(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x

    with pytest.raises(CoverageError) as caught:
        backquant.quantize(Empty(), calibration=[torch.ones(1)])
    snapshot("model-empty", caught.value)


def test_a_model_with_many_refusals_names_some(snapshot: Callable[..., None]) -> None:
    model = nn.Sequential(*(nn.Softplus() for _ in range(20)))
    with pytest.raises(CoverageError) as caught:
        backquant.quantize(model, calibration=[torch.ones(1, 4)])
    snapshot("model-refused", caught.value)


def test_equalization_is_refused(net: nn.Module, snapshot: Callable[..., None]) -> None:
    with pytest.raises(UsageError) as caught:
        backquant.prepare_fx(net, QConfigMapping(), IMAGE, _equalization_config=QConfigMapping())
    snapshot("prepare-equalization", caught.value)


def _right(**changes: Any) -> None:
    """What a fix says to pass, to a model of images."""
    quantize(**changes)(nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU()).eval())


def _written(path: Path, text: str) -> Path:
    path.write_text(f"schema_version: 1\nname: mine\n{text}    dtype_configs: [{{}}]\n")
    return path


def _parts(*_: object) -> None:
    """What decides is a submodule, or is called with the arguments that are passed."""
    custom = backquant.PrepareCustomConfig().set_non_traceable_module_names(["gate"])
    x = torch.ones(2, 4)
    for model, capture in ((Holder(), "trace"), (nn.Sequential(Optional()), "auto")):
        named = custom if isinstance(model, Holder) else None
        backquant.quantize(
            model.eval(), calibration=[x], capture=capture, prepare_custom_config=named
        )


BY_HAND = {
    "model(*example_inputs)": lambda _, n: nn.LazyLinear(3)(n["x"]),
    "backquant.quantize(MyModel()": lambda _, n: quantize(calibration=[n["x"]])(n["linear"]),
    "_equalization_config=None": lambda _, n: backquant.prepare_fx(
        n["net"].eval(), QConfigMapping(), IMAGE, _equalization_config=None
    ),
    'did you mean "engine"?': lambda _, n: backquant.BackendConfig.load(
        _written(n["path"], "engine: x86\nentries:\n  - pattern: torch.add\n")
    ),
    "example_inputs=(x,)": lambda *_: _right(example_inputs=(IMAGE,)),
    "calibration=[(x,), ...]": lambda *_: _right(calibration=[(IMAGE,)]),
    "batch = (x,)": lambda *_: _right(calibration=[(IMAGE,)]),
    "without labels": lambda *_: _right(calibration=[x for x, _ in [(IMAGE, 0)]]),
    "tensors, not numpy arrays": lambda *_: _right(
        example_inputs=torch.from_numpy(np.zeros((1, 3, 8, 8), "float32"))
    ),
    "float32 like the model": lambda *_: _right(example_inputs=IMAGE.double().float()),
    "give batches like those before": lambda *_: _right(calibration=[IMAGE, IMAGE]),
    **dict.fromkeys(
        ["the model does something else", "move these lines", "tracing decides"], _parts
    ),
    **dict.fromkeys(
        ["Linear(...)", "model._orig_mod", "model.module", "pass the nn.Module", "pass the float"],
        lambda _, n: quantize(calibration=[n["x"]])(n["linear"]),
    ),
}
