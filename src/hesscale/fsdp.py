"""What is known of the insides of FSDP2 (``fully_shard``), which nothing but sharded training needs.

Names that torch does not document: ``_get_fsdp_state``, its parameter groups, and what they know of a parameter
(``sharded_param``, ``_unsharded_param``, ``unsharded_accumulated_grad``), without which there is no sharded training;
``_module_state_mapping``, to find sharded modules, without which ``distributed.synchronize`` has to be called.
"""

from __future__ import annotations

from typing import Any

from torch import nn


def sharded_modules() -> list[nn.Module]:
    """All modules that ``fully_shard`` was called on, in the order of these calls."""
    try:
        from torch.distributed._composable_state import _module_state_mapping
    except ImportError:
        return []
    return [module for module in _module_state_mapping if shards_of(module)]


def shards_of(module: nn.Module) -> list[Any]:
    """What FSDP2 knows of each parameter it has sharded as this module's: ``sharded_param`` is the optimizer's."""
    if not hasattr(module, "_get_fsdp_state"):
        return []
    known: Any = module
    state = known._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None) or [state._fsdp_param_group]
    return [shard for each in groups if each is not None for shard in each.fsdp_params]


def whole_of(shard: Any) -> Any:
    """The parameter of which ``shard.sharded_param`` is a part, while it is there."""
    return getattr(shard, "_unsharded_param", None)


def has_whole_gradient(shard: Any) -> bool:
    """Whether there is a gradient that waits to be cut into shards (``set_requires_gradient_sync(False)``)."""
    whole = whole_of(shard)
    return getattr(shard, "unsharded_accumulated_grad", None) is not None or (
        whole is not None and whole.grad is not None
    )
