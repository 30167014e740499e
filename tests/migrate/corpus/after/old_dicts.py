"""PyTorch 1.9 to 1.12: dicts everywhere, some of them in variables."""
import torch
import torch.nn as nn
from backquant.ao.quantization import get_default_qconfig, default_per_channel_qconfig
from backquant.ao.quantization.quantize_fx import prepare_fx, convert_fx, fuse_fx
from backquant.ao.quantization import get_default_qconfig_dict


def quantize_all(model, x):
    # everything but the head
    qconfig_dict = {"": get_default_qconfig("fbgemm"), "module_name": [("head", None)]}
    prepared = prepare_fx(model, qconfig_dict, x)
    prepared(x)
    return convert_fx(prepared)


def quantize_some(model, x, names):
    qconfig_dict = {"": None}
    qconfig_dict["module_name"] = [(name, default_per_channel_qconfig) for name in names]
    prepared = prepare_fx(model, qconfig_dict, x)
    return convert_fx(prepared, is_reference=True)


def quantize_inline(model, x):
    prepared = prepare_fx(
        model,
        {
            "object_type": [
                (nn.Conv2d, default_per_channel_qconfig),
                (torch.nn.functional.conv2d, default_per_channel_qconfig),
                ("reshape", None),
            ],
            "module_name_regex": [(r"blocks\.[0-9]+\.conv", None)],
            "module_name_object_type_order": [("head", nn.functional.linear, 0, None)],
        },
        x,
        prepare_custom_config_dict={
            "non_traceable_module_name": ["head.loop"],
            "preserved_attributes": ["classes"],
        },
    )
    return convert_fx(prepared, _remove_qconfig=False)


def quantize_commented(model, x):
    qconfig_dict = {
        # int8 for all,
        "": get_default_qconfig("fbgemm"),
        # and float for softmax
        "object_type": [(nn.Softmax, None)],
    }
    return convert_fx(prepare_fx(model, qconfig_dict, x))


def quantize_default(model, x):
    return convert_fx(prepare_fx(model, get_default_qconfig_dict("fbgemm"), x))


def quantize_changed(model, x):
    config = get_default_qconfig_dict("fbgemm")
    config["object_type"].append((nn.Softmax, None))
    return convert_fx(prepare_fx(model, config, x))


def quantize_given(model, x, qconfig_dict, backend_dict):
    prepared = prepare_fx(model, qconfig_dict=qconfig_dict, example_inputs=x)
    return convert_fx(prepared)


def fuse_only(model):
    return fuse_fx(model, fuse_custom_config_dict={"preserved_attributes": ["classes"]})
