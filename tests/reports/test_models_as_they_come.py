"""Models and data as people have them: compiled, scripted, wrapped, in half precision, from files on disk.

Each works, or is refused with a fix that works.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

import backquant
from backquant import BackquantError
from backquant.errors import CalibrationError, CaptureError, ConfigError, InputError, UsageError

X = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
MAPPING = backquant.get_default_qconfig_mapping("x86")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 36, 4)
    return nn.Sequential(*layers).eval()


def quantized(model: nn.Module, **changes: Any) -> backquant.QuantizedModel:
    return backquant.quantize(model, **{"calibration": [X], "slower": "keep", **changes})


def works(made: Callable[..., Any]) -> None:
    with torch.no_grad():
        wanted, found = net()(X), made(X)
    assert 20 * torch.log10(wanted.norm() / (wanted - found).norm()) > 25


def with_first(changed: Callable[[nn.Module], nn.Module]) -> nn.Module:
    model = net()
    model[0] = changed(model[0])
    return model


def _compile(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def _in_place(model: nn.Module) -> nn.Module:
    model.compile(backend="eager")
    return model


def _decorated(model: nn.Module) -> nn.Module:
    class Decorated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model

        @torch.compile(backend="eager")
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x)

    return Decorated().eval()


def _called(model: nn.Module) -> Any:
    compiled = _compile(model)
    compiled(X)
    return compiled


def _loaded(model: nn.Module, path: Path) -> Any:
    torch.jit.save(torch.jit.script(model), path)
    return torch.jit.load(path)


@pytest.mark.parametrize(
    "make",
    [
        lambda: _in_place(net()),
        lambda: _decorated(net()),
        lambda: with_first(_compile),
        lambda: with_first(torch.jit.script),
        lambda: with_first(lambda first: torch.jit.trace(first, X)),
        lambda: with_first(nn.DataParallel),
    ],
    ids=[
        "compile()",
        "decorated",
        "compiled part",
        "scripted part",
        "traced part",
        "parallel part",
    ],
)
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_parts_that_are_wrapped_work(make: Callable[[], nn.Module]) -> None:
    works(quantized(make()))


@pytest.mark.parametrize("call", [quantized, lambda m: backquant.prepare_fx(m, MAPPING, (X,))])
@pytest.mark.parametrize("wrap", [_compile, _called, nn.DataParallel])
def test_a_wrapper_is_named(wrap: Callable[..., Any], call: Callable[..., Any]) -> None:
    wrapped = wrap(net())
    with pytest.raises(UsageError) as refused:
        call(wrapped)
    works(call(eval(refused.value.fix.removeprefix("pass "), {"model": wrapped})))


@pytest.mark.parametrize("wrap", ["script", "trace", "freeze", "loaded", "prepare_fx"])
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit
def test_torchscript_is_named(wrap: str, tmp_path: Path) -> None:
    makes: dict[str, Callable[[], Any]] = {
        "trace": lambda: torch.jit.trace(net(), X),
        "freeze": lambda: torch.jit.freeze(torch.jit.script(net())),
        "loaded": lambda: _loaded(net(), tmp_path / "model.pt"),
    }
    model = makes.get(wrap, lambda: torch.jit.script(net()))()
    with pytest.raises(CaptureError, match=r"pass the nn\.Module that was scripted"):
        backquant.prepare_fx(model, MAPPING, (X,)) if wrap == "prepare_fx" else quantized(model)


def _prepared() -> Any:
    return backquant.prepare_fx(net(), MAPPING, (X,))


def _trained() -> Any:
    mapping = backquant.get_default_qat_qconfig_mapping("x86")
    return backquant.prepare_qat_fx(net().train(), mapping, (X,))


def _converted() -> Any:
    prepared = _prepared()
    prepared(X)
    return backquant.convert_fx(prepared)


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod."])
@pytest.mark.parametrize("make", [_prepared, _trained, _converted])
def test_the_names_of_a_wrapper_in_a_state_dict(make: Callable[[], Any], prefix: str) -> None:
    model = make()
    model(X)
    wanted = copy.deepcopy(model.state_dict())
    state_dict = {prefix + key: value for key, value in wanted.items()}
    with pytest.raises(UsageError) as refused:
        model.load_state_dict(state_dict)
    exec(refused.value.fix, {"model": model, "state_dict": state_dict})
    assert model.state_dict().keys() == wanted.keys()


@pytest.mark.parametrize("prefix", ["", "module.", "_orig_mod.", "module._orig_mod."])
def test_the_names_of_a_wrapper_in_files(prefix: str, tmp_path: Path) -> None:
    state = {prefix + key: value.clone() for key, value in net().state_dict().items()}
    save_file(state, tmp_path / "model.safetensors")
    backquant.quantize_files(
        net, tmp_path / "model.safetensors", tmp_path / "model.bq", calibration=[X]
    )
    works(backquant.load(tmp_path / "model.bq"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weights", [None, "int8"])
def test_other_floats_are_named(dtype: torch.dtype, weights: str | None) -> None:
    model, x = net().to(dtype), X.to(dtype)
    asked = {"calibration": None, "example_inputs": x, "weights": weights}
    with pytest.raises(ConfigError, match="only float32 weights") as refused:
        quantized(model, **(asked if weights else {"calibration": [x]}))
    assert refused.value.fix.startswith("backquant.quantize(model.float(), ")
    works(quantized(model.float()))


@pytest.mark.parametrize(
    "inputs",
    [
        lambda x: {"calibration": [x]},
        lambda x: {"calibration": [x * 1]},
        lambda x: {"calibration": [{"input": x}]},
        lambda x: {"example_inputs": x},
        lambda x: {"example_inputs": x, "capture": "export"},
        lambda x: {"calibration": (x for _ in range(2))},
    ],
)
def test_inputs_with_gradients(inputs: Callable[[torch.Tensor], dict[str, Any]]) -> None:
    x = X.clone().requires_grad_()
    made = quantized(net(), **inputs(x))
    works(made)
    assert not made(x).requires_grad and x.grad is None


@pytest.mark.parametrize("kind", ["text", "path", "tuple", "dict", "glob", "folder"])
def test_names_of_files_are_no_batches(kind: str, tmp_path: Path) -> None:
    file = tmp_path / "x.npy"
    np.save(file, X.numpy())
    data: Any = {
        "text": [str(file)],
        "path": [file],
        "tuple": [(str(file),)],
        "dict": [{"input": file}],
        "glob": tmp_path.glob("*.npy"),
        "folder": tmp_path,
    }[kind]
    with pytest.raises(BackquantError) as refused:
        quantized(net(), calibration=data)
    assert isinstance(refused.value, InputError | CalibrationError)
    if kind in ("text", "path"):
        assert refused.value.fix == (
            "calibration=[torch.from_numpy(numpy.load(batch)) for batch in batches]"
        )
        load = lambda name: torch.from_numpy(np.load(name))  # noqa: E731
        works(quantized(net(), calibration=[load(batch) for batch in data]))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("dtype", ["uint8", "int64", "bool", "float16", "bfloat16", "float64"])
def test_batches_of_another_dtype_than_the_example(dtype: str, first: int) -> None:
    batches = [X] * first + [X.to(getattr(torch, dtype))]
    with pytest.raises(InputError, match=f"batch {first} does not fit") as refused:
        quantized(net(), example_inputs=X, calibration=batches)
    again = eval(f"dict({refused.value.fix})", {"batches": batches})
    assert quantized(net(), example_inputs=X, **again).report.quantized


@pytest.mark.parametrize("shapes", [3, 0.5, True, "batch", {0, 1}])
def test_dynamic_shapes_that_name_no_input(shapes: Any, tmp_path: Path) -> None:
    made, file = quantized(net(), backend="onnxruntime"), tmp_path / "model.onnx"
    with pytest.raises(UsageError, match="dynamic_shapes is a ") as refused:
        backquant.export(made, file, dynamic_shapes=shapes)
    backquant.export(made, file, **eval(f"dict({refused.value.fix})"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.bool, torch.complex64])
@pytest.mark.parametrize("named", [False, True])
def test_example_inputs_of_another_type(dtype: torch.dtype, named: bool) -> None:
    """The fix is the call with floats, and works; it was the very call that had failed."""
    model, input = nn.Linear(8, 4).eval(), torch.randn(2, 8).to(dtype)
    with pytest.raises(InputError) as refused:
        backquant.explain(model, {"input": input} if named else input, backend="x86")
    fix = (refused.value.fix or "").partition("   #")[0]
    assert backquant.explain(model, **eval(f"dict({fix})", {"input": input}), backend="x86")


def test_a_model_without_weights() -> None:
    with pytest.raises(InputError, match=r"assign=True\)   # weights on 'meta' have no values"):
        backquant.explain(nn.Linear(8, 4).to("meta").eval(), torch.randn(2, 8), backend="x86")
