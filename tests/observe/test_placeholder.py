from __future__ import annotations

import copy
import pickle

import pytest
import torch

from backquant.errors import ConfigError
from backquant.observe import (
    NoopObserver,
    ObserverBase,
    PlaceholderObserver,
    RecordingObserver,
    ReuseInputObserver,
)

CLASSES = [NoopObserver, PlaceholderObserver, RecordingObserver, ReuseInputObserver]


@pytest.mark.parametrize("cls", CLASSES)
def test_they_pass_on_their_input_and_have_no_qparams(cls: type[ObserverBase]) -> None:
    observer = cls()  # type: ignore[call-arg]
    x = torch.randn(2)
    assert observer(x) is x
    assert type(copy.deepcopy(observer)) is type(pickle.loads(pickle.dumps(observer))) is cls
    with pytest.raises(ConfigError, match=f"{cls.__name__} measures nothing"):
        observer.calculate_qparams()


@pytest.mark.parametrize("cls", [NoopObserver, PlaceholderObserver, ReuseInputObserver])
def test_those_without_state_merge(cls: type[ObserverBase]) -> None:
    observer = cls()  # type: ignore[call-arg]
    assert observer.merge(cls()) is observer  # type: ignore[call-arg]


def test_recordings_are_copies_in_order_and_do_not_merge() -> None:
    observer = RecordingObserver()
    x = torch.ones(2, requires_grad=True)
    observer(x), observer(x * 2)
    with torch.no_grad():
        x.fill_(7)
    assert [t.tolist() for t in observer.get_tensor_value()] == [[1.0, 1.0], [2.0, 2.0]]
    assert not any(t.requires_grad for t in observer.tensor_val)
    with pytest.raises(ConfigError, match="order"):
        observer.merge(RecordingObserver())


def test_placeholder_settings() -> None:
    observer = PlaceholderObserver(
        dtype=torch.quint8, quant_min=0, quant_max=255, is_dynamic=True, eps=2**-12
    )
    assert observer.is_dynamic
    assert (observer.quant_min, observer.quant_max, observer.eps) == (0, 255, 2**-12)
    assert observer.qscheme == torch.per_tensor_affine
    with pytest.raises(ConfigError, match="configured differently"):
        observer.merge(PlaceholderObserver())


def test_the_deprecated_spelling_of_dynamic_warns() -> None:
    with pytest.warns(FutureWarning, match="compute_dtype is deprecated"):
        observer = PlaceholderObserver(compute_dtype=torch.quint8)
    assert observer.is_dynamic
