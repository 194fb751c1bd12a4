"""Tensors that show a whole of which this rank holds a part: what all kinds of them have in common.

A kind is a subclass of `ShownTensor` with a `Registry` of its own. Which operations are done on parts whatever the kind is
registered here; the kinds add what depends on the dimension that is cut.
"""

from lightning_5d.shown import along, calls, elementwise, losses, reductions, shapes  # noqa: F401 - they register what they handle
from lightning_5d.shown.tensor import ShownTensor

__all__ = ["ShownTensor"]
