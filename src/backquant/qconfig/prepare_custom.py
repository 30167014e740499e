"""PrepareCustomConfig: what is treated specially when a model is prepared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from backquant.backend_config import BackendConfig
from backquant.errors import ConfigError
from backquant.qconfig.custom import (
    ClassMap,
    CustomConfig,
    by_name,
    check_list,
)
from backquant.qconfig.mapping import QConfigMapping
from backquant.qconfig.quant_type import QuantType, quant_type_from_str

T = TypeVar("T")


@dataclass
class StandaloneModuleConfigEntry:
    """How a standalone module is prepared. None: as its parent (for ``prepare_custom_config``: an
    empty one).

    >>> StandaloneModuleConfigEntry(None, (), None, None).qconfig_mapping is None
    True
    """

    qconfig_mapping: QConfigMapping | None
    example_inputs: tuple[Any, ...]
    prepare_custom_config: PrepareCustomConfig | None
    backend_config: BackendConfig | None


class PrepareCustomConfig(CustomConfig):
    """What ``prepare_fx`` treats specially: standalone and custom modules, modules to keep whole, quantized
    inputs and outputs, attributes to keep. Every setter returns the config.

    >>> config = PrepareCustomConfig().set_input_quantized_indexes([0])
    >>> config
    PrepareCustomConfig(input_quantized_indexes=[0])
    >>> PrepareCustomConfig.from_dict(config.to_dict()) == config
    True
    """

    _KEYS = (
        "standalone_module_name",
        "standalone_module_class",
        "float_to_observed_custom_module_class",
        "non_traceable_module_name",
        "non_traceable_module_class",
        "input_quantized_idxs",
        "output_quantized_idxs",
        "preserved_attributes",
    )

    def __init__(self) -> None:
        self.standalone_module_names: dict[str, StandaloneModuleConfigEntry] = {}
        self.standalone_module_classes: dict[type, StandaloneModuleConfigEntry] = {}
        self.float_to_observed_mapping: dict[QuantType, ClassMap] = {}
        self.non_traceable_module_names: list[str] = []
        self.non_traceable_module_classes: list[type] = []
        self.input_quantized_indexes: list[int] = []
        self.output_quantized_indexes: list[int] = []
        self.preserved_attributes: list[str] = []

    def set_standalone_module_name(
        self,
        module_name: str,
        qconfig_mapping: QConfigMapping | None,
        example_inputs: tuple[Any, ...],
        prepare_custom_config: PrepareCustomConfig | None = None,
        backend_config: BackendConfig | None = None,
    ) -> PrepareCustomConfig:
        """Prepare the module at this path on its own. None: as its parent.

        >>> config = PrepareCustomConfig().set_standalone_module_name("block", None, ())
        >>> list(config.standalone_module_names)
        ['block']
        """
        self.standalone_module_names[module_name] = StandaloneModuleConfigEntry(
            qconfig_mapping, example_inputs, prepare_custom_config, backend_config
        )
        return self

    def set_standalone_module_class(
        self,
        module_class: type,
        qconfig_mapping: QConfigMapping | None,
        example_inputs: tuple[Any, ...],
        prepare_custom_config: PrepareCustomConfig | None = None,
        backend_config: BackendConfig | None = None,
    ) -> PrepareCustomConfig:
        """Prepare every module of this class on its own. None: as its parent.

        >>> import torch
        >>> config = PrepareCustomConfig().set_standalone_module_class(torch.nn.Linear, None, ())
        >>> [cls.__name__ for cls in config.standalone_module_classes]
        ['Linear']
        """
        self.standalone_module_classes[module_class] = StandaloneModuleConfigEntry(
            qconfig_mapping, example_inputs, prepare_custom_config, backend_config
        )
        return self

    def set_float_to_observed_mapping(
        self,
        float_class: type,
        observed_class: type,
        quant_type: QuantType = QuantType.STATIC,
    ) -> PrepareCustomConfig:
        """Replace modules of ``float_class`` by ``observed_class.from_float(module)``.

        Only modules whose QConfig is of the kind ``quant_type`` are replaced. Static modules are
        observed like operators; dynamic and weight-only ones take and return floats and quantize
        internally (PyTorch has static ones only).

        As in PyTorch, an ``observed_class`` without ``from_float`` is an error only when a module is
        replaced.

        Raises ConfigError for ``QuantType.QAT``: modules are observed for training as for static
        quantization.

        >>> import torch
        >>> class Observed(torch.nn.Linear):
        ...     @classmethod
        ...     def from_float(cls, module): return cls(module.in_features, module.out_features)
        >>> config = PrepareCustomConfig().set_float_to_observed_mapping(torch.nn.Linear, Observed)
        >>> list(config.float_to_observed_mapping)
        [<QuantType.STATIC: 1>]
        """
        where = "PrepareCustomConfig.set_float_to_observed_mapping"
        if quant_type == QuantType.QAT:
            raise ConfigError(
                "observed custom modules are static, dynamic or weight-only: training is static",
                where=where,
                fix="quant_type=QuantType.STATIC",
            )
        mapping = self.float_to_observed_mapping.setdefault(QuantType(quant_type), {})
        mapping[float_class] = observed_class
        return self

    def set_non_traceable_module_names(self, module_names: list[str]) -> PrepareCustomConfig:
        """Keep the modules at these paths whole.

        >>> PrepareCustomConfig().set_non_traceable_module_names(["a"]).non_traceable_module_names
        ['a']
        """
        check_list(module_names, str, "PrepareCustomConfig.set_non_traceable_module_names")
        self.non_traceable_module_names = module_names
        return self

    def set_non_traceable_module_classes(self, module_classes: list[type]) -> PrepareCustomConfig:
        """Keep modules of these classes whole.

        >>> import torch
        >>> custom = PrepareCustomConfig().set_non_traceable_module_classes([torch.nn.LSTM])
        >>> custom.non_traceable_module_classes
        [<class 'torch.nn.modules.rnn.LSTM'>]
        """
        check_list(module_classes, type, "PrepareCustomConfig.set_non_traceable_module_classes")
        self.non_traceable_module_classes = module_classes
        return self

    def set_input_quantized_indexes(self, indexes: list[int]) -> PrepareCustomConfig:
        """The model's inputs at these positions arrive quantized; the others in float.

        >>> PrepareCustomConfig().set_input_quantized_indexes([1]).input_quantized_indexes
        [1]
        """
        check_list(indexes, int, "PrepareCustomConfig.set_input_quantized_indexes")
        self.input_quantized_indexes = indexes
        return self

    def set_output_quantized_indexes(self, indexes: list[int]) -> PrepareCustomConfig:
        """The model's outputs at these positions stay quantized; the others become float.

        >>> PrepareCustomConfig().set_output_quantized_indexes([0]).output_quantized_indexes
        [0]
        """
        check_list(indexes, int, "PrepareCustomConfig.set_output_quantized_indexes")
        self.output_quantized_indexes = indexes
        return self

    def set_preserved_attributes(self, attributes: list[str]) -> PrepareCustomConfig:
        """Keep these attributes of the model on the graph module.

        >>> PrepareCustomConfig().set_preserved_attributes(["tag"]).preserved_attributes
        ['tag']
        """
        check_list(attributes, str, "PrepareCustomConfig.set_preserved_attributes")
        self.preserved_attributes = attributes
        return self

    @classmethod
    def from_dict(cls, prepare_custom_config_dict: Mapping[str, Any]) -> PrepareCustomConfig:
        """From a dict as ``to_dict`` writes it; all keys are optional.

        Raises ConfigError for an unknown key or a malformed value.

        >>> PrepareCustomConfig.from_dict({"input_quantized_idxs": [0]}).input_quantized_indexes
        [0]
        """
        given = prepare_custom_config_dict
        cls.check_keys(given)
        config = cls()
        for key, setter in (
            ("standalone_module_name", config.set_standalone_module_name),
            ("standalone_module_class", config.set_standalone_module_class),
        ):
            seen: list[Any] = []
            for module, mapping, inputs, custom, backend in given.get(key, ()):
                if module in seen:
                    raise ConfigError(
                        f"{module!r} has two entries",
                        where=f"PrepareCustomConfig.from_dict, key {key!r}",
                        fix="leave one of them out",
                    )
                seen.append(module)
                setter(
                    module,
                    _converted(mapping, QConfigMapping, key),
                    inputs,
                    _converted(custom, PrepareCustomConfig, key),
                    _converted(backend, BackendConfig, key),
                )
        for kind, classes in given.get("float_to_observed_custom_module_class", {}).items():
            for float_class, observed_class in classes.items():
                config.set_float_to_observed_mapping(
                    float_class, observed_class, quant_type_from_str(kind)
                )
        config.set_non_traceable_module_names(given.get("non_traceable_module_name", []))
        config.set_non_traceable_module_classes(given.get("non_traceable_module_class", []))
        config.set_input_quantized_indexes(given.get("input_quantized_idxs", []))
        config.set_output_quantized_indexes(given.get("output_quantized_idxs", []))
        return config.set_preserved_attributes(given.get("preserved_attributes", []))

    def to_dict(self) -> dict[str, Any]:
        """What is set, under PyTorch's keys; nested configs as dicts, backends as they are.

        >>> PrepareCustomConfig().set_preserved_attributes(["tag"]).to_dict()
        {'preserved_attributes': ['tag']}
        """
        values = {
            "standalone_module_name": _standalone(self.standalone_module_names),
            "standalone_module_class": _standalone(self.standalone_module_classes),
            "float_to_observed_custom_module_class": by_name(self.float_to_observed_mapping),
            "non_traceable_module_name": self.non_traceable_module_names,
            "non_traceable_module_class": self.non_traceable_module_classes,
            "input_quantized_idxs": self.input_quantized_indexes,
            "output_quantized_idxs": self.output_quantized_indexes,
            "preserved_attributes": self.preserved_attributes,
        }
        return {key: value for key, value in values.items() if value}


def _standalone(entries: Mapping[Any, StandaloneModuleConfigEntry]) -> list[tuple[Any, ...]]:
    return [
        (
            module,
            e.qconfig_mapping.to_dict() if e.qconfig_mapping is not None else None,
            e.example_inputs,
            e.prepare_custom_config.to_dict() if e.prepare_custom_config is not None else None,
            e.backend_config,
        )
        for module, e in entries.items()
    ]


def _converted(value: Any, cls: type[T], key: str) -> T | None:
    if value is None or isinstance(value, cls):
        return value
    if isinstance(value, Mapping):
        converted: T = cls.from_dict(value)  # type: ignore[attr-defined]
        return converted
    raise ConfigError(
        f"expected a {cls.__name__}, a dict or None, got {value!r}",
        where=f"PrepareCustomConfig.from_dict, key {key!r}",
        fix=f"{cls.__name__}.from_dict({{...}})",
    )
