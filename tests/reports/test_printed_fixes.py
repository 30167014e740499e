"""Every printed fix works: those of errors are followed where their text is compared, of reports here."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import backquant
import following
import snapshots
from backquant import QConfig
from backquant.errors import BackquantError, CoverageError, UsageError

TESTS = Path(__file__).parents[1]
#: What is not followed; this number may only fall.
MOST = 38
X = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))


def printed() -> set[str]:
    """The first lines of all fixes in snapshots."""
    found: set[str] = set()
    for path in TESTS.rglob("messages/*.txt"):
        for text in snapshots.sections(path).values():
            found |= {fix.splitlines()[0].strip() for fix in following.fixes_in(text)}
    return found


def test_what_is_not_followed_is_printed_and_becomes_less() -> None:
    assert following.listed() <= printed()
    assert len(following.listed()) <= MOST


def test_a_fix_that_works_is_told_from_one_that_does_not() -> None:
    model = nn.Sequential(nn.Linear(4, 4)).eval()
    for backend, works in (("x68", True), ("zzz", False)):
        following.start(records=True)
        with pytest.raises(BackquantError) as raised:
            backquant.quantize(model, calibration=[torch.ones(2, 4)], backend=backend)
        error = raised.value
        fix = error.fix if works else "backend='yyy'"
        following.made[-1][0].fix = fix
        if works:
            following.check(f"{error.what}\n  fix    {fix}\n")
        else:
            with pytest.raises(AssertionError, match="does not work: UnknownBackendError"):
                following.check(f"{error.what}\n  fix    {fix}\n")
    with pytest.raises(AssertionError, match="no error of this test has the fix"):
        following.check("nothing\n  fix    model.train()\n")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fc = nn.Conv2d(4, 8, 3), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(torch.sigmoid(self.conv(x)).mean((2, 3)))


REQUESTS = ["qnnpack", "x86", "tensorrt", "executorch", "tensorrt_fp8", "xnnpack"]


@pytest.mark.parametrize("asked", REQUESTS)
@pytest.mark.parametrize("backend", ["qnnpack", "tensorrt", "onnxruntime", "xnnpack"])
def test_the_fix_of_a_row_quantizes_it(backend: str, asked: str) -> None:
    """What another backend takes is asked for; each row says what this one takes."""
    torch.manual_seed(0)
    model = Layers().eval()
    mapping = backquant.get_default_qconfig_mapping(asked)
    before = backquant.explain(model, X, backend=backend, qconfig_mapping=mapping)
    fixes = {
        row.module_path: row.reasons[0].fix
        for row in before.rows
        if row.module_path
        and not row.quantized
        and row.reasons
        and "QConfig(" in row.reasons[0].fix
    }
    names = {name: getattr(backquant.observe, name) for name in backquant.observe.__all__}
    names |= {"QConfig": QConfig, "torch": torch, "qconfig_mapping": mapping}
    names |= {name: getattr(backquant.qconfig, name) for name in backquant.qconfig.__all__}
    for path, fix in fixes.items():
        made = eval(fix, names)
        if isinstance(made, QConfig):
            mapping.set_module_name(path, made)
    try:
        quantized = backquant.quantize(
            model, calibration=[X], backend=backend, qconfig_mapping=mapping, slower="keep"
        )
    except (CoverageError, UsageError) as error:
        raise AssertionError(f"{fixes}: {error}") from error
    left = {row.module_path for row in quantized.report.rows if not row.quantized}
    assert not left & fixes.keys(), fixes
