"""Section E, and what of F, G and N is about the tensor axis: cut layers, sequences, masks, tied weights, who reads what."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from lightning_5d import FiveD, TensorParallel, ZeRO
from lightning_5d.launch.failure import RankFailure
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import Dealt, Rows, compare, decoder
from tests.trainers import quiet
from tests.traps.noted import Noted
from tests.traps.replicas import TRAINER

WIDTH = 8
PLAN = {"embed": "vocabulary", "blocks.*.mlp.up": "colwise", "blocks.*.mlp.down": "rowwise", "head": "vocabulary"}
SEQUENCE = pytest.mark.parametrize("sequence", [False, True], ids=["tp", "tp+sp"])


class MLP(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inside, self.residual = Noted(dropout), Noted(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(self.down(self.inside(F.gelu(self.up(x)))))


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), MLP(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class Model(L.LightningModule):
    """A language model of norms and feed-forward layers."""

    def __init__(self, vocabulary: int = 12, dropout: float = 0.0, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(vocabulary, WIDTH)
        self.dropout = Noted(dropout)
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, vocabulary, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.reads: dict[str, list[Tensor]] = {"hook": [], "log": []}

    def forward(self, ids: Tensor) -> Tensor:
        x = self.dropout(self.embed(ids))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return F.cross_entropy(self(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def on_after_backward(self) -> None:
        self.reads["hook"].append(_here(self.blocks[0].norm.weight.grad))  # type: ignore[union-attr]

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        gradient = _here(self.norm.bias.grad)
        self.reads["log"].append(gradient)
        self.log("norm_bias", gradient.norm())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def _here(tensor: Any) -> Tensor:
    """What this rank reads, without asking others."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.detach().clone()


def _tensor(size: int = 2, sequence: bool = False, plan: dict[str, str] | None = None) -> TensorParallel:
    return TensorParallel(size, sequence_parallel=sequence, plan=PLAN if plan is None else plan)


def _trained(rank: int, module: Callable[[], Model], plugins: Any, rows: int = 40, **flags: Any) -> Model:
    trainer = quiet(strategy=FiveD(*plugins), **flags) if plugins else quiet(devices=1, **flags)
    made = module()
    trainer.fit(made, datamodule=Dealt(Rows(rows, 6, 7), 4))
    return made


def _reads(rank: int, plugins: Any, **flags: Any) -> Any:
    module = _trained(rank, Model, plugins, **flags)
    norms = {n: _here(p) for n, p in module.named_parameters() if "norm" in n}
    return {**module.reads, "logged": float(module.trainer.callback_metrics["norm_bias"])}, norms


@pytest.mark.parametrize(
    "clip", [{"gradient_clip_val": 0.1}, {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"}]
)
def test_22_whoever_reads_a_norms_gradient_under_sequence_parallelism_reads_the_sum(
    ranks: RankPool, clip: dict[str, Any]
) -> None:
    found = ranks(2, _reads, (_tensor(sequence=True),), devices=2, **clip, **TRAINER)
    reads, norms = _reads(0, (), **clip)
    assert len(reads["hook"]) == len(reads["log"]) == 10
    for here, weights in found:
        torch.testing.assert_close(here, reads, rtol=1e-4, atol=1e-7)
        torch.testing.assert_close(weights, norms, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(weights, found[0][1], rtol=0, atol=0)


@SEQUENCE
def test_23_more_ranks_than_key_and_value_heads_train_as_one_process(ranks: RankPool, sequence: bool) -> None:
    compare(ranks, decoder(num_heads=4, num_kv_heads=2), TensorParallel(4, sequence_parallel=sequence), world=4)


def _refused(rank: int, heads: int, size: int) -> str:
    with pytest.raises((MisconfigurationException, RankFailure)) as caught:
        quiet(strategy=FiveD(TensorParallel(size)), devices=size).fit(
            decoder(num_heads=heads, num_kv_heads=1, hidden_size=4 * heads)(), datamodule=Dealt(Rows(4, 6), 2)
        )
    return str(caught.value)


def test_23_heads_that_ranks_do_not_divide_are_one_error_with_both_numbers(ranks: RankPool) -> None:
    for message in ranks(2, _refused, 3, 2, **TRAINER):
        assert (
            "tp=2 does not divide the heads of decoder.layers.*.self_attn (3 query heads, 1 key/value heads)" in message
        )


@pytest.mark.parametrize("head", ["vocabulary", "colwise_gather_output", None])
@pytest.mark.parametrize(("vocabulary", "size"), [(13, 4), (7, 2)])
def test_25_a_vocabulary_that_ranks_do_not_divide_trains_as_in_one_process(
    ranks: RankPool, vocabulary: int, size: int, head: str | None
) -> None:
    plan = {**PLAN, "head": head} if head else {k: v for k, v in PLAN.items() if k != "head"}
    compare(ranks, partial(Model, vocabulary), _tensor(size, plan=plan), world=size, rows=80, vocabulary=7)


def _vocabulary(rank: int, path: str) -> Any:
    module = Model(13)
    logits: list[Tensor] = []
    module.head.register_forward_hook(lambda _, args, out: logits.append(out.detach().softmax(-1).sum(-1)))
    trainer = quiet(strategy=FiveD(_tensor(4)), devices=4)
    trainer.fit(module, datamodule=Dealt(Rows(8, 6, 13), 4))
    trainer.save_checkpoint(path)
    return [float(total.sub(1).abs().max()) for total in logits]


def test_25_padding_has_no_probability_and_no_row_in_a_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    path = tmp_path / "odd.ckpt"
    for totals in ranks(4, _vocabulary, str(path), **TRAINER):
        assert max(totals) < 1e-5
    saved = torch.load(path, weights_only=True)
    assert saved["state_dict"]["embed.weight"].shape == saved["state_dict"]["head.weight"].shape == (13, WIDTH)
    moments = saved["optimizer_states"][0]["state"]
    assert {tuple(state["exp_avg"].shape) for state in moments.values() if state["exp_avg"].shape[0] > 12} >= {
        (13, WIDTH)
    }


class Sum(Model):
    """The loss is a sum of which each rank has a part."""

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.blocks[0].mlp(self.embed(batch["input_ids"])).sum()

    def on_after_backward(self) -> None:
        pass  # the norms of other tests have no gradient here

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass


def test_26_the_gradient_of_a_sum_over_ranks_is_not_multiplied_by_their_number(ranks: RankPool) -> None:
    compare(ranks, Sum, _tensor(), world=2, vocabulary=12)
    compare(ranks, Sum, _tensor(4), world=4, vocabulary=12)


def _masks(
    rank: int, plugins: Any, devices: int, save: str | None = None, resume: str | None = None, **flags: Any
) -> dict[str, list[Any]]:
    L.seed_everything(3, verbose=False)
    module = Model(dropout=0.5)
    trainer = quiet(strategy=FiveD(*plugins), devices=devices, accumulate_grad_batches=2, **flags)
    trainer.fit(module, datamodule=Dealt(Rows(16, 6, 7), 4), ckpt_path=resume)
    if save:
        trainer.save_checkpoint(save)
    return {name: m.masks for name, m in module.named_modules() if isinstance(m, Noted)}


def _all(found: list[dict[str, list[Any]]], names: Any) -> list[Any]:
    return [mask for masks in found for name in names for mask in masks[name]]


@SEQUENCE
def test_31_masks_agree_on_whole_activations_and_differ_on_ranks_own_replicas_layers_steps_and_microbatches(
    ranks: RankPool, sequence: bool
) -> None:
    found = ranks(4, _masks, (ZeRO(stage=1), _tensor(sequence=sequence)), 4, **TRAINER)
    inside = {name for name in found[0] if name.endswith("inside")}
    blocks = {name for name in found[0] if name.startswith("blocks")}
    own = blocks if sequence else inside
    for replica in (found[:2], found[2:]):
        for name in found[0]:
            if name not in own:
                assert replica[0][name] == replica[1][name]
                assert len(set(replica[0][name])) == len(replica[0][name]) == 4
    every = _all(found, own)
    assert len(set(every)) == len(every) == 4 * 4 * len(own)
    whole = _all(found[::2], set(found[0]) - own)
    assert len(set(whole)) == len(whole)


class Flat(Block):
    """Layers, and dropout behind and between them, directly in the block."""

    def __init__(self, dropout: float) -> None:
        super().__init__(0.0)
        del self.mlp
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.inside, self.residual = Noted(dropout), Noted(dropout)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.residual(self.down(self.inside(F.gelu(self.up(self.norm(x))))))


def _flat(rank: int) -> tuple[dict[str, list[Any]], list[Tensor]]:
    module = Model()
    module.blocks = nn.ModuleList(Flat(0.5) for _ in range(2))
    plan = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    trainer = quiet(strategy=FiveD(_tensor(plan=plan)), devices=2)
    trainer.fit(module, datamodule=Dealt(Rows(16, 6, 7), 4))
    masks = {name: m.masks for name, m in module.named_modules() if isinstance(m, Noted)}
    return masks, [_here(p) for name, p in module.named_parameters() if not ("up" in name or "down.weight" in name)]


def test_31_ranks_draw_the_same_behind_a_row_layer_also_in_the_same_module(ranks: RankPool) -> None:
    (zero, weights), (one, others) = ranks(2, _flat, **TRAINER)
    assert {name for name in zero if zero[name] != one[name]} == {"blocks.0.inside", "blocks.1.inside"}
    torch.testing.assert_close(weights, others, rtol=0, atol=0)


def test_31_a_resumed_run_goes_on_with_the_masks_of_one_without_a_break(ranks: RankPool, tmp_path: Path) -> None:
    path = str(tmp_path / "half.ckpt")
    run = partial(ranks, 2, _masks, (_tensor(sequence=True),), 2, **TRAINER)
    straight, first, second = run(max_epochs=2), run(max_epochs=1, save=path), run(max_epochs=2, resume=path)
    for rank in range(2):
        assert straight[rank] == {name: first[rank][name] + second[rank][name] for name in first[rank]}


def _gradients(rank: int, plugins: Any, devices: int, checkpointing: Any) -> list[Tensor]:
    L.seed_everything(3, verbose=False)
    module = Model(dropout=0.5)
    seen: list[Tensor] = []

    class Gradients(L.Callback):
        def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
            seen.extend(_here(p.grad) for p in module.parameters())

    strategy = FiveD(*plugins, activation_checkpointing=checkpointing)
    quiet(strategy=strategy, devices=devices, callbacks=[Gradients()]).fit(module, datamodule=Dealt(Rows(8, 6, 7), 4))
    return seen


@SEQUENCE
def test_32_recomputed_regions_draw_their_old_masks(ranks: RankPool, sequence: bool) -> None:
    run = partial(ranks, 2, _gradients, (_tensor(sequence=sequence),), 2, **TRAINER)
    kept = run(checkpointing=None)
    for checkpointing in ("full", "selective", {"modules": ["*.mlp"]}):
        torch.testing.assert_close(run(checkpointing=checkpointing), kept, rtol=1e-6, atol=1e-7)


def _tied(rank: int, how: str) -> dict[str, Any]:
    trainer = quiet(strategy=FiveD(ZeRO(stage=3), _tensor()), devices=4, max_steps=5, max_epochs=-1)
    if how == "meta":
        with trainer.init_module(empty_init=True):
            module = Model(tied=True)
        assert module.embed.weight.is_meta
    else:
        module = Model(tied=True)
    one: list[Any] = []
    module.on_fit_start = lambda: one.append(
        (module.head.weight is module.embed.weight, sum(p.numel() for p in module.parameters()))
    )  # type: ignore[method-assign]
    trainer.fit(module, datamodule=Dealt(Rows(80, 6, 7), 4))
    one.append((module.head.weight is module.embed.weight, sum(p.numel() for p in module.parameters())))
    in_optimizer = [p is module.embed.weight for group in trainer.optimizers[0].param_groups for p in group["params"]]
    return {"one": one, "in optimizer": sum(in_optimizer), "steps": trainer.global_step}


@pytest.mark.parametrize("how", ["usual", "meta"])
def test_34_a_tied_weight_is_one_after_setup_and_after_five_steps(ranks: RankPool, how: str) -> None:
    count = sum(p.numel() for p in Model(tied=True).parameters())
    for found in ranks(4, _tied, how, **TRAINER):
        assert found == {"one": [(True, count)] * 2, "in optimizer": 1, "steps": 5}


class Reader(Model):
    def __init__(self) -> None:
        super().__init__(vocabulary=16)
        self.epochs: list[list[int]] = []

    def on_train_epoch_start(self) -> None:
        self.epochs.append([])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.epochs[-1] += batch.tolist()
        return self(batch[:, None]).float().logsumexp(-1).mean()


def _read(rank: int, workers: int) -> list[list[int]]:
    L.seed_everything(5, workers=True, verbose=False)
    module = Reader()
    trainer = quiet(strategy=FiveD(ZeRO(stage=1), _tensor()), devices=4, max_epochs=2)
    trainer.fit(module, DataLoader(range(16), batch_size=2, shuffle=True, num_workers=workers))  # type: ignore[arg-type]
    return module.epochs


@pytest.mark.parametrize("workers", [0, 2])
def test_76_ranks_of_a_replica_read_the_same_samples_and_replicas_share_them_out(ranks: RankPool, workers: int) -> None:
    found = ranks(4, _read, workers, **TRAINER)
    assert found[0] == found[1]
    assert found[2] == found[3]
    for epoch in range(2):
        assert sorted(found[0][epoch] + found[2][epoch]) == list(range(16))
    assert found[0][0] != found[0][1]
