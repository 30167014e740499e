"""``nn.SyncBatchNorm``, which no description lists: fused and quantized as the batch norm it is.

Behind a convolution or linear layer its dimension is known. There it is replaced by a plain batch
norm of the same tensors, so that patterns match it. For training it is put back afterwards, wherever
it then stands: in a QAT module, too. *Different:* PyTorch matches classes only, and leaves such
models unfused; their batch norms stay in float.
"""

from __future__ import annotations

from torch import fx, nn
from torch.nn.modules.batchnorm import _BatchNorm

from backquant.graph import GraphIndex, set_module

_AFTER: dict[type[nn.Module], type[_BatchNorm]] = {
    nn.Linear: nn.BatchNorm1d,
    nn.Conv1d: nn.BatchNorm1d,
    nn.Conv2d: nn.BatchNorm2d,
    nn.Conv3d: nn.BatchNorm3d,
    nn.ConvTranspose1d: nn.BatchNorm1d,
    nn.ConvTranspose2d: nn.BatchNorm2d,
    nn.ConvTranspose3d: nn.BatchNorm3d,
}


def as_plain(sync: nn.SyncBatchNorm, kind: type[_BatchNorm]) -> _BatchNorm:
    """A batch norm of class ``kind`` with the tensors and settings of ``sync``.

    >>> sync = nn.SyncBatchNorm(2, eps=0.1).eval()
    >>> plain = as_plain(sync, nn.BatchNorm2d)
    >>> plain.running_mean is sync.running_mean, plain.eps, plain.training
    (True, 0.1, False)
    """
    plain = kind(sync.num_features, sync.eps, sync.momentum, device="meta")
    plain.affine, plain.track_running_stats = sync.affine, sync.track_running_stats
    plain._parameters = dict(sync._parameters)
    plain._buffers = dict(sync._buffers)
    return plain.train(sync.training)


def without_sync(module: fx.GraphModule) -> dict[nn.Module, nn.SyncBatchNorm]:
    """Replace what can be replaced in a captured graph; returns what each new module stands for.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)))
    >>> _ = without_sync(gm)
    >>> type(gm.get_submodule("1")).__name__
    'BatchNorm2d'
    """
    graph = GraphIndex(module)
    made: dict[nn.Module, nn.SyncBatchNorm] = {}
    for path, nodes in graph.callers.items():
        sync = graph.modules[path]
        if type(sync) is not nn.SyncBatchNorm:
            continue
        kinds = {_kind(node, graph) for node in nodes}
        kind = kinds.pop()
        if kind is not None and not kinds:
            plain = as_plain(sync, kind)
            made[plain] = sync
            set_module(module, path, plain)
    return made


def _kind(node: fx.Node, graph: GraphIndex) -> type[_BatchNorm] | None:
    before = graph.module_of(node.all_input_nodes[0])
    return None if before is None else _AFTER.get(type(before))


def put_back(module: nn.Module, made: dict[nn.Module, nn.SyncBatchNorm]) -> None:
    """Undo ``without_sync`` wherever its modules are by now.

    >>> gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(1, 2, 1), nn.SyncBatchNorm(2)))
    >>> put_back(gm, without_sync(gm))
    >>> type(gm.get_submodule("1")).__name__
    'SyncBatchNorm'
    """
    for owner in module.modules():
        for name, child in owner._modules.items():
            if child in made:
                owner._modules[name] = made[child]
