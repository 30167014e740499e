"""From a dotted name of PyTorch's quantization to that of the mirror, and to why a name is left out."""

from __future__ import annotations

import re

from backquant.ao.left_out import GROUPS, Group
from backquant.ao.table import table

#: Older spellings of packages; what was migrated before is read as it was.
_ALIASES = (
    (r"torch\.quantization\.(?=_numeric_suite)", "torch.ao.ns."),
    (r"torch\.nn\.quantized\._reference\b", "torch.ao.nn.quantized.reference"),
    (r"torch\.(?=(quantization|nn\.(quantizable|intrinsic|quantized|qat))\b)", "torch.ao."),
    (r"backquant\.ao\b", "torch.ao"),
)
_ENGINE = Group(
    "engine",
    "the engine is not a setting of the process: every model has its own, from its backend",
    "remove it and name the backend: prepare_fx(..., "
    'backend_config=backquant.get_backend_config("x86"))',
)
_SCRIPT = Group(
    "TorchScript",
    "a converted model cannot be scripted or traced",
    "backquant.save(quantized, path) stores it, quantized.compile() makes it fast, and "
    "backquant.export takes it elsewhere",
)
UNKNOWN = Group(
    "unknown name",
    "no version of PyTorch that is known here has it",
    "check the spelling; keep the import if the name is your own addition",
)
HOLDING = frozenset(GROUPS[key] for key in ("inside", "torchscript", "pt2e"))


def canonical(path: str) -> str:
    """The name under ``torch.ao`` of another spelling.

    >>> canonical("torch.quantization.QConfig"), canonical("backquant.ao.nn.qat")
    ('torch.ao.quantization.QConfig', 'torch.ao.nn.qat')
    """
    for old, new in _ALIASES:
        path = re.sub(f"^{old}", new, path)
    return path


def mirrored(path: str) -> str | None:
    """The name in the mirror of a dotted name of PyTorch; None where it is not PyTorch's quantization.

    >>> mirrored("torch.quantization.QConfig"), mirrored("torch.nn.quantized")
    ('backquant.ao.quantization.QConfig', 'backquant.ao.nn.quantized')
    """
    parts = canonical(path).split(".")
    if parts[:2] != ["torch", "ao"] or parts[2:3] not in (["quantization"], ["nn"]):
        return None
    return None if path.startswith("backquant.") else ".".join(["backquant", *parts[1:]])


def left_to_person(path: str) -> Group | None:
    """Why a dotted name needs a person; None where it does not.

    >>> left_to_person("torch.ao.quantization.quantize_jit").kind, left_to_person("torch.nn.Linear")
    ('TorchScript', None)
    """
    path = canonical(path)
    if path.startswith("torch.backends.quantized"):
        return _ENGINE
    if path.startswith(("torch.jit.script", "torch.jit.trace")):
        return _SCRIPT
    if path.startswith("torch.ao.ns"):
        return GROUPS["numeric-suite"]
    parts = path.split(".")
    if parts[:2] != ["torch", "ao"] or parts[2:3] not in (["quantization"], ["nn"]):
        return None
    count = len(parts)
    while ".".join(parts[2:count]) not in table():
        count -= 1
    parent = table().get(".".join(parts[2 : len(parts) - 1]), {})
    if count == len(parts) and parts[-1] not in parent:
        homes = {entry.home for entry in table()[".".join(parts[2:])].values()}
        return GROUPS[homes.pop()[1:]] if len(homes) == 1 and min(homes)[0] == "!" else None
    count = min(count, len(parts) - 1)  # a function may be called as its module
    entry = table()[".".join(parts[2:count])].get(parts[count])
    if entry is None:
        return UNKNOWN
    return GROUPS[entry.home[1:]] if entry.home.startswith("!") else None
