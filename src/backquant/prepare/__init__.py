"""Observers: where they stand, who shares one, and the copy of the graph that holds them."""

from __future__ import annotations

from backquant.prepare.insert import (
    insert_observers,
    observe_quantized_inputs,
    swap_for_training,
    unobserved,
)
from backquant.prepare.placement import observation_sites
from backquant.prepare.record import (
    KeptGraphModule,
    PreparedModule,
    Record,
    Request,
    buffers_of_histograms,
    prepared_state,
    with_state,
)
from backquant.prepare.sites import (
    QUANTIZED_INPUT,
    ObserverSource,
    ObserverSpec,
    Role,
    Site,
    SiteTable,
    needed_names,
)
from backquant.prepare.standalone import give_qconfigs, prepare_standalone_modules

__all__ = [
    "Request",
    "KeptGraphModule",
    "ObserverSource",
    "ObserverSpec",
    "PreparedModule",
    "Record",
    "QUANTIZED_INPUT",
    "Role",
    "Site",
    "SiteTable",
    "buffers_of_histograms",
    "give_qconfigs",
    "insert_observers",
    "needed_names",
    "observation_sites",
    "observe_quantized_inputs",
    "prepare_standalone_modules",
    "prepared_state",
    "swap_for_training",
    "unobserved",
    "with_state",
]
