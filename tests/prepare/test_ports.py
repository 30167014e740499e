"""Which arguments of a graph pattern are observed, and who shares with whom."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import backquant
from backquant.backend_config import (
    AnyOrder,
    BackendConfig,
    BackendPatternConfig,
    DTypeConfig,
    DTypeWithConstraints,
    GraphPattern,
    Port,
)
from backquant.match.plan import Match, PortUse
from backquant.observe import MinMaxObserver
from backquant.prepare import PreparedModule, Role, prepared_state
from backquant.prepare.sites import observed_arguments, shared_port
from backquant.qconfig import PrepareCustomConfig, QConfig, QConfigMapping

STATIC = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)


def prepare(
    forward: Any, *entries: BackendPatternConfig, inputs: int = 2, **options: Any
) -> PreparedModule:
    class Function(nn.Module):
        pass

    Function.forward = forward  # type: ignore[assignment]
    backend = BackendConfig("mine").set_backend_pattern_configs(entries)
    mapping = options.pop("mapping", None) or backquant.get_default_qconfig_mapping("x86")
    example = tuple(torch.randn(2, 4) for _ in range(inputs))
    prepared = backquant.prepare_fx(
        Function().eval(), mapping, example, backend_config=backend, **options
    )
    assert isinstance(prepared, PreparedModule)
    return prepared


def entry(pattern: Any, **ports: Any) -> BackendPatternConfig:
    return BackendPatternConfig(pattern).add_dtype_config(STATIC).set_ports(ports)


def groups(prepared: PreparedModule) -> list[list[str]]:
    """The observed values of each group of sites, in order."""
    sites = prepared_state(prepared).sites
    return [[sites[name].value for name in names] for names in sites.groups().values()]


SUM = GraphPattern(["x", "y"], {"a": (torch.relu, "x"), "out": (torch.add, "a", "y")})


def test_arguments_are_those_of_the_ports() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    inner = graph.call_function(torch.relu, (x,))
    out = graph.call_function(torch.add, (inner, y))
    ports = (
        PortUse("x", ("x",), ("relu",), "activation"),
        PortUse("y", ("y",), ("add",), "weight"),
        PortUse("out", ("add",), (), "activation"),
    )
    match = Match(0, "", ("relu", "add"), "relu", ports=ports)
    assert list(observed_arguments(inner, match, {})) == [(x, Role.INPUT)]
    assert list(observed_arguments(out, match, {})) == [(y, Role.WEIGHT)]


def test_a_value_that_is_bound_twice_plays_the_first_of_weight_bias_activation() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    out = graph.call_function(torch.add, (x, x))
    ports = (
        PortUse("a", ("x",), ("add",), "activation"),
        PortUse("b", ("x",), ("add",), "bias"),
        PortUse("w", ("x",), ("add",), "weight"),
        PortUse("out", ("add",), (), "activation"),
    )
    match = Match(0, "", ("add",), "add", ports=ports)
    assert list(observed_arguments(out, match, {})) == [(x, Role.WEIGHT)] * 2


def test_an_open_operator_is_observed_as_one_that_stands_alone() -> None:
    pattern = GraphPattern([], {"fc": F.linear, "out": (torch.relu, "fc")})
    weights = BackendPatternConfig(F.linear)._set_input_type_to_index({"weight": 1, "bias": 2})
    prepared = prepare(lambda self, x, w: torch.relu(F.linear(x, w)), entry(pattern), weights)
    roles = {s.value: s.role for s in prepared_state(prepared).sites.sites}
    assert roles == {"x": Role.INPUT, "w": Role.WEIGHT, "relu": Role.OUTPUT}


def test_open_operators_do_not_observe_each_other() -> None:
    pattern = GraphPattern([], {"a": torch.relu, "b": torch.sigmoid, "out": (torch.mul, "a", "b")})
    prepared = prepare(
        lambda self, x: torch.mul(a := torch.relu(x), torch.sigmoid(a)), entry(pattern), inputs=1
    )
    assert groups(prepared) == [["x"], ["mul"]]


def test_no_port_shares_by_itself() -> None:
    prepared = prepare(lambda self, x, y: torch.add(torch.relu(x), y), entry(SUM))
    assert groups(prepared) == [["x"], ["y"], ["add"]]


def test_inputs_share() -> None:
    prepared = prepare(
        lambda self, x, y: torch.add(torch.relu(x), y), entry(SUM, y=Port(shares_with="x"))
    )
    assert groups(prepared) == [["x", "y"], ["add"]]
    assert prepared.activation_post_process_0 is prepared.activation_post_process_1


def test_inputs_and_output_share() -> None:
    shares = Port(shares_with="x")
    prepared = prepare(
        lambda self, x, y: torch.add(torch.relu(x), y), entry(SUM, y=shares, out=shares)
    )
    assert groups(prepared) == [["x", "y", "add"]]


def test_a_fixed_range_is_measured_again_before_it_is_shared() -> None:
    """As for cat([sigmoid(x), y]): the other input does not get the sigmoid's [0, 1)."""
    fixed = DTypeWithConstraints(torch.quint8, scale_exact_match=1 / 256, zero_point_exact_match=0)
    sigmoid = BackendPatternConfig(torch.sigmoid).add_dtype_config(DTypeConfig(fixed, fixed))
    prepared = prepare(
        lambda self, x, y: torch.add(torch.relu(torch.sigmoid(x)), y),
        entry(SUM, y=Port(shares_with="x")),
        sigmoid,
    )
    sites = prepared_state(prepared).sites
    [fixed_site] = [site for site in sites.sites if site.producer == "sigmoid"]
    shared = [site for site in sites.sites if site.value in (fixed_site.name, "y")]
    assert len({site.group for site in shared}) == 1
    assert [site.readers for site in shared] == [("add",), ("relu",)]
    assert fixed_site.group == fixed_site.name
    prepared(torch.randn(2, 4), torch.randn(2, 4))


def test_nothing_to_share_is_a_refusal() -> None:
    custom = PrepareCustomConfig().set_input_quantized_indexes([0])
    with pytest.warns(UserWarning, match="supported 'y' and 'x' quantized alike"):
        prepared = prepare(
            lambda self, x, y: torch.add(torch.relu(x), y),
            entry(SUM, y=Port(shares_with="x")),
            prepare_custom_config=custom,
        )
    decision = prepared_state(prepared).plan.decisions["add"]
    assert not decision.quantized
    assert decision.reasons[0].rule == "nothing-to-share"


def test_measured_scales_of_every_port_count() -> None:
    bounded = DTypeWithConstraints(torch.quint8, scale_max_upper_bound=0.5)
    entry = BackendPatternConfig(SUM).add_dtype_config(DTypeConfig(bounded, torch.quint8))
    qconfig = QConfig(MinMaxObserver.with_args(dtype=torch.quint8), MinMaxObserver)
    for scale, is_quantized in ((1.0, True), (1000.0, False)):
        prepared = prepare(
            lambda self, x, y: torch.add(torch.relu(x), y),
            entry,
            mapping=QConfigMapping().set_global(qconfig),
        )
        prepared(torch.rand(2, 4), scale * torch.rand(2, 4))  # y, which the last operator reads
        reference = backquant.convert_to_reference_fx(prepared)
        from backquant.convert import reference_state

        decision = reference_state(reference).plan.decisions["add"]
        assert decision.quantized is is_quantized


def test_shared_port() -> None:
    def ports(*roles: str, shares: str = "") -> Match:
        uses = [PortUse(f"p{i}", ("v",), ("f",), role) for i, role in enumerate(roles)]
        uses.append(PortUse("out", ("f",), (), "activation", shares))
        return Match(0, "", ("f",), "f", ports=tuple(uses))

    assert shared_port(ports("activation"), shares=False) == ""
    assert shared_port(ports("weight", "activation"), shares=True) == "p1"
    assert shared_port(ports("activation", "activation", shares="p1"), shares=True) == "p1"
    assert shared_port(ports("float"), shares=True) == ""


def test_either_order_reads_the_same_ports() -> None:
    swish = GraphPattern(
        ["x"], {"gate": (torch.sigmoid, "x"), "out": (AnyOrder(torch.mul), "x", "gate")}
    )
    made = [
        prepare(forward, entry(swish), inputs=1)
        for forward in (
            lambda self, x: torch.mul(x, torch.sigmoid(x)),
            lambda self, x: torch.mul(torch.sigmoid(x), x),
        )
    ]
    assert [groups(prepared) for prepared in made] == [[["x"], ["mul"]]] * 2
