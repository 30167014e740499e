"""From a reference model to what runs: the engine's table where there is one, else as it is."""

from __future__ import annotations

from torch import fx, nn

from backquant.api.engine_dtypes import check_engine_dtypes
from backquant.api.owned import own_shared_tensors
from backquant.backends.tables import lowering_rules
from backquant.convert import reference_state
from backquant.lower import EngineInfo, QuantizedModel, lower

__all__ = ["quantized_model"]


def quantized_model(
    reference: fx.GraphModule, engine: EngineInfo | None, source: nn.Module
) -> QuantizedModel:
    """Lower ``reference`` for ``engine``; without an engine the reference model itself is wrapped.

    The result shares no tensor with ``source``, the model that it was made from. Raises
    ``EngineError`` when the plan asks for a dtype that the engine lacks.
    """
    state = reference_state(reference)
    if engine is None:
        made = QuantizedModel(reference, plan=state.plan, backend_config=state.backend_config)
    else:
        check_engine_dtypes(state.plan, state.backend_config, engine)
        lowered = lower(reference, lowering_rules(engine.name), engine)
        made = QuantizedModel(
            lowered.graph_module,
            plan=state.plan,
            backend_config=state.backend_config,
            engine=engine,
            kernels=lowered.kernels,
            left_in_float=lowered.left_in_float,
        )
    own_shared_tensors(made, source)
    return made
