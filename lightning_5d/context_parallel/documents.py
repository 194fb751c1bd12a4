"""Documents that share sequences, by an entry of the batch: attention keeps to them, whatever the model knows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.context_parallel.lengths import BatchLengths, named_tensors
from lightning_5d.context_parallel.masks import AttentionMask
from lightning_5d.context_parallel.stated_pairs import both


class Limits:
    """The documents of the sequences in a step, to which all attention of their tokens keeps.

    Attributes:
        documents: (B|1, S), int64, whole: which document each token belongs to.
    """

    def __init__(self, documents: Tensor) -> None:
        self.documents = documents
        self._plain: dict[bool, AttentionMask] = {}
        self._others: dict[int, tuple[AttentionMask, AttentionMask]] = {}

    def on(self, mask: AttentionMask) -> AttentionMask:
        """A mask that keeps to the documents, too; one object for all layers."""
        if mask.plain:
            if mask.causal not in self._plain:
                self._plain[mask.causal] = both(mask, self.documents)
            return self._plain[mask.causal]
        if id(mask) not in self._others:
            # The mask is kept with it, so that no other one gets its id.
            self._others[id(mask)] = mask, both(mask, self.documents)
        return self._others[id(mask)][1]


class StepDocuments:
    """What an entry of one batch says about documents.

    Args:
        name: The entry's.
        entry: (B|1, S), integers that are the same within a document; or (documents + 1,), the tokens before each document of all rows one
            after the other, from 0 to B times S.
        lengths: Those of the step's sequences.
        is_split: Whether a pipeline splits batches into microbatches.

    Raises:
        MisconfigurationException: If it is neither.
    """

    def __init__(self, name: str, entry: Tensor, lengths: BatchLengths, is_split: bool = False) -> None:
        self._name, self._lengths, self._is_split = name, lengths, is_split
        self._what = f"{name}, which ContextParallel(documents={name!r}) names, has shape {tuple(entry.shape)}"
        if entry.is_floating_point() or entry.is_complex() or entry.dtype == torch.bool:
            raise self._wrong(f"and dtype {entry.dtype}", "It has to hold integers.")
        if entry.ndim not in (1, 2):
            raise self._wrong("", "It has to be (batch, tokens), or cumulative lengths (documents + 1,).")
        if entry.ndim == 2 and not lengths.near(entry.shape[1]):
            found = ", ".join(f"{known} with {length} tokens" for known, length in lengths.by_name.items())
            raise self._wrong(f"beside {found}", "It has to hold a number for each token, (batch, tokens).")
        if entry.ndim == 1:
            _check_increasing(self, entry)
        self._entry = entry
        self._limits: dict[tuple[int, int], Limits] = {}

    @classmethod
    def of(
        cls, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], lengths: BatchLengths, is_split: bool
    ) -> StepDocuments:
        """Those of a batch.

        Args:
            name: The entry's; with those it is in before it, and dots between them, where several have one name.
            args: A step's arguments.
            kwargs: Those by name.
            lengths: Those of the step's sequences.
            is_split: Whether a pipeline splits batches into microbatches.

        Raises:
            MisconfigurationException: If the batch has no such entry, or one that says nothing about documents.
        """
        found = [item for value in (*args, *kwargs.values()) for item in named_tensors(value)]
        for path, tensor in found:
            if any(".".join(path[start:]) == name for start in range(len(path))):
                return cls(name, tensor, lengths, is_split)
        there = ", ".join(f"{'.'.join(path) or 'it'} {tuple(tensor.shape)}" for path, tensor in found)
        raise MisconfigurationException(
            f"ContextParallel(documents={name!r}): the batch has no tensor {name!r}, but {there or 'no tensors'}. Give it one with a number for each"
            " token, (batch, tokens), that says which document it belongs to, or cumulative lengths; or leave documents out."
        )

    def limits(self, door: str, rows: int, length: int) -> Limits | None:
        """What attention of so many sequences of some length keeps to; ``None`` if they are not what the entry is about.

        Raises:
            MisconfigurationException: If the entry has another shape than the step's sequences.
        """
        entry = self._entry
        if not self._lengths.near(length):
            return None
        if (rows, length) not in self._limits:
            if entry.ndim == 1:
                documents = self._of_cumulative(door, rows, length)
            elif entry.shape[1] == length and entry.shape[0] in (1, rows):
                documents = entry.long()
            elif abs(entry.shape[1] - length) > 1:
                return None  # another of the batch's sequences
            else:
                raise self._wrong(
                    f"but {door} is called with ({rows}, {length}) tokens", "Give it as many, from which the same ones are left out."
                )  # fmt: skip
            self._limits[rows, length] = Limits(documents)
        return self._limits[rows, length]

    def _of_cumulative(self, door: str, rows: int, length: int) -> Tensor:
        ends = self._entry[1:].contiguous()
        total = int(ends[-1])
        if total != rows * length:
            fix = "Cumulative lengths end with the number of tokens of all rows."
            if self._is_split:
                fix += (
                    " They cannot be split into the microbatches of a pipeline: give each token the number of its document, (batch, tokens),"
                    " or use one microbatch."
                )
            raise self._wrong(
                f"and ends with {total}, but {door} is called with ({rows}, {length}) tokens, {rows * length}", fix
            )
        return torch.searchsorted(ends, torch.arange(total, device=ends.device), right=True).reshape(rows, length)

    def _wrong(self, how: str, fix: str) -> MisconfigurationException:
        return MisconfigurationException(f"{self._what}{f' {how}' if how else ''}. {fix}")


def _check_increasing(step: StepDocuments, entry: Tensor) -> None:
    numbers = entry.tolist()
    if len(numbers) < 2 or numbers[0]:
        first = f"and begins with {numbers[0]}" if numbers else ""
        raise step._wrong(first, "Cumulative lengths begin with 0 and have an end for each document.")
    for place, (before, after) in enumerate(pairwise(numbers)):
        if after < before:
            raise step._wrong(
                f"and falls from {before} to {after} (entries {place} and {place + 1})", "Cumulative lengths increase."
            )
