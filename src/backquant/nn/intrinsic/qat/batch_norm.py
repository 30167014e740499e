"""Training a convolution or linear together with its batch norm, weight fake-quantized as folded.

After training the batch norm is folded, so the weight to fake-quantize is the folded one. The output
is scaled back before the batch norm sees it, which then uses the batch's own statistics
(Krishnamoorthi, arXiv:1806.08342, section 3.2.2; PyTorch's default path, one convolution only):

1. ``factor = gamma / sqrt(running_var + eps)``; gamma is 1 where there is none (``affine=False``)
2. ``y = root(x, fake_quantize(weight * factor)) / factor + bias``
3. output ``bn(y)``

Where gamma is zero the factor is taken as one: residual networks start with such gammas, and
dividing by zero makes PyTorch's modules return NaN there.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import init
from torch.nn.modules.batchnorm import _NormBase

from backquant.nn.intrinsic.fold import folded_weight_and_bias, shallow_copy
from backquant.nn.intrinsic.fused import FusedModule
from backquant.nn.intrinsic.rank import require_trainable
from backquant.nn.qat.weight_fake_quantizer import QATModule
from backquant.uncompiled import uncompiled


class BatchNormAfter(FusedModule, QATModule):
    """Comes before ``nn.ConvNd`` or ``nn.Linear`` in the bases of a class.

    ``freeze_bn`` is true while the batch norm uses its running statistics in training mode too.
    """

    bn: _NormBase
    freeze_bn: bool

    def _attach_bn(self, bn: _NormBase, qconfig: Any) -> None:
        """Take the batch norm, and a fake-quantizer of the weight; called by constructors."""
        self.bn = bn
        self._attach(qconfig, "intrinsic.qat")
        self.freeze_bn = False

    def _take(self, float_module: nn.Module) -> None:
        assert isinstance(float_module, nn.Sequential)
        bn = float_module[1]
        assert isinstance(bn, _NormBase)
        require_trainable(bn, self.bn.num_features)
        self.bn = shallow_copy(bn)

    def _root(self, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """The operator without bias."""
        raise NotImplementedError

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """As the float root followed by its batch norm."""
        factor = _factor(self.bn)
        spatial = [1] * (self.weight.dim() - 2)
        weight = self.weight_fake_quant(self.weight * factor.reshape(-1, 1, *spatial))
        output = self._root(input, weight) / factor.reshape(1, -1, *spatial)
        if isinstance(self.bias, torch.Tensor):
            output = output + self.bias.reshape(1, -1, *spatial)
        normalized: torch.Tensor = self.bn(output)
        return normalized

    def train(self, mode: bool = True) -> BatchNormAfter:
        """As ``nn.Module.train``; a frozen batch norm stays in eval mode."""
        super().train(mode)
        if self.freeze_bn:
            self.bn.eval()
        return self

    def freeze_bn_stats(self) -> BatchNormAfter:
        """Use the running statistics from now on, and do not update them."""
        self.freeze_bn = True
        self.bn.training = False
        return self

    def update_bn_stats(self) -> BatchNormAfter:
        """Use each batch's own statistics again, and track them."""
        self.freeze_bn = False
        self.bn.training = True
        return self

    def reset_running_stats(self) -> None:
        """Mean 0 and variance 1."""
        self.bn.reset_running_stats()

    def reset_bn_parameters(self) -> None:
        """Statistics to 0 and 1, gamma uniform in [0, 1), beta 0, where there are any."""
        self.bn.reset_running_stats()
        if self.bn.affine:
            init.uniform_(self.bn.weight)
            init.zeros_(self.bn.bias)

    def _fold_into(self, root: nn.Module) -> nn.Module:
        """Give the float ``root`` the weight and bias with the batch norm folded in."""
        bias = self.bias if isinstance(self.bias, torch.Tensor) else None
        weight, bias = folded_weight_and_bias(root, self.bn, self.weight, bias)
        root.register_parameter("weight", nn.Parameter(weight))
        root.register_parameter("bias", nn.Parameter(bias))
        return root.train(self.training)


def _compilable_factor(bn: _NormBase) -> torch.Tensor:
    assert bn.running_var is not None
    factor = (1.0 if bn.weight is None else bn.weight) / torch.sqrt(bn.running_var + bn.eps)
    return torch.where(factor == 0, 1.0, factor)


# Step 1. Compiled, alone or with the batch norm, it would be computed again in backward, from statistics
# that have changed by then, which autograd refuses.
_factor: Callable[[_NormBase], torch.Tensor] = uncompiled(_compilable_factor)


def freeze_bn_stats(mod: nn.Module) -> None:
    """Freeze ``mod`` if it trains with a batch norm; for ``model.apply(freeze_bn_stats)``.

    PyTorch's function of this name passes over ``LinearBn1d``; this one does not.

    >>> from backquant.nn.intrinsic.qat import ConvBn2d
    >>> from backquant.qconfig import default_qat_qconfig
    >>> trained = ConvBn2d(1, 1, 1, qconfig=default_qat_qconfig)
    >>> freeze_bn_stats(trained)
    >>> trained.bn.training
    False
    """
    if isinstance(mod, BatchNormAfter):
        mod.freeze_bn_stats()


def update_bn_stats(mod: nn.Module) -> None:
    """Undo ``freeze_bn_stats``; for ``model.apply(update_bn_stats)``."""
    if isinstance(mod, BatchNormAfter):
        mod.update_bn_stats()
