"""What experts cannot be spread in is said in one error before training, with what works."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn

from lightning_5d import ExpertParallel, FiveD, Parallelism, ZeRO
from lightning_5d.models import LanguageModel
from tests.expert_parallel.adapted import Spreading, rows, sentences
from tests.expert_parallel.routed import Routed
from tests.expert_parallel.test_training import mixture
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, decoder
from tests.trainers import quiet


def _listed() -> Routed:
    module = Routed((4,))
    module.layers[0].experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))  # type: ignore[union-attr]
    return module


def _hooked() -> LanguageModel:
    module = mixture()()
    module.decoder.layers[1].mlp.experts.down_proj.register_hook(lambda gradient: 2 * gradient)
    return module


def _averaged() -> LanguageModel:
    module = mixture()()
    module.configure_optimizers = lambda: torch.optim.ASGD(module.parameters(), foreach=True)  # type: ignore[method-assign]
    return module


CASES: list[tuple[Callable[[], Any], list[Parallelism], dict[str, Any], list[str]]] = [
    (decoder(), [ExpertParallel(2)], {}, ["LanguageModel has no MoE layer", "Leave ExpertParallel out", "named experts, or of a class named …Experts"]),
    (partial(Routed, (4, 5)), [ExpertParallel(2)], {}, ["2 does not divide the 5 experts of layers.*.experts", "a size of 1 does"]),
    (_listed, [ExpertParallel(2)], {}, ["layers.0.experts (ModuleList)", "is a ModuleList of 4 modules"]),
    (partial(Spreading, "Mixtral", num_experts_per_tok=6), [ExpertParallel(2)], {}, ["to 6 experts and has 4", "At most 4"]),
    (_hooked, [ExpertParallel(2), ZeRO(stage=0)], {}, ["layers.1.mlp.experts.down_proj", "hooks on these parameters would be lost"]),
    (_averaged, [ExpertParallel(2), ZeRO(stage=0)], {}, ["ASGD updates all weights in one call", "Use ASGD(foreach=False)"]),
    (mixture(), [ExpertParallel(2), ZeRO(stage=0)], {"callback": WeightAveraging}, ["WeightAveraging averages whole"]),
    (
        mixture(),
        [ExpertParallel(2), ZeRO(stage=0)],
        {"callback": partial(StochasticWeightAveraging, 0.1)},
        ["StochasticWeightAveraging averages whole"],
    ),
]  # fmt: skip


def _refused(rank: int) -> list[str]:
    """The error of each case, on this rank; ranks go on together after it."""
    errors = []
    for module, plugins, options, _ in CASES:
        arguments = dict(options)
        if callback := arguments.pop("callback", None):
            arguments["callbacks"] = [callback()]
        try:
            trainer = quiet(strategy=FiveD(*plugins, timeout=30), devices=2, max_steps=1, **arguments)
            trainer.fit(
                module(), datamodule=sentences() if isinstance(module, partial) and module.func is Spreading else rows()
            )
        except Exception as error:
            errors.append(str(error))
        else:
            errors.append("trained")
    return errors


def test_each_is_one_error_before_training(ranks: RankPool) -> None:
    for errors in ranks(2, _refused, **SEPARATE):
        for (module, plugins, _, words), error in zip(CASES, errors, strict=True):
            assert error != "trained", (module, plugins)
            for word in words:
                assert word in error, (module, error)
