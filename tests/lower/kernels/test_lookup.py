from __future__ import annotations

import json

import pytest
import torch

from backquant.lower.kernels.lookup import Lookup, tabulate

LAYOUTS = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "sliced": lambda x: x[:, 1:, ::2],
    "permuted": lambda x: x.permute(3, 0, 2, 1),
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1, -1),
    "empty": lambda x: x[:0],
    "scalar": lambda x: x[0, 0, 0, 0],
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8])
def test_every_byte_finds_its_entry_in_every_layout(dtype, layout, threads):
    before = torch.get_num_threads()
    x = LAYOUTS[layout](torch.randint(0, 256, (2, 4, 5, 6)).to(torch.uint8).view(dtype))
    table = tabulate(dtype, lambda q: ((q.int() * 3 + 5) % 256).to(torch.uint8))
    kernel = Lookup("three times", table)
    torch.set_num_threads(threads)
    try:
        found = kernel(x)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, ((x.int() * 3 + 5) % 256).to(torch.uint8))
    if layout == "channels last":
        assert found.stride() == x.stride()


def test_five_dimensions_stay_channels_last():
    x = torch.randint(0, 256, (2, 3, 4, 5, 6), dtype=torch.uint8)
    x = x.contiguous(memory_format=torch.channels_last_3d)
    found = Lookup("same", tabulate(torch.uint8, lambda q: q))(x)
    assert found.stride() == x.stride()
    assert torch.equal(found, x)


def test_a_table_of_int8_gives_int8():
    table = tabulate(torch.uint8, lambda q: (q.int() - 128).to(torch.int8))
    x = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(Lookup("shift", table)(x), torch.arange(-128, 128, dtype=torch.int8))


def test_the_input_is_not_changed_and_the_result_may_be():
    x = torch.arange(10, dtype=torch.uint8)
    kernel = Lookup("same", tabulate(torch.uint8, lambda q: q))
    kernel(x).add_(1)
    assert torch.equal(x, torch.arange(10, dtype=torch.uint8))
    assert torch.equal(kernel(x), x)


def test_a_loaded_table_is_used():
    x = torch.arange(256, dtype=torch.uint8)
    kernel = Lookup("same", tabulate(torch.uint8, lambda q: q))
    kernel(x)
    kernel.load_state_dict({"table": 255 - x})
    assert torch.equal(kernel(x), 255 - x)


def test_it_is_rebuilt_from_its_configuration():
    kernel = Lookup("invert", tabulate(torch.uint8, lambda q: 255 - q))
    config = json.loads(json.dumps(kernel.artifact_config()))
    other = Lookup.from_artifact(config, dict(kernel.named_buffers()))
    x = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(other(x), kernel(x))
    assert other.name == kernel.name == "lookup(invert)"
