"""One source: what holds a file, what breaks it, and what never changes."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from backquant.migrate import migrate_source


@pytest.mark.parametrize(
    "use",
    [
        "tq.prepare(model)",
        "tq.quantize_qat(model)",
        "tq.prepare_qat(model)",
        "tq.convert_jit(model)",
        "tq.quantize_pt2e.prepare_pt2e(model)",
        "tq.quantize.propagate_qconfig_(model)",
    ],
)
def test_a_flow_without_counterpart_holds_the_file(becomes: Callable[..., None], use: str) -> None:
    code = f"import torch.ao.quantization as tq\ntq.QConfig\n{use}\n"
    result = migrate_source(code)
    assert result.after == code
    assert result.held
    assert [f.line for f in result.findings] == [3]


def test_broken_python_is_a_finding() -> None:
    code = "from torch.ao.quantization import QConfig\ndef f(:\n"
    result = migrate_source(code, "a.py")
    assert result.after == code
    (finding,) = result.findings
    assert (finding.line, finding.kind) == (2, "syntax error")


def test_what_does_not_mention_it_is_not_even_parsed() -> None:
    assert migrate_source("import torch\ndef f(:\n").findings == ()


@pytest.mark.parametrize(
    "deep", ["[" * 3000 + "]" * 3000, "1" + "+1" * 20000, "-" * 50000 + "1", "lambda:" * 9000 + "1"]
)
def test_deep_nesting_is_a_finding(deep: str) -> None:
    """libcst's parser would crash the process on some of these."""
    code = f"from torch.ao.quantization import QConfig\nx = {deep}\n"
    result = migrate_source(code)
    assert result.after == code
    assert [f.kind for f in result.findings] == ["too deep"]


def test_null_bytes_are_a_finding() -> None:
    result = migrate_source("from torch.ao.quantization import QConfig\n\0\n")
    assert not result.changed
    assert [f.kind for f in result.findings] == ["syntax error"]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_stay(end: str) -> None:
    lines = [
        "import torch",
        "from torch.ao.quantization import (",
        "    QConfig,  # one",
        "    QuantStub,",
        ")",
        "",
        "x = torch.ao.quantization.default_qconfig",
        "",
    ]
    after = migrate_source(end.join(lines)).after
    assert after.count("\n") == after.count(end)
    assert "from backquant.nn import (" in after


@pytest.mark.parametrize("end", ["", "\n", "\n\n\n"])
def test_the_end_of_the_file_stays(end: str) -> None:
    assert migrate_source(f"from torch.quantization import QConfig{end}").after == (
        f"from backquant import QConfig{end}"
    )


def test_tabs_and_odd_spaces_stay(becomes: Callable[..., None]) -> None:
    becomes(
        "if True:\n\tfrom   torch.quantization   import  QConfig  as   Q\n\tx  =  Q ( 1,2 )\n",
        "if True:\n\tfrom   backquant   import  QConfig  as   Q\n\tx  =  Q ( 1,2 )\n",
    )


def test_parentheses_around_a_chain_stay(becomes: Callable[..., None]) -> None:
    becomes(
        """
        import torch
        x = (torch.ao.quantization.default_qconfig)
        y = f"{torch.ao.quantization.default_qconfig!r:>3}"
        @torch.ao.quantization.with_args
        def f(a=torch.quantization.QConfig, *, b: torch.quantization.QConfig = 1): ...
        """,
        """
        import backquant
        import torch
        x = (backquant.default_qconfig)
        y = f"{backquant.default_qconfig!r:>3}"
        @torch.ao.quantization.with_args
        def f(a=backquant.QConfig, *, b: backquant.QConfig = 1): ...
        """,
        [(4, "unknown name")],
    )


@pytest.mark.parametrize(
    "code",
    [
        "match x:\n    case torch.ao.quantization.QuantType.STATIC:\n        pass\n",
        "class A[T: torch.ao.quantization.QConfig]:\n    pass\n",
        "x = lambda y=torch.ao.quantization.QConfig: y\n",
        "async def f():\n    async with torch.ao.quantization.QConfig as x:\n        await x\n",
        "x = [torch.ao.quantization.QConfig for torch in y]\n",
        "print(y := torch.ao.quantization.QConfig)\n",
        "try:\n    pass\nexcept* torch.ao.quantization.QConfig:\n    pass\n",
    ],
)
def test_newer_syntax(migrated: Callable[..., object], code: str) -> None:
    result = migrated("import torch\n" + code)
    assert result.findings == ()  # type: ignore[attr-defined]
    assert ("torch.ao" in result.after) == ("for torch" in code)  # type: ignore[attr-defined]
