from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import benchmarks.stock  # noqa: F401 - before transformers, which imports torchvision
import pytest
import torch
from torch import nn

import backquant
from backquant.artifact.json_values import Decoder, Encoder
from backquant.artifact.store import _encode, decode_records
from backquant.artifact.tensors import TensorReader, TensorWriter
from backquant.errors import ArtifactError
from backquant.graph.export import OutputRecord, Structure
from backquant.runtime import QuantizedModel

Again = Callable[..., QuantizedModel]


@dataclasses.dataclass
class Found:
    scores: torch.Tensor
    rest: Any = None


class Net(nn.Module):
    def __init__(self, give: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.give = give

    def forward(self, x: torch.Tensor) -> Any:
        return self.give(self.fc(x))


def quantized(give: Callable[[torch.Tensor], Any], capture: str) -> QuantizedModel:
    x = torch.randn(3, 4)
    return backquant.quantize(Net(give).eval(), x, calibration=[x], capture=capture)


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_ordered_dicts_come_back(capture: str, round_trip: Again) -> None:
    model = quantized(lambda y: OrderedDict(out=y, rest=[y, OrderedDict(z=y + 1)]), capture)
    for one in (model, round_trip(model)):
        found = one(torch.ones(1, 4))
        assert type(found) is OrderedDict
        assert type(found["rest"]) is list
        assert type(found["rest"][1]) is OrderedDict


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_outputs_of_transformers_come_back(capture: str, round_trip: Again) -> None:
    from transformers.modeling_outputs import BaseModelOutput

    model = quantized(lambda y: BaseModelOutput(last_hidden_state=y, hidden_states=(y, y)), capture)
    for one in (model, round_trip(model)):
        found = one(torch.ones(1, 4))
        assert type(found) is BaseModelOutput
        assert list(found) == ["last_hidden_state", "hidden_states"]
        assert found.attentions is None


@pytest.mark.parametrize("capture", ["trace", "export"])
def test_dataclasses_are_records_unless_their_package_is_allowed(
    capture: str, round_trip: Again
) -> None:
    model = quantized(lambda y: Found(y, (y, Found(y))), capture)
    inside, x = model(torch.ones(1, 4)), torch.ones(1, 4)
    assert type(inside) is Found
    assert type(inside.rest[1]) is Found
    record = round_trip(model)(x)
    assert type(record) is OutputRecord
    assert torch.equal(record.scores, inside.scores)
    package = Found.__module__.split(".", maxsplit=1)[0]
    allowed = round_trip(model, allow=(package,))(x)
    assert type(allowed).__qualname__ == "Found"
    assert torch.equal(allowed.rest[0], inside.rest[0])


CRAFTED: dict[str, tuple[Any, Any]] = {
    "record-method": (("scores",), {"update": 1}),
    "record-unnamed": ((0,), {}),
}


@pytest.mark.parametrize("message", CRAFTED)
def test_what_no_encoder_wrote(message: str, snapshot: Callable[..., None]) -> None:
    keys, made = CRAFTED[message]
    name = "transformers.cache_utils.DynamicCache"
    structure = Structure("record", keys, (Structure("value"),), name)
    with pytest.raises(ArtifactError) as caught:
        decode_records(structure, {"parts": [{}], "made": made}, Decoder(TensorReader({}, {})))
    snapshot(message, caught.value)


def test_a_class_in_an_output_that_no_file_may_name(snapshot: Callable[..., None]) -> None:
    with pytest.raises(ArtifactError) as caught:
        _encode(Found, Encoder(TensorWriter().add))
    snapshot("record-class", caught.value, {Found.__module__: "<module>"})


def test_no_other_class_of_transformers_is_imported() -> None:
    from backquant.artifact.store import _found

    assert _found("transformers.cache_utils.DynamicCache", ()) is not None
    for path in (
        "transformers.pipelines.Pipeline",
        "transformers.trainer.Trainer",
        "transformers.models.llama.convert_llama_weights_to_hf.write_model",
        "transformers.cache_utils.torch.Tensor",
        "os.system",
    ):
        assert _found(path, ()) is None
