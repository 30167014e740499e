"""Names of a model are in no text that another language reads."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import backquant
from backquant.runtime.replay import program

MARK = "zqx"  # in no word of ours
NAMES = [
    f'{MARK}"); system("',
    f"{MARK}\n  %1 = aten::from_file()",
    f"{MARK}*/ #include <",
    f"{MARK}µ",
]
PLAIN = [f"plain{place}" for place in range(len(NAMES))]
TOKEN = re.compile(
    r"%[a-z0-9_]+|[A-Za-z_0-9]+(?:::[A-Za-z_0-9.]+)?|-?[0-9.]+(?:e[-+][0-9]+)?|[][(){}:,=?*.]|\s+"
)
X = torch.randn(4, 16, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    """A layer and a factor for each name; a device and a text as arguments."""

    def __init__(self, names: list[str]) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.names = names
        self.heads = nn.ModuleDict({name: nn.Linear(16, 16) for name in names})
        self.factors = nn.ParameterDict({name: nn.Parameter(torch.rand(1)) for name in names})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.names:
            x = torch.relu(self.heads[name](x)) * self.factors[name]
        return nn.functional.gelu(x, approximate="tanh") + torch.ones(1, device="cpu")


def quantized(names: list[str]) -> Any:
    return backquant.quantize(Model(names).eval(), calibration=[X], backend="x86", slower="keep")


@pytest.mark.parametrize("loaded", [False, True])
def test_recordings(loaded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def sources(names: list[str]) -> list[str]:
        seen: list[str] = []

        def interpreted(source: str, embedded: list[Any]) -> Any:
            seen.append(re.sub(r"%packed[0-9]+", "%packed", source))  # numbered by address
            return original(source, embedded)

        original = program.interpreted
        with monkeypatch.context() as patch:
            patch.setattr(program, "interpreted", interpreted)
            model = quantized(names)
            if loaded:
                backquant.save(model, tmp_path / "m.bq")
                model = backquant.load(tmp_path / "m.bq")
            for _ in range(4):
                model(X)
        return seen

    odd, plain = sources(NAMES), sources(PLAIN)
    assert odd
    assert odd == plain
    for source in odd:
        assert TOKEN.sub("", source) == ""


CHILD = r"""
import sys
from pathlib import Path
import torch
torch.set_num_threads(1)
sys.path.insert(0, sys.argv[1])
import test_source_texts as cases
model = cases.quantized(cases.NAMES).compile()
model(cases.X)
"""


def test_code_that_is_compiled(tmp_path: Path) -> None:
    """In its text layers have names that are identifiers; nothing of ours writes the user's."""
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-W", "ignore", "-c", CHILD, str(Path(__file__).parent)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    written = [path for path in tmp_path.rglob("*") if path.suffix in (".cpp", ".py", ".h")]
    assert any(path.suffix == ".cpp" for path in written)
    for path in written:
        followed = re.findall(rf"{MARK}(.?)", path.read_text(encoding="utf-8"), re.DOTALL)
        assert set(followed) <= {"_"}, path  # each mark of a name is written as _22_ and the like
