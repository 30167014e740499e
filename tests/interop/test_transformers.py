from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import benchmarks.stock  # noqa: F401 - before transformers, which imports torchvision
import pytest
import torch
from torch import nn

import backquant
from backquant.errors import InputError, UsageError

pytestmark = pytest.mark.xdist_group("small decoder")  # one worker pays for what they share

TEXT = "the quick brown fox jumps over the lazy dog and the small cat sleeps near a warm old fire; "


def ids(text: str) -> torch.Tensor:
    return torch.tensor([[ord(letter) for letter in text]])


@cache
def trained() -> Any:
    """A small Llama that knows one sentence by heart, from any place in it."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    letters = ids(TEXT * 2)[0]
    for _ in range(60):
        starts = torch.randint(0, len(TEXT), (8,))
        batch = torch.stack([letters[start : start + 40] for start in starts])
        model(input_ids=batch, labels=batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval().requires_grad_(False)


def batches(model: Any) -> list[dict[str, Any]]:
    texts = [TEXT[start : start + 24] for start in (0, 17, 40, 60)]
    return [backquant.decoder_inputs(model, ids(text), cached=n) for text in texts for n in (0, 12)]


@cache
def quantized() -> Any:
    model = trained()
    example = backquant.decoder_inputs(model, ids(TEXT[:24]), cached=12)
    return backquant.quantize(model, example, backend="x86", calibration=batches(model))


@pytest.fixture
def loaded(tmp_path: Path) -> Any:
    backquant.save(quantized(), tmp_path / "decoder.bq")
    return backquant.load(tmp_path / "decoder.bq")


def twenty(generator: Any, prompt: str, **options: Any) -> list[int]:
    options = {"max_new_tokens": 20, "do_sample": False, **options}
    found: list[int] = generator.generate(ids(prompt), **options)[0].tolist()
    return found


def test_twenty_greedy_tokens_are_those_of_the_model(loaded: Any) -> None:
    """Of the float model, of the quantized one in memory, and of the one from a file without weights."""
    model = trained()
    with torch.device("meta"):
        empty = type(model)(model.config)
    in_memory = backquant.as_generator(quantized(), model)
    from_file = backquant.as_generator(loaded, empty)
    for prompt in ("the quick ", "cat sleeps near", TEXT[5:40]):
        wanted = twenty(model, prompt)
        assert len(wanted) == len(prompt) + 20
        assert twenty(in_memory, prompt) == wanted
        assert twenty(from_file, prompt) == wanted
        assert twenty(from_file, prompt, num_beams=2) == twenty(in_memory, prompt, num_beams=2)


def test_prefill_and_steps_are_what_the_file_gives_back(loaded: Any) -> None:
    """Bit for bit, at lengths that the example did not have, with the class of the cache."""
    from transformers import DynamicCache

    for length, cached in ((9, 0), (30, 29), (17, 5), (2, 1)):
        inputs = backquant.decoder_inputs(trained(), ids(TEXT[:length]), cached=cached)
        one, two = (model(**copy.deepcopy(inputs)) for model in (quantized(), loaded))
        assert type(one) is type(two)
        assert torch.equal(one.logits, two.logits)
        assert isinstance(two.past_key_values, DynamicCache)
        assert two.past_key_values.get_seq_length() == length
        again = [layer.keys for layer in two.past_key_values.layers]
        for layer, keys in zip(one.past_key_values.layers, again, strict=True):
            assert torch.equal(layer.keys, keys)


def test_prompts_of_different_lengths_are_padded_on_the_left() -> None:
    model = trained()
    prompts = torch.cat([ids("   the quick "), ids("cat sleeps ne")])
    prompts[0, :3] = 0
    mask = (prompts != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 10, "do_sample": False}
    wanted = model.generate(prompts, **options)
    assert torch.equal(
        backquant.as_generator(quantized(), model).generate(prompts, **options), wanted
    )


def test_the_model_is_not_changed() -> None:
    model = trained()
    names = list(model.state_dict())
    generator = backquant.as_generator(quantized(), model)
    assert list(model.state_dict()) == names
    assert not list(generator.parameters())
    assert isinstance(generator, type(model))


def test_an_exported_decoder_generates(tmp_path: Path) -> None:
    """With four bits; twenty tokens that are the reference model's, from the kernels of ONNX Runtime."""
    model = trained()
    example = backquant.decoder_inputs(model, ids(TEXT[:24]), cached=12)
    four_bits = backquant.quantize(
        model, example, backend="onnxruntime", weights="int4", group_size=32
    )
    axes = backquant.decoder_shapes(model)
    exported = backquant.export(four_bits, tmp_path / "decoder.onnx", dynamic_shapes=axes)
    assert exported.kernel_counts["MatMulNBits(groups of 32) (int4)"] == 15
    with torch.device("meta"):
        empty = type(model)(model.config)
    from_file = backquant.as_generator(tmp_path / "decoder.onnx", empty)
    emulated = backquant.as_generator(four_bits, empty)
    for prompt in ("the quick ", "cat sleeps near"):
        assert twenty(from_file, prompt) == twenty(emulated, prompt)


def test_a_file_of_fixed_sizes_cannot_generate(tmp_path: Path) -> None:
    model = trained()
    example = backquant.decoder_inputs(model, ids(TEXT[:24]), cached=12)
    made = backquant.quantize(model, example, backend="onnxruntime", weights="int8")
    backquant.export(made, tmp_path / "fixed.onnx")
    generator = backquant.as_generator(tmp_path / "fixed.onnx", model)
    with pytest.raises(InputError, match=r"input_ids is \[1, 12\]") as raised:
        twenty(generator, "the quick ")
    assert "decoder_shapes(model)" in raised.value.fix


def test_a_program_of_executorch_generates(tmp_path: Path) -> None:
    """Its file says what its inputs are called; XNNPACK rounds activations at each call, as we do."""
    model = trained()
    example = backquant.decoder_inputs(model, ids(TEXT[:24]), cached=12)
    four_bits = backquant.quantize(model, example, backend="xnnpack", weights="int4", group_size=32)
    pair = {"keys": {2: "cached<=64"}, "values": {2: "cached<=64"}}
    axes = {
        "input_ids": {1: "new<=64"},
        "position_ids": {1: "new<=64"},
        "attention_mask": {1: "all<=128"},
        "past_key_values": {"layers": [pair, pair]},
    }
    exported = backquant.export(four_bits, tmp_path / "decoder.pte", dynamic_shapes=axes)
    assert exported.kernel_counts["XNNPACK FullyConnected (int4)"] == 15
    with torch.device("meta"):
        empty = type(model)(model.config)
    from_file = backquant.as_generator(tmp_path / "decoder.pte", empty)
    emulated = backquant.as_generator(four_bits, empty)
    assert twenty(from_file, "the quick ") == twenty(emulated, "the quick ")


def test_what_cannot_generate_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no file"):
        backquant.as_generator(tmp_path / "decoder.onnx", trained())
    with pytest.raises(UsageError, match="no target has files"):
        backquant.as_generator(tmp_path / "decoder.bq", trained())
    linear = backquant.quantize(nn.Linear(4, 4), calibration=[torch.randn(2, 4)])
    with pytest.raises(UsageError, match="no cache"):
        backquant.as_generator(linear, trained())
    with pytest.raises(UsageError, match="no generate"):
        backquant.as_generator(quantized(), nn.Linear(1, 1))
    with pytest.raises(UsageError, match="none remains"):
        backquant.decoder_inputs(trained(), ids("the"), cached=3)
