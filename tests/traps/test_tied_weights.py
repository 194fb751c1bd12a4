"""Section G: a tied weight is one weight, from deferred initialization to a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.modules import TinyLM, loader
from tests.ranks.pool import RankPool
from tests.trainers import whole, zero
from tests.traps.replicas import STAGES, TRAINER


class Tied(TinyLM):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(tied=True, seed=seed)


class TiedLater(TinyLM):
    """Layers made, and tied, in `configure_model`."""

    def __init__(self) -> None:
        super().__init__()
        embed, head = self.embed, self.head
        del self.embed, self.head
        self._made = (embed, head)
        self._ready = False

    def configure_model(self) -> None:
        if self._ready:
            return
        self.embed, self.head = self._made
        self.head.weight = self.embed.weight
        self._ready = True


def _deferred(rank: int, stage: int, ranks: int, how: str) -> dict[str, Any]:
    trainer = zero(stage, ranks, max_steps=5, max_epochs=-1)
    if how == "meta":
        with trainer.init_module(empty_init=True):
            module: TinyLM = Tied()
        assert module.embed.weight.is_meta
    else:
        module = TiedLater() if how == "configure_model" else Tied()
    counts: list[int] = []
    shared: list[bool] = []

    original = module.on_fit_start

    def on_fit_start() -> None:
        original()
        counts.append(sum(parameter.numel() for parameter in module.parameters()))
        shared.append(module.head.weight is module.embed.weight)

    module.on_fit_start = on_fit_start  # type: ignore[method-assign]
    trainer.fit(module, loader(10 * ranks))
    shared.append(module.head.weight is module.embed.weight)
    optimizer = trainer.optimizers[0]
    in_optimizer = sum(p is module.embed.weight for group in optimizer.param_groups for p in group["params"])
    weights = whole(module)
    finite = all(bool(torch.isfinite(value).all()) for value in weights.values())
    return {
        "count": counts,
        "shared": shared,
        "in_optimizer": in_optimizer,
        "finite": finite,
        "names": sorted(weights),
        "steps": trainer.global_step,
        "sum": float(weights["embed.weight"].abs().sum()),
    }


@pytest.mark.parametrize("how", ["usual", "configure_model", "meta"])
@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("world", [1, 2, 3])
def test_34_a_tied_weight_is_one_after_setup_and_after_five_steps(
    ranks: RankPool, world: int, stage: int, how: str
) -> None:
    expected = sum(p.numel() for p in Tied().parameters())
    results = ranks(world, _deferred, stage, world, how, **TRAINER)
    assert all(result == results[0] for result in results)
    found = results[0]
    assert found["count"] == [expected]
    assert found["shared"] == [True, True]
    assert found["in_optimizer"] == 1
    assert found["finite"]
    assert found["steps"] == 5
    assert "head.weight" not in found["names"]
    assert found["sum"] > 0


def _resumed(rank: int, stage: int, ranks: int, folder: str, part: str) -> dict[str, Any]:
    path = Path(folder) / "tied.ckpt"
    steps = 3 if part == "first" else 6
    trainer = zero(stage, ranks, max_steps=steps, max_epochs=-1)
    module = Tied(seed=0 if part != "second" else 50)
    # One and the same batch in every step, so that the layouts see the same data.
    trainer.fit(module, Same(ranks), ckpt_path=path if part == "second" else None)
    if part == "first":
        trainer.save_checkpoint(path)
    state = trainer.strategy.optimizer_state(trainer.optimizers[0])["state"]
    return {"weights": whole(module), "state": state, "shared": module.head.weight is module.embed.weight}


def Same(ranks: int) -> Any:
    from torch.utils.data import DataLoader

    from tests.modules import Tokens

    rows = [Tokens(1).rows[0]] * (2 * ranks)
    return DataLoader(rows, batch_size=2)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("first", "second"),
    [((0, 2), (0, 2)), ((1, 2), (1, 2)), ((2, 2), (2, 2)), ((3, 2), (3, 2)), ((3, 2), (1, 3)), ((0, 3), (3, 2))],
)
def test_35_a_tied_model_resumes_with_its_moments(
    ranks: RankPool, tmp_path: Path, first: tuple[int, int], second: tuple[int, int]
) -> None:
    ranks(first[1], _resumed, *first, str(tmp_path), "first", **TRAINER)
    straight = ranks(second[1], _resumed, *second, str(tmp_path), "straight", **TRAINER)[0]
    resumed = ranks(second[1], _resumed, *second, str(tmp_path), "second", **TRAINER)
    saved = torch.load(tmp_path / "tied.ckpt", weights_only=True)
    torch.testing.assert_close(saved["state_dict"]["head.weight"], saved["state_dict"]["embed.weight"], rtol=0, atol=0)
    assert len(saved["optimizer_states"][0]["state"]) == len(list(Tied().parameters()))
    for found in resumed:
        assert found["shared"]
        torch.testing.assert_close(found["weights"], straight["weights"], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(resumed[0]["state"], straight["state"], rtol=1e-5, atol=1e-6)
