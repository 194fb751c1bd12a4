"""A bias on the choice follows the load: once for each step that is made, from tokens that were trained on, each counted once."""

from dataclasses import replace
from functools import partial

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, LossScaling, ZeRO
from lightning_5d.activation_checkpointing import ActivationCheckpointing
from lightning_5d.expert_parallel.bias import balance_by_bias, move_biases
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.counted import Counted
from lightning_5d.expert_parallel.moe import MoE
from lightning_5d.models import Decoder, DecoderConfig, LanguageModel
from lightning_5d.plan import find_plan
from tests.trainers import quiet

HIDDEN, EXPERTS = 6, 4
CONFIG = MoEConfig(experts=EXPERTS, top_k=2, intermediate_size=4, scores="sigmoid", bias_rate=0.1)


def hidden(seed: int = 0) -> Tensor:
    return torch.randn(2, 8, HIDDEN, generator=torch.Generator().manual_seed(seed))


def block(config: MoEConfig = CONFIG) -> MoE:
    torch.manual_seed(0)
    return MoE(HIDDEN, config, std=0.5)


def test_a_step_moves_each_bias_by_the_rate_towards_the_mean_load():
    module = nn.ModuleList([block(), block()])
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    balance_by_bias(module, optimizer)
    loads = [torch.tensor([8, 4, 4, 0]), torch.tensor([1, 1, 1, 1])]
    for part, load in zip(module, loads, strict=True):
        part.gate.load.copy_(load)
    optimizer.step()
    torch.testing.assert_close(module[0].gate.expert_bias, torch.tensor([-0.1, 0.0, 0.0, 0.1]))
    assert module[1].gate.expert_bias.equal(torch.zeros(EXPERTS))
    assert all(not part.gate.load.any() for part in module)
    optimizer.step()
    torch.testing.assert_close(module[0].gate.expert_bias, torch.tensor([-0.1, 0.0, 0.0, 0.1]))


def test_the_rate_can_be_given_and_the_hook_taken_away():
    module = block()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    handle = balance_by_bias(module, optimizer, rate=0.5)
    module.gate.load.copy_(torch.tensor([2, 0, 0, 0]))
    optimizer.step()
    torch.testing.assert_close(module.gate.expert_bias, torch.tensor([-0.5, 0.5, 0.5, 0.5]))
    handle.remove()
    module.gate.load.copy_(torch.tensor([2, 0, 0, 0]))
    optimizer.step()
    torch.testing.assert_close(module.gate.expert_bias, torch.tensor([-0.5, 0.5, 0.5, 0.5]))


def test_the_loads_of_all_layers_are_summed_over_ranks_at_once():
    class Ranks(Counted):
        asked = 0

        def sum(self, x, scope):
            assert scope == "global"
            Ranks.asked += 1
            return x + torch.tensor([0, 0, 9, 9] * 3)

    module = nn.ModuleList([block() for _ in range(3)])
    for part in module:
        part.counted = Ranks()
        part.gate.load.copy_(torch.tensor([5, 5, 0, 0]))
    move_biases(module)
    assert Ranks.asked == 1
    for part in module:
        torch.testing.assert_close(part.gate.expert_bias, torch.tensor([0.1, 0.1, -0.1, -0.1]))


def test_a_router_before_which_no_sequence_is_cut_is_summed_over_other_ranks():
    class Ranks(Counted):
        def __init__(self, differs, others):
            self.differs, self.others = differs, torch.tensor(others)

        @property
        def differing(self):
            return self.differs

        def sum(self, x, scope):
            return x + self.others.repeat(len(x) // EXPERTS)

    module = nn.ModuleList([block() for _ in range(3)])
    for part, differs in zip(module, (False, True, False), strict=True):
        part.counted = Ranks(differs, [0, 0, 9, 9] if differs else [0, 0, 0, 0])
        part.gate.load.copy_(torch.tensor([5, 5, 0, 0]))
    move_biases(module)
    for part, differs in zip(module, (False, True, False), strict=True):
        away = torch.tensor([-0.1, -0.1, 0.1, 0.1])
        torch.testing.assert_close(part.gate.expert_bias, -away if differs else away)


def test_the_load_is_that_of_all_microbatches_in_training_and_of_no_other():
    module = block()
    choices = [module.gate(hidden(seed).flatten(0, 1)).index_NK.flatten() for seed in range(3)]
    expected = torch.bincount(torch.cat(choices), minlength=EXPERTS)
    assert module.gate.load.equal(expected)
    module.eval()(hidden(3))
    assert module.gate.load.equal(expected)


def test_biases_bring_balance():
    torch.manual_seed(0)
    sizes = {"experts": EXPERTS, "top_k": 1, "intermediate_size": 4}
    module = block(MoEConfig(**sizes, normalize=False, scores="sigmoid", bias_rate=0.01))
    module.gate.weight.data[0] += 1.0
    x = torch.randn(1, 512, HIDDEN) + 0.5
    shares = []
    for _ in range(150):
        module.gate.load.zero_()
        module(x)
        shares.append(module.gate.load.max().item() / 128)
        move_biases(module)
    assert shares[0] > 2.0
    assert shares[-1] < 1.1


OWN = [ActivationCheckpointing(), ActivationCheckpointing(mode="selective"), ActivationCheckpointing(memory_budget=0.5)]


def recomputed(way: str | ActivationCheckpointing, config: DecoderConfig) -> tuple[Decoder, list[Tensor]]:
    torch.manual_seed(0)
    decoder = Decoder(config)
    if isinstance(way, ActivationCheckpointing):
        way.parallelize(decoder, find_plan(decoder), None, None)  # type: ignore[arg-type]
    elif way:
        for layer in decoder.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=way == "reentrant")
    decoder.embed_tokens.weight.requires_grad_()
    losses = []
    for seed in (0, 1):
        ids = torch.randint(0, 13, (2, 16), generator=torch.Generator().manual_seed(seed))
        output = decoder(ids)
        losses.append(output.logits.square().mean() + sum(output.losses.values()))
    if way != "reentrant":
        sum(losses).backward()  # the second forward comes before the first backward, as in a pipeline
    return decoder, losses


@pytest.mark.parametrize("way", ["not reentrant", *OWN], ids=lambda way: getattr(way, "mode", way))
def test_a_forward_that_backward_runs_again_counts_once_and_has_the_same_gradients(way):
    config = DecoderConfig.preset(
        "tiny", vocab_size=13, moe={"experts": 4, "intermediate_size": 8, "balance": 0.5, "z": 0.1, "bias_rate": 0.1}
    )
    found, found_losses = recomputed(way, config)
    expected, losses = recomputed("", config)
    torch.testing.assert_close(found_losses, losses)
    for name, buffer in expected.named_buffers():
        assert found.get_buffer(name).equal(buffer), name
    assert expected.layers[1].mlp.gate.load.sum() == 2 * 2 * 16 * 2
    for (name, one), other in zip(found.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, msg=lambda m, name=name: f"{name}: {m}")


class Product(Counted):
    """Takes sums over ranks by an operation that selective recomputation keeps by its number."""

    def sum(self, x, scope):
        return (torch.eye(len(x)) @ x.float()[:, None])[:, 0].to(x.dtype)


def test_what_is_not_asked_again_does_not_shift_what_selective_recomputation_keeps():
    def trained(run) -> list[Tensor]:
        blocks = nn.ModuleList([block(replace(CONFIG, balance=0.5, shared=1)) for _ in range(2)])
        for each in blocks:
            each.counted = Product()

        def both(x):
            total = 0.0
            for each in blocks:
                y, losses = each(x)
                x, total = x + y, total + losses["balance"]
            return x, total

        x, total = run(both, hidden().requires_grad_())
        (x.square().sum() + total).backward()
        return [parameter.grad for parameter in blocks.parameters()]

    kept = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
    found = trained(partial(checkpoint, use_reentrant=False, context_fn=kept))
    torch.testing.assert_close(found, trained(lambda both, x: both(x)))


def test_a_reentrant_checkpoint_counts_once_too():
    module = block()
    x = hidden().requires_grad_()
    checkpoint(module, x, use_reentrant=True).sum().backward()
    assert module.gate.load.sum() == 2 * 8 * 2


class Batches(L.LightningDataModule):
    def train_dataloader(self):
        ids = torch.randint(0, 13, (16, 9), generator=torch.Generator().manual_seed(0))
        return DataLoader([{"input_ids": row[:-1], "labels": row[1:]} for row in ids], 4)

    def val_dataloader(self):
        return self.train_dataloader()


class Biases(L.Callback):
    """What biases are after each batch."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []
        self.loads: list[int] = []

    def on_train_batch_end(self, trainer, module, *_):
        gate = module.decoder.layers[0].mlp.gate
        self.seen.append(gate.expert_bias.clone())
        self.loads.append(int(gate.load.sum()))


def language_model(**moe) -> LanguageModel:
    torch.manual_seed(0)
    config = {"experts": 4, "intermediate_size": 8, "bias_rate": 0.1, "shared": 1, **moe}
    return LanguageModel(DecoderConfig.preset("tiny", vocab_size=13, moe=config))


def test_in_a_trainer_they_move_once_for_each_optimizer_step_and_are_in_its_checkpoint(tmp_path):
    biases, module = Biases(), language_model()
    trainer = quiet(callbacks=[biases], accumulate_grad_batches=2, default_root_dir=tmp_path)
    trainer.fit(module, Batches())
    before = [torch.zeros(4), *biases.seen[:-1]]
    moved = [not one.equal(other) for one, other in zip(biases.seen, before, strict=True)]
    assert moved == [False, True, False, True]
    assert biases.loads == [4 * 8 * 2, 0, 4 * 8 * 2, 0]
    trainer.save_checkpoint(tmp_path / "moe.ckpt")
    loaded = LanguageModel.load_from_checkpoint(tmp_path / "moe.ckpt", weights_only=True)
    assert loaded.decoder.layers[0].mlp.gate.expert_bias.equal(biases.seen[-1])
    assert loaded.decoder.config == module.decoder.config


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed", "bf16-true"])
def test_under_zero_the_router_and_its_bias_are_fp32_while_modules_compute_in_16_bits(precision, tmp_path):
    seen: dict[str, torch.dtype] = {}
    biases, module = Biases(), language_model(balance=0.01, z=0.001)

    loads = []

    def note(gate, args, output):
        loads.append(output.index_NK.flatten().bincount(minlength=4))
        seen.update(weight=gate.weight.dtype, logits=output.logits_NE.dtype, bias=gate.expert_bias.dtype)

    gate, experts = module.decoder.layers[0].mlp.gate, module.decoder.layers[0].mlp.experts
    gate.register_forward_hook(note)
    experts.register_forward_pre_hook(
        lambda experts, args: seen.update(experts=experts.down_proj.dtype, rows=args[0].dtype, weights=args[2].dtype)
    )
    module.decoder.layers[1].register_forward_hook(lambda layer, args, _: seen.update(losses=args[3]["z"].dtype))
    trainer = quiet(strategy=FiveD(ZeRO(stage=1)), plugins=FiveDPrecision(precision), callbacks=[biases], devices=1)
    trainer.fit(module, Batches())
    half = torch.float16 if precision == "16-mixed" else torch.bfloat16
    true = precision == "bf16-true"
    assert seen == {
        "weight": half if true else torch.float32,
        "logits": torch.float32,
        "bias": torch.float32,
        "experts": half,
        "rows": half,
        "weights": torch.float32,
        "losses": torch.float32,
    }
    assert biases.seen[-1].dtype == torch.float32
    first = loads[0].float()
    torch.testing.assert_close(biases.seen[0], 0.1 * (first.mean() - first).sign())
    assert trainer.strategy.skipped_steps.total == 0
    assert {"train_balance_loss", "train_z_loss"} <= set(trainer.callback_metrics)


def test_a_step_that_loss_scaling_leaves_out_moves_nothing(tmp_path):
    biases = Biases()
    precision = FiveDPrecision("16-mixed", loss_scaling=LossScaling(init_scale=2.0**40))
    trainer = quiet(strategy=FiveD(ZeRO(stage=1)), plugins=precision, callbacks=[biases], devices=1, max_steps=2)
    trainer.fit(language_model(), Batches())
    assert trainer.strategy.skipped_steps.total == 2
    assert biases.seen[-1].equal(torch.zeros(4))
    assert biases.loads[-1] == 2 * 4 * 8 * 2


def test_a_fused_optimizer_that_finds_an_overflow_itself_moves_nothing():
    module = block()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.0, fused=True)
    balance_by_bias(module, optimizer)
    module.gate.load.copy_(torch.tensor([2, 0, 0, 0]))
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    assert module.gate.expert_bias.equal(torch.zeros(EXPERTS))
    optimizer.found_inf = torch.tensor(0.0)
    optimizer.step()
    assert not module.gate.expert_bias.equal(torch.zeros(EXPERTS))


class Forgetful(LanguageModel):
    """Nobody moves the biases of its routers."""

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Hesitant(LanguageModel):
    """Leaves its first step out."""

    def on_before_optimizer_step(self, optimizer):
        if self.trainer.strategy.skipped_steps.total == 0:
            self.trainer.strategy.skip_step("the first one")


@pytest.mark.parametrize(("kind", "warned"), [(Forgetful, 1), (LanguageModel, 0), (Hesitant, 0)])
def test_biases_that_nothing_moves_are_told_of_once(kind, warned, recwarn):
    module = kind(DecoderConfig.preset("tiny", moe=CONFIG))
    trainer = quiet(strategy=FiveD(), devices=1, max_steps=3)
    rows = torch.randint(0, 256, (12, 6), generator=torch.Generator().manual_seed(0))
    batches = [{"input_ids": row, "labels": row} for row in rows]
    trainer.fit(module, DataLoader(batches, batch_size=4))
    told = [str(warning.message) for warning in recwarn if "starts it anew" in str(warning.message)]
    assert len(told) == warned
    assert all("decoder.layers.0.mlp.gate (2 in all)" in message for message in told)
