"""Which window goes where: by the seed and the epoch, not by the number of ranks."""

from types import SimpleNamespace

import lightning.pytorch as L
import pytest
import torch
from torch.utils.data import DistributedSampler

from lightning_5d.data import TextFiles

WINDOWS = 22


def corpus(tmp_path, ranks=1, rank=0, batch_size=2, seed=5, workers=0):
    path = tmp_path / "text.txt"
    # Window i of training begins with byte i + 1; one more window and a token for validation.
    path.write_bytes(b"".join(bytes([i + 1, 33, 33, 33]) for i in range(WINDOWS)) + b"!" * 23)
    data = TextFiles(path, sequence_length=4, batch_size=batch_size, val_fraction=0.2, seed=seed, num_workers=workers)
    data.trainer = SimpleNamespace(
        distributed_sampler_kwargs={"num_replicas": ranks, "rank": rank} if ranks > 1 else None
    )
    return data


def steps(data, epoch=0):
    loader = data.train_dataloader()
    loader.sampler.set_epoch(epoch)
    return [set(batch["input_ids"][:, 0].tolist()) for batch in loader]


@pytest.mark.parametrize("workers", [0, 2])
def test_a_step_sees_the_same_windows_whatever_the_number_of_ranks(tmp_path, workers):
    one = steps(corpus(tmp_path, batch_size=8))
    two = [steps(corpus(tmp_path, 2, rank, batch_size=4, workers=workers)) for rank in range(2)]
    four = [steps(corpus(tmp_path, 4, rank, batch_size=2)) for rank in range(4)]
    assert len(one) == 2
    for step, windows in enumerate(one):
        assert set().union(*(rank[step] for rank in two)) == windows
        assert set().union(*(rank[step] for rank in four)) == windows
        assert sum(len(rank[step]) for rank in four) == len(windows) == 8


def test_each_epoch_has_a_new_order_that_the_seed_decides(tmp_path):
    first, second = steps(corpus(tmp_path), 0), steps(corpus(tmp_path), 1)
    assert first != second
    assert set().union(*first) == set().union(*second) == set(range(1, WINDOWS + 1))
    assert steps(corpus(tmp_path), 1) == second
    assert steps(corpus(tmp_path, seed=6), 0) != first


def test_the_order_does_not_depend_on_the_global_generator(tmp_path):
    torch.manual_seed(0)
    first = steps(corpus(tmp_path))
    torch.manual_seed(1)
    assert steps(corpus(tmp_path)) == first


def test_validation_keeps_the_order_of_the_text_and_repeats_nothing(tmp_path):
    data = corpus(tmp_path, batch_size=3)
    loader = data.val_dataloader()
    assert [len(batch["input_ids"]) for batch in loader] == [3, 2]
    assert list(loader.sampler) == [0, 1, 2, 3, 4]
    ranks = [list(corpus(tmp_path, 2, rank).val_dataloader().sampler) for rank in range(2)]
    assert ranks == [[0, 2], [1, 3]]


def test_lightning_leaves_the_sampler_alone_and_tells_it_the_epoch(tmp_path):
    class Seen(L.LightningModule):
        def __init__(self):
            super().__init__()
            self.layer, self.epochs = torch.nn.Linear(1, 1), {}

        def training_step(self, batch, batch_idx):
            self.epochs.setdefault(self.current_epoch, []).append(set(batch["input_ids"][:, 0].tolist()))
            return self.layer(torch.ones(1, 1)).sum()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.0)

    data, module = corpus(tmp_path), Seen()
    trainer = L.Trainer(
        max_epochs=2, accelerator="cpu", logger=False, enable_progress_bar=False, enable_checkpointing=False,
        enable_model_summary=False, limit_val_batches=0, default_root_dir=tmp_path,
    )  # fmt: skip
    trainer.fit(module, datamodule=data)
    assert isinstance(trainer.train_dataloader.sampler, DistributedSampler)
    assert module.epochs == {epoch: steps(corpus(tmp_path), epoch) for epoch in range(2)}


def test_more_ranks_than_the_data_can_feed_are_refused_with_both_numbers(tmp_path):
    with pytest.raises(
        ValueError, match=r"22 training windows of 4.*batch of 8 on each of 4 data ranks, which takes 32"
    ):
        corpus(tmp_path, 4, batch_size=8).setup("fit")
    assert "use batch_size 5, fewer ranks" in corpus(tmp_path, batch_size=8).problems(data_ranks=4)[0]
    assert not corpus(tmp_path, batch_size=5).problems(data_ranks=4)
    training, validation = corpus(tmp_path, batch_size=1).problems(data_ranks=64)
    assert "22 training windows" in training
    assert "which takes 64; use fewer ranks" in training
    assert "5 validation windows of 4 tokens are too few for 64 data ranks; use at most 5 ranks" in validation
