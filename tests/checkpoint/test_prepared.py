"""State dicts of prepared models, observed or in training: from torch.ao and from us."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.ao.quantization as tq
from tests.checkpoint.cases import CASES, Case
from tests.snapshots import compare as snapshot
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx, prepare_qat_fx

import backquant as bq
from backquant.checkpoint import plain_state
from backquant.errors import CalibrationError, UsageError

STATIC = [name for name, case in CASES.items() if case.qconfig is None and name != "static lstm"]
TRAINED = ["conv2d, batch norm, relu", "linear, relu", "residual", "residual, qnnpack"]


def _inputs(case: Case, count: int = 2) -> list[Any]:
    torch.manual_seed(1)
    return [case.inputs() for _ in range(count)]


def _prepared(case: Case, *, training: bool) -> tuple[Any, Any, list[Any]]:
    """PyTorch's, calibrated or trained; ours, fresh and with other weights."""
    torch.manual_seed(0)
    default = tq.get_default_qat_qconfig_mapping if training else tq.get_default_qconfig_mapping
    mapping, batches = default(case.backend), _inputs(case)
    model, other = case.model().train(training), case.model().train(training)
    # PyTorch's default, which admits norms, too
    config = bq.get_backend_config(case.backend if training else "native")
    assert config.defaults is not None  # PyTorch has no rules about what is left in float
    config = copy.copy(config).set_defaults(replace(config.defaults, leave_float=()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = (prepare_qat_fx if training else prepare_fx)(model, mapping, batches[0])
        prepare: Any = bq.prepare_qat_fx if training else bq.prepare_fx
        ours = prepare(other, bq.from_torch_ao(mapping), batches[0], backend_config=config)
        for batch in batches:
            theirs(*batch)
    return theirs, ours, batches


def _same_scales(ours: Any, theirs: Any, backend: str) -> None:
    """Converted, both have the same qparams."""
    engine = torch.backends.quantized.engine
    torch.backends.quantized.engine = backend
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            expected = plain_state(convert_fx(copy.deepcopy(theirs).eval()).state_dict())
    finally:
        torch.backends.quantized.engine = engine
    found = bq.convert_fx(copy.deepcopy(ours).eval()).state_dict()
    keys = [k for k in expected if k in found and ("scale" in k or "zero_point" in k)]
    assert keys
    for key in keys:
        assert torch.equal(found[key].double(), expected[key].double().reshape(found[key].shape)), (
            key
        )


@pytest.mark.parametrize("name", STATIC)
def test_calibrated_by_torch(name: str) -> None:
    theirs, ours, _ = _prepared(CASES[name], training=False)
    ours.load_state_dict(theirs.state_dict())
    _same_scales(ours, theirs, CASES[name].backend)


@pytest.mark.parametrize("name", TRAINED)
def test_trained_by_torch(name: str) -> None:
    theirs, ours, _ = _prepared(CASES[name], training=True)
    ours.load_state_dict(theirs.state_dict())
    _same_scales(ours, theirs, CASES[name].backend)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", TRAINED)
def test_ours(name: str, training: bool, tmp_path: Path) -> None:
    """Into one that was prepared anew, by a file: the same converted model."""
    _, fresh, batches = _prepared(CASES[name], training=training)
    measured = copy.deepcopy(fresh)
    for batch in batches:
        measured(*batch)
    torch.save(measured.state_dict(), tmp_path / "ours.pt")
    fresh.load_state_dict(torch.load(tmp_path / "ours.pt", weights_only=True))
    one, two = (bq.convert_fx(model.eval()) for model in (measured, fresh))
    assert all(torch.equal(one(*batch), two(*batch)) for batch in batches)


def test_what_torch_counted_is_not_counted_on() -> None:
    theirs, ours, batches = _prepared(CASES["residual"], training=False)
    ours.load_state_dict(theirs.state_dict())
    with pytest.raises(CalibrationError, match=r"measured by torch\.ao"):
        ours(*batches[0])


def _set(key: str, value: Any) -> Any:
    return lambda state: {**state, key: value(state[key]) if callable(value) else value}


_NAN = float("nan")
WRONG = {
    "a missing observer": lambda s: {k: v for k, v in s.items() if "process_1." not in k},
    "an unexpected key": _set("other.weight", torch.ones(1)),
    "another shape": _set("more.weight", lambda t: t[:1]),
    "NaN in a weight": _set("more.weight", lambda t: t * _NAN),
    "NaN in a range": _set("activation_post_process_0.min_val", lambda t: t * _NAN),
    "a range upside down": _set("activation_post_process_0.min_val", lambda t: t + 1e6),
    "truncated": lambda s: dict(list(s.items())[:4]),
    "another kind of observer": _set("activation_post_process_0.histogram", torch.ones(2048)),
}


@pytest.mark.parametrize("name", WRONG)
def test_it_is_refused_and_nothing_is_loaded(name: str) -> None:
    training = name == "another kind of observer"
    theirs, ours, _ = _prepared(CASES["residual"], training=training)
    before = copy.deepcopy(ours.state_dict())
    with pytest.raises(UsageError) as caught:
        ours.load_state_dict(WRONG[name](dict(theirs.state_dict())))
    snapshot(Path(__file__), name.replace(" ", "-"), str(caught.value))
    after = ours.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_observers_that_are_not_here_are_never_passed_over() -> None:
    """Their numbers would be those of other values."""
    theirs, ours, _ = _prepared(CASES["residual"], training=False)
    state = {**theirs.state_dict(), "activation_post_process_99.eps": torch.ones(1)}
    with pytest.raises(UsageError, match="process_99"):
        ours.load_state_dict(state, strict=False)
    del state["activation_post_process_99.eps"]
    result = ours.load_state_dict({**state, "other": torch.ones(1)}, strict=False)
    assert result.unexpected_keys == ["other"]


def test_a_state_of_training_is_none_of_calibration() -> None:
    trained, _, _ = _prepared(CASES["residual"], training=True)
    _, ours, _ = _prepared(CASES["residual"], training=False)
    with pytest.raises(UsageError, match="prepare_qat_fx"):
        ours.load_state_dict(trained.state_dict())


BY_HAND = {
    "prepare with the model": lambda _, n: copy.deepcopy(n["ours"]).load_state_dict(
        n["theirs"].state_dict()
    ),
}
