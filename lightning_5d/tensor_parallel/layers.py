"""Puts a layout of the tensor axis to work on a module, and takes it off again."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from torch import Tensor, nn

from lightning_5d.absent import Absent
from lightning_5d.pipeline_parallel.deferred_weights import DeferringForward
from lightning_5d.tensor_parallel.axis import TensorAxis
from lightning_5d.tensor_parallel.columns import (
    ColumnForward,
    Doors,
    EmbeddingForward,
    HeadForward,
    OwnDoorForward,
    WholeFeatures,
)
from lightning_5d.tensor_parallel.doors import BlockForward, CutHook, NoteHook, RegionForward, WholeHook
from lightning_5d.tensor_parallel.forwards import Forward, linear_product, nothing
from lightning_5d.tensor_parallel.layout import Region, TensorLayout
from lightning_5d.tensor_parallel.row_layers import BiaslessForward, RowForward, RowsInsideForward
from lightning_5d.tensor_parallel.sequence import SequenceCut


class Installed:
    """A layout at work on a module. Made by `install`.

    Attributes:
        sequence: Where the sequence is cut; ``None`` without sequence parallelism.
    """

    def __init__(self) -> None:
        self.sequence: SequenceCut | None = None
        self._undo: list[Callable[[], None]] = []

    def later(self, undo: Callable[[], None]) -> None:
        """What `close` has to do, the last first."""
        self._undo.append(undo)

    def close(self) -> None:
        """Gives modules their own forwards and attributes back. Weights stay as they are."""
        while self._undo:
            self._undo.pop()()


def install(module: nn.Module, layout: TensorLayout, axis: TensorAxis, sequence_parallel: bool) -> Installed:
    """Puts a layout to work.

    Classes, names, weights and state of modules stay as they are; their weights have to be this rank's parts, plain tensors,
    when they run. Modules that this rank does not hold are left out.

    Args:
        module: The user's module.
        layout: What becomes of its modules.
        axis: The ranks.
        sequence_parallel: Activations outside of regions are cut along the sequence.

    Raises:
        ValueError: If the layout asks for something that cannot be right.
    """
    installed = Installed()
    try:
        _Installation(module, layout, axis, sequence_parallel, installed).run()
    except BaseException:
        installed.close()
        raise
    return installed


class _Installation:
    def __init__(
        self, root: nn.Module, layout: TensorLayout, axis: TensorAxis, sequence_parallel: bool, installed: Installed
    ) -> None:
        self.root, self.layout, self.axis, self.installed = root, layout, axis, installed
        self.sequence: SequenceCut | None = None
        self.blocks: tuple[str, ...] = ()
        if sequence_parallel:
            if layout.sequence is None:
                raise ValueError(
                    "Sequence parallelism needs a layout that says between which modules the sequence is cut."
                )
            self.blocks = layout.sequence.blocks
            elsewhere = next((name for name in self.blocks if self.find(name) is None), None)
            self.sequence = SequenceCut(axis, None if elsewhere is None else self.received(elsewhere))
            installed.sequence = self.sequence

    def run(self) -> None:
        """Puts everything in place."""
        gathered, split = set(self.layout.gathered), set(self.layout.split)
        for region in self.layout.regions:
            self.region(region, gathered, split)
        in_regions = {name for region in self.layout.regions for name in (*region.columns, *region.rows)}
        for name in self.layout.gathered:
            if name not in in_regions and (module := self.find(name)) is not None:
                self.add(OwnDoorForward(module, self.axis, self.within(name), whole=self.features(name)))
        for name in self.layout.split:
            if name not in in_regions and (module := self.find(name)) is not None:
                self.add(RowForward(self.linear(name, module), self.axis, self.within(name), split="outside"))
        for name in self.layout.heads:
            if (module := self.find(name)) is not None:
                self.add(HeadForward(module, self.axis, self.layout.weights[f"{name}.weight"].whole))
        for name in self.layout.embeddings:
            if (module := self.find(name)) is not None:
                self.embedding(name, module)
        if self.sequence is not None and self.layout.sequence is not None:
            self.cut_sequence(self.sequence, self.layout.sequence.whole)

    def region(self, region: Region, gathered: set[str], split: set[str]) -> None:
        """One region."""
        outer = self.find(region.name)
        if outer is None:
            return
        sequence = self.within(region.name, *region.columns, *region.rows)
        columns = self.held(region.columns)
        doors = None if region.door == "module" else Doors(self.axis, sequence, [module for _, module in columns])
        for name, column in columns:
            whole = self.features(name) if name in gathered else None
            if doors is None:
                self.add(ColumnForward(column, self.axis, whole))
            else:
                self.add(OwnDoorForward(column, self.axis, sequence, doors, whole))
        for name, row in self.held(region.rows):
            if f"{name}.weight" not in self.layout.weights:
                self.around_rows(name, row, sequence, doors)
                continue
            place: Literal["inside", "outside"] = "inside" if doors is None else "outside"
            self.add(
                RowForward(self.linear(name, row), self.axis, sequence, doors, split=place if name in split else None)
            )
        if doors is None:
            self.add(RegionForward(outer, self.axis, sequence, [module for _, module in columns]))
        if sequence is not None and region.name not in self.blocks:
            handle = outer.register_forward_pre_hook(NoteHook(sequence), with_kwargs=True)
            self.installed.later(handle.remove)
            if doors is not None:
                self.add(BlockForward(outer, self.axis, sequence))
        for (name, attribute), value in region.attributes.items():
            if (owner := self.find(name)) is not None:
                self.set(owner, attribute, value)

    def around_rows(self, name: str, outer: nn.Module, sequence: SequenceCut | None, doors: Doors | None) -> None:
        """A module around row layers."""
        inner = []
        for path, module in outer.named_modules(prefix=name):
            if not isinstance(module, nn.Linear):
                continue
            rows = self.layout.weights.get(f"{path}.weight")
            if rows is not None and rows.dim == 1:
                inner.append(module)
                if module.bias is not None:
                    self.add(BiaslessForward(module, self.axis, None))
            elif module.bias is not None:
                raise ValueError(
                    f"{path} has a bias behind the row layer of {name}, which {self.axis.size} ranks would each add. Build it with"
                    " bias=False, or leave the module out of the plan."
                )
        if not inner:
            raise ValueError(f"{name} is a {type(outer).__name__} without a row layer inside of it.")
        self.add(RowsInsideForward(outer, self.axis, sequence, inner, doors))

    def features(self, name: str) -> WholeFeatures:
        """What makes the output of a column layer whole."""
        rows = self.layout.weights.get(f"{name}.weight")
        index: Tensor | None = None
        if rows is not None and rows.index is not None:
            index = rows.restore(torch.arange(rows.stored).unsqueeze(1 - rows.dim)).flatten()
        return WholeFeatures(self.axis, index)

    def linear(self, name: str, module: nn.Module) -> nn.Module:
        """A row layer, of which nothing but its product and its bias is known to be right.

        Raises:
            ValueError: If it computes something else.
        """
        own = module.__dict__.get("forward")
        if linear_product(module) is None or not (own is None or isinstance(own, DeferringForward)):
            raise ValueError(
                f"{name} is a {type(module).__name__} with a forward of its own, so it cannot be cut along its input features: only"
                " plain linear layers can. Leave it out of the plan."
            )
        return module

    def embedding(self, name: str, module: nn.Module) -> None:
        """An embedding cut along the vocabulary."""
        if not isinstance(module, nn.Embedding):
            raise ValueError(f"{name} is a {type(module).__name__}, and only nn.Embedding can be cut along its words.")
        for option in ("max_norm", "scale_grad_by_freq"):
            if getattr(module, option):
                raise ValueError(
                    f"{name} has {option}={getattr(module, option)}, which looks at words that are on other ranks. Leave it out of the"
                    " plan, or build it without."
                )
        self.add(EmbeddingForward(module, self.axis))

    def cut_sequence(self, sequence: SequenceCut, whole: str) -> None:
        """Where the sequence is cut, and made whole again."""
        for name, block in self.held(self.blocks):
            self.add(BlockForward(block, self.axis, sequence))
            if name == self.blocks[0]:
                handle = block.register_forward_pre_hook(CutHook(sequence), with_kwargs=True)
                self.installed.later(handle.remove)
        if (last := self.find(whole)) is not None:
            handle = last.register_forward_hook(WholeHook(sequence), with_kwargs=True)
            self.installed.later(handle.remove)

    def within(self, *names: str) -> SequenceCut | None:
        """The sequence's cut, for modules inside of blocks."""
        inside = any(name == block or name.startswith(f"{block}.") for name in names for block in self.blocks)
        return self.sequence if inside else None

    def held(self, names: Iterable[str]) -> list[tuple[str, nn.Module]]:
        """Those modules that this rank holds."""
        return [(name, module) for name in names if (module := self.find(name)) is not None]

    def received(self, name: str) -> Callable[[], Any]:
        """Gives what a stage gets in place of a block of another one."""
        absent = self.root.get_submodule(name)
        return absent.received if isinstance(absent, Absent) else nothing

    def find(self, name: str) -> nn.Module | None:
        """A module, if this rank holds it.

        Raises:
            ValueError: If there is none of that name.
        """
        module: Any = self.root
        for part in name.split(".") if name else ():
            if isinstance(module, Absent):
                return None
            module = module._modules.get(part)
            if module is None:
                raise ValueError(f"The layout names {name}, and {type(self.root).__name__} has no such module.")
        return None if isinstance(module, Absent) else module

    def add(self, forward: Forward) -> None:
        """Notes what was put in place."""
        self.installed.later(forward.close)

    def set(self, owner: nn.Module, attribute: str, value: Any) -> None:
        """Sets an attribute until the end."""
        before = getattr(owner, attribute)
        setattr(owner, attribute, value)
        self.installed.later(lambda: setattr(owner, attribute, before))
