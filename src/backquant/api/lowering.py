"""From a reference model to what runs: the engine's table where there is one, else as it is."""

from __future__ import annotations

from torch import fx

from backquant.backends.tables import lowering_rules
from backquant.convert import reference_state
from backquant.lower import EngineInfo, QuantizedModel, lower

__all__ = ["quantized_model"]


def quantized_model(reference: fx.GraphModule, engine: EngineInfo | None) -> QuantizedModel:
    """Lower ``reference`` for ``engine``; without an engine the reference model itself is wrapped."""
    state = reference_state(reference)
    if engine is None:
        return QuantizedModel(reference, plan=state.plan, backend_config=state.backend_config)
    lowered = lower(reference, lowering_rules(engine.name), engine)
    return QuantizedModel(
        lowered.graph_module,
        plan=state.plan,
        backend_config=state.backend_config,
        engine=engine,
        kernels=lowered.kernels,
        left_in_float=lowered.left_in_float,
    )
