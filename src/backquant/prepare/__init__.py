"""Observers: where they stand, who shares one, and the copy of the graph that holds them."""

from __future__ import annotations

from backquant.prepare.custom_modules import give_qconfigs
from backquant.prepare.insert import insert_observers
from backquant.prepare.needed import needed_names
from backquant.prepare.placement import observation_sites
from backquant.prepare.qat import swap_for_training
from backquant.prepare.quantized_inputs import observe_quantized_inputs
from backquant.prepare.record import (
    KeptGraphModule,
    PreparedModule,
    Record,
    Request,
    buffers_of_histograms,
    prepared_state,
    with_state,
)
from backquant.prepare.requests import ObserverSource, ObserverSpec
from backquant.prepare.roles import Role
from backquant.prepare.sites import QUANTIZED_INPUT, Site, SiteTable
from backquant.prepare.standalone import prepare_standalone_modules
from backquant.prepare.unobserved import unobserved

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
