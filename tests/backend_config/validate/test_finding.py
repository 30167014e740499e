from __future__ import annotations

from backquant.backend_config.dtype_rules import Place


def test_places_nest():
    place = Place(4, "torch.add")
    assert str(place) == "entry 4 (torch.add)"
    assert str(place.at("a").at("b")) == "entry 4 (torch.add): a.b"


def test_a_finding_knows_its_entry():
    finding = Place(4, "torch.add").at("a").find("warning", "rule", "message", "fix")
    assert (finding.entry, finding.place) == (4, "entry 4 (torch.add): a")
    assert str(finding).endswith("[rule]\n  fix  fix")
