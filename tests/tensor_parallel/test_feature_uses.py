"""Code between the layers of a region that would compute something else on a part of the features, without failing."""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from lightning_5d import FiveD, TensorParallel
from lightning_5d.data_parallel.compatibility import module_problems
from lightning_5d.parallelism import RunContext
from lightning_5d.plan import ParallelPlan
from lightning_5d.tensor_parallel.feature_uses import Trace
from lightning_5d.tensor_parallel.first_step import FirstStep
from lightning_5d.tensor_parallel.plan import layout_of
from tests.ranks.failure import RankError
from tests.ranks.pool import RankPool
from tests.tensor_parallel.models import ENCODER_PLAN, Attention, Encoder
from tests.tensor_parallel.parity import SEPARATE, Dealt, Rows
from tests.tensor_parallel.test_first_step import Two
from tests.trainers import quiet

PLAN = {**ENCODER_PLAN, "blocks.*.mlp.up": "colwise"}
del PLAN["blocks.*.mlp.gate_up"], PLAN["head"]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 24), nn.Linear(24, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)) * 2 / x.shape[-1] ** 0.5)


class Centered(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h - h.mean(-1, keepdim=True))


class Normalised(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(F.layer_norm(h, h.shape[-1:]))


class Competing(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


class Scaled(MLP):
    def forward(self, x: Tensor) -> Tensor:
        h = self.up(x)
        return self.down(h / h.shape[-1])


class Residual(MLP):
    def forward(self, x: Tensor) -> Tensor:
        return x + super().forward(x)


class Gain(MLP):
    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return (1 + self.gain) * super().forward(x)


class Linearized(Attention):
    """No softmax, so that nobody knows it for an attention."""

    count = 4

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (layer(x_BTD).view(*x_BTD.shape[:2], self.count, -1) for layer in (self.q, self.k, self.v))
        state = torch.einsum("bthk,bthv->bhkv", F.elu(k) + 1, v)
        return self.out(torch.einsum("bthk,bhkv->bthv", F.elu(q) + 1, state).flatten(-2))


class OfItsSize(Linearized):
    count = -1

    def forward(self, x_BTD: Tensor) -> Tensor:
        q, k, v = (layer(x_BTD).unflatten(-1, (-1, 4)) for layer in (self.q, self.k, self.v))
        state = torch.einsum("bthk,bthv->bhkv", F.elu(k) + 1, v)
        return self.out(torch.einsum("bthk,bhkv->bthv", F.elu(q) + 1, state).flatten(-2))


def watched(attention: type[nn.Module] = Attention, mlp: type[nn.Module] = MLP) -> None:
    """The first step of rank 0 of two."""
    model = Encoder(attention, mlp)
    layout, problems = layout_of(model, ParallelPlan(["blocks.*"], tensor=PLAN), 2)
    assert not problems
    guards = FirstStep(model, layout, Two())  # type: ignore[arg-type]
    for name, rows in layout.weights.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        setattr(module, own, nn.Parameter(rows.part(getattr(module, own).detach(), 0, 2)))
    for region in layout.regions:
        for (owner, own), value in region.attributes.items():
            setattr(model.get_submodule(owner), own, value)
    with guards.watching("train"):
        model(torch.arange(12).view(2, 6))


@pytest.mark.parametrize("attention", [Attention, OfItsSize])
def test_code_that_fits_passes(attention: type[nn.Module]) -> None:
    watched(attention)


@pytest.mark.parametrize(
    ("mlp", "says"),
    [
        (Centered, "over 24 features or heads, of which it has 12 (mean"),
        (Normalised, "over 24 features or heads, of which it has 12 (layer_norm"),
        (Competing, "over 24 features or heads, of which it has 12 (softmax"),
        (Scaled, "computes with 12 where the whole module computes with 24"),
        (Residual, "puts its own input together with the output of its last layer"),
        (Gain, "uses gain on the output of its last layer"),
    ],
)
def test_code_that_does_not_fit_is_named(mlp: type[nn.Module], says: str) -> None:
    with pytest.raises(MisconfigurationException) as caught:
        watched(mlp=mlp)
    assert f"blocks.0.mlp ({mlp.__name__}) " in str(caught.value)
    assert says in str(caught.value)
    assert "test_feature_uses.py:" in str(caught.value)


def test_a_reshape_that_tears_heads_apart_is_noticed_without_a_softmax() -> None:
    with pytest.raises(MisconfigurationException, match=r"reshapes \(2, 6, 8\) to \(2, 6, 4, 2\)"):
        watched(Linearized)


class Penalised(L.LightningModule):
    """Its loss has something of what each rank computes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Encoder(Attention, MLP)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())
        return loss + self.net.blocks[0].mlp.seen.mean()

    def setup(self, stage: str) -> None:
        for block in self.net.blocks:
            block.mlp.up.register_forward_hook(partial(_keep, block.mlp))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def _keep(mlp: Any, module: nn.Module, args: Any, output: Tensor) -> None:
    mlp.seen = output


def train(rank: int, module: Callable[[], Any]) -> None:
    plan = {f"net.{pattern}": style for pattern, style in PLAN.items()}
    trainer = quiet(strategy=FiveD(TensorParallel(2, plan=plan)), devices=2, use_distributed_sampler=False)
    trainer.fit(module(), datamodule=Dealt(Rows(8, 6), 4))


def test_a_loss_made_of_what_each_rank_has_alone_is_refused(ranks: RankPool) -> None:
    with pytest.raises(RankError, match="The first loss is not the same on the 2 ranks of the tensor axis"):
        ranks(2, train, Penalised, **SEPARATE)


def test_blocks_that_are_known_to_mix_positions_are_refused_under_sequence_parallelism() -> None:
    layer = nn.TransformerEncoderLayer(16, 4, 24, batch_first=True)
    plan = {"layers.*.linear1": "colwise", "layers.*.linear2": "rowwise"}
    module = nn.TransformerEncoder(layer, 2)
    context = RunContext(2, 1, "cpu", "32-true", {"tp": 2}, module)
    assert not TensorParallel(2, plan=plan).validate(context)
    problems = TensorParallel(2, sequence_parallel=True, plan=plan).validate(context)
    assert [str(problem).split(" mixes")[0] for problem in problems] == [
        f"layers.{i}{what}"
        for i in range(2)
        for what in (" (TransformerEncoderLayer)", ".self_attn (MultiheadAttention)")
    ]


@pytest.mark.parametrize("plan", ["colwise", ["up"], {5: "colwise"}])
def test_a_plan_that_is_no_mapping_of_text_is_refused(plan: Any) -> None:
    (problem,) = TensorParallel(2, plan=plan).validate(RunContext(2, 1, "cpu", "32-true", {"tp": 2}, nn.Linear(2, 2)))
    assert repr(plan) in problem.what


def test_hooks_on_parameters_and_averages_of_weights_are_refused_at_stage_0() -> None:
    module = nn.Linear(4, 4)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    found = module_problems(module, 0, 1, [StochasticWeightAveraging(1e-3)], tensor=2)
    assert [problem.what.split(" when ")[0].split(", and ")[0] for problem in found] == [
        "Hooks on these parameters would be lost",
        "StochasticWeightAveraging averages whole parameters",
    ]
    assert module_problems(module, 0, 1, [StochasticWeightAveraging(1e-3)]) == []


class Counted(Attention):
    looks = 0

    def forward(self, x_BTD: Tensor) -> Tensor:
        Counted.looks += isinstance(x_BTD, FakeTensor)
        return super().forward(x_BTD)


def test_a_region_is_looked_at_once_whole_and_once_cut_for_all_blocks_that_are_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Counted, "looks", 0)
    watched(Counted)
    assert Counted.looks == 2


def test_a_linear_layer_that_is_looked_at_gives_what_its_own_forward_would() -> None:
    layer = nn.Linear(4, 6)
    handles = Trace({layer: True}).follow(layer)
    assert layer(torch.ones(2, 3, 4)).shape == (2, 3, 6)
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.ones(2, 5))
    with pytest.raises(RuntimeError, match="same dtype"):
        layer(torch.ones(2, 4, dtype=torch.float64))
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.ones(2, 4)).dtype == torch.bfloat16
    for handle in handles:
        handle.remove()
    torch.testing.assert_close(layer(torch.zeros(2, 4)), layer.bias.expand(2, 6))
