"""Arguments of the torch-compatible entry points: dict forms become objects, defaults are filled in."""

from __future__ import annotations

from typing import Any

from backquant.backend_config import BackendConfig, get_native_backend_config
from backquant.qconfig import PrepareCustomConfig, QConfigMapping

__all__ = ["given_backend", "given_custom", "given_mapping"]


def given_backend(config: BackendConfig | dict[str, Any] | None) -> BackendConfig:
    """The description as it is, from its dict form, or native for None.

    >>> given_backend(None).name
    'native'
    """
    if config is None:
        return get_native_backend_config()
    return BackendConfig.from_dict(config) if isinstance(config, dict) else config


def given_mapping(mapping: QConfigMapping | dict[str, Any]) -> QConfigMapping:
    """The mapping as it is, or from its dict form.

    >>> given_mapping({"": None}).global_qconfig is None
    True
    """
    return QConfigMapping.from_dict(mapping) if isinstance(mapping, dict) else mapping


def given_custom(
    custom: PrepareCustomConfig | dict[str, Any] | None,
) -> PrepareCustomConfig | None:
    """The custom config as it is, or from its dict form.

    >>> given_custom({"non_traceable_module_name": ["head"]}).non_traceable_module_names
    ['head']
    """
    return PrepareCustomConfig.from_dict(custom) if isinstance(custom, dict) else custom
