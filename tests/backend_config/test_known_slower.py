"""Records of what is slower on integers: checked, equal, written and read back, inherited, shown."""

from __future__ import annotations

from typing import Any

import pytest

from backquant.backend_config import BackendConfig, KnownSlower, files
from backquant.backend_config.derived import slower_lines
from backquant.errors import SpecError

SMALL = KnownSlower(("lstm",), {"hidden_size": {"max": 63}}, "20 steps", 20.0, 18.0)
HEAD = "schema_version: 1\nname: mine\n"
TEXT = """\
slower:
  - operators: [lstm]
    where: {hidden_size: {max: 63}}
    measured: 20 steps
    integer_us: 20
    float_us: 18
"""


def test_a_description_with_records_is_another_one() -> None:
    plain, knowing = BackendConfig("mine"), BackendConfig("mine").set_slower([SMALL])
    assert plain != knowing
    assert BackendConfig.from_dict(knowing.to_dict()) == knowing
    [change] = plain.diff(knowing).fields
    assert (change.field, change.before) == ("slower[0]", "")
    assert "slower" not in plain.to_dict()
    assert slower_lines(knowing) == [
        "lstm where hidden_size ≤ 63 – 20 steps: 20 µs on integers, 18 in float"
    ]


def test_in_a_file() -> None:
    read = files.loads(HEAD + TEXT, "yaml", file="mine")
    assert read.slower == (SMALL,)
    assert files.loads(files.dumps(read, "yaml"), "yaml", file="mine") == read


@pytest.mark.parametrize(
    ("old", "new", "line", "message"),
    [
        ("[lstm]", "[lstn]", 4, "no operator is called 'lstn'"),
        ("[lstm]", "[conv2d+relu]", 4, "no operator is called 'conv2d+relu'"),
        ("[lstm]", "[]", 4, "operators"),
        ("[lstm]", "[linear]", 5, "no quantity and no parameter 'hidden_size'"),
        ("{max: 63}", "{mux: 63}", 5, 'did you mean "max"?'),
        ("{hidden_size: {max: 63}}", "{}", 5, "a KnownSlower names its where"),
        ("integer_us: 20", "integer_us: 17", 7, "integers are not slower"),
        ("float_us: 18", "float_us: none", 8, "float_us"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(old: str, new: str, line: int, message: str) -> None:
    assert old in TEXT
    with pytest.raises(SpecError) as raised:
        files.loads(HEAD + TEXT.replace(old, new), "yaml", file="mine")
    assert message in str(raised.value)
    assert f"mine:{line}" in str(raised.value)


@pytest.mark.parametrize(
    ("changed", "where"),
    [
        ({"operators": ()}, "operators"),
        ({"operators": "lstm"}, "operators"),
        ({"where": {}}, "where"),
        ({"where": {"groups": {"mux": 1}}}, "where"),
        ({"measured": " "}, "measured"),
        ({"float_us": 0}, "float_us"),
        ({"integer_us": "20"}, "integer_us"),
        ({"integer_us": 18.0}, "integer_us"),
        ({"integer": 18.0}, "integer"),
    ],
)
def test_wrong_records(changed: dict[str, Any], where: str) -> None:
    with pytest.raises(SpecError) as raised:
        BackendConfig.from_dict({"name": "mine", "slower": [SMALL.to_dict() | changed]})
    assert "slower[0]" in str(raised.value)
    assert where in str(raised.value)


def test_only_records_are_taken() -> None:
    with pytest.raises(SpecError, match="expected a KnownSlower"):
        BackendConfig("mine").set_slower(["lstm"])  # type: ignore[list-item]
    with pytest.raises(SpecError, match="slower stand in a tuple"):
        BackendConfig("mine").set_slower("lstm")  # type: ignore[arg-type]
