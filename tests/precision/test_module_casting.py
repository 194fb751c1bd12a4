"""Modules compute in 16 bits, what a step computes by itself is fp32, and the user's code stays as it is."""

from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from lightning_5d import FiveD, FiveDPrecision, ZeRO
from lightning_5d.checkpoint.full_state import gather
from tests.modules import Block, TinyLM, batches
from tests.ranks.pool import RankPool
from tests.trainers import quiet, whole
from tests.traps.replicas import TRAINER

MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
HALF = pytest.mark.parametrize("precision", list(MIXED))


def fit(
    module: L.LightningModule, data: list[Any], precision: str, stage: int = 1, ranks: int = 1, **arguments: Any
) -> Any:
    plugin = precision if isinstance(precision, FiveDPrecision) else FiveDPrecision(precision)
    trainer = quiet(
        strategy=FiveD(ZeRO(stage=stage)), devices=ranks, plugins=plugin, use_distributed_sampler=False, **arguments
    )
    trainer.fit(module, DataLoader(data, batch_size=None))  # type: ignore[arg-type]
    return trainer


class Noted(L.LightningModule):
    """Notes dtypes by name, on its way to a loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dtypes: dict[str, torch.dtype] = {}
        self.facts: dict[str, Any] = {}

    def note(self, **tensors: Tensor) -> None:
        self.dtypes.update({name: tensor.dtype for name, tensor in tensors.items()})

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class OwnLosses(Noted):
    """Losses in the user's own words, of modules inside and outside of blocks and of a weight of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 8)
        self.layers = nn.ModuleList(Block(8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 4)
        self.bias = nn.Parameter(torch.zeros(4))
        self.register_buffer("positions", torch.linspace(0, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        # The fp32 buffer meets 16-bit activations, and the sum a LayerNorm, which takes one dtype only.
        x = self.embed(x) + self.positions
        self.note(stream=self.embed.weight)
        for layer in self.layers:
            x = layer(x)
            self.note(block=x)
        return self.head(self.norm(x + self.positions))

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        x, target = batch
        logits = self(x)
        by_parts = self.head(self.norm(self.layers[1](self.layers[0](self.embed(x)))))
        own = -torch.log_softmax(logits + self.bias, -1)[:, 0].mean()
        product = (logits @ self.bias).mean()
        squared = F.mse_loss(by_parts, target)
        self.note(logits=logits, by_parts=by_parts, own=own, squared=squared, target=target, weight=self.head.weight)
        self.note(bias=self.bias)
        self.facts["target"] = float(target[0, 0])
        loss = own + squared + product
        self.note(loss=loss)
        self.log("loss", loss)
        return loss

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.note(validated=self(batch[0]))


def _own_losses(rank: int, precision: str) -> list[tuple[dict[str, torch.dtype], dict[str, Any], float]]:
    found = []
    for stage in (0, 1, 3):
        module = OwnLosses()
        data = [(torch.randn(2, 3), torch.full((2, 4), 1.0001))]
        trainer = fit(module, data, precision, stage)
        trainer.validate(module, DataLoader(data, batch_size=None), verbose=False)  # type: ignore[arg-type]
        with trainer.strategy.unsharded(), torch.no_grad():
            module.note(sampled=module(data[0][0]))
        found.append((module.dtypes, module.facts, float(trainer.callback_metrics.get("loss", 0.0))))
    return found


@HALF
def test_losses_are_fp32_whatever_the_step_computes_them_from(ranks: RankPool, precision: str) -> None:
    for dtypes, facts, _ in ranks(1, _own_losses, precision, **TRAINER)[0]:
        half = {name for name, dtype in dtypes.items() if dtype == MIXED[precision]}
        assert half == {"stream", "block", "weight", "bias"}
        assert {dtypes[name] for name in dtypes.keys() - half} == {torch.float32}
        assert facts["target"] == pytest.approx(1.0001, abs=1e-7)  # 1 in either 16-bit dtype


class Normalized(Noted):
    """Batch normalization keeps its statistics in fp32, and so its weights; spectral norm its vectors."""

    def __init__(self) -> None:
        super().__init__()
        last = weight_norm(spectral_norm(nn.Linear(16, 2)), "bias", dim=None)
        self.net = nn.Sequential(nn.Conv1d(2, 4, 3), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), last)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        output = self.net(batch)
        made_of = self.net[4].parametrizations.weight.original
        self.note(
            parametrized=made_of,
            convolution=self.net[0].weight,
            normalization=self.net[1].weight,
            statistics=self.net[1].running_mean,
        )
        return output.pow(2).mean()


def _normalized(rank: int, precision: str, ranks: int) -> list[tuple[dict[str, torch.dtype], dict[str, Tensor]]]:
    found = []
    for stage in (0, 2, 3):
        module = Normalized()
        fit(
            module,
            [torch.randn(4, 2, 6, generator=torch.Generator().manual_seed(i)) for i in range(3)],
            precision,
            stage,
            ranks,
        )
        found.append((module.dtypes, {**whole(module), "mean": module.net[1].running_mean}))
    return found


@HALF
def test_batch_normalization_and_parametrizations_stay_in_fp32(ranks: RankPool, precision: str) -> None:
    right = ranks(1, _normalized, "32-true", 1, **TRAINER)[0][0][1]
    for world in (1, 2):
        for dtypes, weights in ranks(world, _normalized, precision, world, **TRAINER)[0]:
            assert dtypes == {
                "convolution": MIXED[precision],
                "parametrized": torch.float32,
                "normalization": torch.float32,
                "statistics": torch.float32,
            }
            for name, value in right.items():
                torch.testing.assert_close(weights[name], value, rtol=2e-2, atol=2e-2, msg=name)


class Checkpointed(TinyLM):
    """Recomputes its blocks in backward; reentrant or not."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.reentrant = reentrant

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.reentrant is None else checkpoint(layer, x, use_reentrant=self.reentrant)
        return self.head(x)


class CheckpointedStep(Checkpointed):
    """The step itself recomputes: the blocks are the outermost calls."""

    def loss(self, batch: Tensor) -> Tensor:
        return F.cross_entropy(Checkpointed.forward(self, batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def _checkpointed(rank: int, precision: str) -> list[dict[str, Tensor]]:
    torch.set_num_threads(1)
    found = []
    for kind in (Checkpointed, CheckpointedStep):
        for reentrant in (None, False, True):
            module = kind(reentrant)
            fit(module, batches(2), precision, 3)
            found.append(whole(module))
    return found


@HALF
def test_recomputed_blocks_compute_the_same(ranks: RankPool, precision: str) -> None:
    first, *others = ranks(1, _checkpointed, precision, **TRAINER)[0]
    for other in others:
        for name, value in first.items():
            assert torch.equal(other[name], value), name


class Compiled(TinyLM):
    """Its blocks are compiled (into what they were, which is quick)."""

    def configure_model(self) -> None:
        for layer in self.layers:
            layer.compile(backend="eager", fullgraph=True)


def _compiled(rank: int, compiled: bool) -> dict[str, Tensor]:
    torch.set_num_threads(1)
    module = Compiled() if compiled else TinyLM()
    fit(module, batches(2), "bf16-mixed", 3)
    return {name.replace("_orig_mod.", ""): value for name, value in whole(module).items()}


def test_compiled_blocks_stay_whole(ranks: RankPool) -> None:
    right = ranks(1, _compiled, False, **TRAINER)[0]
    for name, value in ranks(1, _compiled, True, **TRAINER)[0].items():
        torch.testing.assert_close(value, right[name], rtol=0, atol=1e-4, msg=name)


class Pretrained(Noted):
    """A Hugging Face model as it comes; its own loss."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        import transformers as hf

        small = {"vocab_size": 13, "hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
        if kind == "llama":
            config = hf.LlamaConfig(**small, intermediate_size=16, num_key_value_heads=1, max_position_embeddings=16)
            self.model = hf.LlamaForCausalLM(config)
        elif kind == "gpt2":
            config = hf.GPT2Config(vocab_size=13, n_embd=8, n_layer=2, n_head=2, n_positions=16)
            self.model = hf.GPT2LMHeadModel(config)
        else:
            config = hf.BertConfig(**small, intermediate_size=16, max_position_embeddings=16, num_labels=1)
            self.model = hf.BertForSequenceClassification(config)
        self.regresses = kind == "bert"
        self.eval()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        labels = batch[:, 0].float() / 13 if self.regresses else batch
        output = self.model(input_ids=batch, labels=labels)
        self.note(loss=output.loss, logits=output.logits)
        self.facts.setdefault("losses", []).append(float(output.loss))
        return output.loss


def _pretrained(rank: int, kind: str, ranks: int) -> dict[str, tuple[dict[str, torch.dtype], list[float]]]:
    pytest.importorskip("transformers")
    found = {}
    for precision in ("32-true", *MIXED):
        module = Pretrained(kind)
        fit(module, batches(3), precision, 3, ranks)
        found[precision] = (module.dtypes, module.facts["losses"])
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "bert"])
def test_hugging_face_models_train_in_mixed_precision(ranks: RankPool, kind: str) -> None:
    found = ranks(2, _pretrained, kind, 2, **TRAINER)[0]
    for precision in MIXED:
        dtypes, losses = found[precision]
        assert set(dtypes.values()) == {torch.float32}
        assert losses == pytest.approx(found["32-true"][1], rel=2e-2)


class Teacher(TinyLM):
    """A frozen copy follows the trained head, written in the step and, by hand, in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = nn.Linear(8, 13, bias=False).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.teacher.weight[0].fill_(0.5)
        return super().training_step(batch, batch_idx) + 0.0 * self.teacher(self.embed(batch)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.1)


def _masters(rank: int, ranks: int) -> list[bool]:
    found = []
    for stage in (0, 1, 3):
        module = Teacher()
        before = module.teacher.weight.detach().clone()
        fit(module, batches(2), "bf16-mixed", stage, ranks)
        after = gather(dict(module.named_parameters()), keep=True)["teacher.weight"]
        found.append(torch.equal(after[1:], before[1:]) and bool((after[0] == 0.5).all()))
    return found


@pytest.mark.parametrize("world", [1, 2])
def test_masters_keep_the_digits_that_their_copies_do_not_have(ranks: RankPool, world: int) -> None:
    assert ranks(world, _masters, world, **TRAINER) == [[True, True, True]] * world
