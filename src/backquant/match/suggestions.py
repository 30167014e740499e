"""A QConfig, as code, for an operator that no rule of the mapping quantizes."""

from __future__ import annotations

from functools import cached_property

from backquant.backend_config import BackendConfig, BackendPatternConfig
from backquant.errors import BackquantError, literal
from backquant.match.fixes import qconfig_fix
from backquant.match.qconfig_reader import QConfigReader
from backquant.match.verdict import Judge, QConfigRequest, Roles
from backquant.qconfig import QConfig, get_default_qconfig

_NOTHING = QConfigRequest(None, None)


class Suggestions:
    """Suggests the backend's default QConfig where the entry admits it, else another that the entry admits.

    >>> import torch
    >>> from backquant.backend_config import get_backend_config
    >>> backend = get_backend_config("x86")
    >>> suggestions, roles = Suggestions(backend, QConfigReader(), Judge()), Roles(True, False, False)
    >>> known = [config.pattern for config in backend.configs]
    >>> suggestions.request(known.index(torch.add), roles)
    'get_default_qconfig("x86")'
    >>> suggestions.request(known.index(torch.sigmoid), roles)[:46]
    'QConfig(\\n    activation=FixedQParamsObserver.w'
    """

    def __init__(self, backend: BackendConfig, reader: QConfigReader, judge: Judge) -> None:
        self._backend = backend
        self._entries = backend.configs
        self._reader = reader
        self._judge = judge

    def request(self, entry: int, roles: Roles) -> str:
        """For an operator that matches ``entry``; below zero for modules that match none."""
        if entry < 0:
            return "default_qconfig" if self._default is None else self._default_code
        config = self._entries[entry]
        if self._default is not None and self._admits(entry, config, self._default, roles):
            return self._default_code
        nearest = self._judge.rule(entry, config, _NOTHING, roles).nearest
        if nearest is None:
            return ""
        return str(qconfig_fix(config.dtype_configs[nearest], _NOTHING, roles))

    @property
    def _default_code(self) -> str:
        return f"get_default_qconfig({literal(self._backend.name)})"

    @cached_property
    def _default(self) -> QConfig | None:
        try:
            return get_default_qconfig(self._backend.name)
        except BackquantError:  # a backend that is not registered under its name
            return None

    def _admits(
        self, entry: int, config: BackendPatternConfig, qconfig: QConfig, roles: Roles
    ) -> bool:
        where = self._default_code
        reader = self._reader
        requests = QConfigRequest(
            reader.activation(qconfig, where),
            reader.weight(qconfig, where),
            reader.output(qconfig, where),
        )
        return self._judge.rule(entry, config, requests, roles).dtype_config is not None
