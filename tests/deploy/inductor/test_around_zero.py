"""Scales that are measured at each call, of values on one side of zero."""

from __future__ import annotations

from pathlib import Path

import torch
from torch._inductor.decomposition import choose_qparams_tensor

import backquant
from backquant.deploy import find_target
from backquant.deploy.inductor.workarounds import hold_zero
from backquant.deploy.job_of import export_job
from backquant.deploy.program import export_program


def test_inductor_decomposes_it_wrongly() -> None:
    """Once this fails, ``hold_zero`` can go."""
    x = torch.rand(64) / 2 + 0.5
    rest = (0, 255, 1e-7, torch.uint8)
    scale, zero_point = torch.ops.quantized_decomposed.choose_qparams.tensor(x, *rest)
    wrong, _ = choose_qparams_tensor(x, *rest)
    assert scale > 1.9 * wrong
    ends = torch.stack([x.amin().clamp(max=0), x.amax().clamp(min=0)])
    assert choose_qparams_tensor(ends, *rest) == (scale, zero_point)


def test_it_reads_a_range_that_holds_zero() -> None:
    """The program computes the same, and measures nothing but two ends."""
    torch.manual_seed(0)
    x = torch.rand(3, 8) / 2 + 0.5
    mapping = backquant.QConfigMapping().set_global(backquant.qconfig.per_channel_dynamic_qconfig)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4)).eval()
    backend = backquant.get_backend_config("inductor_x86")
    prepared = backquant.prepare_fx(model, mapping, x, backend_config=backend)
    reference = backquant.convert_to_reference_fx(prepared, dialect="decomposed")
    job = export_job(reference, find_target("inductor", Path("m.pt2")), (x,))
    program = export_program(job.module, job.args, {}, None)
    before = program.exported.module()(x)
    hold_zero(program)
    target = torch.ops.quantized_decomposed.choose_qparams.tensor
    [chosen] = program.exported.graph.find_nodes(op="call_function", target=target)
    assert chosen.args[0].meta["val"].shape == (2,)
    assert torch.equal(program.exported.module()(x), before)
