"""Layers that the library of kernels may compute, for Hypothesis."""

from __future__ import annotations

import torch
from hypothesis import strategies as st

from backquant.native.library import Case
from backquant.native.plan import Result, Shape

POST_OPS = [("none", (), ""), ("relu", (), ""), ("hardtanh", (0.0, 6.0), ""), ("swish", (), "")]
POST_OPS += [("gelu", (), "none"), ("gelu", (), "tanh")]


@st.composite
def layers(draw: st.DrawFn) -> Case:
    depthwise, grouped = draw(st.booleans()), draw(st.booleans())
    channels = draw(st.integers(1, 140))
    if depthwise:
        size = draw(st.sampled_from([3, 5, 7]))
        kernel, step = (size, size), draw(st.integers(1, 2))
        stride, dilation, groups = (step, step), (1, 1), channels
        weight = (channels, 1, *kernel)
    else:
        pairs = st.tuples(st.integers(1, 3), st.integers(1, 3))
        kernel = draw(st.tuples(st.integers(1, 7), st.integers(1, 7)))
        stride, dilation, groups = draw(pairs), draw(pairs), 1
        weight = (draw(st.integers(1, 140)), channels, *kernel)
        if grouped:
            deep, groups = draw(st.sampled_from([4, 8, 12, 16, 20, 36])), draw(st.integers(2, 9))
            out = draw(st.sampled_from([deep, 1, 17]))
            channels, weight = deep * groups, (out * groups, deep, *kernel)
    padding = tuple(draw(st.integers(0, n // 2)) for n in kernel)
    least = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    height, width = (draw(st.integers(n, n + 20)) for n in least)
    shape = Shape(weight, stride, padding, dilation, groups)
    dtype = draw(st.sampled_from([torch.uint8, torch.float32]))
    scale, zero_point = (0.05, 17) if dtype == torch.uint8 else (1.0, 0)
    result = Result(
        scale, zero_point, dtype, *draw(st.sampled_from(POST_OPS[:4] if depthwise else POST_OPS))
    )
    adds = not depthwise and result.activation is None and draw(st.booleans())
    return Case((draw(st.integers(1, 3)), channels, height, width), shape, result, adds)
