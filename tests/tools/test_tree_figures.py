"""Figures of a source tree: each on a text that is known."""

from __future__ import annotations

from tools import tree_figures as tool

TEXT = '''"""Doc of
two lines."""
import torch  # a comment

TABLE = {torch.qint8: 1, torch.float16: 2, torch.float8_e4m3fn: 3}
OTHER = {torch.relu: 1, torch.add: 2, torch.int8: 3}
x = torch.ops.aten.add.Tensor
'''


def test_lines_and_tables() -> None:
    assert tool.code_lines(TEXT) == 4
    assert list(tool.dtype_tables(TEXT)) == [5]


def test_figures_of_a_tree() -> None:
    files = {"src/a.py": TEXT, "src/operators/b.py": TEXT, "src/c.yaml": "a: 1\n"}
    found = tool.figures(files)
    assert found["lines of src"] == "15"
    assert found["files of src"] == "3"
    assert (
        found["tables with three PyTorch dtypes or more as keys"]
        == "2: src/a.py:5, src/operators/b.py:5"
    )
    assert found["files outside of operators/ that name aten overloads"] == "1"


def test_packages_lie_outside_of_src() -> None:
    assert min(tool.extensions().values()) >= 3
