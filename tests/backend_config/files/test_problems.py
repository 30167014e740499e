from __future__ import annotations

from backquant.backend_config.import_paths import Problem, SpecFileError, suggestion
from backquant.errors import SpecError


def test_one_problem():
    error = SpecFileError([Problem("a.yaml", 2, "name", "is missing", "name: mine")])
    assert isinstance(error, SpecError)
    assert str(error) == "is missing\n  where  a.yaml:2: name\n  fix    name: mine"


def test_several_problems_are_all_listed():
    error = SpecFileError(
        [Problem("a.yaml", 2, "x", "unknown"), Problem("a.yaml", 5, "y", "wrong", "mend it")]
    )
    assert error.problems[1].line == 5
    assert str(error) == (
        "unknown (and 1 more)\n  where  a.yaml:2: x\n         a.yaml:5: y: wrong; mend it"
    )


def test_a_problem_without_line_or_field():
    assert str(Problem("a.yaml", None, "", "is empty")) == "a.yaml: is empty"


def test_did_you_mean():
    assert suggestion("patern", ["pattern", "patterns"]) == 'did you mean "pattern"?'
    assert suggestion("zzz", []) == ""
    assert suggestion("zzz", [f"name{i}" for i in range(20)]).endswith(", …")
