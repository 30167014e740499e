"""Names that a file may hold: labels for keys and attributes, and never source text.

1. Methods are those of the table in ``backquant.artifact.operators``.
2. Attributes, read with ``getattr``, are data of tensors and fields of torch's named tuples.
3. Paths of modules and tensors consist of identifiers and numbers here: what a file has otherwise becomes a
   name of ours. Arguments, keywords and nodes have an identifier. All are ASCII and no keywords: nothing
   that is compared means another name after normalisation. None but nodes, which are no attributes, begin
   with two underscores.
4. Keywords of a call are those of the operator's schema, or of the function's signature (``keywords.py``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from backquant.artifact.functions import find_defined, is_within, stranger
from backquant.artifact.operators import is_method
from backquant.errors import ArtifactError
from backquant.identifiers import identifier, is_identifier

_words = re.compile(r"\w+").findall
_DATA = frozenset(
    _words(
        "H T data device dtype imag index is_complex is_cpu is_cuda is_floating_point is_meta is_mkldnn "
        "is_nested is_quantized is_signed is_sparse itemsize layout mH mT nbytes ndim real requires_grad "
        "shape type"
    )
)
_PATH = re.compile(r"[^\x00-\x1f\x7f\"'\\\\{}]{1,1024}")
_LONGEST = 200  # characters of a foreign name that an error shows


@cache
def _attributes() -> frozenset[str]:
    """Rule 2; the named tuples of torch are those of ``torch.return_types``."""
    fields = {
        name
        for result in vars(torch.return_types).values()
        if isinstance(result, type) and issubclass(result, tuple)
        for name in vars(result)
        if not name.startswith(("_", "n_"))
    }
    return _DATA | fields


def check_method(name: str, where: str) -> str:
    """``name`` if a graph may call this method; raises ``ArtifactError`` if not.

    >>> check_method("view", "node view")
    'view'
    """
    if not is_method(name):
        raise ArtifactError(
            f".{shown(name)[1:-1]}() is no method that an artifact may call",
            where=where,
            fix="call a function of torch on the tensor instead",
        )
    return name


def is_attribute(name: object) -> bool:
    """Whether a graph may read this attribute of anything.

    >>> is_attribute("shape"), is_attribute("__class__")
    (True, False)
    """
    return isinstance(name, str) and name in _attributes()


def check_attribute(name: object, where: str) -> str:
    """``name`` if a graph may read this attribute; raises ``ArtifactError`` if not.

    >>> check_attribute("shape", "node getattr_1")
    'shape'
    """
    if not is_attribute(name):
        raise ArtifactError(
            f"{shown(name)} is no attribute that an artifact may read",
            where=where,
            fix="pass tensors, tuples and dicts; read fields by index or key",
        )
    return str(name)


def shown(name: object) -> str:
    """What a file has as a name, in ASCII and shortened.

    >>> shown("\uff46orward")
    "'\\\\uff46orward'"
    """
    text = ascii(name)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def is_usable(name: object) -> bool:
    """Rule 3, for one name.

    >>> [is_usable(name) for name in ("conv1", "\uff46orward", "in", "__class__", "a b")]
    [True, False, False, False, False]
    """
    return isinstance(name, str) and is_identifier(name) and not name.startswith("__")


def check_path(path: str, where: str) -> str:
    """The path of a module or tensor in a graph, as it is here: what is not usable becomes a name of ours,
    from which ``backquant.identifiers.label`` reads the stored one.

    >>> check_path("layers.0.weight", "node w"), check_path("layers.in.\xb5", "node layers_in")
    ('layers.0.weight', 'layers.bqname_in.bqname__b5_')
    """
    parts = path.split(".") if isinstance(path, str) else [""]
    if not all(_PATH.fullmatch(part) and not part.startswith("__") for part in parts):
        raise ArtifactError(
            f"{shown(path)} is no path of a module or tensor", where=where, fix="rename the module"
        )
    return ".".join(
        part if is_usable(part) or _is_index(part) else identifier(part) for part in parts
    )


def renamed(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A table of modules or tensors of a module by the names that they have here. No two become one.

    >>> renamed({"a": 1, "in": 2}, "the model")
    {'a': 1, 'bqname_in': 2}
    """
    found = {check_path(name, where): value for name, value in table.items()}
    if len(found) < len(table) or any("." in name for name in found):
        raise ArtifactError("names of modules or tensors that are no different ones", where=where)
    return found


def _is_index(name: object) -> bool:
    return isinstance(name, str) and name.isascii() and name.isdecimal()


def check_argument(name: str, where: str) -> str:
    """``name`` if it can be an argument of ``forward``, ``*args`` and ``**kwargs`` included.

    >>> check_argument("**options", "node options")
    '**options'
    """
    stars = len(name) - len(name.lstrip("*"))
    check_keyword(name[stars:] if stars <= 2 else name, where)
    return name


def check_keyword(name: str, where: str) -> str:
    """``name`` if it can name an argument of a call, or a node.

    >>> check_keyword("dim", "node sum_1")
    'dim'
    """
    if not is_usable(name):
        raise ArtifactError(f"{shown(name)} is no name of an argument", where=where)
    return name


def check_node(name: str) -> str:
    """``name`` if a node can be called so.

    >>> check_node("relu_1")
    'relu_1'
    """
    if not is_identifier(name):  # torch.export calls nodes ``__and___tensor``
        raise ArtifactError(f"{shown(name)} cannot be the name of a node", where="the graph")
    return name


# Classes of modules as text, and back.
#
# Admitted are classes of modules of ``torch.nn``, ``backquant.nn`` and ``backquant.lower.kernels``, and
# with ``allow=("package",)`` those *defined* in that package. Loading a file calls no ``__init__`` but
# the kernels' own, with numbers and tensors.

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
