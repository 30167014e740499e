"""Which fusions are planned for training."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from backquant.backend_config import BackendConfig, BackendPatternConfig, folds_for_inference_only
from backquant.backend_config.fusers import reverse_sequential_wrapper2
from backquant.graph import capture
from backquant.match import plan_fusion


@folds_for_inference_only
def fold(is_qat, *parts):
    return parts[0]


def keep(is_qat, *parts):
    return nn.Sequential(*parts)


def _planned(*entries, is_qat):
    backend = BackendConfig("b").set_backend_pattern_configs(list(entries))
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.ReLU())
    return [f.pattern for f in plan_fusion(capture(model).module, backend, is_qat=is_qat)]


PAIR = (nn.Linear, nn.BatchNorm1d)
ALL = (nn.Linear, nn.BatchNorm1d, nn.ReLU)


@pytest.mark.parametrize("is_qat", [True, False])
def test_an_unmarked_fuser_is_asked_in_both_modes(is_qat):
    entry = BackendPatternConfig(PAIR).set_fuser_method(keep)
    assert _planned(entry, is_qat=is_qat) == ["Linear, BatchNorm1d"]


def test_a_marked_fuser_is_not_asked_for_training():
    entry = BackendPatternConfig(PAIR).set_fuser_method(fold)
    assert _planned(entry, is_qat=False) == ["Linear, BatchNorm1d"]
    assert _planned(entry, is_qat=True) == []


def test_the_next_longest_pattern_takes_its_place():
    entries = [
        BackendPatternConfig(ALL).set_fuser_method(fold),
        BackendPatternConfig(PAIR).set_fuser_method(keep),
    ]
    assert _planned(*entries, is_qat=False) == ["Linear, BatchNorm1d, ReLU"]
    assert _planned(*entries, is_qat=True) == ["Linear, BatchNorm1d"]


def test_patterns_without_batch_norm_are_fused_in_both_modes():
    entry = BackendPatternConfig((nn.BatchNorm1d, nn.ReLU)).set_fuser_method(keep)
    assert _planned(entry, is_qat=True) == ["BatchNorm1d, ReLU"]
    no_norm = BackendPatternConfig((nn.Linear, nn.ReLU)).set_fuser_method(fold)
    backend = BackendConfig("b").set_backend_pattern_config(no_norm)
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    assert plan_fusion(capture(model).module, backend, is_qat=True)


def test_the_mark_is_seen_in_a_reversed_pattern():
    entry = BackendPatternConfig()._set_pattern_complex_format((nn.BatchNorm1d, nn.Linear))

    @folds_for_inference_only
    def reversed_fold(is_qat, bn, linear):
        return linear

    entry.set_fuser_method(reversed_fold)
    assert _planned(entry, is_qat=True) == []
    entry.set_fuser_method(reverse_sequential_wrapper2(nn.Sequential))
    assert len(_planned(entry, is_qat=True)) == 1


def test_the_mark_survives_wrapping():
    from backquant.backend_config import is_for_inference_only
    from backquant.backend_config.fusers import in_forward_order, in_reversed_order

    assert is_for_inference_only(in_reversed_order(fold))
    assert is_for_inference_only(in_forward_order(fold))
    assert not is_for_inference_only(in_reversed_order(keep))
    assert not is_for_inference_only(None)
    assert not is_for_inference_only(torch.relu)
