"""Passes that are broken on purpose: the error names the pass, the node, and what was expected of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import fx, nn

import backquant as bq
from backquant.convert import interface, reference, scales, weights
from backquant.convert.contracts import standalone_are_converted
from backquant.convert.hardware import hardware_scales
from backquant.convert.scales import convert_activations
from backquant.convert.state import Conversion
from backquant.errors import PassError
from backquant.fuse import apply
from backquant.graph import Breach, contract, register_quantized_decomposed, run_pass
from backquant.lower import KernelUse, engine_info, lower
from backquant.lower import lowering as boundaries
from backquant.lower.fuse_followers import fuse_followers
from backquant.lower.lowering import FloatFallback
from backquant.prepare import PreparedModule, insert, insert_observers, prepared_state
from backquant.qconfig import PrepareCustomConfig, get_default_qconfig_mapping

X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(0))
FIRST = "activation_post_process_0"


def prepared(**options: Any) -> PreparedModule:
    layers = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1))
    made = bq.prepare_fx(layers.eval(), get_default_qconfig_mapping("x86"), (X,), **options)
    made(X)
    assert isinstance(made, PreparedModule)
    return made


def conversion(module: PreparedModule) -> Conversion:
    state = prepared_state(module)
    return reference._working_copy(module, state, state, "decomposed")


def nothing(*_: Any, **__: Any) -> None:
    """A step that does not do its work."""


@contextmanager
def breach(where: str, node: str, expected: str) -> Iterator[None]:
    with pytest.raises(PassError) as caught:
        yield
    assert caught.value.where == where
    assert caught.value.what.startswith(f"{node}: expected {expected}")


def test_an_operator_that_was_not_fused(monkeypatch: pytest.MonkeyPatch) -> None:
    copy = apply._copy_graph
    monkeypatch.setattr(apply, "_copy_graph", lambda graph, _, made: copy(graph, (), made))
    with breach("after pass 'fuse patterns'", "_1", "to be fused into _0"):
        prepared()


def test_an_observer_that_is_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "_connect", nothing)
    with breach("after pass 'insert observers'", FIRST, "a call of the observer of input_1"):
        prepared()


def test_a_value_that_is_read_beside_its_observer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(insert, "_rewired", lambda *_: [])
    with breach(
        "after pass 'insert observers'", "_0", f"to read input_1 through its observer {FIRST}"
    ):
        prepared()


def test_a_plan_of_another_graph() -> None:
    other = fx.symbolic_trace(nn.Sequential(nn.ReLU()))
    with breach("before pass 'insert observers'", "_3", "a node of the graph, where the plan has"):
        insert_observers(other, prepared_state(prepared()))


def test_an_observer_that_conversion_does_not_find() -> None:
    module = prepared()
    work = conversion(module)
    del work.nodes[FIRST]
    with breach("before pass 'measure groups'", FIRST, "a call of the observer of input_1"):
        run_pass(reference._measure_groups, module, work)


def test_a_value_without_qparams() -> None:
    work = conversion(prepared())
    with breach("after pass 'hardware scales'", FIRST, "scale and zero point"):
        run_pass(hardware_scales, work)
    with breach("before pass 'convert activations'", FIRST, "an observed value with scale"):
        run_pass(convert_activations, work, frozenset({FIRST}), set[str]())


def test_a_value_that_was_not_quantized(monkeypatch: pytest.MonkeyPatch) -> None:
    module = prepared()
    monkeypatch.setattr(
        scales, "_write", lambda _, __, node, value: node.replace_all_uses_with(value)
    )
    with breach("after pass 'convert activations'", "input_1", "quantize and dequantize nodes"):
        bq.convert_to_reference_fx(module)


def test_a_weight_that_stayed_float(monkeypatch: pytest.MonkeyPatch) -> None:
    module = prepared()
    monkeypatch.setattr(weights._Converter, "convert", nothing)
    with breach("after pass 'convert weighted modules'", "_0", "a reference module of Conv2d"):
        bq.convert_to_reference_fx(module)


def test_a_module_that_still_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = nn.Sequential(nn.Linear(4, 4), nn.ReLU()).train()
    mapping = bq.get_default_qat_qconfig_mapping("x86")
    module = bq.prepare_qat_fx(layers, mapping, (X.flatten()[:4][None],))
    module(X.flatten()[:4][None])
    monkeypatch.setattr(weights._Converter, "convert", nothing)
    with breach("after pass 'convert weighted modules'", "_0", "no training module, and finds"):
        bq.convert_to_reference_fx(module.eval())


def test_an_input_that_is_read_as_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    custom = PrepareCustomConfig().set_input_quantized_indexes([0])
    module = prepared(prepare_custom_config=custom)
    monkeypatch.setattr(interface, "insert_dequantize", nothing)
    with breach("after pass 'dequantize inputs'", "_0", "to read the input input_1 dequantized"):
        bq.convert_to_reference_fx(module)


def test_a_standalone_module_that_is_still_observed() -> None:
    work = conversion(prepared())
    work.module.add_submodule("block", prepared())
    with work.module.graph.inserting_before():
        call = work.module.graph.call_module("block")
    (found,) = standalone_are_converted(None, work, reference.convert_to_reference)
    assert found == Breach(call.name, "a converted standalone module")


def test_an_observer_that_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    module = prepared()
    monkeypatch.setattr(
        reference, "drop_rank_checks", lambda made: made.add_module(FIRST, nn.Identity())
    )
    with breach("after pass 'finish reference'", FIRST, "no observer in the reference model"):
        bq.convert_to_reference_fx(module)


def test_a_boundary_that_is_not_folded(monkeypatch: pytest.MonkeyPatch) -> None:
    register_quantized_decomposed()
    ops, qparams = torch.ops.quantized_decomposed, (0.5, 0, 0, 255, torch.uint8)

    def twice(x: torch.Tensor) -> Any:
        integers = ops.quantize_per_tensor.default(x, *qparams)
        again = ops.quantize_per_tensor.default(
            ops.dequantize_per_tensor.default(integers, *qparams), *qparams
        )
        return ops.dequantize_per_tensor.default(again, *qparams)

    run_pass(boundaries.fold_boundaries, fx.symbolic_trace(twice).graph, engine_info("x86"))
    with (
        monkeypatch.context() as patched,
        breach(
            "after pass 'fold boundaries'",
            "quantize_per_tensor_default_1",
            "integers to stay integers",
        ),
    ):
        patched.setattr(boundaries, "_join", nothing)
        run_pass(boundaries.fold_boundaries, fx.symbolic_trace(twice).graph, engine_info("x86"))
    monkeypatch.setattr(boundaries, "_erase_unread", nothing)
    with breach("after pass 'fold boundaries'", "dequantize_per_tensor_default", "a reader of"):
        run_pass(boundaries.fold_boundaries, fx.symbolic_trace(twice).graph, engine_info("x86"))


def test_a_reference_module_without_kernel_or_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    module = bq.convert_to_reference_fx(prepared())
    assert {reason.node for reason in lower(module, [], engine_info("x86")).left_in_float} >= {"_0"}
    monkeypatch.setattr(FloatFallback, "reasons", lambda *_: ())
    with breach("after pass 'lower'", "_0", "a kernel in the place of the reference module"):
        lower(module, [], engine_info("x86"))


def test_a_kernel_that_is_only_in_the_record() -> None:
    use = KernelUse(("conv", "clamp"), "conv(clamp)", torch.uint8, "x86")
    with breach("after pass 'fuse followers'", "conv+clamp", "a call of its kernel conv(clamp)"):
        run_pass(fuse_followers, fx.symbolic_trace(nn.ReLU()), [use], dict[fx.Node, int]())


def test_a_contract_holds_where_the_pass_is_run_as_one() -> None:
    def empty(values: list[int]) -> Iterator[Breach]:
        yield from (Breach(str(value), "nothing") for value in values)

    @contract(ensures=[lambda _, values: empty(values)])
    def clear(values: list[int]) -> None:
        values[:] = values[:0] if len(values) < 2 else values

    run_pass(clear, [1])
    clear([1, 2])
    with breach("after pass 'clear'", "1", "nothing"):
        run_pass(clear, [1, 2])
