"""Which modules of a model hold the linear map of a router."""

from dataclasses import dataclass

from torch import nn

from ds_moe_lb.config import ROUTER_SECTION
from ds_moe_lb.discovery import NothingToBalanceError, find_sites
from ds_moe_lb.routers.swap import made_weight


@dataclass(frozen=True)
class RouterLinear:
    """The linear map of one MoE layer's router.

    Attributes:
        name: of the layer, as users know it in the model.
        owner: the module whose `weight` it is, ``(E, M)``.
    """

    name: str
    owner: nn.Module


def find_router_linears(model: nn.Module) -> list[RouterLinear]:
    """The routers' linear maps, in the model's order; a pipeline stage may have none.

    Raises:
        NothingToBalanceError: the model has no routers.
        ValueError: one of them is of no known form; says which.
    """
    try:
        sites = find_sites(model)
    except NothingToBalanceError:
        raise NothingToBalanceError(
            f"{ROUTER_SECTION}: the model ({type(model).__name__}) has no deepspeed.moe.layer.MoE "
            f"layers and no routers of transformers' MoE families; remove the section or use MoE "
            f"layers"
        ) from None
    except ValueError as error:
        raise ValueError(f"{ROUTER_SECTION}: {error}") from error
    return [
        RouterLinear(site.name, _owner(site.name, site.module, num_experts=site.num_experts))
        for site in sites
    ]


def weight_shape(parameter: nn.Parameter) -> tuple[int, ...]:
    """Its whole shape, also where ZeRO-3 has partitioned it already."""
    return tuple(getattr(parameter, "ds_shape", parameter.shape))


def _owner(name: str, router: nn.Module, *, num_experts: int) -> nn.Module:
    if ".modules_to_save." in f".{name}." or ".base_layer." in f".{name}.":
        raise ValueError(
            f"{ROUTER_SECTION}: the router {name!r} is wrapped by peft, which trains it in a way "
            f"of its own; leave routers out of target_modules and modules_to_save, or remove the "
            f"section"
        )
    owners = [m for m in router.modules() if _holds_linear_map(m, num_experts)]
    if len(owners) != 1:
        raise ValueError(
            f"{ROUTER_SECTION}: the router of {name!r} ({type(router).__qualname__}) has "
            f"{len(owners)} linear maps to its {num_experts} experts, where one is expected; "
            f"remove the section"
        )
    return owners[0]


def _holds_linear_map(module: nn.Module, num_experts: int) -> bool:
    if made_weight(module) is not None:
        return True
    weight = module._parameters.get("weight")
    if weight is None:
        return False
    shape = weight_shape(weight)
    return len(shape) == 2 and shape[0] == num_experts
