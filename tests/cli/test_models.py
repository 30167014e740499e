from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from backquant.cli.models import import_object, load_model, parse_inputs
from backquant.errors import UsageError


@pytest.mark.parametrize("name", ["Net", "make", "INSTANCE"])
def test_what_a_model_may_be_named_by(here: Path, name: str) -> None:
    model, inputs = load_model(f"zoo:{name}")
    assert type(model).__name__ == "Net" and inputs is None


def test_example_inputs_come_as_they_are(here: Path) -> None:
    assert isinstance(load_model("zoo:PAIR")[1], torch.Tensor)
    assert isinstance(load_model("zoo:with_inputs")[1], tuple)
    assert set(load_model("zoo:with_keywords")[1]) == {"x"}


def test_names_inside_of_names(here: Path) -> None:
    (here / "factories.py").write_text(
        "from torch import nn\nclass Zoo:\n    @staticmethod\n    def make():\n        return nn.ReLU()\n"
    )
    assert isinstance(load_model("factories:Zoo.make")[0], nn.ReLU)
    (here / "pack").mkdir()
    (here / "pack" / "models.py").write_text("from torch import nn\nmake = nn.Tanh\n")
    assert isinstance(load_model("pack.models:make")[0], nn.Tanh)


def test_the_current_folder_is_searched_first(here: Path) -> None:
    load_model("zoo:make")
    assert sys.path[0] == str(here) and sys.path.count(str(here)) == 1


def write_broken(here: Path) -> None:
    (here / "imports_missing.py").write_text("x = 1\nimport zo\n")
    (here / "fails.py").write_text("x = 1\n\nraise OSError('no weights.pt here')\n")
    (here / "syntax.py").write_text("def broken(:\n")
    (here / "loud.py").write_text("def make():\n    raise RuntimeError\n")


BAD = {
    "no-colon": "zoo",
    "no-name": "zoo:",
    "no-module": ":make",
    "missing-module": "zoom:make",
    "missing-submodule": "zoo.models:make",
    "a-file": "models/zoo.py:make",
    "a-pt2": "model.pt2",
    "misspelt": "zoo:with_input",
    "missing-name": "zoo:transformer",
    "not-a-model": "zoo:number",
    "not-callable": "zoo:BATCHES",
    "needs-arguments": "zoo:needs",
    "raises": "zoo:raises",
    "raises-silently": "loud:make",
    "imports-what-is-missing": "imports_missing:make",
    "fails-to-import": "fails:make",
    "syntax": "syntax:make",
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_no_model(name: str, here: Path, snapshot: Callable[..., None]) -> None:
    write_broken(here)
    with pytest.raises(UsageError) as caught:
        load_model(BAD[name])
    text = re.sub(r"(SyntaxError): .*", r"\1: <what>", str(caught.value))
    snapshot(f"model-{name}", text)


def test_a_missing_part_of_the_name_is_told_from_a_failing_import(here: Path) -> None:
    """``zo`` is not ``zoo``: a prefix of the name in letters is not a package of it."""
    write_broken(here)
    with pytest.raises(UsageError, match=r"'imports_missing' fails to import: .*'zo'"):
        import_object("imports_missing:make", "MODEL")


def test_inputs() -> None:
    floats, words, flags, scalar = parse_inputs(
        ["1,3,4:bfloat16", "2,5:int64", "2:bool", ":float32"]
    )
    assert (floats.dtype, tuple(floats.shape)) == (torch.bfloat16, (1, 3, 4))
    assert words.dtype == torch.int64 and not words.any() and flags.dtype == torch.bool
    assert tuple(scalar.shape) == ()
    assert torch.equal(*parse_inputs(["3", "3:float32"]))
    assert tuple(parse_inputs(["(1, 3)"])[0].shape) == (1, 3)


@pytest.mark.parametrize(
    "text", ["1,x", "1,-3", "1x3", "1,3:float33", "1,3:nn", "1,,3", "3:8:int8"]
)
def test_what_is_no_shape(text: str) -> None:
    with pytest.raises(UsageError, match="is not a shape with a dtype"):
        parse_inputs([text])


def test_shape_message(snapshot: Callable[..., None]) -> None:
    with pytest.raises(UsageError) as caught:
        parse_inputs(["1x3x224x224"])
    snapshot("inputs", caught.value)


def _repaired(*_: object) -> None:
    """A module that imports, and makes a model."""
    Path("repaired.py").write_text("from zoo import make")
    load_model("repaired:make")


BY_HAND = {
    "--inputs": lambda *_: parse_inputs(["1,3,224,224:float32"]),
    "repair that line": _repaired,
    "check the path": _repaired,
    **dict.fromkeys(
        ["name the module", "run from", "it has", "name a function", "write MODEL", "return model"],
        lambda *_: load_model("zoo:make"),
    ),
}
