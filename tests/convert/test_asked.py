from __future__ import annotations

from backquant.convert import ConvertAsked
from backquant.qconfig import ConvertCustomConfig, QConfigMapping


def test_nothing_asked_is_the_default() -> None:
    assert ConvertAsked() == ConvertAsked(ConvertCustomConfig(), None, None, True)
    assert ConvertAsked() != ConvertAsked(qconfig_mapping=QConfigMapping())
    one, two = ConvertAsked(), ConvertAsked()
    one.custom.set_preserved_attributes(["tag"])
    assert two.custom.preserved_attributes == []
