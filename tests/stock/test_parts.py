"""Whole detectors of torchvision, which sort their boxes by values: no capture takes them, their parts are
quantized.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from benchmarks.stock import has_operators
from torch import nn

import backquant
from backquant.errors import CaptureError

pytestmark = pytest.mark.stock


def suppressed(boxes: torch.Tensor, scores: torch.Tensor, threshold: float) -> torch.Tensor:
    """Non-maximum suppression, for a torchvision without its operators."""
    sizes = (boxes[:, 2:] - boxes[:, :2]).prod(1)
    left, kept = scores.argsort(descending=True), []
    while len(left):
        best, left = left[0], left[1:]
        kept.append(best)
        corners = torch.maximum(boxes[best, :2], boxes[left, :2])
        sides = torch.minimum(boxes[best, 2:], boxes[left, 2:]) - corners
        common = sides.clamp(min=0).prod(1)
        left = left[common <= threshold * (sizes[best] + sizes[left] - common)]
    return torch.stack(kept) if kept else scores.new_empty(0, dtype=torch.long)


@pytest.fixture
def detector(monkeypatch: pytest.MonkeyPatch) -> Iterator[nn.Module]:
    import torchvision

    folders = map(Path, torchvision.__path__)
    library = None
    if not has_operators(folders):
        library = torch.library.Library("torchvision", "IMPL")
        library.impl("nms", suppressed, "CPU")
        monkeypatch.setattr(torchvision.extension, "_has_ops", lambda: True)
    torch.manual_seed(0)
    made = torchvision.models.detection.ssdlite320_mobilenet_v3_large(
        weights=None, weights_backbone=None, score_thresh=0.0, topk_candidates=30
    )
    for part in made.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.reset_running_stats()
    yield made.eval()
    if library is not None:
        library._destroy()


def test_a_detector_is_quantized_part_by_part(detector: nn.Module) -> None:
    pictures = [([torch.rand(3, 120, 160), torch.rand(3, 100, 90)],) for _ in range(2)]
    with pytest.raises(CaptureError, match="neither by symbolic tracing") as raised:
        backquant.quantize(detector, calibration=pictures)
    assert raised.value.fix.startswith("backquant.quantize_parts(model, calibration=...)")
    found = backquant.quantize_parts(
        detector, calibration=pictures, slower="keep", recipe="none", require=0.99
    )
    assert list(found.parts) == ["backbone", "head"]
    with torch.no_grad():
        wanted, got = detector(*pictures[0]), found(*pictures[0])
    assert type(found.model) is type(detector) and len(got) == 2
    for one, two in zip(wanted, got, strict=True):
        assert one.keys() == two.keys() and two["boxes"].shape[1] == 4
        assert bool((two["scores"] >= 0).all())
    features = found.parts["backbone"](torch.rand(1, 3, 320, 320))
    assert list(features) == list(detector.backbone(torch.rand(1, 3, 320, 320)))  # type: ignore[operator]
