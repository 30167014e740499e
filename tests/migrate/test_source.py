"""What becomes of single lines: the prefix, the import that it needs, and what is reported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from backquant.migrate import migrate_source

Q, AO = "torch.ao.quantization", "backquant.ao.quantization"


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (f"import {Q}", f"import {AO}"),
        (f"import {Q} as tq", f"import {AO} as tq"),
        (f"import os, {Q}.observer", f"import os, {AO}.observer"),
        (f"from {Q}.fx.custom_config import X", f"from {AO}.fx.custom_config import X"),
        (f"from {Q} import *  # all", f"from {AO} import *  # all"),
        ("from torch.ao import quantization", "from backquant.ao import quantization"),
        ("from torch import quantization as q", "from backquant.ao import quantization as q"),
        ("from torch.nn import qat, quantized", "from backquant.ao.nn import qat, quantized"),
        ("from torch import nn, quantization", "from torch import nn\nfrom backquant.ao import quantization"),
        (
            "x = 1; from torch import nn, quantization",
            "x = 1; from torch import nn; from backquant.ao import quantization",
        ),
        (f"import torch\n{Q}.QConfig", f"import backquant.ao\nimport torch\n{AO}.QConfig"),
        (f"import {Q}\ntorch.zeros(1); {Q}.QConfig", f"import torch, {AO}\ntorch.zeros(1); {AO}.QConfig"),
        (
            "from torch import nn\nnn.qat.Linear",
            "import backquant.ao\nfrom torch import nn\nbackquant.ao.nn.qat.Linear",
        ),
        ("from torch import nn\nnn.Linear  # quantized", "from torch import nn\nnn.Linear  # quantized"),
        ("é = 'ü'; import torch.quantization as q", "é = 'ü'; import backquant.ao.quantization as q"),
        ("from torch.ao.pruning import Sparsifier", "from torch.ao.pruning import Sparsifier"),
    ],
)  # fmt: skip
def test_lines(before: str, after: str) -> None:
    result = migrate_source(before + "\n")
    assert result.after == after + "\n"
    assert migrate_source(result.after).after == result.after


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (f"from {Q} import no_such\n", "unknown name"),
        (f"import {Q} as tq\ntq.get_default_qconfig_dict()\n", "old dicts"),
        (f"import {Q} as tq\ntq.default_observer = 1\n", "patched name"),
        (f"import {Q} as tq, torch\ntorch.jit.script(tq.QConfig)\n", "TorchScript"),
        (f"import {Q} as tq, torch\ntorch.backends.quantized.engine = 'x86'\n", "engine"),
        (f"import torch\ndef f(torch):\n    return {Q}.QConfig\n", "ambiguous name"),
        (f"patch('{Q}.QConfig')\n", "name in a string"),
        ("import torch.ao.ns._numeric_suite_fx as ns\nns.extract_weights(m)\n", "numeric suite"),
        (
            f"from {Q}.quantize_fx import convert_fx\nconvert_fx(m, is_reference=True)\n",
            "old keyword",
        ),
    ],
)
def test_what_needs_a_person(code: str, kind: str) -> None:
    (finding,) = migrate_source(code).findings
    assert (finding.kind, finding.holds) == (kind, False)
    assert finding.why and finding.how


@pytest.mark.parametrize("name", ["quantize_jit.quantize_jit", "prepare_jit", "fuse_conv_bn_jit"])
def test_a_file_with_another_flow_stays(name: str) -> None:
    code = f"import {Q} as tq\ntq.{name}(m)\n"
    result = migrate_source(code)
    assert result.held and result.after == code


def test_scripting_where_nothing_is_quantized_is_no_finding(migrated: Callable[[str], Any]) -> None:
    assert migrated("import torch  # quantized\ntorch.jit.script(m)\n").findings == ()


@pytest.mark.parametrize(
    "code", ["torch.quantization(", "torch.quantization\0", f"{'(' * 3000} qat torch"]
)
def test_what_is_not_python_is_a_finding(code: str) -> None:
    (finding,) = migrate_source(code).findings
    assert finding.kind == "syntax error" and finding.why
