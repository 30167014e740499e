"""What is written for TOSA's reference model, which does not run here."""

from __future__ import annotations

import numpy as np
import torch
from tools.tosa.agreement import calls_of
from tools.tosa.cases import CASES

from backquant.conformance.tosa.moves import Graph, multiplier_and_shift
from backquant.conformance.tosa.translate import in_our_order, translated, windowed
from backquant.dtypes.arithmetic import quantize_multiplier


def test_a_scale_is_written_as_the_reference_multiplies() -> None:
    reals = torch.rand(500, dtype=torch.float64).exp2() * torch.logspace(-6, 1, 500)
    multipliers, shifts = quantize_multiplier(reals)
    for real, multiplier, shift in zip(reals, multipliers, shifts, strict=True):
        assert multiplier_and_shift(float(real)) == (int(multiplier), 31 - int(shift))


def test_a_depthwise_convolution_is_written() -> None:
    """Weights are [height, width, channel, multiple], images have their channels last."""
    [case] = (case for case in CASES if case.name == "depthwise, two each")
    [call] = calls_of(case)
    graph, output = translated(call.kernel, call.inputs, call.out)
    names = [operator["op"] for operator in graph.operators if "CONST" not in operator["op"]]
    assert names == ["DEPTHWISE_CONV2D", "RESCALE"]
    [image] = graph.inputs.values()
    assert np.array_equal(image.transpose(0, 3, 1, 2), call.inputs[0].numpy())
    written = {
        tensor["name"]: tensor
        for tensor in graph.to_dict(output)["regions"][0]["blocks"][0]["tensors"]
    }
    shapes = [tensor["shape"] for tensor in written.values()]
    assert [3, 3, 6, 2] in shapes and written[output]["shape"] == [2, 4, 3, 12]
    back = in_our_order(call.out.permute(0, 2, 3, 1).numpy(), call.out, call.kernel)
    assert np.array_equal(back, call.out.numpy())


def test_what_no_window_reads_is_not_given() -> None:
    """TOSA refuses sizes that strides do not divide: less padding behind, a slice of what is left over."""
    graph = Graph()
    image = np.arange(8 * 9, dtype=np.int8).reshape(1, 8, 9, 1)
    geometry = {"stride": [3, 3], "pad": [1, 1, 0, 0]}
    name, pad = windowed(graph, image, (1, 3, 3, 1), (2, 2), geometry)
    assert pad == [
        1,
        0,
        0,
        0,
    ]  # 1 + 8 rows hold three windows with one row left over, 9 columns, too
    [sliced] = (each for each in graph.operators if each["op"] == "SLICE")
    assert sliced["outputs"] == [name]
    [shape] = (each["shape"] for each in graph.tensors if each["name"] == name)
    assert shape == [1, 7, 8, 1]
