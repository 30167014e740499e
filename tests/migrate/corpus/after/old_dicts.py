"""PyTorch 1.9 to 1.12: dicts everywhere, some of them in variables."""
import torch
import torch.nn as nn
from backquant import get_default_qconfig, default_per_channel_qconfig
from backquant import (
    prepare_fx,
    convert_fx,
    fuse_fx,
    convert_to_reference_fx,
    QConfigMapping,
    PrepareCustomConfig,
    FuseCustomConfig,
)
from backquant import get_default_qconfig_mapping


def quantize_all(model, x):
    # everything but the head
    qconfig_dict = (
        QConfigMapping()
        .set_global(get_default_qconfig("fbgemm"))
        .set_module_name("head", None)
    )
    prepared = prepare_fx(model, qconfig_dict, x)
    prepared(x)
    return convert_fx(prepared)


def quantize_some(model, x, names):
    qconfig_dict = {"": None}
    qconfig_dict["module_name"] = [(name, default_per_channel_qconfig) for name in names]
    prepared = prepare_fx(model, QConfigMapping.from_dict(qconfig_dict), x)
    return convert_to_reference_fx(prepared)


def quantize_inline(model, x):
    prepared = prepare_fx(
        model,
        QConfigMapping()
        .set_object_type(nn.Conv2d, default_per_channel_qconfig)
        .set_object_type(torch.nn.functional.conv2d, default_per_channel_qconfig)
        .set_object_type("reshape", None)
        .set_module_name_regex(r"blocks\.[0-9]+\.conv", None)
        .set_module_name_object_type_order("head", nn.functional.linear, 0, None),
        x,
        prepare_custom_config=PrepareCustomConfig()
            .set_non_traceable_module_names(["head.loop"])
            .set_preserved_attributes(["classes"]),
    )
    return convert_fx(prepared, _remove_qconfig=False)


def quantize_commented(model, x):
    qconfig_dict = {
        # int8 for all,
        "": get_default_qconfig("fbgemm"),
        # and float for softmax
        "object_type": [(nn.Softmax, None)],
    }
    return convert_fx(prepare_fx(model, QConfigMapping.from_dict(qconfig_dict), x))


def quantize_default(model, x):
    return convert_fx(prepare_fx(model, get_default_qconfig_mapping("fbgemm"), x))


def quantize_changed(model, x):
    config = get_default_qconfig_mapping("fbgemm").to_dict()
    config["object_type"].append((nn.Softmax, None))
    return convert_fx(prepare_fx(model, QConfigMapping.from_dict(config), x))


def quantize_given(model, x, qconfig_dict, backend_dict):
    prepared = prepare_fx(model, qconfig_mapping=qconfig_dict, example_inputs=x)
    return convert_fx(prepared)


def fuse_only(model):
    return fuse_fx(model, fuse_custom_config=FuseCustomConfig().set_preserved_attributes(["classes"]))
