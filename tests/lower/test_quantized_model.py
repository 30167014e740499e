"""What was pickled before classes moved and were renamed."""

from __future__ import annotations

import pickle

from backquant.lower import quantized_model as before
from backquant.match.plan import TensorRequest
from backquant.prepare.pickling import load
from backquant.runtime import quantized_model as now


def test_pickles_of_before_find_what_they_name():
    assert before.QuantizedModel is now.QuantizedModel
    assert before._restored is now._restored


def test_classes_that_were_renamed_are_found():
    """``TensorAsk`` became ``TensorRequest``; a pickle of protocol 0 names a class in plain text."""
    stored = pickle.dumps(TensorRequest, protocol=0)
    assert load(stored.replace(b"TensorRequest", b"TensorAsk")) is TensorRequest
