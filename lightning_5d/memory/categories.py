"""What a piece of memory is for: the names, in the order in which charts stack them."""

from __future__ import annotations

from collections.abc import Iterable

WEIGHTS = "weights"
MASTER_WEIGHTS = "master weights"
MOMENTUM = "optimizer momentum"
VARIANCE = "optimizer variance"
GRADIENTS = "gradients"
ACTIVATIONS = "activations"
COMMUNICATION = "communication buffers"
OTHER = "other"
ELSEWHERE = "memory of other ranks"
"""Not a category of this rank's account: it maps such memory, and its owner counts it."""

CATEGORIES = (WEIGHTS, MASTER_WEIGHTS, MOMENTUM, VARIANCE, GRADIENTS, ACTIVATIONS, COMMUNICATION, OTHER)

COLOURS = {
    WEIGHTS: "#8f8f8f",
    MASTER_WEIGHTS: "#e8862a",
    MOMENTUM: "#2b6ea6",
    VARIANCE: "#7db8e0",
    GRADIENTS: "#3c9a5f",
    ACTIVATIONS: "#c94f4a",
    COMMUNICATION: "#8d62b5",
    OTHER: "#d9c9a3",
}
_MORE_COLOURS = ("#17807e", "#b0559a", "#6f7f2f", "#444a7a")

# The names torch's own optimizers give to the two running means of a gradient and of its square.
_OF_STATE = {
    "exp_avg": MOMENTUM,
    "momentum_buffer": MOMENTUM,
    "exp_avg_sq": VARIANCE,
    "square_avg": VARIANCE,
    "sum": VARIANCE,
}
# A tensor that two hold counts as what comes first here; unnamed optimizer states rank with the named ones.
_STRENGTH = {
    ELSEWHERE: 6,
    WEIGHTS: 5,
    MASTER_WEIGHTS: 5,
    MOMENTUM: 4,
    VARIANCE: 4,
    GRADIENTS: 3,
    COMMUNICATION: 2,
    OTHER: 1,
}


def optimizer_category(state: str) -> str:
    """The category of an optimizer's state tensor by its name; an unknown one gets a category of its own."""
    return _OF_STATE.get(state, f"optimizer {state}")


def stronger(claimed: str | None, category: str) -> str:
    """Which of two claims to one storage holds."""
    if claimed is None or _STRENGTH.get(category, 4) > _STRENGTH.get(claimed, 4):
        return category
    return claimed


def in_order(names: Iterable[str]) -> list[str]:
    """All fixed categories, and after the optimizer's known ones those that turned up."""
    more = sorted(set(names) - set(CATEGORIES))
    position = CATEGORIES.index(VARIANCE) + 1
    return [*CATEGORIES[:position], *more, *CATEGORIES[position:]]


def colours(names: Iterable[str]) -> dict[str, str]:
    """A colour for each category; those that are not fixed get one in turn."""
    more = [name for name in names if name not in COLOURS]
    return COLOURS | {name: _MORE_COLOURS[index % len(_MORE_COLOURS)] for index, name in enumerate(more)}
