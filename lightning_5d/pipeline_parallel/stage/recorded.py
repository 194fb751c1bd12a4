"""Logits of routers, which hooks of Hugging Face's models keep for a loss behind the blocks: handed from stage to stage beside the payload."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

from torch import Tensor, nn

_KEY = "router_logits"


# [Note: recorded logits]
# With ``output_router_logits=True`` a model of transformers keeps in a context variable, while its forward runs, what hooks on its routers see,
# and computes a balance loss of all of them behind the blocks. A stage has the routers of its own blocks. What it has got from the stage
# before is put there where the block before its first one would have run, and its own come behind; where it ends, all of them go to the next
# stage, and gradients come back. They are small beside the hidden state: (tokens, experts) for each layer so far.
# Private names of transformers; checked with 5.24. Nothing of it is imported: where it is not, no model of it runs.
class WithLogits(NamedTuple):
    """A payload, and the logits of all routers so far, in the order of layers."""

    payload: Any
    logits: tuple[Tensor, ...]


def logits_so_far() -> list[Tensor]:
    """What the model whose forward is running has kept; empty if it keeps none."""
    kept = _kept()
    return [] if kept is None else kept


def with_logits(payload: Any) -> Any:
    """What a stage hands on."""
    logits = logits_so_far()
    return WithLogits(payload, tuple(logits)) if logits else payload


def apart(received: Any) -> tuple[Any, tuple[Tensor, ...]]:
    """What a stage has got, and the logits beside it."""
    return (received.payload, received.logits) if isinstance(received, WithLogits) else (received, ())


def keep(logits: tuple[Tensor, ...]) -> None:
    """Puts logits of earlier stages to what the model keeps."""
    kept = _kept()
    if kept is not None:
        kept.extend(logits)


def install_hooks(module: nn.Module) -> None:
    """Has models put their hooks on their routers now, when all that a rank holds is in place, and not in the run of one of its stages."""
    capturing = sys.modules.get("transformers.utils.output_capturing")
    if capturing is None:
        return
    for inner in module.modules():
        if _KEY in capturing._CAN_RECORD_REGISTRY.get(inner):
            capturing.maybe_install_capturing_hooks(inner)


def _kept() -> list[Tensor] | None:
    capturing = sys.modules.get("transformers.utils.output_capturing")
    collector = None if capturing is None else capturing._active_collector.get()
    found: list[Tensor] | None = None if collector is None else collector.get(_KEY)
    return found
