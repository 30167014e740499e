from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from safetensors.torch import save

from backquant.artifact.file import pieces
from backquant.errors import ArtifactError


def test_the_bytes_are_those_of_safetensors() -> None:
    tensors = {
        "b": torch.arange(3),
        "a": torch.ones(2, 2),
        "c": torch.zeros(0),
        "d": torch.ones(5).bool(),
    }
    assert b"".join(pieces(tensors, {"k": "v"})) == save(tensors, metadata={"k": "v"})


def test_a_dtype_that_files_have_not(snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as caught:
        list(pieces({"t0": torch.ones(2, dtype=torch.complex128)}, {}))
    snapshot("dtype", caught.value)


BY_HAND = {
    "a buffer of another dtype": lambda *_: list(pieces({"t0": torch.ones(2).cfloat()}, {})),
}
