from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.ao.quantization as ao
from torch import nn

from backquant import prepare_fx
from backquant.errors import ConfigError
from backquant.observe import FakeQuantize, MinMaxObserver
from backquant.qconfig import QConfig, QConfigMapping, default_qconfig, qconfig_equals


def test_it_is_a_named_tuple_of_two() -> None:
    qconfig = QConfig(activation=MinMaxObserver, weight=nn.Identity)
    activation, weight = qconfig
    assert (activation, weight) == (qconfig.activation, qconfig.weight)
    assert qconfig._fields == ("activation", "weight")
    assert isinstance(qconfig._replace(weight=MinMaxObserver), QConfig)


def test_outputs_may_be_measured_otherwise_than_inputs() -> None:
    qconfig = QConfig(MinMaxObserver, MinMaxObserver, output=MinMaxObserver.with_args(eps=0.5))
    assert len(qconfig) == 2 and QConfig(MinMaxObserver, MinMaxObserver).output is None
    assert qconfig != QConfig(MinMaxObserver, MinMaxObserver)
    for same in (
        qconfig._replace(weight=MinMaxObserver),
        copy.deepcopy(qconfig),
        pickle.loads(pickle.dumps(qconfig)),
    ):
        assert same == qconfig and same.output().eps == 0.5
    assert "output=MinMaxObserver.with_args(eps=0.5)" in repr(qconfig)


@pytest.mark.parametrize("role", ["activation", "weight", "output"])
def test_instances_are_refused_with_the_fix(role: str) -> None:
    factories = {"activation": MinMaxObserver, "weight": MinMaxObserver, role: FakeQuantize()}
    with pytest.raises(ConfigError, match=f"instance of FakeQuantize as {role}") as caught:
        QConfig(**factories)
    assert f"{role}=FakeQuantize.with_args(...)" in caught.value.fix
    with pytest.raises(ValueError, match="instance"):  # as PyTorch's, so that callers can catch it
        QConfig(**factories)


def test_what_cannot_be_called_is_refused_where_an_observer_is_made_of_it() -> None:
    wrong = QConfig(activation=MinMaxObserver, weight="int8")
    assert wrong == QConfig(MinMaxObserver, "int8") != QConfig(MinMaxObserver, "int4")
    mapping = QConfigMapping().set_global(
        wrong
    )  # PyTorch takes both, so that they can be written and read
    with pytest.raises(ConfigError, match="makes no observer: 'int8' raised TypeError"):
        prepare_fx(nn.Sequential(nn.Linear(2, 2)).eval(), mapping, (torch.ones(1, 2),))
    assert QConfig(activation=MinMaxObserver, weight=None).weight is None


def test_equality_is_by_what_is_made() -> None:
    def make(eps: float = 0.5) -> QConfig:
        partial = MinMaxObserver.with_args(eps=eps)
        return QConfig(partial, FakeQuantize.with_args(observer=partial))

    assert make() == make()
    assert hash(make()) == hash(make())
    assert make() != make(0.25)
    assert qconfig_equals(make(), make())
    assert not qconfig_equals(make(), None)
    assert qconfig_equals(None, None)
    assert make() != "something"


def test_pytorchs_qconfigs_compare_with_each_other_and_differ_from_ours() -> None:
    one, two = (ao.get_default_qconfig("fbgemm") for _ in range(2))
    assert qconfig_equals(one, two)
    assert not qconfig_equals(one, ao.get_default_qconfig("qnnpack"))
    assert not qconfig_equals(one, default_qconfig)
    wrapped = QConfig(ao.MinMaxObserver.with_args(eps=0.5), nn.Identity)
    again = QConfig(ao.MinMaxObserver.with_args(eps=0.5), nn.Identity)
    assert wrapped == again
    assert hash(wrapped) == hash(again)


def test_copies_and_pickles_are_equal() -> None:
    assert copy.deepcopy(default_qconfig) == default_qconfig
    assert pickle.loads(pickle.dumps(default_qconfig)) == default_qconfig


def test_repr_is_code() -> None:
    qconfig = QConfig(MinMaxObserver.with_args(dtype=torch.qint8), nn.Identity)
    assert repr(qconfig) == (
        "QConfig(activation=MinMaxObserver.with_args(dtype=torch.qint8), weight=Identity)"
    )
