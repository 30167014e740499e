"""Stubs and the wrapper."""

from __future__ import annotations

import copy
import pickle

import torch
from torch import nn

from backquant.nn import DeQuantStub, QuantStub, QuantWrapper


def test_stubs_are_identities() -> None:
    x = torch.randn(3)
    for stub in (QuantStub(), DeQuantStub("asked")):
        assert stub(x) is x
    assert not hasattr(QuantStub(), "qconfig")
    assert DeQuantStub("asked").qconfig == "asked"


def test_wrapper() -> None:
    inner = nn.Linear(2, 3).eval()
    inner.qconfig = "asked"
    wrapper = QuantWrapper(inner)
    assert not wrapper.training and not inner.training
    assert wrapper.quant.qconfig == wrapper.dequant.qconfig == "asked"
    x = torch.randn(1, 2)
    for twin in (wrapper, copy.deepcopy(wrapper), pickle.loads(pickle.dumps(wrapper))):
        assert torch.equal(twin(x), inner(x))
    assert list(wrapper.state_dict()) == ["module.weight", "module.bias"]
