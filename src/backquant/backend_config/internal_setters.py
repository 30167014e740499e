"""The setters of an entry that PyTorch's ``BackendPatternConfig`` marks as internal."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from typing_extensions import Self

from backquant.backend_config.checks import check_bool, check_callable, check_choice, check_count
from backquant.backend_config.observation import ObservationType, check_observation_type
from backquant.backend_config.pattern import Pattern
from backquant.backend_config.ports import as_getter, check_getters


class InternalSetters:
    """A part of ``BackendPatternConfig``: what its underscore setters set, and themselves."""

    def __init__(self) -> None:
        self.pattern: Pattern | None = None
        self._root_node_getter: Callable[..., Any] | None = None
        self._extra_inputs_getter: Callable[..., Any] | None = None
        self._num_tensor_args_to_observation_type: dict[int, ObservationType] = {}
        self._input_type_to_index: dict[str, int] = {}
        # Fields of PyTorch 1.13.
        self._input_output_observed: bool | None = None
        self._overwrite_output_fake_quantize: Callable[..., Any] | None = None
        self._overwrite_output_observer: Callable[..., Any] | None = None

    def _check_names(self) -> None:
        """Raise ``SpecError`` when a getter chooses by a name that the pattern has not."""
        root, extra = self._root_node_getter, self._extra_inputs_getter
        check_getters(self.pattern, [("root_node_getter", root), ("extra_inputs_getter", extra)])

    def _set_root_node_getter(self, root_node_getter: Callable[..., Any] | str | None) -> Self:
        """``f(node pattern) -> node``: the node that carries the fused module.

        For a ``GraphPattern``: its name, or ``f({name: node}) -> node``.
        """
        self._root_node_getter = as_getter(root_node_getter, "root_node_getter", several=False)
        self._check_names()
        return self

    def _set_extra_inputs_getter(
        self, extra_inputs_getter: Callable[..., Any] | Sequence[str] | None
    ) -> Self:
        """``f(node pattern) -> list of nodes``: inputs of the fused module beyond the root's.

        For a ``GraphPattern``: their names, or ``f({name: node}) -> list of nodes``.
        """
        self._extra_inputs_getter = as_getter(
            extra_inputs_getter, "extra_inputs_getter", several=True
        )
        self._check_names()
        return self

    def _set_num_tensor_args_to_observation_type(
        self, num_tensor_args_to_observation_type: Mapping[int, ObservationType]
    ) -> Self:
        """The observation type by number of tensor arguments; it overrides the entry's own."""
        mapping = dict(num_tensor_args_to_observation_type)
        for count, observation_type in mapping.items():
            place = f"num_tensor_args_to_observation_type[{count!r}]"
            check_count(count, place)
            check_observation_type(observation_type, place)
        self._num_tensor_args_to_observation_type = mapping
        return self

    def _set_input_type_to_index(self, input_type_to_index: Mapping[str, int]) -> Self:
        """Positions of ``"weight"``, ``"bias"`` or ``"input"`` among the call's arguments."""
        mapping = dict(input_type_to_index)
        for kind, index in mapping.items():
            check_choice(kind, "input_type_to_index", ("input", "weight", "bias"))
            check_count(index, f"input_type_to_index[{kind!r}]")
        self._input_type_to_index = mapping
        return self

    def _set_input_output_observed(self, input_output_observed: bool | None) -> Self:
        """PyTorch 1.13; False makes ``observation_type`` ``INPUT_OUTPUT_NOT_OBSERVED``."""
        check_bool(input_output_observed, "input_output_observed")
        self._input_output_observed = input_output_observed
        return self

    def _set_overwrite_output_fake_quantize(
        self, overwrite_output_fake_quantize: Callable[..., Any] | None
    ) -> Self:
        """PyTorch 1.13; a factory whose product observes the output during training."""
        self._overwrite_output_fake_quantize = check_callable(
            overwrite_output_fake_quantize, "overwrite_output_fake_quantize"
        )
        return self

    def _set_overwrite_output_observer(
        self, overwrite_output_observer: Callable[..., Any] | None
    ) -> Self:
        """PyTorch 1.13; a factory whose product observes the output instead of the QConfig's."""
        self._overwrite_output_observer = check_callable(
            overwrite_output_observer, "overwrite_output_observer"
        )
        return self
