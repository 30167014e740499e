"""Checks that one observer suits all values that share it.

The observer is that of the first site of the group (its head). Its dtype has to be the one that every member
asks for, and the backend's entries for the members' operators have to admit it. *Different:* PyTorch puts the
first observer everywhere, whatever that violates.
"""

from __future__ import annotations

from collections.abc import Iterator

from backquant.backend_config import BackendConfig, DTypeConfig, DTypeWithConstraints
from backquant.dtypes import dtype_name
from backquant.errors import ConfigError
from backquant.match.constraints import check_tensor
from backquant.match.plan import Decision, MatchKind, Plan, TensorRequest
from backquant.match.refusal import Refusal
from backquant.observe import ReuseInputObserver
from backquant.prepare.requests import ObserverSource
from backquant.prepare.roles import Role
from backquant.prepare.sites import Site, SiteTable
from backquant.reason_codes import ReasonCode


def check_groups(
    table: SiteTable, plan: Plan, backend_config: BackendConfig, source: ObserverSource
) -> None:
    """Raise ConfigError, naming entry and node, for a member that the head's observer does not suit."""
    _Check(table, plan, backend_config, source).run()


class _Check:
    """The lookups that the members share."""

    def __init__(
        self, table: SiteTable, plan: Plan, backend: BackendConfig, source: ObserverSource
    ) -> None:
        self._table, self._plan, self._source = table, plan, source
        self._name = backend.name or "the backend"
        self._entries = backend.configs
        self._roots = {name: match.anchor for match in plan.matches for name in match.readers}

    def run(self) -> None:
        for head, members in self._table.groups().items():
            for name in members:
                if name != head:
                    self._check(self._table[head], self._table[name])

    def _check(self, head: Site, member: Site) -> None:
        given, asked = self._source.probe(head.spec), self._source.probe(member.spec)
        if given.dtype != asked.dtype and not asked.reuses_input:
            text = f"{dtype_name(given.dtype)}, and {dtype_name(asked.dtype)} is asked"
            node = member.producer or member.readers[0]
            raise self._conflict(head, member, text, self._roots.get(node, node))
        request = self._request(head)
        if request is None or head.spec.part not in ("activation", "output"):
            return
        for anchor, refusal in self._refusals(request, member):
            text = f"{refusal.asked}, and {refusal.admitted} is admitted"
            raise self._conflict(head, member, text, anchor)

    def _request(self, head: Site) -> TensorRequest | None:
        """What the head's observer was asked to be, from the decision that it was made for."""
        decision = self._decision(head)
        if decision is None:
            return None
        return decision.asked_output if head.spec.part == "output" else decision.asked_activation

    def _decision(self, site: Site) -> Decision | None:
        node = site.producer or (site.readers[0] if site.readers else "")
        return self._plan.decisions.get(self._roots.get(node, node))

    def _refusals(self, request: TensorRequest, member: Site) -> Iterator[tuple[str, Refusal]]:
        """What the entries of the member's producer and readers do not admit, with their anchors.

        The fixed qparams of an entry are those of its output: what it reads is measured.
        """
        if member.role is Role.OUTPUT:
            admitted = [c.output_dtype_with_constraints for c in self._configs(member.producer)]
            for refusal in _refused_by_all(request, admitted):
                yield member.producer, refusal
        for reader in member.readers if member.role in (Role.INPUT, Role.OUTPUT) else ():
            anchor = self._roots.get(reader, reader)
            admitted = [c.input_dtype_with_constraints for c in self._configs(anchor)]
            for refusal in _refused_by_all(request, admitted):
                if refusal.rule != ReasonCode.FIXED_QPARAMS:
                    yield anchor, refusal

    def _configs(self, anchor: str) -> list[DTypeConfig]:
        """The dtype configs that may apply at ``anchor``: the chosen one, or all if the output takes its
        input's dtype."""
        decision = self._plan.decisions.get(anchor)
        if decision is None or decision.dtype_config is None or decision.match is None:
            return []
        match = self._plan.matches[decision.match]
        if match.kind is not MatchKind.PATTERN or not decision.quantized:
            return []
        configs = self._entries[match.entry].dtype_configs
        request = decision.asked_activation
        if request is not None and request.observer == ReuseInputObserver.__name__:
            return configs
        return [configs[decision.dtype_config]]

    def _conflict(self, head: Site, member: Site, why: str, anchor: str) -> ConfigError:
        decision = self._plan.decisions.get(anchor)
        entry = ""
        if decision is not None and decision.match is not None:
            match = self._plan.matches[decision.match]
            entry = f"{self._name}, entry {match.entry} ({match.pattern}), "
        return ConfigError(
            f"values that share one observer cannot agree: that of {head.value!r} gives {why} "
            f"for {member.value!r}",
            where=f"{entry}node {anchor!r}",
            fix="the same activation in the QConfigs of both, or None for one of them",
        )


def _refused_by_all(request: TensorRequest, admitted: list[DTypeWithConstraints]) -> list[Refusal]:
    """The refusals of the first, if none of ``admitted`` takes what is asked."""
    refusals = [list(check_tensor(request, constraints)) for constraints in admitted]
    return refusals[0] if refusals and all(refusals) else []
