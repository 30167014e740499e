"""What can be done about a model whose own ``forward`` no capture takes."""

from __future__ import annotations

import sys
from pathlib import Path

from torch import nn

_OF_PACKAGES = frozenset({"site-packages", "dist-packages"})
_LISTS = (nn.ModuleList, nn.ModuleDict)


def is_packages(model: nn.Module) -> bool:
    """Whether the class of ``model`` is in an installed package: its code is not the user's to change.

    >>> is_packages(nn.Linear(1, 1))
    True
    """
    path = getattr(sys.modules.get(type(model).__module__), "__file__", None) or ""
    return not _OF_PACKAGES.isdisjoint(Path(path).parts)


def by_parts(model: nn.Module) -> str:
    """Code that quantizes ``model`` part by part, or its layers where they stand; ``""``: it has no parts.

    >>> print(by_parts(nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(2, 2))})))
    backquant.quantize_parts(model, calibration=...)  # 'encoder' is the largest part
    or without a capture: backquant.api.quantize_dynamic(model, {torch.nn.Linear})
    """
    path = largest_part(model)
    return path and (
        f"backquant.quantize_parts(model, calibration=...)  # {path!r} is the largest part\n"
        "or without a capture: backquant.api.quantize_dynamic(model, {torch.nn.Linear})"
    )


def largest_part(model: nn.Module) -> str:
    """The path of the part right below ``model`` that has the most weights; ``""``: it has no parts.

    >>> largest_part(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 4)))
    '1'
    """
    parts = {path: _weights(part) for path, part in _parts(model, "")}
    return max(parts, key=parts.__getitem__, default="")


def _parts(model: nn.Module, prefix: str) -> list[tuple[str, nn.Module]]:
    """The modules right below that can be called, each with its path."""
    found: list[tuple[str, nn.Module]] = []
    for name, child in model.named_children():
        path = f"{prefix}{name}"
        found += _parts(child, f"{path}.") if isinstance(child, _LISTS) else [(path, child)]
    return found


def _weights(part: nn.Module) -> int:
    return sum(parameter.numel() for parameter in part.parameters())
