from __future__ import annotations

import copy
import pickle

import pytest
import torch

from backquant.errors import ConfigError
from backquant.observe import FixedQParamsObserver


def test_the_given_qparams_come_back_whatever_is_seen() -> None:
    observer = FixedQParamsObserver(scale=0.5, zero_point=3)
    x = torch.randn(3)
    assert observer(x) is x
    for other in (observer, copy.deepcopy(observer), pickle.loads(pickle.dumps(observer))):
        scale, zero_point = other.calculate_qparams()
        assert (scale.tolist(), zero_point.tolist()) == ([0.5], [3])
        assert (scale.dtype, zero_point.dtype) == (torch.float32, torch.int32)
    assert (observer.quant_min, observer.quant_max) == (0, 255)


def test_equal_ones_merge_and_others_do_not() -> None:
    one = FixedQParamsObserver(scale=0.5, zero_point=3)
    assert one.merge(FixedQParamsObserver(scale=0.5, zero_point=3)) is one
    with pytest.raises(ConfigError, match="scale"):
        one.merge(FixedQParamsObserver(scale=0.25, zero_point=3))


def test_dynamic_is_refused() -> None:
    with pytest.raises(ConfigError, match="measured at inference"):
        FixedQParamsObserver(scale=0.5, zero_point=3, is_dynamic=True)


def test_repr() -> None:
    observer = FixedQParamsObserver(scale=0.5, zero_point=3)
    assert repr(observer) == "FixedQParamsObserver(scale=0.5, zero_point=3)"
