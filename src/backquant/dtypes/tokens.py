"""Tokens of few bits that PyTorch has, and its type stubs have not."""

from __future__ import annotations

import torch

INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
UINT4: torch.dtype = torch.uint4  # type: ignore[attr-defined]
INT3: torch.dtype = torch.int3  # type: ignore[attr-defined]
UINT3: torch.dtype = torch.uint3  # type: ignore[attr-defined]
INT2: torch.dtype = torch.int2  # type: ignore[attr-defined]
UINT2: torch.dtype = torch.uint2  # type: ignore[attr-defined]
E2M1: torch.dtype = torch.float4_e2m1fn_x2  # PyTorch's tensors of it hold two in a byte
