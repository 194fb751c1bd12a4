"""What ranks of the tensor axis send in a training step, and what they keep of it for backward, as formulas say."""

from functools import partial
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_5d import FiveD, TensorParallel
from tests.ranks.pool import RankPool
from tests.tensor_parallel.parity import SEPARATE, SIZES, Dealt, Rows, decoder
from tests.trainers import quiet

ROWS, TOKENS = 4, 8
ACTIVATION = ROWS * TOKENS * SIZES["hidden_size"] * 4
"""Bytes of a whole activation between modules."""
NUMBERS = 3 * ROWS * TOKENS * 4
"""Bytes of the three numbers per token that each rank has of its part of the vocabulary."""


class Counted(L.Callback):
    """Counts the last step (the first one is looked at more closely, which costs some more), and what its blocks save for backward.

    Attributes:
        saved: Bytes saved inside of attention and feed-forward modules, and beside them.
    """

    def __init__(self) -> None:
        self.calls: dict[str, int] = {}
        self.bytes: dict[str, int] = {}
        self.saved: dict[str, int] = {}

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self._place: list[str] = []
        for block in module.decoder.layers:
            self._follow(block, "beside")
            self._follow(block.self_attn, "inside")
            self._follow(block.mlp, "inside")

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, FiveD):
            trainer.strategy.parallelized[0].axis.traffic.reset()
        self._seen: dict[tuple[str, int], Tensor] = {}
        self._saving = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)
        self._saving.__enter__()

    def on_before_backward(self, *_: Any) -> None:
        self._saving.__exit__()
        self.saved = {"inside": 0, "beside": 0}
        for (place, _), tensor in self._seen.items():
            self.saved[place] += tensor.untyped_storage().nbytes()
        self._seen.clear()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if isinstance(trainer.strategy, FiveD):
            traffic = trainer.strategy.parallelized[0].axis.traffic
            self.calls, self.bytes = dict(traffic.calls), dict(traffic.bytes)

    def _follow(self, module: nn.Module, place: str) -> None:
        module.register_forward_pre_hook(lambda *_: self._place.append(place))
        module.register_forward_hook(lambda *_: self._place.pop() and None)

    def _pack(self, tensor: Tensor) -> Tensor:
        if self._place and not isinstance(tensor, nn.Parameter):
            self._seen[self._place[-1], tensor.untyped_storage().data_ptr()] = tensor
        return tensor


def _step(rank: int, size: int, cases: list[tuple[bool, int]]) -> list[tuple[dict[str, int], ...]]:
    found = []
    for sequence, layers in cases:
        counted = Counted()
        strategy: Any = {"strategy": FiveD(TensorParallel(size, sequence_parallel=sequence))} if size > 1 else {}
        trainer = quiet(
            devices=size,
            callbacks=[counted],
            use_distributed_sampler=False,
            max_steps=2,
            limit_val_batches=0,
            **strategy,
        )
        trainer.fit(decoder(num_layers=layers, num_kv_heads=4)(), Dealt(Rows(2 * ROWS, TOKENS), ROWS))
        found.append((counted.calls, counted.bytes, counted.saved))
    return found


@pytest.mark.parametrize("size", [2, 4])
def test_a_step_sends_what_the_formulas_say_and_keeps_a_share_of_what_is_beside_regions(
    ranks: RankPool, size: int
) -> None:
    cases = [(sequence, layers) for sequence in (False, True) for layers in (2, 3)]
    ((_, _, alone),) = _step(0, 1, [(False, 2)])
    for results in ranks(size, partial(_step, size=size, cases=cases), **SEPARATE):
        for (sequence, layers), (calls, volume, saved) in zip(cases, results, strict=True):
            loss = size * NUMBERS
            if sequence:
                norms = (
                    (2 * layers + 1) * (SIZES["hidden_size"] + 1) * 4
                )  # their gradients, and how many ranks have one
                # Beside the blocks: the gradient of the cut and the whole for the head, the head's gradient, the embedding.
                assert calls == {"all_gather": 4 * layers + 3, "reduce_scatter": 4 * layers + 1, "all_reduce": 2}
                assert volume == {
                    "all_gather": (4 * layers + 2) * ACTIVATION + loss,
                    "reduce_scatter": (4 * layers + 1) * ACTIVATION,
                    "all_reduce": ACTIVATION + norms,
                }
            else:
                # Beside the blocks: the embedding, and the gradient of the head's input.
                assert calls == {"all_gather": 1, "reduce_scatter": 0, "all_reduce": 4 * layers + 2}
                assert volume == {
                    "all_gather": loss,
                    "reduce_scatter": 0,
                    "all_reduce": (4 * layers + 2) * ACTIVATION,
                }
            beside = alone["beside"] // 2 * layers
            assert saved["beside"] == (beside // size if sequence else beside)
            assert saved["inside"] < alone["inside"] // 2 * layers
