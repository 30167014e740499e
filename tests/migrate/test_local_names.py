"""Which names stand for something of PyTorch, scope by scope."""

from __future__ import annotations

from textwrap import dedent

import libcst as cst
from libcst.metadata import MetadataWrapper

from backquant.migrate.local_names import Local, Names, names_of


def look(code: str) -> Names:
    return names_of(MetadataWrapper(cst.parse_module(dedent(code))))


def local(names: Names, name: str) -> Local:
    (found,) = [local for local in names.locals if local.name == name]
    return found


def test_a_dotted_import_binds_its_first_part() -> None:
    names = look(
        """
        import torch.ao.quantization
        import torch
        def f(torch):
            return torch.ao.quantization.a
        torch.ao.quantization.b
        """
    )
    torch = local(names, "torch")
    assert [(b.path, b.imported) for b in torch.bindings] == [
        ("torch", "torch.ao.quantization"),
        ("torch", "torch"),
    ]
    assert [use.attributes for use in torch.uses] == [["ao", "quantization", "b"]]


def test_what_else_a_name_may_be() -> None:
    names = look("import torch as t\nt = 3\nimport torch as u\nimport os as u\n")
    assert local(names, "t").other
    assert local(names, "u").other
    assert [b.path for b in local(names, "u").bindings] == ["torch"]


def test_uses_in_quotes_and_stores() -> None:
    names = look("import torch\ndef f(x: 'torch.Tensor'): torch.a.b = del_ = x\n")
    torch = local(names, "torch")
    assert torch.quoted
    assert [(use.attributes, use.stored) for use in torch.uses] == [(["a", "b"], True)]


def test_names_that_nothing_binds() -> None:
    names = look("from torch.ao import *\nfrom os import *\nprint(a.b, len)\n")
    assert list(names.unresolved) == ["a"]
    assert [star.path for star in names.stars] == ["torch.ao"]


def test_an_import_in_a_function_is_a_name_of_its_own() -> None:
    names = look("import torch\ndef f():\n    import torch\n    torch.x\ntorch.y\n")
    uses = [[use.attributes for use in found.uses] for found in names.locals]
    assert sorted(uses) == [[["x"]], [["y"]]]


def test_other_imports_are_not_listed() -> None:
    names = look("import os\nfrom .torch import a\nimport torchvision\nfrom . import torch\n")
    assert names.locals == []
