"""Which sites are needed quantized."""

from __future__ import annotations

from backquant.prepare import ObserverSpec, Role, Site, needed_names


def _site(value: str, *readers: str, made: bool = True) -> Site:
    spec = ObserverSpec(None, "activation")
    return Site(f"of_{value}", value, Role.OUTPUT, spec, readers, value if made else "")


#: ``linear`` is read by ``view`` alone, and that by nothing that is quantized; ``conv`` by ``linear``.
SITES = (_site("x", "conv", made=False), _site("conv", "linear"), _site("linear", "view"))
SITES = (*SITES, _site("view"), _site("add"))


def _needed(floats: set[str], given: tuple[str, ...] = ()) -> set[str]:
    found = needed_names(SITES, lambda name: name != "x", lambda n: n == "view", floats, given)
    return {name.removeprefix("of_") for name in found}


def test_without_a_rule_all_are() -> None:
    assert _needed(set()) == {"x", "conv", "linear", "view", "add"}


def test_moves_to_float_operators_take_the_result_in_front_along() -> None:
    assert _needed({"conv", "linear"}) == {"x", "conv", "add"}


def test_what_is_given_quantized_keeps_what_it_moves() -> None:
    assert _needed({"conv", "linear"}, ("of_view",)) == {"x", "conv", "linear", "view", "add"}
