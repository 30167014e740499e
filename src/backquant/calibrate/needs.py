"""Which observers of a prepared model need data before it can be converted.

1. Observers that measure at each call, hold a dtype only, or have fixed qparams need none.
2. A weight that depends on no input is measured at conversion.
3. Observers that saw data already need no more.
4. Those inside of standalone and custom modules count, too.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx, nn

from backquant.calibrate.feed import UnseenObserver
from backquant.calibrate.observers import custom_observers, prepared_parts, saw_data
from backquant.observe import is_placeholder
from backquant.prepare import Role, prepared_state


def waiting_for_data(prepared: fx.GraphModule) -> tuple[UnseenObserver, ...]:
    """The observers that calibration has to feed, in graph order; none if there is nothing to measure.

    Raises UsageError when the model is not prepared.
    """
    return tuple(
        waiting
        for prefix, part in prepared_parts(prepared)
        for waiting in (*_of_sites(part, prefix), *_of_custom_modules(part, prefix))
    )


def _of_sites(prepared: fx.GraphModule, prefix: str) -> Iterator[UnseenObserver]:
    sites = prepared_state(prepared).sites
    nodes = _from_inputs(prepared.graph)
    needed = {
        site.group for site in sites.sites if site.role is not Role.WEIGHT or site.name in nodes
    }
    for head in sites.groups():
        if head in needed and _waits(prepared.get_submodule(head)):
            yield UnseenObserver(f"{prefix}{head}", f"{prefix}{sites[head].value}")


def _of_custom_modules(prepared: fx.GraphModule, prefix: str) -> Iterator[UnseenObserver]:
    for name, observer in custom_observers(prepared).items():
        if not name.endswith(".weight_fake_quant") and _waits(observer):
            yield UnseenObserver(f"{prefix}{name}", f"{prefix}{name}")


def _waits(observer: nn.Module) -> bool:
    dynamic = getattr(observer, "is_dynamic", False) or is_placeholder(observer)
    return not dynamic and not saw_data(observer)


def _from_inputs(graph: fx.Graph) -> set[str]:
    """The names of all nodes whose value depends on an input."""
    reached: set[str] = set()
    for node in graph.nodes:
        if node.op == "placeholder" or any(n.name in reached for n in node.all_input_nodes):
            reached.add(node.name)
    return reached
