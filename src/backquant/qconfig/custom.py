"""What preparation, conversion and fusion treat specially, as configs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from typing_extensions import Self

from backquant.backend_config import BackendConfig
from backquant.errors import ConfigError, did_you_mean
from backquant.qconfig.mapping import QConfigMapping
from backquant.qconfig.qconfig import QuantType, quant_type_from_str

ClassMap = dict[type, type]


class CustomConfig:
    """Base of custom configs: equality, repr and the form as a dict, by the fields.

    ``_FIELDS``: by PyTorch's key the attribute, and what it holds: a list of texts, classes or positions;
    for ``QuantType`` classes by the kind of quantization; for ``StandaloneModuleConfigEntry`` one by module.

    >>> FuseCustomConfig() == FuseCustomConfig()
    True
    """

    _FIELDS: ClassVar[Mapping[str, tuple[str, type]]] = {
        "preserved_attributes": ("preserved_attributes", str)
    }

    preserved_attributes: list[str]

    def __init__(self) -> None:
        for attribute, kind in self._FIELDS.values():
            setattr(self, attribute, [] if kind in _EXAMPLES else {})

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if value)
        return f"{type(self).__name__}({inside})"

    def set_preserved_attributes(self, attributes: list[str]) -> Self:
        """Keep these attributes of the model on the graph module.

        >>> FuseCustomConfig().set_preserved_attributes(["tag"]).preserved_attributes
        ['tag']
        """
        return self._set_list("preserved_attributes", attributes, str)

    def _set_list(self, attribute: str, values: Any, kind: type) -> Self:
        """Raises ConfigError unless ``values`` is a list or tuple of this kind (numbers: from 0)."""
        if not isinstance(values, (list, tuple)) or not all(_is(value, kind) for value in values):
            raise ConfigError(
                f"expected a list such as {_EXAMPLES[kind]}, got {values!r}",
                where=f"{type(self).__name__}.set_{attribute}",
                fix=_EXAMPLES[kind],
            )
        setattr(self, attribute, values)
        return self

    @classmethod
    def _read(cls, given: Mapping[str, Any]) -> Self:
        for key in given:
            if key not in cls._FIELDS:
                keys = list(cls._FIELDS)
                raise ConfigError(
                    f"{cls.__name__} has no key {key!r}",
                    where=f"{cls.__name__}.from_dict",
                    fix=did_you_mean(key, keys, f"use {', '.join(map(repr, keys))}"),
                )
        config = cls()
        for key, (attribute, kind) in cls._FIELDS.items():
            if kind in _EXAMPLES:
                config._set_list(attribute, given.get(key, []), kind)
            elif kind is QuantType:
                setter = getattr(config, f"set_{attribute}")
                for name, classes in given.get(key, {}).items():
                    for one, other in classes.items():
                        setter(one, other, quant_type_from_str(name))
        return config

    def to_dict(self) -> dict[str, Any]:
        """What is set, under PyTorch's keys; nested configs as dicts, backends as they are.

        >>> PrepareCustomConfig().set_preserved_attributes(["tag"]).to_dict()
        {'preserved_attributes': ['tag']}
        """
        found: dict[str, Any] = {}
        for key, (attribute, kind) in self._FIELDS.items():
            value = getattr(self, attribute)
            if kind is QuantType:
                value = {of.key: classes for of, classes in value.items()}
            elif kind is StandaloneModuleConfigEntry:
                value = _standalone(value)
            if value:
                found[key] = value
        return found


#: Of the lists that there are.
_EXAMPLES = {str: '["encoder.layer1"]', type: "[torch.nn.LSTM]", int: "[0]"}


class ConvertCustomConfig(CustomConfig):
    """What ``convert_fx`` treats specially: custom modules, attributes to keep. Setters return the config.

    >>> ConvertCustomConfig().set_preserved_attributes(["tag"])
    ConvertCustomConfig(preserved_attributes=['tag'])
    """

    _FIELDS: ClassVar = {
        "observed_to_quantized_custom_module_class": ("observed_to_quantized_mapping", QuantType),
        **CustomConfig._FIELDS,
    }

    observed_to_quantized_mapping: dict[QuantType, ClassMap]

    def set_observed_to_quantized_mapping(
        self,
        observed_class: type,
        quantized_class: type,
        quant_type: QuantType = QuantType.STATIC,
    ) -> ConvertCustomConfig:
        """Replace modules of ``observed_class`` by ``quantized_class.from_observed(module)``.

        As in PyTorch, a ``quantized_class`` without ``from_observed`` is an error only when a module is
        replaced.

        >>> class Quantized:
        ...     @classmethod
        ...     def from_observed(cls, module): return cls()
        >>> config = ConvertCustomConfig().set_observed_to_quantized_mapping(object, Quantized)
        >>> config.to_dict()["observed_to_quantized_custom_module_class"].keys()
        dict_keys(['static'])
        """
        mapping = self.observed_to_quantized_mapping.setdefault(QuantType(quant_type), {})
        mapping[observed_class] = quantized_class
        return self

    @classmethod
    def from_dict(cls, convert_custom_config_dict: Mapping[str, Any]) -> ConvertCustomConfig:
        """From a dict as ``to_dict`` writes it; all keys are optional.

        Raises ConfigError for an unknown key or kind of quantization.

        >>> ConvertCustomConfig.from_dict({"preserved_attributes": ["tag"]}).preserved_attributes
        ['tag']
        """
        return cls._read(convert_custom_config_dict)


class FuseCustomConfig(CustomConfig):
    """What ``fuse_fx`` treats specially: attributes to keep.

    >>> FuseCustomConfig().set_preserved_attributes(["tag"]).to_dict()
    {'preserved_attributes': ['tag']}
    """

    @classmethod
    def from_dict(cls, fuse_custom_config_dict: Mapping[str, Any]) -> FuseCustomConfig:
        """From a dict as ``to_dict`` writes it. Raises ConfigError for an unknown key.

        >>> FuseCustomConfig.from_dict({"preserved_attributes": ["tag"]}).preserved_attributes
        ['tag']
        """
        return cls._read(fuse_custom_config_dict)


def _is(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, kind)


# PrepareCustomConfig: what is treated specially when a model is prepared.

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

    _FIELDS: ClassVar = {
        "standalone_module_name": ("standalone_module_names", StandaloneModuleConfigEntry),
        "standalone_module_class": ("standalone_module_classes", StandaloneModuleConfigEntry),
        "float_to_observed_custom_module_class": ("float_to_observed_mapping", QuantType),
        "non_traceable_module_name": ("non_traceable_module_names", str),
        "non_traceable_module_class": ("non_traceable_module_classes", type),
        "input_quantized_idxs": ("input_quantized_indexes", int),
        "output_quantized_idxs": ("output_quantized_indexes", int),
        **CustomConfig._FIELDS,
    }

    standalone_module_names: dict[str, StandaloneModuleConfigEntry]
    standalone_module_classes: dict[type, StandaloneModuleConfigEntry]
    float_to_observed_mapping: dict[QuantType, ClassMap]
    non_traceable_module_names: list[str]
    non_traceable_module_classes: list[type]
    input_quantized_indexes: list[int]
    output_quantized_indexes: list[int]

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
        return self._set_list("non_traceable_module_names", module_names, str)

    def set_non_traceable_module_classes(self, module_classes: list[type]) -> PrepareCustomConfig:
        """Keep modules of these classes whole.

        >>> import torch
        >>> custom = PrepareCustomConfig().set_non_traceable_module_classes([torch.nn.LSTM])
        >>> custom.non_traceable_module_classes
        [<class 'torch.nn.modules.rnn.LSTM'>]
        """
        return self._set_list("non_traceable_module_classes", module_classes, type)

    def set_input_quantized_indexes(self, indexes: list[int]) -> PrepareCustomConfig:
        """The model's inputs at these positions arrive quantized; the others in float.

        >>> PrepareCustomConfig().set_input_quantized_indexes([1]).input_quantized_indexes
        [1]
        """
        return self._set_list("input_quantized_indexes", indexes, int)

    def set_output_quantized_indexes(self, indexes: list[int]) -> PrepareCustomConfig:
        """The model's outputs at these positions stay quantized; the others become float.

        >>> PrepareCustomConfig().set_output_quantized_indexes([0]).output_quantized_indexes
        [0]
        """
        return self._set_list("output_quantized_indexes", indexes, int)

    @classmethod
    def from_dict(cls, prepare_custom_config_dict: Mapping[str, Any]) -> PrepareCustomConfig:
        """From a dict as ``to_dict`` writes it; all keys are optional.

        Raises ConfigError for an unknown key or a malformed value.

        >>> PrepareCustomConfig.from_dict({"input_quantized_idxs": [0]}).input_quantized_indexes
        [0]
        """
        given, config = prepare_custom_config_dict, cls._read(prepare_custom_config_dict)
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
        return config


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
