"""Notebooks: their code cells are one program."""

from __future__ import annotations

import json
from typing import Any

import pytest

from backquant.migrate import migrate_notebook


def code(*lines: str, **more: Any) -> dict[str, Any]:
    source = [line + "\n" for line in lines[:-1]] + [lines[-1]] if lines else []
    return {"cell_type": "code", "execution_count": 1, "outputs": [], "source": source, **more}


def notebook(*cells: dict[str, Any], **metadata: Any) -> dict[str, Any]:
    return {"cells": list(cells), "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def written(value: dict[str, Any]) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


CELLS = [
    {"cell_type": "markdown", "metadata": {}, "source": ["# torch.ao.quantization – *naïve*"]},
    code("%matplotlib inline", "!pip install torch", "import torch"),
    code("from torch.ao.quantization import quantize_fx", "# comment"),
    code(),
    code("%%bash", "echo torch.ao.quantization.prepare"),
    code("%%time", "if torch:", "    !ls", "    x = torch.zeros(1)", "quantize_fx?"),
    code(
        'p = quantize_fx.prepare_fx(model, {"": torch.quantization.default_qconfig}, x)',
        "p",
        "",
        outputs=[{"output_type": "stream", "name": "stdout", "text": ["torch.quantization\n"]}],
    ),
]


def test_cells_are_one_program() -> None:
    before = written(notebook(*CELLS))
    result = migrate_notebook(before, "a.ipynb")
    assert result.findings == ()
    after = json.loads(result.after)
    sources = [cell["source"] for cell in after["cells"]]
    assert sources[1] == [
        "%matplotlib inline\n",
        "!pip install torch\n",
        "import backquant.ao\n",
        "import torch",
    ]
    assert sources[2] == ["from backquant.ao.quantization import quantize_fx\n", "# comment"]
    assert sources[3:6] == [cell["source"] for cell in CELLS[3:6]]
    assert sources[6] == [
        'p = quantize_fx.prepare_fx(model, {"": backquant.ao.quantization.default_qconfig}, x)\n',
        "p\n",
    ]
    assert after["cells"][6]["outputs"] == CELLS[6]["outputs"]
    assert after["cells"][0] == CELLS[0]


def test_the_rest_of_the_file_stays() -> None:
    """Everything but the sources of changed cells is the same, and a second time nothing changes."""
    before = written(notebook(*CELLS, kernelspec={"language": "python", "name": "é"}))
    after = migrate_notebook(before).after
    old, new = json.loads(before), json.loads(after)
    for cell in (*old["cells"], *new["cells"]):
        if cell["cell_type"] == "code":
            cell["source"] = []
    assert written(old) == written(new)
    assert after == written(json.loads(after))
    assert migrate_notebook(after).after == after


@pytest.mark.parametrize("indent", [1, 2, 4, None])
@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("ascii_only", [True, False])
def test_layouts(indent: int | None, end: str, ascii_only: bool) -> None:
    cell = code("from torch.quantization import QConfig  # é")
    before = json.dumps(notebook(cell), indent=indent, ensure_ascii=ascii_only) + end
    after = migrate_notebook(before).after
    assert after == before.replace("torch.quantization", "backquant.ao.quantization")


def test_a_source_as_one_string() -> None:
    cell = {"cell_type": "code", "source": "import torch\ntorch.quantization.QConfig\n"}
    after = migrate_notebook(written(notebook(cell))).after
    assert json.loads(after)["cells"][0]["source"] == (
        "import backquant.ao\nimport torch\nbackquant.ao.quantization.QConfig\n"
    )


def test_findings_name_cell_and_line() -> None:
    result = migrate_notebook(
        written(
            notebook(CELLS[0], code("import torch"), code("", "torch.quantization.quantize_jit()"))
        ),
        "a.ipynb",
    )
    (finding,) = result.findings
    assert (finding.path, finding.line) == ("a.ipynb#cell 2", 2)
    assert result.held


def test_broken_cells_are_findings() -> None:
    result = migrate_notebook(written(notebook(code("x = !ls"), code("torch.quantization.x = 1"))))
    (finding,) = result.findings
    assert (finding.kind, finding.path) == ("syntax error", "<notebook>#cell 0")


@pytest.mark.parametrize(
    "text",
    [
        "torch.quantization",
        '["torch.quantization"]',
        '{"cells": 3, "x": "torch.quantization"}',
        '{"cells": [{"cell_type": "code", "x": "torch.quantization"}]}',
    ],
)
def test_what_is_no_notebook(text: str) -> None:
    result = migrate_notebook(text)
    assert [f.kind for f in result.findings] == ["notebook"]
    assert not result.changed


def test_a_layout_that_cannot_be_kept() -> None:
    before = json.dumps(notebook(code("from torch.quantization import QConfig")), indent=3)
    result = migrate_notebook(before)
    assert not result.changed
    assert [f.kind for f in result.findings] == ["notebook"]


def test_other_languages_are_left_alone() -> None:
    before = written(
        notebook(code("from torch.quantization import QConfig"), kernelspec={"language": "R"})
    )
    assert migrate_notebook(before).after == before


def test_imports_do_not_move_cells() -> None:
    cells = [
        code("import torch"),
        code("import torch.ao.quantization"),
        code("torch.ao.quantization.QConfig"),
        code("def f():", "    import torch.quantization as q"),
        code("torch.zeros(1)"),
    ]
    after = json.loads(migrate_notebook(written(notebook(*cells))).after)
    assert ["".join(cell["source"]) for cell in after["cells"]] == [
        "import torch",
        "import backquant.ao.quantization",
        "backquant.ao.quantization.QConfig",
        "def f():\n    import backquant.ao.quantization as q",
        "torch.zeros(1)",
    ]
