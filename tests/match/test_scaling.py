"""Matching costs nodes × candidates of the anchor; counted, not timed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from backquant.backend_config import BackendConfig, BackendPatternConfig, get_backend_config
from backquant.fuse import apply_fusion
from backquant.graph import GraphIndex, capture
from backquant.match import make_plan, plan_fusion
from backquant.match.matcher import Matcher, PatternIndex
from backquant.qconfig import get_default_qconfig_mapping


class Tower(nn.Module):
    def __init__(self, depth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(2, 2, 1) for _ in range(depth))
        self.norms = nn.ModuleList(nn.BatchNorm2d(2) for _ in range(depth))

    def forward(self, x):
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x))) + x
        return x


def attempts(depth: int, backend: BackendConfig) -> int:
    matcher = Matcher(GraphIndex(capture(Tower(depth).eval()).module), PatternIndex(backend))
    matcher.run()
    return matcher.attempts


def test_attempts_grow_with_nodes() -> None:
    backend = get_backend_config("x86")
    small, large = attempts(8, backend), attempts(64, backend)
    assert 0 < large <= 8 * small


def test_attempts_do_not_grow_with_other_entries() -> None:
    backend = get_backend_config("x86")
    before = attempts(16, backend)
    for number in range(500):
        other: Any = type(f"Other{number}", (nn.Module,), {})
        backend.set_backend_pattern_config(BackendPatternConfig(other))
    assert attempts(16, backend) == before


def test_depth_needs_no_recursion() -> None:
    """A chain of 3,000 functions is deeper than Python's stack."""

    def chain(x):
        for _ in range(1500):
            x = torch.relu(x + 1)
        return x

    class Chain(nn.Module):
        def forward(self, x):
            return chain(x)

    backend = get_backend_config("x86")
    captured = capture(Chain())
    decided = make_plan(
        captured.module, captured.scopes, backend, get_default_qconfig_mapping("x86")
    )
    assert len(decided.decisions) == 3000
    assert all(decision.quantized for decision in decided.decisions.values())


@pytest.mark.parametrize("depth", [4, 40])
def test_requests_are_read_once(depth: int) -> None:
    """Observers are made per QConfig, not per node."""
    from backquant.observe import MinMaxObserver
    from backquant.qconfig import QConfig, QConfigMapping

    made = []

    class Counting(MinMaxObserver):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

    backend = get_backend_config("x86")
    captured = capture(Tower(depth).eval())
    fusions = plan_fusion(captured.module, backend)
    fused, scopes, *_ = apply_fusion(
        captured.module, captured.scopes, fusions, backend, is_qat=False
    )
    make_plan(fused, scopes, backend, QConfigMapping().set_global(QConfig(Counting, Counting)))
    assert len(made) <= 2
