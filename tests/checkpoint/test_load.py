"""State dicts of converted models: from torch.ao, from us, into models that were converted anew."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization.fx.custom_config
import torch.ao.quantization.quantize_fx
from tests.checkpoint.cases import CASES, Pair, pair
from torch import nn

import backquant as bq
import backquant.ao
from backquant.checkpoint import plain_state, slots_of
from backquant.errors import UsageError

_MADE: dict[str, Pair] = {}


@pytest.fixture(params=CASES)
def made(request: pytest.FixtureRequest) -> Pair:
    """Each pair once: converting takes longer than loading."""
    if request.param not in _MADE:
        _MADE[request.param] = pair(CASES[request.param])
    return _MADE[request.param]


def _step(model: bq.QuantizedModel) -> float:
    """The scale of the last activation; 0 where none is quantized."""
    assert model.origin is not None
    scales = [
        s.value.item() for s in slots_of(model.origin.reference) if s.node and "scale" in s.key
    ]
    return scales[-1] if scales else 0.0


def _agrees(ours: bq.QuantizedModel, theirs: nn.Module, batches: list[Any], backend: str) -> None:
    before = torch.backends.quantized.engine
    torch.backends.quantized.engine = backend
    try:
        for batch in batches:
            expected = theirs(*batch)
            assert (ours(*batch) - expected).abs().max() <= 1.001 * _step(ours) + 1e-6
    finally:
        torch.backends.quantized.engine = before


@pytest.mark.parametrize("calibrated", [False, True])
def test_torchs_state_dict_gives_torchs_model(made: Pair, calibrated: bool) -> None:
    ours = made.ours(calibrated=calibrated)
    result = ours.load_state_dict(made.theirs.state_dict())
    assert not result.missing_keys and not result.unexpected_keys
    _agrees(ours, made.theirs, made.batches, made.backend)


def test_torchs_file(made: Pair, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's own storages of quantized tensors
        torch.save(made.theirs.state_dict(), tmp_path / "theirs.pt")
    held = any(isinstance(v, torch.ScriptObject) for v in made.theirs.state_dict().values())
    # PyTorch refuses objects of its engines in files that hold weights only
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state = torch.load(tmp_path / "theirs.pt", weights_only=not held)
    ours = made.ours(calibrated=False)
    ours.load_state_dict(state)
    _agrees(ours, made.theirs, made.batches, made.backend)


@pytest.mark.parametrize("calibrated", [False, True])
def test_our_state_dict_gives_the_same_bits(made: Pair, calibrated: bool, tmp_path: Path) -> None:
    model = made.ours(calibrated=True)
    torch.save(model.state_dict(), tmp_path / "ours.pt")
    other = made.ours(calibrated=calibrated)
    other.load_state_dict(
        {
            k: torch.zeros_like(v) if v.is_floating_point() and "scale" not in k else v
            for k, v in model.state_dict().items()
        }
    )
    other.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    for batch in made.batches:
        assert torch.equal(other(*batch), model(*batch))
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value)


def test_keys_are_torchs(made: Pair) -> None:
    """Up to layers that give floats here, and recurrent ones, whose weights have the float layer's names."""
    ours, theirs = made.ours(calibrated=False).state_dict(), plain_state(made.theirs.state_dict())
    lost = {
        key for key in theirs if key not in ours and "scale" not in key and "zero_point" not in key
    }
    assert not {
        key for key in lost if "_all_weight_values" not in key and "_packed_weight_" not in key
    }


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.fc(x)))


def _standalone(ao: Any, factor: float, seed: int, *, integers: bool) -> tuple[nn.Module, Any]:
    torch.manual_seed(seed)
    x, of = torch.randn(6, 8), ao.quantization
    model = nn.Sequential(nn.Linear(8, 8), _Inner(), nn.Linear(8, 4)).eval()
    held, custom = (of.fx.custom_config.PrepareCustomConfig() for _ in range(2))
    places = [0] if integers else []
    held.set_input_quantized_indexes(places).set_output_quantized_indexes(places)
    custom.set_standalone_module_name("1", None, (x,), held, None)
    mapping = of.get_default_qconfig_mapping("fbgemm")
    prepared = of.quantize_fx.prepare_fx(model, mapping, (x,), prepare_custom_config=custom)
    prepared(factor * x)
    return of.quantize_fx.convert_fx(prepared), x


@pytest.mark.parametrize("integers", [False, True])
def test_integers_that_pass_to_a_standalone_module_are_read_as_loaded(integers: bool) -> None:
    """Its layers read them by the scale of the quantize node outside; they kept the one before."""
    model, x = _standalone(backquant.ao, 1, 0, integers=integers)
    other, _ = _standalone(backquant.ao, 3, 1, integers=integers)
    assert not torch.equal(other(x), model(x))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x)) and torch.equal(other._literally(x), model(x))  # type: ignore[operator]


@pytest.mark.filterwarnings("ignore")  # PyTorch's own, of observers and quantized tensors
def test_torchs_standalone_module_that_takes_integers() -> None:
    theirs, x = _standalone(torch.ao, 1, 0, integers=True)
    ours, _ = _standalone(backquant.ao, 3, 1, integers=True)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(
        ours(x), theirs(x), rtol=0, atol=1.001 * ours.get_submodule("2").scale
    )  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["x86", "qnnpack", "onnxruntime"])
def test_inputs_and_outputs_that_are_integers_are_read_as_loaded(backend: str) -> None:
    """Their scales are part of the ``state_dict``: no quantize node of the graph has them."""

    def made(factor: float, seed: int) -> bq.QuantizedModel:
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
        batches = [factor * x]
        return bq.quantize(model, x, calibration=batches, backend=backend, integer_io=True)

    x = torch.randn(2, 3, 8, 8)
    model, other = made(1, 0), made(3, 1)
    state = model.state_dict()
    assert {"input_scale_0", "input_zero_point_0", "2.scale", "2.zero_point"} <= set(state)
    other.load_state_dict(state)
    assert torch.equal(other(x), model(x)) and torch.equal(other._literally(x), model(x))
    assert other.input_qparams == model.input_qparams
    assert other.output_qparams == model.output_qparams
    with pytest.raises(UsageError, match="input_scale_0: missing"):
        other.load_state_dict({k: v for k, v in state.items() if k != "input_scale_0"})
