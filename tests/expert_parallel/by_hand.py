"""A language model of blocks with experts, written by hand, whose tokens go to their experts by plain collectives, and trained in stages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import lightning as L
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_5d.parallelism import Dtypes, Parallelism, Parallelized

WIDTH, EXPERTS, VOCABULARY = 8, 4, 13


class Losses(NamedTuple):
    """Of blocks so far."""

    balance: Tensor
    z: Tensor


class AllToAll(torch.autograd.Function):
    """Rows to other ranks, and gradients back."""

    calls: ClassVar[list[str]] = []

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: Any) -> Tensor:
        ctx.sizes = send, receive, group
        AllToAll.calls.append("again" if torch._C._current_graph_task_id() != -1 else "forward")
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        send, receive, group = ctx.sizes
        out = grad.new_empty(sum(send), grad.shape[1])
        AllToAll.calls.append("backward")
        dist.all_to_all_single(out, grad.contiguous(), send, receive, group=group)
        return out, None, None, None


class Experts(nn.Module):
    """All experts are on each rank, which computes with its part of them what all ranks' tokens ask of those."""

    group: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.4)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.4)

    def forward(self, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        order = torch.argsort(index.flatten(), stable=True)
        counts = torch.bincount(index.flatten(), minlength=EXPERTS)
        rows = hidden[order // index.shape[1]]
        if self.group is None:
            out = self.compute(rows, counts, 0)
        else:
            size, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
            own = EXPERTS // size
            arriving = torch.empty_like(counts)
            dist.all_to_all_single(arriving, counts, group=self.group)
            send, receive = counts.view(size, own).sum(1).tolist(), arriving.view(size, own).sum(1).tolist()
            rows = AllToAll.apply(rows, send, receive, self.group)
            by_expert = torch.argsort(torch.arange(own).repeat(size).repeat_interleave(arriving), stable=True)
            out = self.compute(rows[by_expert], arriving.view(size, own).sum(0), rank * own)
            out = torch.empty_like(out).index_copy(0, by_expert, out)
            out = AllToAll.apply(out, receive, send, self.group)
        return torch.zeros_like(hidden).index_add(0, order // index.shape[1], out * weights.flatten()[order, None])

    def compute(self, rows: Tensor, counts: Tensor, first: int) -> Tensor:
        parts = [
            F.gelu(part @ self.up[first + i].T) @ self.down[first + i].T
            for i, part in enumerate(rows.split(counts.tolist()))
        ]
        return torch.cat(parts)


class Balance(torch.autograd.Function):
    """Sum of shares times mean scores. What was counted is not saved as torch saves, so it is not made again when the block runs again."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, shares: Tensor) -> Tensor:
        ctx.shares = shares
        return len(shares) * (scores * shares).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * len(ctx.shares) * ctx.shares, None


class Sparse(nn.Module):
    """A block with experts, the shares of whose choices are those of the step so far if `running`."""

    group: Any = None
    over: Any = staticmethod(lambda weight: ())  # groups of ranks that have counted other tokens

    def __init__(self, running: bool, checkpointed: bool | None) -> None:
        super().__init__()
        self.running, self.checkpointed = running, checkpointed
        self.norm = nn.LayerNorm(WIDTH)
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        nn.init.normal_(self.router.weight, std=0.5)
        self.experts = Experts()
        self.register_buffer("bias", torch.zeros(EXPERTS))
        for name in ("load", "shares"):
            self.register_buffer(name, torch.zeros(EXPERTS), persistent=False)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, x: Tensor, losses: Losses | None) -> tuple[Tensor, Losses]:
        if self.checkpointed is None or not torch.is_grad_enabled():
            return self.inner(x, losses)
        return checkpoint(self.inner, x, losses, use_reentrant=self.checkpointed)

    def inner(self, x: Tensor, losses: Losses | None) -> tuple[Tensor, Losses]:
        hidden = self.norm(x).flatten(0, -2)
        logits = self.router(hidden)
        scores = logits.softmax(-1)
        index = (scores.detach() + self.bias).topk(2).indices
        x = x + self.experts(hidden, index, scores.gather(-1, index)).view_as(x)
        counts = torch.bincount(index.flatten(), minlength=EXPERTS).float()
        everyone = counts.clone()
        if self.group is not None:
            dist.all_reduce(everyone, group=self.group)
        again = torch._C._current_graph_task_id() != -1
        with torch.no_grad():
            shares = everyone / everyone.sum()
            if self.running:
                shares = (self.shares + shares) / (self.seen + 1)
                if self.training and not again:
                    self.shares += everyone / everyone.sum()
                    self.seen += 1
            if self.training and not again:
                self.load += counts
        balance = 0.3 * Balance.apply(scores.mean(0), shares)
        z = 0.2 * logits.logsumexp(-1).square().mean()
        return x, Losses(balance, z) if losses is None else Losses(losses.balance + balance, losses.z + z)


class Dense(nn.Module):
    """A block without."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor, losses: Losses | None) -> tuple[Tensor, Losses | None]:
        return x + self.down(F.gelu(self.up(x))), losses


class Model(L.LightningModule):
    """Adds the losses of its blocks to its own."""

    def __init__(self, *, running: bool = True, checkpointed: bool | None = None, dense: Sequence[int] = ()) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layers = nn.ModuleList(Dense() if i in dense else Sparse(running, checkpointed) for i in range(4))
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        x, losses = self.embed(batch["input_ids"]), None
        for layer in self.layers:
            x, losses = layer(x, losses)
        loss = F.cross_entropy(self.head(x).flatten(0, 1), batch["labels"].flatten())
        if losses is not None:
            self.log("balance", losses.balance, on_step=False, on_epoch=True, sync_dist=True)
            loss = loss + losses.balance + losses.z
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        optimizer.register_step_post_hook(self.balance)
        return optimizer

    @torch.no_grad()
    def balance(self, *_: Any) -> None:
        for layer in self.layers:
            if "load" in layer._buffers:  # and not only what stands for a block of another stage
                load = layer.load.clone()
                for group in layer.over(layer.router.weight):
                    dist.all_reduce(load, group=group)
                layer.bias += 0.05 * (load.mean() - load).sign()
                for counted in (layer.load, layer.shares, layer.seen):
                    counted.zero_()


@dataclass(frozen=True)
class Sending(Parallelism):
    """Has tokens sent over the data ranks."""

    axis: ClassVar[str] = "sending"
    order: ClassVar[int] = 15

    def parallelize(self, module: nn.Module, plan: Any, mesh: Any, dtypes: Dtypes) -> Parallelized:
        return Sent(module, mesh.data_group)


class Sent(Parallelized):
    """That at work."""

    def __init__(self, module: nn.Module, group: Any) -> None:
        self.group = group
        self.axes: Sequence[Parallelized] = ()
        for inner in module.modules():
            if isinstance(inner, Sparse):
                inner.group = inner.experts.group = group
                inner.over = self.over

    def all_at_work(self, axes: Sequence[Parallelized]) -> None:
        self.axes = axes

    def over(self, weight: Tensor) -> list[Any]:
        holders = [axis.holders_of(weight) for axis in self.axes]
        return [self.group, *(group for group in holders if group is not None)]
