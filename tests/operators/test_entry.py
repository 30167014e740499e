from __future__ import annotations

import torch
from torch import nn

from backquant.backend_config import BackendPatternConfig, DTypeConfig, ObservationType
from backquant.operators import (
    conv,
    conv_add,
    elementwise,
    embedding,
    fixed_qparams,
    linear,
    norm,
    pooling,
    recurrent,
    shape,
)
from backquant.operators import equivalents as catalog
from backquant.operators.entry import admit, functional, fusion, observed, sharing, swapped

INT8 = DTypeConfig(torch.quint8, torch.quint8, torch.qint8, torch.float)
EVERY_FAMILY = (
    conv.entries,
    conv.aten_entries,
    conv_add.entries,
    linear.entries,
    linear.addmm_entries,
    linear.aten_entries,
    linear.leaky_relu_entries,
    linear.tanh_entries,
    norm.batch_norm_entries,
    norm.layer_norm_entries,
    elementwise.binary_entries,
    elementwise.matmul_entries,
    elementwise.aten_entries,
    fixed_qparams.entries,
    pooling.aten_entries,
    shape.cat_entries,
    shape.tensor_info_entries,
    recurrent.entries,
    embedding.entries,
    embedding.functional_entries,
    catalog.observed_entries,
    catalog.sharing_qparams_entries,
)


def test_admit_gives_each_entry_a_list_of_its_own() -> None:
    dtype_configs = [INT8]
    one, two = admit([observed(nn.ELU), observed(nn.Hardswish)], dtype_configs)
    one.add_dtype_config(DTypeConfig())
    assert two.dtype_configs == dtype_configs == [INT8]


def test_entries_of_every_family_are_fresh_and_admitted() -> None:
    for entries in EVERY_FAMILY:
        first, second = entries([INT8]), entries([INT8])
        assert first == second
        for a, b in zip(first, second, strict=True):
            assert a is not b
            assert a.dtype_configs is not b.dtype_configs
            assert len(a.dtype_configs) == 1


def test_by_tensor_arguments_does_not_share_its_mapping() -> None:
    one = elementwise.by_tensor_arguments(torch.add)
    one._num_tensor_args_to_observation_type[1] = ObservationType.INPUT_OUTPUT_NOT_OBSERVED
    two = elementwise.by_tensor_arguments(torch.add)
    assert (
        two._num_tensor_args_to_observation_type[1]
        is ObservationType.OUTPUT_USE_DIFFERENT_OBSERVER_AS_INPUT
    )


def test_kinds_of_entry() -> None:
    share = ObservationType.OUTPUT_SHARE_OBSERVER_WITH_INPUT
    assert observed(nn.ELU) == BackendPatternConfig(nn.ELU)
    assert sharing("view") == BackendPatternConfig("view").set_observation_type(share)
    assert functional(torch.mm, weight=1)._input_type_to_index == {"weight": 1}
    root = swapped(nn.Linear, nn.Linear, nn.Identity)
    assert (root.root_module, root.reference_quantized_module) == (nn.Linear, nn.Identity)
    fused = fusion((nn.Linear, nn.ReLU), nn.Sequential, lambda is_qat, a, b: nn.Sequential(a, b))
    assert fused.fused_module is nn.Sequential
    assert fused.fuser_method is not None


def test_backends_share_no_dtype_config() -> None:
    """A DTypeConfig can be changed; changing one entry's must not change another's."""
    from backquant.backends.x86 import backend_config

    one, two = backend_config(), backend_config()
    ids = [id(d) for config in (one, two) for entry in config.configs for d in entry.dtype_configs]
    assert len(ids) == len(set(ids))
    one.configs[0].dtype_configs[0].input_dtype_with_constraints.quant_max_upper_bound = 1
    assert one != two and two == backend_config()
