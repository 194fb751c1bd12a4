"""Which tokens of a microbatch the rows of each rank are, where its sequences are cut."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut


@dataclass(frozen=True)
class MicrobatchRows:
    """How the tokens of a microbatch, B sequences of one length, are rows (B * t, …) on each of the ranks that have different ones.

    The context axis cuts a sequence first, where it does, and the tensor axis what a context rank has: into pieces one after the other, the
    last of which may be padded. Ranks are numbered with the tensor axis innermost.

    Attributes:
        tokens: Tokens of a sequence that the ranks of the tensor axis have together.
        pieces: Over how many of them those are spread; 1 if each has all.
        cut: How the whole sequence is cut over context ranks, `tokens` of it to each; ``None`` if it is not.
    """

    tokens: int
    pieces: int = 1
    cut: SequenceCut | None = None

    @property
    def length(self) -> int:
        """Tokens of a whole sequence, without padding."""
        return self.tokens if self.cut is None else self.cut.length

    @property
    def local(self) -> int:
        """Tokens of a sequence that each rank has, t, padding included."""
        return -(-self.tokens // self.pieces)

    @property
    def ranks(self) -> int:
        """Ranks with different tokens."""
        return self.pieces * (1 if self.cut is None else self.cut.size)

    def sequences(self, rows: int) -> int:
        """How many sequences so many rows of one rank are of.

        Raises:
            ValueError: If they are not as many tokens of each.
        """
        if rows % self.local:
            raise ValueError(
                f"Experts got {rows} rows where each rank has {self.local} tokens of every sequence ({self.length} tokens over {self.ranks} ranks), so"
                f" nobody can tell which tokens they are. Call experts with the rows of all tokens, {self.local} for every sequence."
            )
        return rows // self.local

    def real(self, rank: int, rows: int, device: torch.device | None = None) -> Tensor | None:
        """Which rows of a rank are tokens and not padding, as booleans (rows,); ``None`` if all are, or if they are not whole sequences' tokens."""
        context, piece = divmod(rank, self.pieces)
        has_padding = self.local * self.pieces > self.tokens or (self.cut is not None and self.cut.padded > self.length)
        if not has_padding or rows % self.local:
            return None
        # Made on the CPU, so that an accelerator need not be asked whether there is any.
        place = torch.arange(self.local) + piece * self.local
        real = place < self.tokens
        if self.cut is not None:
            positions = self.cut.positions(context)
            real &= positions[place.clamp(max=self.tokens - 1)] < self.length
        return None if bool(real.all()) else real.repeat(rows // self.local).to(device)

    def whole(self, parts: Sequence[Tensor]) -> Tensor:
        """The rows (B * S, …) of all tokens, sequence after sequence, of the rows of all ranks."""
        pieces = [part.unflatten(0, (-1, self.local)) for part in parts]  # type: ignore[no-untyped-call]
        held = [
            torch.cat(pieces[first : first + self.pieces], 1)[:, : self.tokens]
            for first in range(0, len(pieces), self.pieces)
        ]
        return (held[0] if self.cut is None else self.cut.join(held, 1)).flatten(0, 1)

    def part(self, whole: Tensor, rank: int, fill: float | bool = 0) -> Tensor:
        """The rows of one rank of rows of all tokens; those of padding are `fill`."""
        context, piece = divmod(rank, self.pieces)
        held = whole.unflatten(0, (-1, self.length))  # type: ignore[no-untyped-call]
        if self.cut is not None:
            held = self.cut.part(held, 1, context, fill)
        start = min(piece * self.local, self.tokens)
        own = held[:, start : start + self.local]
        missing = self.local - own.shape[1]
        if missing:
            own = torch.cat([own, own.new_full((own.shape[0], missing, *own.shape[2:]), fill)], 1)
        rows: Tensor = own.flatten(0, 1)
        return rows
