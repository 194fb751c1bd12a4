"""Code around and inside of experts that nobody has written with other ranks in mind: it computes what one process does, or is refused."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from lightning_5d import ExpertParallel, FiveD, ZeRO
from lightning_5d.expert_parallel.config import MoEConfig
from lightning_5d.expert_parallel.dispatch import Capacity, kept_by_capacity
from lightning_5d.expert_parallel.experts import Experts as OurExperts
from lightning_5d.expert_parallel.load import choices_per_expert
from lightning_5d.expert_parallel.own_forward import compute
from lightning_5d.expert_parallel.survey import found_experts, near_misses
from lightning_5d.launch.failure import RankFailure
from tests.expert_parallel.routed import Experts, Routed
from tests.expert_parallel.test_plugin import context
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, Dealt, apart, fit
from tests.trainers import quiet


class ScaledInputs(Experts):
    """As Llama 4's."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        rows = (hidden[:, None] * weights[..., None]).flatten(0, 1)
        out = super().forward(rows, index.reshape(-1, 1), torch.ones_like(weights).reshape(-1, 1))
        return out.view(*index.shape, -1).sum(1)


class NormalisedWeights(Experts):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights / weights.sum(-1, keepdim=True))


class Residual(Experts):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return hidden + super().forward(hidden, index, weights)


class TwoOutputs(Experts):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Any:
        return super().forward(hidden, index, weights), index


class AllWeights(Experts):
    """Weights of all experts for each token, as gpt-oss's once were."""

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index, weights.gather(-1, index))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (ScaledInputs, "does not return the sum of what its experts make of a row, each times its weight"),
        (NormalisedWeights, "does not return the sum"),
        (Residual, "does not return the sum"),
        (TwoOutputs, "does not run with half of its 2 experts"),
        (AllWeights, "does not run with rows of one expert each"),
    ],
)
def test_a_forward_that_is_no_weighted_sum_is_refused(
    kind: Callable[[int], nn.Module], words: str, device: str
) -> None:
    with torch.device(device):
        module = kind(2)
        right = Experts(12)
    assert not near_misses(nn.ModuleDict({"experts": right}))
    (problem,) = near_misses(nn.ModuleDict({"experts": module}))
    assert words in str(problem)
    assert {parameter.device.type for parameter in module.parameters()} == {device}


def test_experts_made_of_ours_compute_by_their_own_forward() -> None:
    class Louder(OurExperts):
        def forward(self, hidden_ND: Tensor, index_NK: Tensor, weights_NK: Tensor) -> Tensor:
            return 2 * super().forward(hidden_ND, index_NK, weights_NK)

    config = MoEConfig(experts=4, top_k=2, intermediate_size=6)
    (layer,) = found_experts(nn.ModuleDict({"experts": Louder(8, config)}))
    assert layer.compute is compute
    normed = parametrizations.weight_norm(OurExperts(8, config), "down_proj")
    (problem,) = near_misses(nn.ModuleDict({"experts": normed}))
    assert "parametrizations.down_proj" in str(problem)


def test_tied_and_hooked_weights_of_experts_are_refused_by_name() -> None:
    module = Routed((4, 4, 4))
    module.layers[1].experts.down_proj = module.layers[0].experts.down_proj
    module.layers[2].experts = module.layers[0].experts  # a whole module twice is fine
    module.layers[0].experts.gate_up_proj.register_hook(lambda grad: grad * 2)
    tied, hooked = ExpertParallel(2).validate(context(module, dp_shard=8))
    assert "layers.0.experts.down_proj and layers.1.experts.down_proj" in str(tied)
    assert "hooks on these parameters would be lost" in str(hooked)
    assert "layers.0.experts.gate_up_proj" in str(hooked)


def test_a_choice_of_nobody_takes_no_room_and_counts_nowhere() -> None:
    index = torch.tensor([[0, -1], [1, 3], [0, 3], [-1, 0]])
    assert choices_per_expert(index, 3).tolist() == [3, 1, 0]
    assert choices_per_expert(index, 3, torch.tensor([True, True, True, False])).tolist() == [2, 1, 0]
    kept = kept_by_capacity(index, torch.ones(4, 2), 3, Capacity(0.5, "position"))  # two tokens of each
    assert kept[:, 0].tolist()[:3] == [True, True, True]
    assert not kept[3, 1]


class Chooser(Routed):
    """Chooses in some other way, in an own batch of an own size."""

    def __init__(self, way: str) -> None:
        super().__init__(top_k=1 if way == "one" else 2, lr=0.1)
        for layer in self.layers:
            layer.gate.forward = Ways(layer.gate, way)
        self.way = way

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch["input_ids"])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.way != "ragged":
            return self.loss(batch)
        rows, scored = batch["input_ids"], []
        for row in rows:
            # One of the sequences has no tokens, and others are shorter.
            tokens = row[None, : int(row[0]) % 6]
            scored.append(self(tokens).flatten(0, 1).logsumexp(-1).sum() / 8)
        return torch.stack(scored).mean()


class Ways(nn.Module):
    def __init__(self, router: nn.Module, way: str) -> None:
        super().__init__()
        self.__dict__.update(router=router, way=way)

    def forward(self, hidden: Tensor) -> Any:
        index, weights = type(self.router).forward(self.router, hidden)
        if self.way in ("none", "last"):
            none = -1 if self.way == "none" else len(self.router.weight)
            index = index.masked_fill(weights < weights.mean(-1, keepdim=True), none).int()
        return (index[:, 0], weights[:, 0]) if self.way == "one" else (index, weights)


class OneChoice(Experts):
    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return super().forward(hidden, index.reshape(-1, 1), weights.reshape(-1, 1))


class Filled(Experts):
    """Fills in what its experts make: nothing of no rows, and then nothing of its weights either."""

    def compute_sorted(self, rows: Tensor, counts: Tensor) -> Tensor:
        out, parts = torch.zeros_like(rows), rows.split(counts.tolist())
        place = 0
        for expert, part in enumerate(parts):
            if len(part):
                gate, up = F.linear(part, self.gate_up_proj[expert]).chunk(2, -1)
                out[place : place + len(part)] = F.linear(F.silu(gate) * up, self.down_proj[expert])
            place += len(part)
        return out


def chooser(way: str) -> Chooser:
    module = Chooser(way)
    if way == "always the same":
        for layer in module.layers:
            layer.experts.__class__ = Filled
            layer.gate.e_score_correction_bias[:2] = 100.0
    if way == "one":
        for layer in module.layers:
            layer.experts.__class__ = OneChoice
    return module


WAYS = {
    "none": ExpertParallel(2),
    "last": ExpertParallel(2, capacity_factor=9.0),
    "one": ExpertParallel(2),
    "ragged": ExpertParallel(2),
    "always the same": ExpertParallel(2),
}


def rows() -> Dealt:
    from tests.tensor_parallel.parity import Rows

    return Dealt(Rows(8, 6), 4)


def _each_way(rank: int) -> dict[str, Any]:
    return {
        way: _trained(way, lambda plugin=plugin: FiveD(plugin, timeout=20), devices=2) for way, plugin in WAYS.items()
    }


def _trained(way: str, strategy: Any, **arguments: Any) -> Any:
    return fit(0, lambda: chooser(way), rows, strategy, **arguments)


def test_choices_of_any_kind_train_as_in_one_process(ranks: RankPool) -> None:
    found = ranks(2, _each_way, **SEPARATE)
    for way in WAYS:
        expected = _trained(way, None, devices=1)
        differences = apart([each[way] for each in found], expected, 1e-6)
        assert max(differences.values()) < 1e-5, (way, differences)


class Reads(Routed):
    """Uses weights of experts in its step."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, weight = self.loss(batch["input_ids"]), self.layers[1].experts.down_proj
        if self.what == "penalty":
            return loss + sum(p.pow(2).sum() for p in self.parameters())
        if self.what == "one expert":
            return loss + weight[5].norm()
        if self.what == "count":
            return loss / weight.shape[0]
        return loss * (weight.shape[-1] * weight.new_ones(1)).sum()


def _reading(rank: int, what: str, stage: int) -> str:
    trainer = quiet(strategy=FiveD(ExpertParallel(2), ZeRO(stage=stage)), devices=2, use_distributed_sampler=False)
    with pytest.raises((MisconfigurationException, RankFailure)) as caught:
        trainer.fit(Reads(what), datamodule=rows())
    return str(caught.value)


@pytest.mark.parametrize(
    ("what", "stage", "words"),
    [
        ("penalty", 1, "layers.0.experts.gate_up_proj has the weights of 4 experts, spread over 2 ranks"),
        ("one expert", 0, "the step uses it otherwise than by calling layers.1.experts: __getitem__"),
        ("count", 2, "Keep the number of experts as a number, such as layers.1.experts.num_experts"),
    ],
)
def test_weights_of_experts_used_beside_their_module_are_refused_by_name_and_line(
    ranks: RankPool, what: str, stage: int, words: str
) -> None:
    for message in ranks(2, _reading, what, stage, **SEPARATE):
        assert words in message
        assert "test_other_peoples_code.py:" in message
