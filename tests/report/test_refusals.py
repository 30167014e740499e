"""A model with five kinds of refusal: what text, JSON and page say, and that each fix works."""

from __future__ import annotations

import json
import operator
from typing import Any

import pytest
import torch

import backquant.observe
import backquant.qconfig
from backquant.report.model import Report
from report_examples.five_refusals import KINDS, mapping, report


@pytest.fixture(scope="module")
def found() -> Report:
    return report()


def test_each_refusal_has_its_kind(found: Report) -> None:
    kinds = {row.node: row.reasons[0].rule for row in found.float_rows}
    assert kinds == KINDS
    assert len(set(kinds.values())) >= 5


def test_text_data_and_page_say_all_of_it(found: Report) -> None:
    text, page = str(found), found.to_html()
    data = json.loads(json.dumps(found.to_dict()))
    assert Report.from_dict(data) == found
    for name, rule in KINDS.items():
        assert f"\n{name}  " in text
        assert rule in text and rule in page and name in page
    for part in (text, page, json.dumps(data)):
        assert "decodr.fc" in part
    assert "http://" not in page.replace("http://www.w3.org", "") and "https://" not in page


@pytest.mark.parametrize(
    "name", [n for n, r in KINDS.items() if r not in ("no-entry", "not-traced")]
)
def test_each_fix_works(found: Report, name: str) -> None:
    row = next(row for row in found.rows if row.node == name)
    if KINDS[name] == "qconfig-none":
        assert row.rule == 'module_name "skip"' and row.reasons[0].fix == ""  # as the user asked
        return
    changed = mapping()
    names: dict[str, Any] = {"torch": torch, "operator": operator, "qconfig_mapping": changed}
    for module in (backquant.observe, backquant.qconfig):
        names.update({public: getattr(module, public) for public in module.__all__})
    exec(row.reasons[0].fix, names)
    assert next(r for r in report(changed).rows if r.node == name).quantized
