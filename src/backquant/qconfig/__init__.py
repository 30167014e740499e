"""What the user asks for: QConfigs, the mapping of them to parts of a model, custom configs.

The names and their meaning are those of PyTorch 2.x. The default mappings are derived from a
backend's description.
"""

from backquant.qconfig import build as named
from backquant.qconfig.build import *  # noqa: F403  (the named defaults; see named.__all__)
from backquant.qconfig.custom import (
    ConvertCustomConfig,
    FuseCustomConfig,
    PrepareCustomConfig,
    StandaloneModuleConfigEntry,
)
from backquant.qconfig.default_mapping import (
    get_default_qat_qconfig,
    get_default_qat_qconfig_mapping,
    get_default_qconfig,
    get_default_qconfig_mapping,
)
from backquant.qconfig.mapping import RULE_KINDS, MappingRule, QConfigMapping
from backquant.qconfig.qconfig import QConfig, QConfigAny, QuantType, qconfig_equals

__all__ = [
    "QConfig",
    "QConfigAny",
    "qconfig_equals",
    "QConfigMapping",
    "MappingRule",
    "RULE_KINDS",
    "get_default_qconfig",
    "get_default_qat_qconfig",
    "get_default_qconfig_mapping",
    "get_default_qat_qconfig_mapping",
    "PrepareCustomConfig",
    "ConvertCustomConfig",
    "FuseCustomConfig",
    "StandaloneModuleConfigEntry",
    "QuantType",
]
__all__ += named.__all__
