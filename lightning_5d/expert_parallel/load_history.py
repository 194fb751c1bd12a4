"""The loads of a run's experts over its steps, in bounded memory, and the files they are written to."""

from __future__ import annotations

import csv
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Load:
    """The experts of one layer in some steps.

    Attributes:
        tokens_E: Choices of each expert, float64.
        dropped_E: Of these, those that it left out.
        bias_E: What its router adds to choose by; NaN where it has no such thing.
    """

    tokens_E: Tensor
    dropped_E: Tensor
    bias_E: Tensor

    @property
    def relative_E(self) -> Tensor:
        """Tokens of each expert over the mean; NaN if there were none."""
        return self.tokens_E / self.tokens_E.mean()

    @property
    def imbalance(self) -> float:
        """Tokens of the busiest expert over the mean, from 1 (balanced) to E; NaN if there were none."""
        return float(self.relative_E.max())

    @property
    def dropped(self) -> float:
        """The share of choices that were left out; NaN if there were none."""
        return float(self.dropped_E.sum() / self.tokens_E.sum())

    @property
    def bias_spread(self) -> float:
        """Largest less smallest bias; NaN where there is none."""
        return float(self.bias_E.max() - self.bias_E.min())


@dataclass
class Column:
    """Some steps in a row.

    Attributes:
        first, last: The optimizer steps, from 1.
        loads: Of each layer, tokens of these steps added up, the bias of the last one.
        imbalance: Of each layer, the mean over readings. (That of the added tokens would be smaller.)
        readings: How many there were.
    """

    first: int
    last: int
    loads: dict[str, Load]
    imbalance: dict[str, float]
    readings: int = 1

    def joined(self, later: Column) -> Column:
        """Both as one."""
        loads = {
            name: Load(mine.tokens_E + load.tokens_E, mine.dropped_E + load.dropped_E, load.bias_E)
            for name, load in later.loads.items()
            for mine in (self.loads[name],)
        }
        count = self.readings + later.readings
        imbalance = {
            name: _mean_of_two(self.imbalance[name], self.readings, value, later.readings)
            for name, value in later.imbalance.items()
        }
        return Column(self.first, later.last, loads, imbalance, count)


class LoadHistory:
    """Loads over steps. When there are too many columns, each two become one: a long run is kept as well as a short one, more coarsely.

    Args:
        layers: How many experts each layer has, by name.
        columns: How many are kept at most; even.
    """

    def __init__(self, layers: Mapping[str, int], columns: int = 200) -> None:
        self.layers = dict(layers)
        self.columns: list[Column] = []
        self._most, self._width = columns, 1

    def add(self, first: int, last: int, loads: Mapping[str, Load]) -> None:
        """Adds what was read after step `last`, of all steps from `first` on."""
        new = Column(first, last, dict(loads), {name: load.imbalance for name, load in loads.items()})
        if self.columns and self.columns[-1].readings < self._width:
            self.columns[-1] = self.columns[-1].joined(new)
            return
        if len(self.columns) == self._most:
            self._join_pairs()
        self.columns.append(new)

    def _join_pairs(self) -> None:
        pairs = [self.columns[i : i + 2] for i in range(0, len(self.columns), 2)]
        self.columns = [pair[0].joined(pair[1]) if len(pair) > 1 else pair[0] for pair in pairs]
        self._width *= 2

    def series(self, layer: str) -> Load:
        """A layer's loads in all columns, (columns, E) each."""
        loads = [column.loads[layer] for column in self.columns]
        return Load(
            torch.stack([load.tokens_E for load in loads]),
            torch.stack([load.dropped_E for load in loads]),
            torch.stack([load.bias_E for load in loads]),
        )

    # In and out of checkpoints and files

    def state_dict(self) -> dict[str, Any]:
        """Everything, in tensors and plain numbers."""
        return {
            "layers": self.layers,
            "width": self._width,
            "columns": [
                {
                    "steps": (column.first, column.last),
                    "readings": column.readings,
                    "imbalance": column.imbalance,
                    "loads": {
                        name: (load.tokens_E, load.dropped_E, load.bias_E) for name, load in column.loads.items()
                    },
                }
                for column in self.columns
            ],
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any], columns: int) -> Self:
        """The one that `state_dict` was asked of."""
        made = cls(state["layers"], columns)
        made._width = state["width"]
        made.columns = [
            Column(
                first=column["steps"][0],
                last=column["steps"][1],
                loads={name: Load(*load) for name, load in column["loads"].items()},
                imbalance=column["imbalance"],
                readings=column["readings"],
            )
            for column in state["columns"]
        ]
        while len(made.columns) > columns:
            made._join_pairs()
        return made

    def write(self, folder: Path) -> list[Path]:
        """Writes ``expert_load.csv``, a line for each layer in each column, and ``expert_load.json``, with numbers of every expert."""
        folder.mkdir(parents=True, exist_ok=True)
        table, data = folder / "expert_load.csv", folder / "expert_load.json"
        with table.open("w", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(["first_step", "last_step", "layer", "imbalance", "tokens", "dropped_share", "bias_spread"])
            for column in self.columns:
                for name, load in column.loads.items():
                    numbers = (column.imbalance[name], load.tokens_E.sum().item(), load.dropped, load.bias_spread)
                    lines.writerow([column.first, column.last, name, *(_short(number) for number in numbers)])
        content = {
            "steps": [[column.first, column.last] for column in self.columns],
            "layers": {name: self._plain(name) for name in self.layers} if self.columns else {},
        }
        data.write_text(json.dumps(content, separators=(",", ":"), allow_nan=False))
        return [table, data]

    def _plain(self, layer: str) -> dict[str, Any]:
        series = self.series(layer)
        biased = not series.bias_E.isnan().any()
        return {
            "imbalance": [_number(column.imbalance[layer]) for column in self.columns],
            "tokens": series.tokens_E.long().tolist(),
            "dropped": series.dropped_E.long().tolist(),
            "bias": [[float(f"{value:.6g}") for value in row] for row in series.bias_E.tolist()] if biased else None,
        }


def _mean_of_two(one: float, count: int, other: float, more: int) -> float:
    """Of means over so many each, those that are NaN left out."""
    if math.isnan(one) or math.isnan(other):
        return other if math.isnan(one) else one
    return (one * count + other * more) / (count + more)


def _short(value: float) -> str:
    return "" if math.isnan(value) else f"{value:.6g}" if value != int(value) else str(int(value))


def _number(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 6)
