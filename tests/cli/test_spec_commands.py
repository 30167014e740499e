from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import backquant
from backquant.backend_config import BackendConfig, list_backends

Run = Callable[..., Any]


def test_backends(run: Run) -> None:
    shown = run("backends")
    assert shown.status == 0 and all(name in shown.out for name in list_backends())
    rows = run("backends", "--json").data
    assert [row["name"] for row in rows] == list_backends()
    by_name = {row["name"]: row for row in rows}
    assert by_name["x86"]["entries"] == 191 and by_name["tensorrt"]["engine"] is None
    assert by_name["x86"]["runs_here"].startswith("yes, ")


@pytest.mark.parametrize("backend", ["x86", "tensorrt", "qnnpack_pt2e"])
def test_show(run: Run, backend: str) -> None:
    shown = run("show", backend)
    assert shown.status == 0 and shown.err == ""
    assert all(len(line) <= 140 for line in shown.out.splitlines() if "  " in line[1:40])
    data = run("show", backend, "--json").data
    assert data["name"] == backquant.get_backend_config(backend).name
    operators = [operator for row in data["rows"] for operator in row["operators"]]
    assert len(operators) == len(backquant.get_backend_config(backend).configs)


def test_show_says_the_defaults(run: Run) -> None:
    out = run("show", "x86").out
    assert "\nDefaults\nactivation: histogram, reduced range\n" in out


def test_show_in_other_forms(run: Run) -> None:
    assert "| operators |" in run("show", "x86", "--format", "markdown").out
    assert run("show", "x86", "--format", "html").out.lstrip().startswith("<")
    assert run("show", "x86", "--format", "pdf").status == 2


def test_diff(run: Run) -> None:
    assert run("diff", "x86", "x86").status == 0
    differing = run("diff", "x86", "qnnpack")
    assert differing.status == 1 and "qnnpack" in differing.out
    data = run("diff", "x86", "qnnpack", "--json")
    assert data.status == 1 and data.data["first"] == "x86" and data.data["entries"]
    assert run("diff", "x86", "x86", "--json").data["entries"] == []


def test_diff_with_a_file(run: Run, here: Path) -> None:
    config = backquant.get_backend_config("x86").set_engine(None)
    config.save(here / "mine.json")
    out = run("diff", "x86", "mine.json").out
    assert "engine: x86" in out


@pytest.mark.parametrize("backend", list_backends())
def test_built_in_backends_pass_the_check(run: Run, backend: str) -> None:
    result = run("check", backend)
    assert result.status == 0 and f"{backend}: 0 errors" in result.out


BROKEN = """\
schema_version: 1
name: mine
engien: x86
entries:
  - pattern: torch.addd
  - patern: torch.add
"""


def test_check_of_a_broken_file(run: Run, here: Path, snapshot: Callable[..., None]) -> None:
    (here / "broken.yaml").write_text(BROKEN)
    result = run("check", "broken.yaml")
    assert result.status == 1 and result.err == ""
    assert (
        "broken.yaml:3: engien: unknown field" in result.out
        and 'did you mean "engine"?' in result.out
    )
    data = run("check", "broken.yaml", "--json")
    assert data.status == 1 and data.data["error"] == len(data.data["findings"]) > 0
    snapshot("check-broken", result.out)


def test_check_of_a_sound_file(run: Run, here: Path) -> None:
    BackendConfig("mine").save(here / "mine.yaml")
    assert run("check", "mine.yaml").out == "mine.yaml: 0 errors, 0 warnings, 0 notes\n"


def test_check_repeats_itself_little(run: Run) -> None:
    text, data = run("check", "x86").out, run("check", "x86", "--json").data
    assert len(data["findings"]) == data["error"] + data["warning"] + data["note"]
    assert text.count("[engine-dtype]") < sum(f["rule"] == "engine-dtype" for f in data["findings"])
    assert "more places (--json lists them)" in text


def test_schema(run: Run) -> None:
    plain, data = run("schema"), run("schema", "--json")
    assert plain.status == 0 and plain.out == data.out
    assert plain.data == backquant.backend_config.json_schema()
    assert run("schema", "--of", "artifact").data["title"] == "backquant artifact"


@pytest.mark.parametrize(
    "arguments",
    [
        ("show", "x68"),
        ("show", "nothing.yaml"),
        ("diff", "x86", "x68"),
        ("check", "x68"),
        ("check", "nothing.yaml"),
    ],
    ids=" ".join,
)
def test_what_does_not_exist_is_bad_usage(run: Run, arguments: tuple[str, ...]) -> None:
    for more in ((), ("--json",)):
        result = run(*arguments, *more)
        assert result.status == 2 and result.err.startswith("error: ")
        assert (result.out == "") == (more == ())
        if more:
            assert set(result.data["error"]) == {"kind", "what", "where", "fix"}
