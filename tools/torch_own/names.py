"""The names of ``torch.ao.quantization`` and its modules, as backquant has them.

A module of it (``observer``, ``quantize_fx``, …) is this module again. A name that backquant lacks is a
``Missing``: it can be imported, and fails the test that uses it.

Private names that tests read are given what they stand for: the keys of the dict forms, the tuple in
which a test writes down a node (``NodeInfo``), and the look-up of a rule in a mapping.
"""

from __future__ import annotations

import functools
import importlib
import re
import sys
from collections import namedtuple
from types import ModuleType
from typing import Any

import backquant
import backquant.backend_config
import backquant.nn
from backquant.match.rules import RuleTable
from backquant.migrate.names import FLAT, PRIVATE
from torch_own.eager import EAGER

__all__ = ["Missing", "NotProvided"]

_MODULES = ("fx", "quantize_fx", "observer", "fake_quantize", "qconfig", "qconfig_mapping")
_MODULES += ("quant_type", "utils", "backend_config", "native", "lstm_utils")

#: Names of PyTorch's implementation, with what does the same in backquant.
_SAME: dict[str, str] = {
    **FLAT,
    **PRIVATE,
    "_sequential_wrapper2": "backquant.backend_config.reverse_sequential_wrapper2",
}

_KEYS: dict[str, str] = {
    "_GLOBAL_DICT_KEY": "",
    "_OBJECT_TYPE_DICT_KEY": "object_type",
    "_MODULE_NAME_REGEX_DICT_KEY": "module_name_regex",
    "_MODULE_NAME_DICT_KEY": "module_name",
    "_MODULE_NAME_OBJECT_TYPE_ORDER_DICT_KEY": "module_name_object_type_order",
    "STANDALONE_MODULE_NAME_DICT_KEY": "standalone_module_name",
    "STANDALONE_MODULE_CLASS_DICT_KEY": "standalone_module_class",
    "FLOAT_TO_OBSERVED_DICT_KEY": "float_to_observed_custom_module_class",
    "OBSERVED_TO_QUANTIZED_DICT_KEY": "observed_to_quantized_custom_module_class",
    "NON_TRACEABLE_MODULE_NAME_DICT_KEY": "non_traceable_module_name",
    "NON_TRACEABLE_MODULE_CLASS_DICT_KEY": "non_traceable_module_class",
    "INPUT_QUANTIZED_INDEXES_DICT_KEY": "input_quantized_idxs",
    "OUTPUT_QUANTIZED_INDEXES_DICT_KEY": "output_quantized_idxs",
    "PRESERVED_ATTRIBUTES_DICT_KEY": "preserved_attributes",
}


class NotProvided(AttributeError):
    """A name of PyTorch that backquant does not have."""


class Missing:
    """Stands for a name that backquant lacks. Using it raises ``NotProvided``."""

    def __init__(self, name: str) -> None:
        self._name = name

    def _used(self) -> NotProvided:
        return NotProvided(f"backquant has no {self._name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise self._used()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise self._used()


def _rule(kind: str, mapping: Any, key: Any, default: Any) -> Any:
    """The QConfig of the rule that backquant's look-up finds for ``key``, or ``default``."""
    hit = getattr(RuleTable(mapping), kind)(*key if isinstance(key, tuple) else (key,))
    return default if hit is None else hit.qconfig


def _order(mapping: Any, name: str, kind: Any, index: int, default: Any) -> Any:
    return _rule("by_order", mapping, (name, kind, index), default)


_HERE: dict[str, Any] = {
    **_KEYS,
    **EAGER,
    "NodeInfo": namedtuple("NodeInfo", "op target"),
    "_get_object_type_qconfig": functools.partial(_rule, "by_type"),
    "_get_module_name_qconfig": functools.partial(_rule, "by_name"),
    "_get_module_name_regex_qconfig": functools.partial(_rule, "by_name"),
    "_maybe_adjust_qconfig_for_module_name_object_type_order": _order,
    "_get_quant_type_to_str": lambda quant_type: quant_type.key,
    "_convert_to_reference_decomposed_fx": functools.partial(
        backquant.convert_to_reference_fx, dialect="decomposed"
    ),
}


def unscripted(model: Any) -> Any:
    """The model itself, where a test makes TorchScript of it."""
    return model


def has_qparams(model: Any, name: str) -> bool:
    """Whether ``model.qparams`` has what PyTorch keeps as the attribute ``name``.

    ``mods1_0_scale_1`` is the output of the kernel that runs for ``mods1.0``, ``mods1_0_input_scale_0`` an
    input of it.
    """
    path, side = re.fullmatch(r"(.+?)(_input)?_(?:scale|zero_point)_\d", name).groups()
    found = {key.replace(".", "_"): value for key, value in model.qparams.items()}[path]
    return bool(found.inputs if side else found.output)


def weight_of(model: Any) -> Any:
    """The integer weight that ``model.state_dict()`` has of its first kernel with a weight."""
    state = model.state_dict()
    return next((value for key, value in state.items() if key.endswith("_kernel.weight")), None)


def assert_within_a_step(case: Any, result: Any, other: Any) -> None:
    """Whether ``result`` is ``other`` but for one step of the grid that both lie on."""
    values = other.unique()
    step = float(values.diff().min()) if values.numel() > 1 else 0.0
    case.assertEqual(result, other, atol=1.01 * step, rtol=0)


#: Configs that PyTorch keeps for its tests: converted, as a user's own would be; the description with the
#: engine on which PyTorch runs whatever it converts.
_CONVERTED: dict[str, str] = {
    "get_test_only_legacy_native_backend_config": "torch.ao.quantization.backend_config.native",
    "_get_symmetric_qnnpack_qconfig_mapping": "torch.ao.quantization.qconfig_mapping",
    "_get_symmetric_qnnpack_qat_qconfig_mapping": "torch.ao.quantization.qconfig_mapping",
}


def _converted(name: str) -> Any:
    make = getattr(importlib.import_module(_CONVERTED[name]), name)

    def converted() -> Any:
        found = backquant.from_torch_ao(make())
        if isinstance(found, backquant.BackendConfig):
            found.set_engine(backquant.get_native_backend_config().engine)
        return found

    return converted


def _found(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return None
    return None if isinstance(found, ModuleType) else found  # backquant.convert is a room


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    if name in _HERE:
        return _HERE[name]
    if name in _CONVERTED:
        return _converted(name)
    if name in _MODULES:
        return sys.modules[__name__]
    found = _found(_SAME.get(name, f"backquant.{name}"))
    return Missing(name) if found is None else found
