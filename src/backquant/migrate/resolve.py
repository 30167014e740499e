"""From a dotted name to what becomes of it: a name of backquant, or work for a person."""

from __future__ import annotations

from dataclasses import dataclass

from backquant.migrate.by_hand import (
    GROUPS,
    HOMONYMS,
    IMPLEMENTATION,
    INTERNAL,
    PACKAGES,
    UNKNOWN,
    ByHand,
)
from backquant.migrate.names import (
    ALIASES,
    FLAT,
    FUSERS,
    MODULES,
    NN,
    PRIVATE,
    RENAMED_CALLS,
    ROOMS,
)

_QUANTIZATION = "torch.ao.quantization"
_NN = "torch.ao.nn"
_BY_NAME = {name: group for group in GROUPS for name in group.names}
_BY_PACKAGE = {package: group for group in GROUPS for package in group.packages}
_TARGETS = {
    **FLAT,
    **FUSERS,
    **PRIVATE,
    **{old: FLAT[new] for old, new in RENAMED_CALLS.items()},
}


@dataclass(frozen=True)
class Fate:
    """What becomes of a dotted name.

    ``target`` is the dotted name in backquant, or None with the reason in ``by_hand``. ``length`` is
    how many parts of the name it stands for: what follows are attributes, which stay.
    """

    source: str
    length: int
    target: str | None = None
    is_module: bool = False
    by_hand: ByHand | None = None

    @property
    def symbol(self) -> str:
        """The last part of the name in PyTorch."""
        return self.source.rpartition(".")[2]


def canonical(path: str) -> str:
    """The name under ``torch.ao`` of an older spelling.

    >>> canonical("torch.quantization.QConfig"), canonical("torch.nn.qat")
    ('torch.ao.quantization.QConfig', 'torch.ao.nn.qat')
    """
    for old, new in ALIASES:
        if path == old or path.startswith(old + "."):
            return new + path[len(old) :]
    return path


def is_ours(path: str) -> bool:
    """Whether a dotted name belongs to a package that is migrated.

    >>> is_ours("torch.nn.quantized.Linear"), is_ours("torch.nn.Linear")
    (True, False)
    """
    path = canonical(path)
    return any(path == package or path.startswith(package + ".") for package in PACKAGES)


def fate(path: str) -> Fate | None:
    """What becomes of a dotted name; None when it is not PyTorch's quantization.

    >>> fate("torch.quantization.MinMaxObserver.with_args").target
    'backquant.MinMaxObserver'
    >>> fate("torch.ao.quantization.quantize_fx").target
    'backquant'
    >>> fate("torch.nn.intrinsic.modules.fused.ConvReLU2d").target
    'backquant.nn.intrinsic.ConvReLU2d'
    >>> fate("torch.ao.quantization.prepare").by_hand.kind
    'eager mode'
    >>> fate("torch.nn.Linear") is None
    True
    """
    if not is_ours(path):
        return None
    spelled = len(path.split("."))
    parts = canonical(path).split(".")
    shortened = (
        len(parts) - spelled
    )  # an old alias may have fewer parts than the name it stands for
    if parts[:3] == _QUANTIZATION.split("."):
        found = _in_quantization(parts)
    elif parts[:3] == _NN.split("."):
        found = _in_nn(parts)
    else:
        found = _package(parts) or Fate(".".join(parts), len(parts), by_hand=UNKNOWN)
    return Fate(
        found.source, found.length - shortened, found.target, found.is_module, found.by_hand
    )


def _in_quantization(parts: list[str]) -> Fate:
    """The first part that is a name decides; a module whose name is also a function's comes last."""
    for count in range(4, len(parts) + 1):
        name, source = parts[count - 1], ".".join(parts[:count])
        if source in MODULES or (name in HOMONYMS and count < len(parts)):
            continue
        target = _TARGETS.get(name)
        if target is not None:
            return Fate(source, count, target)
        if source in _BY_PACKAGE:
            return Fate(".".join(parts), len(parts), by_hand=_BY_PACKAGE[source])
        if name in _BY_NAME:
            return Fate(source, count, by_hand=_BY_NAME[name])
        if ".".join(parts[3:count]) not in IMPLEMENTATION:
            return Fate(source, count, by_hand=INTERNAL if _is_internal(parts[3:]) else UNKNOWN)
    source = ".".join(parts)
    if source in MODULES:
        return Fate(source, len(parts), MODULES[source], is_module=True)
    return Fate(source, len(parts), by_hand=INTERNAL)


def _is_internal(parts: list[str]) -> bool:
    return parts[0] in ("fx", "utils") or any(part.startswith("_") for part in parts)


def _in_nn(parts: list[str]) -> Fate:
    """Packages first, then ``modules`` and its files, then a class."""
    count, package = 3, ""
    while count < len(parts):
        part = parts[count]
        inner = f"{package}.{part}".lstrip(".")
        if f"{_NN}.{inner}" in _BY_PACKAGE and inner != "quantized":
            return Fate(".".join(parts), len(parts), by_hand=_BY_PACKAGE[f"{_NN}.{inner}"])
        if inner in NN:
            package = inner
        elif part != "modules" and not (parts[count - 1] == "modules" and part.islower()):
            break
        count += 1
    source = ".".join(parts[: count + 1])
    if count == len(parts):
        module = f"{_NN}.{package}".rstrip(".")
        return Fate(source, count, MODULES[module], is_module=True)
    name = parts[count]
    if name in NN.get(package, ()):
        return Fate(source, count + 1, f"backquant.nn.{package}.{name}")
    if name in PRIVATE:
        return Fate(source, count + 1, PRIVATE[name])
    if package.startswith("quantized") and package != "quantized.reference":
        return Fate(".".join(parts), len(parts), by_hand=_BY_PACKAGE[f"{_NN}.quantized"])
    return Fate(source, count + 1, by_hand=INTERNAL if name.startswith("_") else UNKNOWN)


def _package(parts: list[str]) -> Fate | None:
    for count in range(len(parts), 1, -1):
        group = _BY_PACKAGE.get(".".join(parts[:count]))
        if group is not None:
            return Fate(".".join(parts), len(parts), by_hand=group)
    return None


def name_in(module: str, target: str) -> str | None:
    """How ``target`` is called as an attribute of ``module``, a module of backquant.

    >>> name_in("backquant.observe", "backquant.MinMaxObserver")
    'MinMaxObserver'
    >>> name_in("backquant", "backquant.nn.intrinsic.ConvReLU2d")
    'nn.intrinsic.ConvReLU2d'
    >>> name_in("backquant.observe", "backquant.QConfig") is None
    True
    """
    if target.startswith(module + "."):
        return target[len(module) + 1 :]
    name = target.rpartition(".")[2]
    return name if name in ROOMS.get(module, ()) and FLAT.get(name) == target else None
