"""Fully-qualified names without the parts that wrappers put into them."""

from __future__ import annotations

# Checked with torch 2.13: `torch.compile(module)`, and `checkpoint_wrapper` (also under its name in named_parameters).
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})


def plain_name(name: str) -> str:
    """The name that a parameter or module has when nothing is wrapped, such as ``layers.0.up.weight``."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)
