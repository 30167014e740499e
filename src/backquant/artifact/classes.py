"""Classes of modules as text, and back.

Admitted are classes of modules of ``torch.nn``, ``backquant.nn`` and ``backquant.lower.kernels``, and
with ``allow=("package",)`` those *defined* in that package. Loading a file calls no ``__init__`` but
the kernels' own, with numbers and tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from backquant.artifact.functions import find_defined, is_within, stranger
from backquant.errors import ArtifactError

_TORCH = (
    "activation adaptive batchnorm channelshuffle container conv distance dropout flatten fold "
    "instancenorm linear loss module normalization padding pixelshuffle pooling rnn sparse transformer "
    "upsampling"
)
MODULE_PACKAGES = (
    *(f"torch.nn.modules.{name}" for name in _TORCH.split()),
    "backquant.nn",
    "backquant.lower.kernels",
)


def class_path(cls: type) -> str:
    """Import path of a class.

    >>> class_path(nn.Conv2d)
    'torch.nn.modules.conv.Conv2d'
    """
    return f"{cls.__module__}.{cls.__qualname__}"


def find_class(path: str, allow: Sequence[str] = ()) -> type:
    """The class at ``path``; raises ``ArtifactError`` for what is not admitted.

    >>> find_class("torch.nn.modules.linear.Linear")
    <class 'torch.nn.modules.linear.Linear'>
    """
    if not is_within(path, (*MODULE_PACKAGES, *allow)):
        raise stranger(path, "class")
    found = find_defined(path, "class")
    if not isinstance(found, type) or not (issubclass(found, nn.Module) or is_within(path, allow)):
        raise ArtifactError(f"{path} is no class of modules", where=path)
    return found


def find_module_class(path: str, allow: Sequence[str] = ()) -> type[nn.Module]:
    """The same, for modules only."""
    found = find_class(path, allow)
    if not issubclass(found, nn.Module):
        raise ArtifactError(f"{path} is no class of modules", where=path)
    return found


def storable_path(cls: type[Any], where: str, allow: Sequence[str] = ()) -> str:
    """Path of ``cls`` under which ``find_class`` finds it again; raises ``ArtifactError`` naming it.

    >>> storable_path(nn.ReLU, "act")
    'torch.nn.modules.activation.ReLU'
    """
    path = class_path(cls)
    try:
        if find_class(path, allow) is cls:
            return path
    except ArtifactError:
        pass
    raise ArtifactError(
        f"the class {path} cannot be stored: a file loads without your code",
        where=where,
        fix=_fix(cls, path.split(".", maxsplit=1)[0]),
    )


def _fix(cls: type[Any], package: str) -> str:
    if "Parametrized" in cls.__name__ and package == "torch":
        return "torch.nn.utils.parametrize.remove_parametrizations(module, name), then quantize"
    fix = "let the tracer go into it, or replace it by torch operators"
    if "<" in cls.__qualname__ or package in ("torch", "__main__"):
        return fix
    return f'{fix}, or pass allow=("{package}",) to save and to load'
