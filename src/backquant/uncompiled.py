"""Calls that ``torch.compile`` leaves alone, without the start-up cost of Dynamo.

``torch.compiler.disable`` imports Dynamo (and sympy) where it decorates, which doubled the time until a
saved model answered. PyTorch's own operators are decorated by a function that imports it with the first
call; it has no public name, so a version without it gets the public one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch._compile

uncompiled: Any = getattr(torch._compile, "_disable_dynamo", torch.compiler.disable)
