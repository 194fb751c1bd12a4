"""What becomes of each module on the tensor axis: values that a plan is turned into, before anything changes."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lightning_5d.tensor_parallel.rows import Rows

Door = Literal["module", "layers"]
"""Where a region is entered: at the door of its module, or at each of its column layers."""


@dataclass(frozen=True)
class Region:
    """Modules between a replicated (or sequence-sharded) input and output that compute on their rank's heads or features.

    Attributes:
        name: The lowest module that holds all of its column and row layers; or, entered at its door, that holds the column layers.
        columns: Linear layers whose outputs are cut (``colwise``). Those with the same input share one entry.
        rows: Linear layers whose inputs are cut (``rowwise``), whose outputs are sums over ranks, and whose bias is added once,
            after that. May be modules around a linear layer (adapters), then the sum is formed at their end.
        door: ``"module"``: the module's first tensor argument (or ``hidden_states``) enters, and column layers take what the
            module gives them. ``"layers"``: the input of each column layer enters.
        attributes: What attributes of modules are set to while the axis is at work: counts of heads that a rank has.
    """

    name: str
    columns: tuple[str, ...]
    rows: tuple[str, ...]
    door: Door = "module"
    attributes: Mapping[tuple[str, str], Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Sequence:
    """Between which modules activations are cut along the sequence (dimension 1 of (B, T, D)).

    Attributes:
        blocks: All blocks, in order. Where an input of one comes from outside of them it is cut.
        whole: The module whose output is made whole again: the norm after the last block, or that block.
    """

    blocks: tuple[str, ...]
    whole: str


@dataclass(frozen=True)
class Became:
    """What became of a module, for reports.

    Attributes:
        kind: Its class.
        what: In words.
        shapes: Of each weight of its own, what one rank stores.
    """

    kind: str
    what: str
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.what


@dataclass(frozen=True)
class TensorLayout:
    """What the tensor axis does to a module.

    Attributes:
        regions: In module order.
        embeddings: `nn.Embedding` modules cut along the vocabulary.
        heads: Linear layers cut along the vocabulary: their outputs are `VocabularyShard`s. Their own entry, as column layers.
        gathered: Column layers whose outputs are made whole again at once (``colwise_gather_output``).
        split: Row layers that take their part of a whole input (``rowwise_split_input``).
        weights: How the weights that are cut are, by name. A tied weight has all of its names.
        partial: Names of weights that all ranks hold whole and of whose gradient each has only a summand: those used
            inside regions, and with sequence parallelism those of norms and of biases behind a reduce-scatter.
        sequence: Where the sequence is cut; ``None`` without sequence parallelism.
        became: For people: module name -> what became of it; modules with weights, and those of regions.
    """

    regions: tuple[Region, ...] = ()
    embeddings: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    gathered: tuple[str, ...] = ()
    split: tuple[str, ...] = ()
    weights: Mapping[str, Rows] = field(default_factory=dict)
    partial: frozenset[str] = frozenset()
    sequence: Sequence | None = None
    became: Mapping[str, Became] = field(default_factory=dict)

    def without_weights(self, names: Collection[str]) -> TensorLayout:
        """The same for a module of whose weights these are another axis's."""
        if not names:
            return self
        weights = {name: rows for name, rows in self.weights.items() if name not in names}
        return replace(self, weights=weights, partial=self.partial.difference(names))
