"""Ranks agree on their batches: the same one where they must hold the same, and the same number of them everywhere."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sized
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.data import _set_sampler_epoch, sized_len
from lightning.fabric.utilities.seed import pl_worker_init_function
from lightning.fabric.utilities.types import _Stateful
from lightning.pytorch.loops.fetchers import _DataLoaderIterDataFetcher
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from lightning_5d.initialization import module_seed, run_seed
from lightning_5d.mesh import DATA_AXES, ParallelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl


def batch_digest(batch: Any) -> int:
    """A 62-bit hash of a batch: its structure, shapes, dtypes and values."""
    digest = hashlib.sha256()
    leaves, _ = tree_flatten_with_path(batch)
    for path, leaf in leaves:
        digest.update(keystr(path).encode())
        if isinstance(leaf, Tensor):
            digest.update(f"{leaf.dtype}{tuple(leaf.shape)}".encode())
            whole = leaf.detach().cpu().contiguous()
            digest.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
        else:
            digest.update(repr(leaf).encode())
    return int.from_bytes(digest.digest()[:8], "big") >> 2


def check_same_batch(batch: Any, mesh: ParallelMesh, device: torch.device, where: str) -> None:
    """Raises on every rank if ranks that must hold the same batch hold different ones.

    Args:
        batch: This rank's batch.
        mesh: The ranks by axis; those that differ in pp, cp or tp alone must agree. Costs one small all-reduce.
        device: Where a collective's tensor may live.
        where: Which batch this is, for the message.

    Raises:
        MisconfigurationException: If the hashes differ, with what usually causes it.
    """
    group = mesh.replica_group
    if group is None:
        return
    digest = batch_digest(batch)
    # The maximum of x and of -x tells whether all are equal, in one collective.
    both = torch.tensor([digest, -digest], dtype=torch.int64, device=device)
    dist.all_reduce(both, op=dist.ReduceOp.MAX, group=group)
    if int(both[0]) != -int(both[1]):
        ranks = dist.get_process_group_ranks(group)
        raise MisconfigurationException(
            f"Ranks {', '.join(map(str, ranks))} must hold the same batch, but {where} differs between them (rank"
            f" {dist.get_rank()} has hash {digest:015x}). They share data rank {mesh.rank(*DATA_AXES)} of"
            f" {mesh.size(*DATA_AXES)}. Give a sampler of your own `num_replicas={mesh.size(*DATA_AXES)}` and"
            " `rank=trainer.strategy.distributed_sampler_kwargs['rank']`, the same seed on all ranks, and augmentations"
            " that do not depend on the rank."
        )


class _Wrapped:
    """A dataloader but for iteration and length."""

    _loader: Any
    _OWN: tuple[str, ...] = ("_loader",)

    def __init__(self, loader: Any) -> None:
        object.__setattr__(self, "_loader", loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(object.__getattribute__(self, "_loader"), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self._OWN:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)


class EvenLoader(_Wrapped):
    """A dataloader that gives every data rank the same number of batches: that of the rank with the fewest.

    Without that, a rank that runs out first would leave the others waiting in a collective. Everything but iteration and
    length is the wrapped loader's.

    Args:
        loader: The loader of this rank.
        group: The data ranks.
        device: Where a collective's tensor may live.
        length: The agreed number of batches, or ``None`` if it is not known.
        stream: Whether the length is only what the loader says of itself; ranks then agree before each batch.
    """

    _OWN = ("_loader", "_group", "_device", "_length", "_stream")

    def __init__(
        self, loader: Any, group: dist.ProcessGroup, device: torch.device, length: int | None, stream: bool = False
    ) -> None:
        super().__init__(loader)
        self._group, self._device = group, device
        self._length, self._stream = length, stream or length is None

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("The number of batches of this loader is not known.")
        return int(self._length)

    def __iter__(self) -> Iterator[Any]:
        return self._agreed() if self._stream else self._first()

    def _first(self) -> Iterator[Any]:
        batches = iter(self._loader)
        for index in range(len(self)):
            try:
                batch = next(batches)
            except StopIteration:
                raise MisconfigurationException(
                    f"A dataloader ({type(self._loader).__name__}) said that it has {len(self._loader)} batches, and ended after"
                    f" {index}. Let its length be true, or leave `__len__` out: ranks then agree before each batch."
                ) from None
            yield batch

    def _agreed(self) -> Iterator[Any]:
        batches, nothing = iter(self._loader), object()
        ranks = dist.get_world_size(self._group)
        while True:
            batch = next(batches, nothing)
            more = torch.tensor([batch is not nothing], dtype=torch.int32, device=self._device)
            dist.all_reduce(more, group=self._group)
            if (having := int(more)) < ranks:
                if having:
                    rank_zero_warn(
                        "Data ranks have different numbers of batches; the epoch ends with the shortest, so some"
                        " batches of other ranks are not used."
                    )
                return
            yield batch


class NoBatches(_Wrapped):
    """The loader of a rank that has nothing to predict while others have.

    It says that it has a batch: Lightning leaves ranks without one out of the loop, whose hooks may communicate.
    """

    def __len__(self) -> int:
        return 1

    def __iter__(self) -> Iterator[Any]:
        return iter(())


def even_loader(loader: Any, mesh: ParallelMesh, device: torch.device, *, predicting: bool) -> tuple[Any, bool]:
    """Makes a dataloader safe for collectives in the loop; all ranks call it together.

    Args:
        loader: What the user's hook returned, with Lightning's sampler already in place.
        mesh: The ranks by axis.
        device: Where a collective's tensor may live.
        predicting: Whether every batch matters (prediction), so that nothing may be left out.

    Returns:
        The loader, wrapped where ranks would part ways, and whether ranks have different numbers of batches.

    Raises:
        MisconfigurationException: If the data cannot give every rank a sample and a batch. No data at all are no error, as in
            one process.
    """
    _seed_workers(loader, mesh)
    replicas = mesh.size(*DATA_AXES)
    if replicas == 1:
        return loader, False
    stream = isinstance(loader, DataLoader) and isinstance(loader.dataset, IterableDataset)
    length, samples = sized_len(loader), _samples(loader)
    group = mesh.data_group
    lengths = _gathered(-1 if length is None else length, group, device)
    known = min(lengths) >= 0
    if predicting:
        left_out = known and length == 0 and any(lengths)
        return NoBatches(loader) if left_out else loader, stream or not known or len(set(lengths)) > 1
    if samples and samples < replicas:
        raise MisconfigurationException(
            f"The data set has {samples} samples for {replicas} data ranks. Give it at least {replicas}, or use at most"
            f" {samples} data ranks."
        )
    if not known:
        return EvenLoader(loader, group, device, None), False
    if min(lengths) == 0 and (samples or any(lengths)):
        raise _no_batch(loader, lengths, samples, replicas)
    uneven = len(set(lengths)) > 1
    if uneven:
        rank_zero_warn(
            f"Data ranks have different numbers of batches: {lengths}. Each uses the first {min(lengths)}, as a rank that"
            " goes on alone would wait for the others for ever."
        )
    if uneven or stream:
        return EvenLoader(loader, group, device, min(lengths), stream=stream), False
    return loader, False


def _gathered(number: int, group: dist.ProcessGroup, device: torch.device) -> list[int]:
    mine = torch.tensor([number], dtype=torch.int64, device=device)
    everyone = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(everyone, mine, group=group)
    return [int(each) for each in everyone]


def _no_batch(loader: Any, lengths: list[int], samples: int | None, replicas: int) -> MisconfigurationException:
    size = getattr(loader, "batch_size", None)
    need = f"at least {replicas * size} samples, or a smaller batch size" if isinstance(size, int) else "more samples"
    return MisconfigurationException(
        f"A dataloader has no batch on some ranks (batches by data rank: {lengths};"
        f" {samples if samples is not None else 'unknown'} samples, batch size {size}, {replicas} data ranks,"
        f" drop_last={getattr(loader, 'drop_last', None)}). Give it {need}, or drop_last=False."
    )


def leave_out_seen(trainer: pl.Trainer) -> None:
    """After a resume in the middle of an epoch: reads and drops the batches that were trained on before the break.

    Lightning counts them but begins the epoch's data again. Loaders that save their own position are left alone.

    Args:
        trainer: The Trainer, at the start of training, with the first epoch's iterator made.
    """
    # Checked with lightning 2.6.6, whose loops are not public in this detail.
    loop = trainer.fit_loop
    progress, fetcher = loop.epoch_loop.batch_progress, loop._data_fetcher
    seen = getattr(progress.current, "processed", 0)
    if not loop.restarting or progress.is_last_batch or not 0 < seen < trainer.num_training_batches:
        return
    if fetcher is None or isinstance(fetcher, _DataLoaderIterDataFetcher):
        return
    if all(isinstance(loader, _Stateful) for loader in fetcher.combined_loader.flattened):
        return
    for loader in fetcher.combined_loader.flattened:
        _set_sampler_epoch(loader, trainer.current_epoch)
    iter(fetcher)  # the order of the epoch, which the iterator made before did not know of
    for _ in range(seen):
        next(fetcher)
    fetcher.fetched -= seen  # the loop adds them


def _samples(loader: Any) -> int | None:
    """Samples of the whole data set where a `DistributedSampler` spreads it over ranks."""
    for holder in (loader, getattr(loader, "batch_sampler", None)):
        sampler = getattr(holder, "sampler", None)
        if isinstance(sampler, DistributedSampler) and isinstance(sampler.dataset, Sized):
            return len(sampler.dataset)
    return None


def _seed_workers(loader: Any, mesh: ParallelMesh) -> None:
    if not isinstance(loader, DataLoader) or not loader.num_workers:
        return
    data_rank = mesh.rank(*DATA_AXES)
    # Workers start from a number that the loader draws from the global stream, which is the same on all ranks: data ranks
    # would all augment alike. The order of samples has a stream of its own.
    if loader.generator is None:
        loader.generator = torch.Generator().manual_seed(module_seed(run_seed(), f"workers/{data_rank}"))
    # Lightning would seed workers by global rank: ranks that must hold the same batch would then augment it differently.
    if int(os.environ.get("PL_SEED_WORKERS", "0")) and loader.worker_init_fn is None:
        loader.worker_init_fn = partial(pl_worker_init_function, rank=data_rank)
