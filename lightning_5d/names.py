"""Fully-qualified names without the parts that wrappers put into them."""

from __future__ import annotations

# Checked with torch 2.13: `torch.compile(module)`, and `checkpoint_wrapper` (also under its name in named_parameters).
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def class_name(module: object) -> str:
    """The name of a module's class as its author wrote it: FSDP2 makes a class of its own of it, ``FSDPNet`` or ``ReplicateNet``."""
    from torch.distributed.fsdp import FSDPModule

    # Checked with torch 2.13: the author's class comes right behind this one.
    kinds = type(module).__mro__
    return kinds[kinds.index(FSDPModule) + 1 if FSDPModule in kinds else 0].__name__


def plain_name(name: str) -> str:
    """The name that a parameter or module has when nothing is wrapped, such as ``layers.0.up.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
