"""Copies of PyTorch's test files that import backquant: the text edits, one by one.

1. Names of ``torch.ao.quantization`` and of the modules below it come from ``torch_own.names``, which
   takes them from ``backquant``.
2. ``torch.ao.nn.intrinsic`` (``.qat``), ``.qat``, ``.quantizable`` and ``.quantized.reference`` are
   backquant's packages; so are ``FloatFunctional``, ``LSTM`` and ``MultiheadAttention`` of
   ``torch.ao.nn.quantized``. Its other classes stay: they are only compared with (``torch_own.graphs``).
3. The base class of the tests is the one of the installed torch, edited likewise: its helper that
   prepares and converts is then backquant's.
4. ``type`` is ``torch_own.graphs.type_in_torch``: a kernel of backquant tells the class of
   ``torch.ao.nn.quantized`` that it stands for.
5. ``torch_own/spelled.py`` lists the edits of single lines, with a reason each.
6. Where a test compares with eager mode, that side runs on ``torch.ao`` (``torch_own/eager.py``).
"""

from __future__ import annotations

import re
from pathlib import Path

import torch.testing._internal as internal

from torch_own.spelled import with_lines

__all__ = ["BASE", "adapted", "write_adapted"]

#: The module that holds the edited base class.
BASE = "torch_own_base"

_OURS = ("FloatFunctional", "LSTM", "MultiheadAttention")

_EDITS: tuple[tuple[str, str], ...] = (
    (r"from torch\.ao\.quantization[\w.]* import", "from torch_own.names import"),
    (r"(?m)^import torch\.ao\.quantization[\w.]*$", "import torch_own.names"),
    (r"\btorch\.ao\.quantization\b", "torch_own.names"),
    (r"\btorch\.ao\.nn\.quantized\.reference\b", "backquant.nn.quantized.reference"),
    (r"\btorch\.ao\.nn\.intrinsic\.modules\.fused\b", "backquant.nn.intrinsic"),
    (r"\btorch\.ao\.nn\.(intrinsic\.qat|qat)\.modules(\.\w+)?\b", r"backquant.nn.\1"),
    (r"\btorch\.ao\.nn\.(intrinsic(?!\.quantized)|qat|quantizable)\b", r"backquant.nn.\1"),
    (rf"\btorch\.ao\.nn\.quantized\.({'|'.join(_OURS)})\b", r"backquant.nn.quantized.\1"),
    (rf"\bnnq\.({'|'.join(_OURS)})\b", r"backquant.nn.quantized.\1"),
    (
        r"from backquant\.nn\.intrinsic import _FusedModule",
        "from torch_own.names import _FusedModule",
    ),
    (r"\btorch\.testing\._internal\.common_quantization\b", BASE),
)

_BEFORE = """\
import backquant
import backquant.nn.intrinsic.qat
import backquant.nn.qat
import backquant.nn.quantizable
import backquant.nn.quantized
import torch_own.graphs
import torch_own.names
from torch_own.graphs import type_in_torch as type
"""

_AFTER_BASE = """
from torch_own.judge import install
install(QuantizationTestCase)
"""


def adapted(text: str) -> str:
    """The text of a test file after the edits.

    >>> print(adapted("from torch.ao.quantization.observer import MinMaxObserver").splitlines()[-1])
    from torch_own.names import MinMaxObserver
    """
    text = with_lines(text)
    for pattern, new in _EDITS:
        text = re.sub(pattern, new, text)
    return _BEFORE + text


def write_adapted(sources: list[Path], folder: Path) -> list[Path]:
    """Edited copies of ``sources`` and of their base class in ``folder``; the paths of the tests."""
    base = Path(internal.__path__[0]) / "common_quantization.py"
    (folder / f"{BASE}.py").write_text(adapted(base.read_text()) + _AFTER_BASE)
    written = []
    for source in sources:
        path = folder / source.name
        path.write_text(adapted(source.read_text()))
        written.append(path)
    return written
