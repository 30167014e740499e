from __future__ import annotations

from backquant.lower import quantized_model as before
from backquant.runtime import quantized_model as now


def test_pickles_of_before_find_what_they_name():
    assert before.QuantizedModel is now.QuantizedModel
    assert before._restored is now._restored
