"""The table of what users report: kinds and backends with outcomes."""

from __future__ import annotations

from pathlib import Path

from tools.reports import backend_of, lines_of, table_of

RESULTS = """<testsuites><testsuite>
<testcase classname="tests.reports.test_integer_edges" name="test_files[litert]"/>
<testcase classname="tests.reports.test_integer_edges" name="test_images[x86]"><failure/></testcase>
<testcase classname="tests.reports.test_integer_edges" name="test_saved"><skipped/></testcase>
<testcase classname="tests.reports.test_degenerate_ranges" name="test_loads[zero-openvino]"/>
</testsuite></testsuites>"""


def test_outcomes_by_kind_and_backend(tmp_path: Path) -> None:
    (tmp_path / "results.xml").write_text(RESULTS)
    table = table_of(tmp_path / "results.xml")
    assert table["integer edges", "litert"] == {"ok": 1}
    assert table["integer edges", "x86"] == {"failed": 1}
    assert table["integer edges", "any"] == {"skipped": 1}
    assert table["degenerate ranges", "openvino"] == {"ok": 1}
    assert lines_of(table)[0].split() == ["degenerate", "ranges", "openvino", "1", "ok"]


def test_descriptions_of_vendors_are_backends() -> None:
    assert backend_of("test_no_part_of_a_head_is_erased[ti_tidl]") == "ti_tidl"
    assert backend_of("test_ratios[concatenated-100]") == "any"
