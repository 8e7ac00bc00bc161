"""Global-batch load balancing for Mixture-of-Experts training on DeepSpeed. Public names only.

Importing this package does no work: names are resolved on first use, so that neither torch nor
DeepSpeed is imported before a script has chosen its accelerator.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_moe_lb.adapters.autoep import GlobalBatchTopKRouter as GlobalBatchTopKRouter
    from ds_moe_lb.balancer import LoadBalancer as LoadBalancer
    from ds_moe_lb.gate import GlobalBatchTopKGate as GlobalBatchTopKGate
    from ds_moe_lb.installation import initialize as initialize
    from ds_moe_lb.installation import install as install
    from ds_moe_lb.loss import expert_fraction as expert_fraction
    from ds_moe_lb.loss import load_balancing_loss as load_balancing_loss
    from ds_moe_lb.loss import router_z_loss as router_z_loss
    from ds_moe_lb.metrics import max_violation as max_violation

__version__ = "0.1.0"

_HOME = {
    "GlobalBatchTopKGate": "ds_moe_lb.gate",
    "GlobalBatchTopKRouter": "ds_moe_lb.adapters.autoep",
    "LoadBalancer": "ds_moe_lb.balancer",
    "expert_fraction": "ds_moe_lb.loss",
    "initialize": "ds_moe_lb.installation",
    "install": "ds_moe_lb.installation",
    "load_balancing_loss": "ds_moe_lb.loss",
    "max_violation": "ds_moe_lb.metrics",
    "router_z_loss": "ds_moe_lb.loss",
}

__all__ = [
    "GlobalBatchTopKGate",
    "GlobalBatchTopKRouter",
    "LoadBalancer",
    "__version__",
    "expert_fraction",
    "initialize",
    "install",
    "load_balancing_loss",
    "max_violation",
    "router_z_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
