"""Training: modules whose weight is fake-quantized. A pass of its own, between plan and observers."""

from __future__ import annotations

from torch import fx, nn
from torch.nn.utils.parametrize import type_before_parametrizations

from backquant.backend_config import BackendConfig, get_module_to_qat_module
from backquant.errors import ConfigError
from backquant.graph import DeferredGraphModule, own_tensors, rebuilt, set_module
from backquant.match.plan import MatchKind, Plan
from backquant.prepare.requests import ObserverSource
from backquant.qconfig import QConfigMapping


def swap_for_training(
    module: fx.GraphModule,
    plan: Plan,
    backend_config: BackendConfig,
    qconfig_mapping: QConfigMapping,
) -> fx.GraphModule:
    """A copy of ``module`` in which the weighted modules of quantized matches are the backend's QAT modules.

    All parameters and buffers of the copy are its own (tied ones stay tied), so that training does
    not reach the model that was captured. Each module is made by ``from_float`` and carries the
    QConfig of its rule as ``qconfig``. A module that is called several times is swapped once.

    Raises ConfigError for a QAT class without ``from_float``.

    >>> from backquant.graph import capture
    >>> gm = capture(nn.Sequential(nn.Linear(2, 2))).module
    >>> swapped = swap_for_training(gm, Plan("x86"), BackendConfig("x86"), QConfigMapping())
    >>> type(swapped.get_submodule("0")).__name__
    'Linear'
    """
    trained = rebuilt(DeferredGraphModule, module, own_tensors(module))
    source = ObserverSource(backend_config, qconfig_mapping)
    classes = get_module_to_qat_module(backend_config)
    nodes = {node.name: node for node in trained.graph.nodes}
    swapped: set[str] = set()
    for match, root in ((m, nodes[name]) for m in plan.matches for name in m.carriers):
        path = str(root.target)
        if match.kind is not MatchKind.PATTERN or root.op != "call_module" or path in swapped:
            continue
        decision = plan.decisions[root.name]
        float_module = trained.get_submodule(path)
        qat_class = classes.get(type_before_parametrizations(float_module))
        qconfig = source.qconfig(decision.rule)
        if not decision.quantized or qat_class is None or qconfig is None:
            continue
        float_module.qconfig = qconfig  # type: ignore[assignment]
        set_module(trained, path, _made(qat_class, float_module, path))
        swapped.add(path)
    return trained


def _made(qat_class: type[nn.Module], float_module: nn.Module, path: str) -> nn.Module:
    from_float = getattr(qat_class, "from_float", None)
    where = f"BackendPatternConfig.set_qat_module({qat_class.__name__}), module {path!r}"
    fix = f"class {qat_class.__name__}:\n    @classmethod\n    def from_float(cls, module): ..."
    if not callable(from_float):
        raise ConfigError(
            f"the QAT module {qat_class.__name__} has no from_float", where=where, fix=fix
        )
    try:
        made: nn.Module = from_float(float_module)
    except ConfigError as error:
        raise ConfigError(
            error.what, where=f"module {path!r}: {error.where}", fix=error.fix
        ) from error
    except Exception as error:
        raise ConfigError(
            f"{qat_class.__name__}.from_float raised {type(error).__name__}: {error}",
            where=where,
            fix=fix,
        ) from error
    return made.train(float_module.training)
