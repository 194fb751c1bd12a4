"""What two checkpoints have in common."""

from typing import Any

import torch


def assert_same(found: Any, expected: Any, atol: float = 1e-6) -> None:
    """Weights and optimizer states are equal within rounding, and have the same names, groups and numbers."""
    assert list(found["state_dict"]) == list(expected["state_dict"])
    torch.testing.assert_close(found["state_dict"], expected["state_dict"], rtol=1e-5, atol=atol)
    (mine,), (theirs,) = found["optimizer_states"], expected["optimizer_states"]
    assert mine["param_groups"] == theirs["param_groups"]
    assert sorted(mine["state"]) == sorted(theirs["state"])
    for number, entries in theirs["state"].items():
        torch.testing.assert_close(mine["state"][number], entries, rtol=1e-5, atol=atol)
