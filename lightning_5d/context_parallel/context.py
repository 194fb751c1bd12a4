"""The context axis: `ContextParallel`, how sequences are cut and attention is computed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from torch import nn

from lightning_5d.context_parallel.attention import METHODS, Method
from lightning_5d.context_parallel.cut import Balance, SequenceCut
from lightning_5d.mesh import nearest_divisor
from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized, Problem, RunContext, Size

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh
    from lightning_5d.plan import ParallelPlan

BALANCES: tuple[Balance, ...] = ("zigzag", "contiguous")


@dataclass(frozen=True)
class ContextParallel(Parallelism):
    """Cuts sequences over ranks that compute one batch together, so that activations of a rank grow with its share alone.

    The user's step sees whole sequences: sequences are cut where the step calls a model, and put together again in what comes out of
    it, which each rank holds its part of. Losses, shifts of labels and metrics are those of one process, whatever tokens count.
    Attention, as the model calls it (``F.scaled_dot_product_attention``), is computed by the ranks together.

    | method | keys and values | what is sent per layer and rank, forward (E: elements of a rank's keys and values, c: ranks) |
    |---|---|---|
    | ring | one block of another rank at a time | (c - 1) E, while the block before is computed; less with causal attention |
    | ulysses | whole, for H / c heads | (c - 1) / c of queries, keys, values and the output |
    | all_gather | whole | (c - 1) E |

    Args:
        size: Ranks of the axis.
        method: How attention sees the other ranks' tokens.
        balance: ``"zigzag"`` gives each rank an early and a late chunk of the sequence, so that causal attention is equal work on all;
            ``"contiguous"`` gives each one span. Ulysses is balanced by itself and always has one.
        ulysses: Neighbours that exchange heads inside of each place of a ring, for a two-dimensional mixture; divides `size`.
        keys: Sequence dimensions by name, where they are not dimension 1 or are not found: names of entries of the batch, or of arguments
            of the model; ``None`` for what is not to be cut.
        pad: Whether lengths that the ranks do not divide are padded inside; they are refused otherwise.
        whole_outputs: Whether what validation, test and predict steps return is put together in the order of the sequence.
        documents: The entry of the batch that says which document each token belongs to, where several share a sequence: integers of shape
            (batch, tokens), or cumulative lengths over all rows, from 0 to batch times tokens. All attention of the sequences then keeps to
            documents, whatever masks the model has, and also with a size of 1.

    Source: Liu et al., "Ring Attention with Blockwise Transformers" (2023); Jacobs et al., "DeepSpeed Ulysses" (2023); Fang and
    Zhao, "USP: A Unified Sequence Parallelism Approach" (2024), for the mixture; Llama 3 (2024), section 3.3.2, for the gather.
    """

    axis: ClassVar[str] = "context"
    order: ClassVar[int] = 40

    size: int
    method: Method = "ring"
    balance: Balance = "zigzag"
    ulysses: int = 1
    keys: Mapping[str, int | None] | None = None
    pad: bool = True
    whole_outputs: bool = True
    documents: str | None = None

    def mesh_sizes(self) -> dict[str, Size]:
        """The size of ``cp``."""
        return {"cp": self.size}

    def validate(self, context: RunContext) -> list[Problem]:
        """Checks sizes and words, and where the module is known whether its attention can be cut."""
        problems = []
        if not _is_count(self.size):
            what = f"ContextParallel(size={self.size!r}) is not a whole number of at least 1."
            problems.append(Problem(what, "Use 1 or more."))
        if self.method not in METHODS:
            problems.append(Problem(f"ContextParallel(method={self.method!r}) is unknown.", f"Use {_one_of(METHODS)}."))
        if self.balance not in BALANCES:
            problems.append(
                Problem(f"ContextParallel(balance={self.balance!r}) is unknown.", f"Use {_one_of(BALANCES)}.")
            )
        problems += self._mixture_problems()
        for name in ("pad", "whole_outputs"):
            if not isinstance(getattr(self, name), bool):
                what = f"ContextParallel({name}={getattr(self, name)!r}) is neither True nor False."
                problems.append(Problem(what, "Use one of them."))
        if self.keys is not None and not (
            isinstance(self.keys, Mapping)
            and all(
                isinstance(name, str) and (dim is None or (isinstance(dim, int) and not isinstance(dim, bool)))
                for name, dim in self.keys.items()
            )
        ):
            what = f"ContextParallel(keys={self.keys!r}) is no mapping of names to dimensions or None."
            problems.append(Problem(what, 'Write {"frames": 2, "speaker": None}.'))
        if self.documents is not None and not (isinstance(self.documents, str) and self.documents):
            what = f"ContextParallel(documents={self.documents!r}) is no name of an entry of the batch."
            problems.append(Problem(what, 'Write documents="document_ids", or leave it out.'))
        if problems or context.module is None or not self._is_at_work:
            return problems
        from lightning_5d.context_parallel.compatibility import module_problems

        return module_problems(context.module, self, tensor=context.sizes.get("tp", 1))

    @property
    def _is_at_work(self) -> bool:
        """One rank alone has something to do, too, where attention has to keep to documents."""
        return self.size > 1 or self.documents is not None

    def _mixture_problems(self) -> list[Problem]:
        if not _is_count(self.ulysses):
            what = f"ContextParallel(ulysses={self.ulysses!r}) is not a whole number of at least 1."
            return [Problem(what, "Use 1 for a plain ring.")]
        problems = []
        if self.ulysses > 1 and self.method in METHODS and self.method != "ring":
            what = f'ContextParallel(method="{self.method}", ulysses={self.ulysses}): the mixture is of Ulysses and a ring.'
            problems.append(Problem(what, 'Use method="ring", or leave ulysses out.'))
        if _is_count(self.size) and self.size % self.ulysses:
            what = f"ContextParallel(size={self.size}, ulysses={self.ulysses}): {self.ulysses} does not divide {self.size}."
            problems.append(Problem(what, f"ulysses={nearest_divisor(self.size, self.ulysses)} does."))
        return problems

    def cut(self, length: int) -> SequenceCut:
        """How a sequence of so many tokens is cut."""
        if self.method == "ulysses":
            return SequenceCut(length, self.size, "contiguous", self.size)
        return SequenceCut(length, self.size, self.balance, self.ulysses)

    def parallelize(self, module: nn.Module, plan: ParallelPlan, mesh: ParallelMesh, dtypes: Dtypes) -> Parallelized:
        """Puts doors around the models that the module calls."""
        if not self._is_at_work:
            return Parallelized()
        from lightning_5d.context_parallel.cut_sequences import CutSequences

        return CutSequences(module, self, mesh)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


def _one_of(words: tuple[str, ...]) -> str:
    return " or ".join(repr(word) for word in words)
