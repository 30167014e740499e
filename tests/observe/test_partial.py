from __future__ import annotations

import copy
import pickle

import torch
import torch.ao.quantization as ao

from backquant.observe import FakeQuantize, MinMaxObserver, ObserverPartial, factories_equal


def test_later_arguments_win() -> None:
    factory = MinMaxObserver.with_args(quant_min=0, quant_max=15).with_args(quant_max=127)
    assert (factory().quant_min, factory().quant_max) == (0, 127)
    assert factory(quant_max=255).quant_max == 255


def test_callable_args_are_called_for_each_observer_and_yield_to_the_call() -> None:
    made: list[float] = []

    def eps() -> float:
        made.append(2.0**-12)
        return made[-1]

    factory = MinMaxObserver.with_callable_args(eps=eps)
    assert factory().eps.item() == factory().eps.item() == 2.0**-12
    assert len(made) == 2
    assert factory(eps=0.5).eps.item() == 0.5
    assert len(made) == 2
    assert factory.with_args(eps=0.25)().eps.item() == 0.25
    assert MinMaxObserver.with_args(eps=0.25).with_callable_args(eps=eps)().eps.item() == 2.0**-12


def test_precedence_equals_the_oracle() -> None:
    def make(cls):  # type: ignore[no-untyped-def]
        first = cls.with_callable_args(eps=lambda: 1.0)
        second = cls.with_args(eps=2.0).with_callable_args(eps=lambda: 3.0)
        factories = [first, first.with_args(eps=4.0), second, second.with_args(eps=5.0)]
        factories += [f.with_args(quant_min=0, quant_max=7) for f in factories]
        return [(f().eps.item(), f().quant_max, f(eps=9.0).eps.item()) for f in factories]

    assert make(MinMaxObserver) == make(ao.MinMaxObserver)


def test_equality_is_by_what_is_made() -> None:
    one = MinMaxObserver.with_args(quant_min=0).with_args(quant_max=127)
    two = MinMaxObserver.with_args(quant_max=127, quant_min=0)
    assert one == two
    assert hash(one) == hash(two)
    assert one != MinMaxObserver.with_args(quant_max=127)
    assert one != MinMaxObserver
    nested = FakeQuantize.with_args(observer=MinMaxObserver.with_args(eps=0.5))
    assert nested == FakeQuantize.with_args(observer=MinMaxObserver.with_args(eps=0.5))
    assert nested != FakeQuantize.with_args(observer=MinMaxObserver.with_args(eps=0.25))


def test_partials_of_pytorch_compare_too() -> None:
    one = ao.MinMaxObserver.with_args(quant_min=0)
    assert factories_equal(one, ao.MinMaxObserver.with_args(quant_min=0))
    assert not factories_equal(one, ao.MinMaxObserver.with_args(quant_min=1))
    assert not factories_equal(one, MinMaxObserver.with_args(quant_min=0))


def test_factories_copy_and_pickle() -> None:
    factory = MinMaxObserver.with_args(dtype=torch.qint8, qscheme=torch.per_tensor_symmetric)
    assert copy.deepcopy(factory) == factory
    assert pickle.loads(pickle.dumps(factory)) == factory


def test_repr_is_code() -> None:
    factory = FakeQuantize.with_args(observer=MinMaxObserver, quant_min=0)
    assert repr(factory) == "FakeQuantize.with_args(observer=MinMaxObserver, quant_min=0)"
    assert isinstance(factory, ObserverPartial)
