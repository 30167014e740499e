"""The ``state_dict`` of a lowered model: that of the reference model it was lowered from, and loading one.

Kernels fold qparams into packed weights, tables and biases, each in its own way. So nothing is unpicked: a
``state_dict`` with other numbers gives another reference model, which is lowered like the first one, and
what comes out takes the place of what was here. A module of the same path and class stays the same object.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules.module import _IncompatibleKeys

from backquant.checkpoint import Loaded, slots_of, values_of, with_state_dict
from backquant.convert import ReferenceModel


class Origin(NamedTuple):
    """What a model was lowered from; ``lowered`` does so again (``None``: nobody said how)."""

    reference: ReferenceModel
    lowered: Callable[[ReferenceModel], nn.Module] | None


class Checkpointed(nn.Module):
    """``origin``: ``None`` of a model from a file, whose ``state_dict`` is that of its kernels."""

    origin: Origin | None = None

    def _take_over(self, other: Any) -> None:
        """Become ``other``, a model lowered for the same engine."""
        raise NotImplementedError

    def _shows_tensors(self) -> bool:
        """Whether what is shown has tensors of its own, by PyTorch's names."""
        raise NotImplementedError

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """PyTorch's keys and plain tensors: ``conv.weight`` (integers), ``conv.weight_scale``,
        ``conv.weight_zero_point``, ``conv.bias``, ``conv.scale``, ``conv.zero_point``."""
        if self.origin is None:
            return super().state_dict(*args, **kwargs)
        destination = kwargs.get("destination", args[0] if args else None)
        prefix = kwargs.get("prefix", args[1] if len(args) > 1 else "")
        found = OrderedDict() if destination is None else destination
        shown = super().state_dict() if self._shows_tensors() else None
        for key, value in values_of(slots_of(self.origin.reference), shown).items():
            found[prefix + key] = value if kwargs.get("keep_vars") else value.detach()
        return found

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Take over weights, scales and zero points: those of a model of ours, for any engine, or of one
        that ``torch.ao`` converted, with its quantized tensors.

        Args:
            state_dict: of a model that was prepared and converted as this one; calibrated or not, this one
                has its numbers afterwards.
            strict: refuse missing and unexpected keys; else they are left out and returned.
            assign: of no effect on integers: what is loaded is always copied.

        Raises UsageError for a ``state_dict`` of another model or backend, by key; nothing is loaded then.
        """
        if self.origin is None or self.origin.lowered is None:
            return super().load_state_dict(state_dict, strict, assign)
        loaded = self._loaded(state_dict, strict=strict)
        return _IncompatibleKeys(list(loaded.missing), list(loaded.unexpected))

    def _loaded(self, state_dict: Mapping[str, Any], *, strict: bool) -> Loaded:
        assert self.origin is not None and self.origin.lowered is not None
        loaded = with_state_dict(self.origin.reference, state_dict, strict=strict)
        self._take_over(self.origin.lowered(loaded.reference))
        return loaded

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """As a part of a larger model, whose ``load_state_dict`` goes from module to module."""
        if self.origin is None or self.origin.lowered is None:
            super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)
            return
        own = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        loaded = self._loaded({k.removeprefix(prefix): v for k, v in own.items()}, strict=False)
        _, _, missing, unexpected, _ = args
        missing += [prefix + key for key in loaded.missing]
        unexpected += [prefix + key for key in loaded.unexpected]
        for key in own:
            del state_dict[key]
        # what PyTorch visits next are the children: they find what they have
        kernels = super().state_dict(prefix=prefix)
        state_dict.update({key: value for key, value in kernels.items() if key not in state_dict})


def adopt(before: nn.Module, after: nn.Module) -> None:
    """Put the modules of ``before`` into ``after`` where path and class agree, each with the state of the one
    whose place it takes, and with its own hooks."""
    for name, module in list(after._modules.items()):
        known = before._modules.get(name)
        if module is None or known is None or type(known) is not type(module) or known is module:
            continue
        adopt(known, module)
        hooks = {key: value for key, value in vars(known).items() if key.endswith("_hooks")}
        known.__dict__.update({**vars(module), **hooks})
        after._modules[name] = known
