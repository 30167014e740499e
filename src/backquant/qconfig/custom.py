"""ConvertCustomConfig and FuseCustomConfig: what conversion and fusion treat specially."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from backquant.errors import ConfigError, did_you_mean
from backquant.qconfig.quant_type import QuantType, quant_type_from_str

ClassMap = dict[type, type]


class CustomConfig:
    """Base of custom configs: equality and repr by the fields that are set.

    >>> FuseCustomConfig() == FuseCustomConfig()
    True
    """

    _KEYS: ClassVar[tuple[str, ...]] = ()

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and other.__dict__ == self.__dict__

    __hash__ = None  # type: ignore[assignment]  # mutable

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in self.__dict__.items() if value)
        return f"{type(self).__name__}({inside})"

    @classmethod
    def check_keys(cls, values: Mapping[str, Any]) -> None:
        """Raise ConfigError for a key that ``to_dict`` does not write."""
        for key in values:
            if key not in cls._KEYS:
                raise ConfigError(
                    f"{cls.__name__} has no key {key!r}",
                    where=f"{cls.__name__}.from_dict",
                    fix=did_you_mean(key, cls._KEYS, f"use {', '.join(map(repr, cls._KEYS))}"),
                )


class ConvertCustomConfig(CustomConfig):
    """What ``convert_fx`` treats specially: custom modules, attributes to keep. Setters return the config.

    >>> ConvertCustomConfig().set_preserved_attributes(["tag"])
    ConvertCustomConfig(preserved_attributes=['tag'])
    """

    _KEYS = ("observed_to_quantized_custom_module_class", "preserved_attributes")

    def __init__(self) -> None:
        self.observed_to_quantized_mapping: dict[QuantType, ClassMap] = {}
        self.preserved_attributes: list[str] = []

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

    def set_preserved_attributes(self, attributes: list[str]) -> ConvertCustomConfig:
        """Keep these attributes of the model on the graph module.

        >>> ConvertCustomConfig().set_preserved_attributes(["tag"]).preserved_attributes
        ['tag']
        """
        check_list(attributes, str, "ConvertCustomConfig.set_preserved_attributes")
        self.preserved_attributes = attributes
        return self

    @classmethod
    def from_dict(cls, convert_custom_config_dict: Mapping[str, Any]) -> ConvertCustomConfig:
        """From a dict as ``to_dict`` writes it; all keys are optional.

        Raises ConfigError for an unknown key or kind of quantization.

        >>> ConvertCustomConfig.from_dict({"preserved_attributes": ["tag"]}).preserved_attributes
        ['tag']
        """
        given = convert_custom_config_dict
        cls.check_keys(given)
        config = cls()
        for kind, classes in given.get("observed_to_quantized_custom_module_class", {}).items():
            for observed_class, quantized_class in classes.items():
                config.set_observed_to_quantized_mapping(
                    observed_class, quantized_class, quant_type_from_str(kind)
                )
        return config.set_preserved_attributes(given.get("preserved_attributes", []))

    def to_dict(self) -> dict[str, Any]:
        """What is set, under PyTorch's keys.

        >>> ConvertCustomConfig().set_preserved_attributes(["tag"]).to_dict()
        {'preserved_attributes': ['tag']}
        """
        values = {
            "observed_to_quantized_custom_module_class": by_name(
                self.observed_to_quantized_mapping
            ),
            "preserved_attributes": self.preserved_attributes,
        }
        return {key: value for key, value in values.items() if value}


class FuseCustomConfig(CustomConfig):
    """What ``fuse_fx`` treats specially: attributes to keep.

    >>> FuseCustomConfig().set_preserved_attributes(["tag"]).to_dict()
    {'preserved_attributes': ['tag']}
    """

    _KEYS = ("preserved_attributes",)

    def __init__(self) -> None:
        self.preserved_attributes: list[str] = []

    def set_preserved_attributes(self, attributes: list[str]) -> FuseCustomConfig:
        """Keep these attributes of the model on the graph module.

        >>> FuseCustomConfig().set_preserved_attributes(["tag"]).preserved_attributes
        ['tag']
        """
        check_list(attributes, str, "FuseCustomConfig.set_preserved_attributes")
        self.preserved_attributes = attributes
        return self

    @classmethod
    def from_dict(cls, fuse_custom_config_dict: Mapping[str, Any]) -> FuseCustomConfig:
        """From a dict as ``to_dict`` writes it. Raises ConfigError for an unknown key.

        >>> FuseCustomConfig.from_dict({"preserved_attributes": ["tag"]}).preserved_attributes
        ['tag']
        """
        cls.check_keys(fuse_custom_config_dict)
        attributes = fuse_custom_config_dict.get("preserved_attributes", [])
        return cls().set_preserved_attributes(attributes)

    def to_dict(self) -> dict[str, Any]:
        """What is set, under PyTorch's key.

        >>> FuseCustomConfig().set_preserved_attributes(["tag"]).to_dict()
        {'preserved_attributes': ['tag']}
        """
        attributes = self.preserved_attributes
        return {"preserved_attributes": attributes} if attributes else {}


def check_list(values: Any, kind: type, where: str) -> None:
    """Raise ConfigError unless ``values`` is a list or tuple of this kind (numbers: from 0)."""
    if isinstance(values, (list, tuple)) and all(_is(value, kind) for value in values):
        return
    example = {str: '["encoder.layer1"]', type: "[torch.nn.LSTM]", int: "[0]"}[kind]
    raise ConfigError(
        f"expected a list such as {example}, got {values!r}", where=where, fix=example
    )


def _is(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool) and value >= 0
    return isinstance(value, kind)


def by_name(mapping: Mapping[QuantType, ClassMap]) -> dict[str, ClassMap]:
    """The mapping with the kinds of quantization as strings.

    >>> by_name({QuantType.STATIC: {}})
    {'static': {}}
    """
    return {kind.key: classes for kind, classes in mapping.items()}
