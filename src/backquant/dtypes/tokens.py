"""Tokens of few bits that PyTorch has, and its type stubs have not."""

from __future__ import annotations

import torch

__all__ = ["INT2", "INT4", "UINT2", "UINT4"]

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
INT2: torch.dtype = torch.int2  # type: ignore[attr-defined]
UINT2: torch.dtype = torch.uint2  # type: ignore[attr-defined]
