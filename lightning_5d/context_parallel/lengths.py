"""How long the sequences of a step are, by its batch; and sequence dimensions by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor

from lightning_5d.context_parallel.cut import SequenceCut
from lightning_5d.pipeline_parallel.containers import children

Path = tuple[str, ...]
"""Where a value is in others: keys, indices and names of fields."""

SEQUENCE_NAMES: Final = frozenset(
    {"input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds", "tokens", "token_ids"}
)
"""Tensors of these names have one entry per token along dimension 1."""

LABEL_NAMES: Final = frozenset({"labels", "label", "shift_labels", "label_ids", "targets", "target"})
"""Tensors of these names are compared with what a model makes of the sequence, and are never cut; also with ``…_`` before them."""


def is_label(name: str) -> bool:
    """Whether a tensor of this name is compared with outputs."""
    return name in LABEL_NAMES or any(name.endswith(f"_{label}") for label in LABEL_NAMES)


def is_mask(name: str) -> bool:
    """Whether a tensor of this name says what may be seen, or counts."""
    return "mask" in name


def named_tensors(value: Any, path: Path = ()) -> Iterator[tuple[Path, Tensor]]:
    """The tensors in `value`, each with where it is, in order."""
    if isinstance(value, Tensor):
        yield path, value
    else:
        for key, child in children(value) or ():
            yield from named_tensors(child, (*path, str(key)))


class Keys:
    """What a person says about sequence dimensions.

    Args:
        keys: Dimensions by name: of an entry of the batch, of an argument or an output of a module, or any of them with what it is
            in (``"inputs.frames"``, ``"encoder.memory"``, ``"encoder.1"``); ``None`` for what has no sequence.
    """

    def __init__(self, keys: Mapping[str, int | None] | None = None) -> None:
        self._keys = dict(keys or {})
        self._used: set[str] = set()

    def __contains__(self, path: Path) -> bool:
        return self._find(path) is not None

    def __getitem__(self, path: Path) -> int | None:
        """The dimension of what is there.

        Raises:
            KeyError: If nothing is said about it.
        """
        name = self._find(path)
        if name is None:
            raise KeyError(path)
        self._used.add(name)
        return self._keys[name]

    def unused(self) -> list[str]:
        """Names that were not looked up so far."""
        return [name for name in self._keys if name not in self._used]

    def dimension(self, path: Path, tensor: Tensor) -> int | None:
        """The dimension of a tensor, counted from 0.

        Raises:
            KeyError: If nothing is said about it.
            MisconfigurationException: If it has no such dimension.
        """
        dim = self[path]
        if dim is None:
            return None
        if not -tensor.ndim <= dim < tensor.ndim:
            raise MisconfigurationException(
                f"ContextParallel(keys={{{'.'.join(path)!r}: {dim}}}): it has shape {tuple(tensor.shape)}, without a dimension {dim}."
                f" Use one from 0 to {tensor.ndim - 1}, or None if it has no sequence."
            )
        return dim % tensor.ndim

    def _find(self, path: Path) -> str | None:
        # An index alone names nothing, but for the whole of a path.
        for start in range(len(path)):
            name = ".".join(path[start:])
            if name in self._keys and not (start and path[start:] == path[-1:] and name.isdigit()):
                return name
        return None


class BatchLengths:
    """The lengths of the sequences in a batch.

    Attributes:
        by_name: Lengths by where they were found.
    """

    def __init__(self, by_name: Mapping[str, int], tensors: Sequence[Tensor]) -> None:
        self.by_name = dict(by_name)
        self._storages = {_storage(tensor) for tensor in tensors}
        self._lengths = set(by_name.values())

    def near(self, length: int) -> bool:
        """Whether it is one of them, or one off: inputs of a model are the batch without its last token, or with one before it."""
        return any(abs(length - known) <= 1 for known in self._lengths)

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor is, or is a piece of, one of the batch that has a sequence."""
        return _storage(tensor) in self._storages


def batch_lengths(args: Sequence[Any], kwargs: Mapping[str, Any], keys: Keys) -> BatchLengths:
    """The lengths of the sequences in a batch.

    They are those of the tensors named in `keys`, and of those with names of Hugging Face's (`SEQUENCE_NAMES`). Without any, that of
    the first tensor of integers with at least two dimensions, or else of the first with three of any kind: their dimension 1.

    Args:
        args: A step's arguments: the batch and its number.
        kwargs: Those by name.
        keys: What the person says about dimensions.

    Raises:
        MisconfigurationException: If no tensor has a sequence.
    """
    found: list[tuple[Path, Tensor]] = [
        item for value in (*args, *kwargs.values()) for item in named_tensors(value) if item[1].ndim
    ]
    by_name: dict[str, int] = {}
    tensors: list[Tensor] = []
    for path, tensor in found:
        if path in keys:
            dim = keys.dimension(path, tensor)
        else:
            dim = 1 if path and path[-1] in SEQUENCE_NAMES and tensor.ndim >= 2 else None
        if dim is not None:
            by_name[".".join(path)] = tensor.shape[dim]
            tensors.append(tensor)
    if not by_name:
        path, tensor = _first(found, keys)
        by_name[".".join(path) or "the batch"] = tensor.shape[1]
    lengths = set(by_name.values())
    tensors += [
        tensor
        for path, tensor in found
        if path not in keys and tensor.ndim >= 2 and tensor.shape[1] in lengths and _of_tokens(path, tensor)
    ]
    return BatchLengths(by_name, tensors)


def _first(found: Sequence[tuple[Path, Tensor]], keys: Keys) -> tuple[Path, Tensor]:
    free = [(path, tensor) for path, tensor in found if path not in keys]
    kinds: tuple[Callable[[Tensor], bool], ...] = (
        lambda t: t.ndim >= 2 and not t.is_floating_point() and not t.is_complex(),
        lambda t: t.ndim == 3,
    )
    for fits in kinds:
        for path, tensor in free:
            if fits(tensor) and not (path and is_label(path[-1])):
                return path, tensor
    shapes = ", ".join(f"{'.'.join(path) or 'it'} {tuple(tensor.shape)}" for path, tensor in found) or "no tensors"
    name = next((".".join(path) for path, tensor in found if tensor.ndim >= 2 and path), "x")
    raise MisconfigurationException(
        f"ContextParallel cuts sequences, and found none in the batch ({shapes}): no input_ids or inputs_embeds, no integers of shape"
        f' (batch, tokens) and nothing of shape (batch, tokens, features). Say where it is: ContextParallel(keys={{"{name}": 1}}), or train without'
        " the context axis."
    )


def _of_tokens(path: Path, tensor: Tensor) -> bool:
    """Whether a tensor of a sequence's length has an entry per token, and not features that happen to be as many."""
    return (
        tensor.ndim >= 3 or not tensor.is_floating_point() or bool(path and (is_mask(path[-1]) or is_label(path[-1])))
    )


def _storage(tensor: Tensor) -> int:
    # Tensor subclasses without memory of their own are told apart by themselves.
    try:
        return tensor.untyped_storage().data_ptr() or id(tensor)
    except (RuntimeError, NotImplementedError):
        return id(tensor)


def checked(lengths: BatchLengths, cut: Callable[[int], SequenceCut], *, pad: bool) -> BatchLengths:
    """The same lengths, if every rank gets a part of all sequences.

    Args:
        lengths: Those of a batch.
        cut: How a sequence of so many tokens is cut.
        pad: Whether the ranks may hold padding.

    Raises:
        MisconfigurationException: If a sequence is too short, or would need padding and may not have it.
    """
    for name, length in lengths.by_name.items():
        check_length(cut(length), name, pad=pad)
    return lengths


def check_length(cut: SequenceCut, name: str, *, pad: bool) -> None:
    """Raises `MisconfigurationException` if a sequence cannot be cut.

    Args:
        cut: How it would be.
        name: Where it is, for a person.
        pad: Whether the ranks may hold padding.
    """
    length, multiple = cut.length, cut.multiple
    how = "" if cut.spans_per_place == 1 else f" in zigzag order, where each of them has {cut.spans_per_place} pieces"
    if length < multiple:
        fix = f"Pad to {multiple} tokens in collate_fn"
        if cut.spans_per_place > 1 and length >= cut.size:
            fix += ', or use balance="contiguous"'
        fewer = length // cut.spans_per_place
        if fewer > 1:
            fix += f", or use {fewer} ranks"
        raise MisconfigurationException(
            f"{name} has {length} tokens, and {cut.size} ranks need at least {multiple}{how}. {fix}."
        )
    if length % multiple and not pad:
        below, above = length // multiple * multiple, cut.padded
        raise MisconfigurationException(
            f"{name} has {length} tokens, and only a multiple of {multiple} can be shared evenly by {cut.size} ranks{how}; ContextParallel(pad=False) does not"
            " pad."
            f" {below} or {above} tokens would do, or pad=True."
        )
