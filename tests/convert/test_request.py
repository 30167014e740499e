from __future__ import annotations

from backquant.convert import ConvertRequest
from backquant.qconfig import ConvertCustomConfig, QConfigMapping


def test_nothing_asked_is_the_default() -> None:
    assert ConvertRequest() == ConvertRequest(ConvertCustomConfig(), None, None, True)
    assert ConvertRequest() != ConvertRequest(qconfig_mapping=QConfigMapping())
    one, two = ConvertRequest(), ConvertRequest()
    one.custom.set_preserved_attributes(["tag"])
    assert two.custom.preserved_attributes == []
