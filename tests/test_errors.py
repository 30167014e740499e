from __future__ import annotations

import pickle

import pytest

import backquant
from backquant import errors
from backquant.errors import BackquantError

BUILT_IN = {
    "CalibrationError": ValueError,
    "ConfigError": ValueError,
    "EngineError": RuntimeError,
    "InputError": ValueError,
    "MissingExtraError": ImportError,
    "PassError": AssertionError,
    "SpecError": ValueError,
    "UnknownBackendError": KeyError,
    "UsageError": ValueError,
}


@pytest.mark.parametrize("name", errors.__all__)
def test_every_error(name: str) -> None:
    kind = getattr(errors, name)
    assert issubclass(kind, BackquantError) and kind.__doc__
    assert issubclass(kind, BUILT_IN.get(name, Exception))
    assert getattr(backquant, name) is kind
    if kind is errors.MissingExtraError:  # composes its fix
        return
    error = kind("what went wrong", where="a place", fix="line 1\nline 2")
    assert (error.what, error.where, error.fix) == ("what went wrong", "a place", "line 1\nline 2")
    assert str(error) == ("what went wrong\n  where  a place\n  fix    line 1\n         line 2")


@pytest.mark.parametrize("name", errors.__all__)
def test_errors_survive_a_process_pool(name: str) -> None:
    extra = name == "MissingExtraError"
    error = getattr(errors, name)("what", where="where", **{"extra" if extra else "fix": "fix"})
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == str(error)
    assert again.fix == ("pip install '.[fix]'   # in a checkout of backquant" if extra else "fix")


def test_parts_that_are_not_known_are_left_out() -> None:
    assert str(BackquantError("what")) == "what"
    assert str(BackquantError("what", fix="so")) == "what\n  fix    so"
    assert str(errors.UnknownBackendError("no backend")) == "no backend"


def test_all_is_complete() -> None:
    classes = {
        name
        for name, value in vars(errors).items()
        if isinstance(value, type) and issubclass(value, BackquantError)
    }
    assert classes == set(errors.__all__)
