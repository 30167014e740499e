from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import backquant
from backquant.errors import ArtifactError, EngineError, InputError
from backquant.graph.example import ExampleSpec
from backquant.runtime.unlowered import failed_call

ERROR = RuntimeError("mat1 and mat2 shapes cannot be multiplied\nmore")
EXAMPLE = ExampleSpec.of((torch.rand(2, 3), {"mask": torch.ones(2)}))


def test_the_inputs_are_at_fault_where_they_differ(snapshot: Callable[..., None]) -> None:
    given = ((torch.rand(2, 4), {"mask": torch.ones(2)}), {})
    found = failed_call(ERROR, given, EXAMPLE, "model.bq")
    assert isinstance(found, InputError)
    snapshot("failed-call-inputs", found)


def test_the_file_is_at_fault_where_they_do_not(snapshot: Callable[..., None]) -> None:
    given = ((torch.rand(2, 3), {"mask": torch.ones(2)}), {})
    found = failed_call(ERROR, given, EXAMPLE, "model.bq")
    assert isinstance(found, ArtifactError)
    snapshot("failed-call-file", found)
    assert isinstance(failed_call(InputError("no"), given, EXAMPLE, "model.bq"), ArtifactError)
    assert isinstance(failed_call(ERROR, given, EXAMPLE, ""), InputError)


def test_errors_of_ours_stay_as_they_are() -> None:
    given = ((torch.rand(2, 3),), {"flag": True})
    for error in (InputError("no"), EngineError("no"), ArtifactError("no")):
        assert failed_call(error, given, None, "model.bq") is error


@pytest.mark.parametrize("backend", ["x86", "onnxruntime"])
def test_images_as_files_hold_them_get_the_fix_that_applies(backend: str) -> None:
    """On kernels, whose own error speaks of their integers, and in a reference model."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 64, 3), nn.ReLU(), nn.Conv2d(64, 64, 3)).eval()
    images = torch.rand(2, 3, 16, 16)
    quantized = backquant.quantize(model, backend=backend, calibration=[images])
    bytes_of_files = (images * 255).byte()
    for given, start in (
        (bytes_of_files, "bytes become floats"),
        (bytes_of_files.permute(0, 2, 3, 1), "channels come first: images.permute(0, 3, 1, 2); b"),
        (images.permute(0, 2, 3, 1), "channels come first"),
        (torch.rand(2, 4, 16, 16), "inputs like those of the calibration: float32[2, 3, 16, 16]"),
    ):
        with pytest.raises(InputError) as caught:
            quantized(given)
        assert caught.value.fix.startswith(start), caught.value
        assert caught.value.where.startswith(str(given.dtype).removeprefix("torch."))


def test_an_example_in_a_file_may_be_anything() -> None:
    example = ExampleSpec([{"tensor": 3, "dtype": "float32"}], {})
    found = failed_call(ERROR, ((torch.rand(1, 2, 3, 4),), {}), example, "model.bq")
    assert isinstance(found, InputError) and "tensor: 3" in found.fix


BY_HAND = {
    "inputs like those": lambda *_: failed_call(
        ERROR, ((torch.rand(2, 3), {"mask": torch.ones(2)}), {}), EXAMPLE, "model.bq"
    ),
}
