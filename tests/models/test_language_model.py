import math
from pathlib import Path

import lightning.pytorch as L
import pytest
import torch
import torch.nn.functional as F
import yaml
from torch.utils.data import DataLoader

from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.models import DecoderConfig, LanguageModel, OptimizerConfig
from lightning_5d.models.language_model import warmup_cosine

SILENT = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}


class OneBatch(L.LightningDataModule):
    def __init__(self, bytes_per_token=None, examples=8):
        super().__init__()
        self.bytes_per_token = bytes_per_token
        ids = torch.randint(0, 13, (examples, 9), generator=torch.Generator().manual_seed(0))
        self.examples = [{"input_ids": row[:-1], "labels": row[1:]} for row in ids]

    def train_dataloader(self):
        return DataLoader(self.examples, 4)

    def val_dataloader(self):
        return DataLoader(self.examples, 4)


def model(**optimizer):
    return LanguageModel(DecoderConfig.preset("tiny", vocab_size=13), OptimizerConfig(**optimizer))


def fit(module, tmp_path, data=None, **settings):
    settings = SILENT | {"max_epochs": 1, "enable_checkpointing": False} | settings
    trainer = L.Trainer(default_root_dir=tmp_path, **settings)
    trainer.fit(module, datamodule=data or OneBatch())
    return trainer


def test_the_loss_is_the_cross_entropy_of_label_t_at_input_t():
    module, batch = model(), next(iter(OneBatch().train_dataloader()))
    logits = module(batch["input_ids"])
    by_hand = -torch.stack(
        [logits[b, t].log_softmax(-1)[batch["labels"][b, t]] for b in range(4) for t in range(8)]
    ).mean()
    torch.testing.assert_close(module.loss(batch), by_hand)


def test_training_learns_the_batch_by_heart(tmp_path):
    torch.manual_seed(0)
    module = model(lr=1e-2, warmup_steps=5)
    before = module.loss(next(iter(OneBatch().train_dataloader()))).item()
    trainer = fit(module, tmp_path, max_epochs=60)
    assert before > 2.4
    assert float(trainer.callback_metrics["train_loss"]) < 0.5


def test_bits_per_byte_are_logged_where_the_data_knows_the_bytes(tmp_path):
    metrics = fit(model(), tmp_path, OneBatch(bytes_per_token=1.0)).callback_metrics
    assert float(metrics["val_bits_per_byte"]) == pytest.approx(float(metrics["val_loss"]) / math.log(2))
    metrics = fit(model(), tmp_path, OneBatch(bytes_per_token=4.0)).callback_metrics
    assert float(metrics["val_bits_per_byte"]) == pytest.approx(float(metrics["val_loss"]) / math.log(2) / 4)
    assert "val_bits_per_byte" not in fit(model(), tmp_path, OneBatch()).callback_metrics


def test_weight_decay_reaches_matrices_and_not_norms(tmp_path):
    module = model(weight_decay=0.3)
    groups = fit(module, tmp_path).optimizers[0].param_groups
    decayed = {id(p) for group in groups if group["weight_decay"] == 0.3 for p in group["params"]}
    spared = {id(p) for group in groups if group["weight_decay"] == 0.0 for p in group["params"]}
    names = {id(p): name for name, p in module.named_parameters()}
    assert decayed | spared == set(names)
    assert {names[i] for i in spared} == {name for name in names.values() if "norm" in name}


def test_the_learning_rate_changes_at_every_step(tmp_path):
    class Rates(L.Callback):
        def __init__(self):
            self.seen = []

        def on_train_batch_start(self, trainer, *_):
            self.seen.append(trainer.optimizers[0].param_groups[0]["lr"])

    rates = Rates()
    fit(model(lr=0.1, warmup_steps=2, min_lr_ratio=0.5), tmp_path, callbacks=[rates], max_epochs=3)
    shape = [warmup_cosine(step, warmup_steps=2, total_steps=6, floor=0.5) for step in range(6)]
    assert rates.seen == pytest.approx([0.1 * value for value in shape])


def test_warmup_and_cosine_hit_their_corners():
    schedule = [warmup_cosine(step, warmup_steps=4, total_steps=14, floor=0.1) for step in range(20)]
    assert schedule[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert schedule[9] == pytest.approx(0.55)
    assert schedule[14:] == pytest.approx([0.1] * 6)
    assert warmup_cosine(0, warmup_steps=0, total_steps=0, floor=0.1) == pytest.approx(1.0)


def test_a_checkpoint_is_read_back_without_its_classes(tmp_path):
    module = model()
    trainer = fit(module, tmp_path)
    trainer.save_checkpoint(tmp_path / "model.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "model.ckpt", weights_only=True)
    assert loaded.decoder.config == module.decoder.config
    assert loaded.optimizer_config == module.optimizer_config
    ids = torch.arange(6)[None]
    torch.testing.assert_close(loaded(ids), module(ids), atol=0, rtol=0)


def test_labels_of_minus_100_do_not_count():
    module, batch = model(), next(iter(OneBatch().train_dataloader()))
    batch["labels"][:, 3:] = -100
    kept = module(batch["input_ids"])[:, :3]
    torch.testing.assert_close(
        module.loss(batch), F.cross_entropy(kept.flatten(0, 1), batch["labels"][:, :3].flatten())
    )


def test_losses_of_experts_are_trained_and_logged_beside_the_loss(tmp_path):
    moe = {"experts": 4, "intermediate_size": 8, "balance": 0.5, "z": 0.1}
    module = LanguageModel(DecoderConfig.preset("tiny", vocab_size=13, moe=moe))
    batch = next(iter(OneBatch().train_dataloader()))
    loss, losses = module.losses(batch)
    assert set(losses) == {"balance", "z"}
    module.log = lambda *_, **__: None
    module.decoder.layers[0].mlp.gate.load.zero_()
    module.decoder.layers[1].mlp.gate.load.zero_()
    torch.testing.assert_close(module.training_step(batch, 0), loss + losses["balance"] + losses["z"])
    del module.log
    metrics = fit(module, tmp_path).callback_metrics
    assert float(metrics["train_balance_loss"]) == pytest.approx(2 * 0.5, rel=0.1)
    assert float(metrics["train_z_loss"]) > 0
    assert float(metrics["train_loss"]) < 3


def test_the_small_model_of_experts_is_the_one_that_is_configured():
    configured = yaml.safe_load((Path(__file__).parents[2] / "conf/model/moe_tiny.yaml").read_text())["decoder"]
    preset = DecoderConfig.preset("moe_tiny")
    assert configured | {"moe": None} == {name: getattr(preset, name) for name in configured} | {"moe": None}
    assert MoEConfig.of(configured["moe"]) == preset.moe
