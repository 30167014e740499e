"""Functions whose arguments have changed since older versions of PyTorch, or differ here: data."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Signature:
    """Parameters in PyTorch's order; ``missing``: those that backquant's function has not.

    ``missing`` maps a parameter to the way out. ``required`` are those without a default.
    """

    parameters: tuple[str, ...]
    required: tuple[str, ...]
    missing: dict[str, str] = field(default_factory=dict)


_PREPARE = Signature(
    (
        "model",
        "qconfig_mapping",
        "example_inputs",
        "prepare_custom_config",
        "_equalization_config",
        "backend_config",
    ),
    ("model", "qconfig_mapping", "example_inputs"),
    {"_equalization_config": "remove it: equalization has no counterpart"},
)
_QAT = Signature(
    ("model", "qconfig_mapping", "example_inputs", "prepare_custom_config", "backend_config"),
    ("model", "qconfig_mapping", "example_inputs"),
)
_CONVERT = Signature(
    (
        "graph_module",
        "convert_custom_config",
        "_remove_qconfig",
        "qconfig_mapping",
        "backend_config",
        "keep_original_weights",
    ),
    ("graph_module",),
)

#: By the function's name in backquant.
SIGNATURES: dict[str, Signature] = {
    "backquant.prepare_fx": _PREPARE,
    "backquant.prepare_qat_fx": _QAT,
    "backquant.convert_fx": _CONVERT,
    "backquant.convert_to_reference_fx": Signature(_CONVERT.parameters[:5], ("graph_module",)),
    "backquant.fuse_fx": Signature(("model", "fuse_custom_config", "backend_config"), ("model",)),
}

#: Older names of parameters.
KEYWORDS: dict[str, str] = {
    "qconfig_dict": "qconfig_mapping",
    "prepare_custom_config_dict": "prepare_custom_config",
    "convert_custom_config_dict": "convert_custom_config",
    "fuse_custom_config_dict": "fuse_custom_config",
    "backend_config_dict": "backend_config",
    "equalization_config": "_equalization_config",
    "equalization_qconfig_dict": "_equalization_config",
}

#: The class that a parameter takes, which older code passes as a dict.
CONFIGS: dict[str, str] = {
    "qconfig_mapping": "backquant.QConfigMapping",
    "prepare_custom_config": "backquant.PrepareCustomConfig",
    "convert_custom_config": "backquant.ConvertCustomConfig",
    "fuse_custom_config": "backquant.FuseCustomConfig",
    "backend_config": "backquant.BackendConfig",
}
