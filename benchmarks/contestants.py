"""Ways to train the decoder on data ranks: each returns a function that makes one optimizer step."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from benchmarks.decoder import Decoder, Size

Step = Callable[[Tensor, Tensor], Any]
LEARNING_RATE = 1e-3


def _decoder(size: Size) -> Decoder:
    torch.manual_seed(0)
    return Decoder(size)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, fused=True)


def _loop(module: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    def step(tokens: Tensor, targets: Tensor) -> None:
        loss = module(tokens, targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    return step


def ceiling(size: Size) -> Step:
    """Independent processes side by side: nothing is shared."""
    module = _decoder(size)
    return _loop(module, _adamw(module))


def torch_ddp(size: Size) -> Step:
    module = nn.parallel.DistributedDataParallel(_decoder(size), gradient_as_bucket_view=True)
    return _loop(module, _adamw(module))


def ddp_zero_redundancy(size: Size) -> Step:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    module = nn.parallel.DistributedDataParallel(_decoder(size), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        module.parameters(), torch.optim.AdamW, lr=LEARNING_RATE, fused=True, parameters_as_bucket_view=True
    )
    return _loop(module, optimizer)


def fsdp2(reshard: bool) -> Callable[[Size], Step]:
    """FSDP2 as it comes: stage 2 without, stage 3 with resharding after forward."""

    def make(size: Size) -> Step:
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        module = _decoder(size)
        for layer in module.layers:
            fully_shard(layer, mesh=mesh, reshard_after_forward=reshard)
        fully_shard(module, mesh=mesh, reshard_after_forward=False)
        return _loop(module, _adamw(module))

    return make


def deepspeed_zero(stage: int) -> Callable[[Size], Step]:
    """DeepSpeed's ZeRO on the same optimizer, where it is installed (it is none of this project's dependencies)."""

    def make(size: Size) -> Step:
        import deepspeed

        module = _decoder(size)
        config = {
            "train_micro_batch_size_per_gpu": size.batch,
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "wall_clock_breakdown": False,
            "steps_per_print": 10**9,
        }
        model, *_ = deepspeed.initialize(model=module, optimizer=_adamw(module), config=config)

        def step(tokens: Tensor, targets: Tensor) -> None:
            model.backward(model(tokens, targets))
            model.step()

        return step

    return make


def engine(stage: int) -> Callable[[Size], Step]:
    """This package's engine in a bare loop."""

    def make(size: Size) -> Step:
        from lightning_5d.data_parallel import ShardOptions, shard

        module = _decoder(size)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp_shard",))
        sharded = shard(module, list(module.layers), mesh, ShardOptions(stage=stage))
        optimizer = _adamw(module)

        def step(tokens: Tensor, targets: Tensor) -> None:
            sharded.begin(last=True)
            loss = module(tokens, targets)
            optimizer.zero_grad()
            loss.backward()
            sharded.wait()
            optimizer.step()

        return step

    return make


def fit_and_tick(
    module: Any, strategy: Any, batches: list[tuple[Tensor, Tensor]], tick: Callable[[], None], *callbacks: Any
) -> None:
    """Fits a LightningModule to batches, and calls `tick` after every step."""
    import lightning as L

    class Tick(L.Callback):
        def on_train_batch_end(self, *_: Any) -> None:
            tick()

    warnings.simplefilter("ignore")
    L.Trainer(
        accelerator="cpu",
        devices=dist.get_world_size(),
        strategy=strategy,
        max_steps=len(batches),
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        callbacks=[Tick(), *callbacks],
    ).fit(module, torch.utils.data.DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def trainer(strategy: Callable[[], Any]) -> Callable[[Size], Any]:
    """A Lightning Trainer; instead of a step it returns a function that fits and calls ``tick`` after every step."""

    def make(size: Size) -> Any:
        def fit(batches: list[tuple[Tensor, Tensor]], tick: Callable[[], None]) -> None:
            import lightning as L

            class Module(L.LightningModule):
                def __init__(self) -> None:
                    super().__init__()
                    self.decoder = _decoder(size)

                def training_step(self, batch: Any, index: int) -> Tensor:
                    loss: Tensor = self.decoder(*batch)
                    return loss

                def configure_optimizers(self) -> torch.optim.Optimizer:
                    return _adamw(self)

            fit_and_tick(Module(), strategy(), batches, tick)

        return fit

    return make


def _five_d(stage: int) -> Callable[[], Any]:
    def make() -> Any:
        from lightning_5d import FiveD, ZeRO

        return FiveD(ZeRO(stage=stage))

    return make


def _lightning_ddp() -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(gradient_as_bucket_view=True)


CONTESTANTS: dict[str, Callable[[Size], Any]] = {
    "ceiling": ceiling,
    "torch DDP": torch_ddp,
    "Lightning ddp": trainer(_lightning_ddp),
    "DDP + ZeroRedundancyOptimizer": ddp_zero_redundancy,
    "FSDP2 stage 2": fsdp2(reshard=False),
    "FSDP2 stage 3": fsdp2(reshard=True),
    **({f"DeepSpeed stage {stage}": deepspeed_zero(stage) for stage in (1, 2, 3)} if find_spec("deepspeed") else {}),
    **{f"engine stage {stage}": engine(stage) for stage in range(4)},
    **{f"FiveD stage {stage}": trainer(_five_d(stage)) for stage in range(4)},
}
REFERENCES = tuple(name for name in CONTESTANTS if name != "ceiling" and not name.startswith(("engine", "FiveD")))
TARGETS = {
    "small": {0: 0.97, 1: 0.97, 2: 0.95, 3: 0.93},
    "medium": {0: 0.96, 1: 0.96, 2: 0.90, 3: 0.86},
}
