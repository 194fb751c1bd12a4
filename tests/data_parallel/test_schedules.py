"""Schedules of microbatches, driven by hand: two parts on each rank, in orders that no single backward would have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F

from lightning_5d.data_parallel import Engine, ShardOptions
from lightning_5d.data_parallel.blocks import outer_modules
from lightning_5d.data_parallel.sharded import ShardedData
from lightning_5d.data_parallel.zero import ZeRO
from lightning_5d.parallelism import Part, RunContext
from tests.data_parallel.odd_modules import WIDTH, Block
from tests.data_parallel.training import inputs, mesh_engine, whole

STAGES = pytest.mark.parametrize("stage", [0, 1, 2, 3])
MICROBATCHES = 3
# (microbatch, part) of all backwards: the second part before the first for each microbatch, else any.
ORDERS = (
    ((2, 1), (0, 1), (0, 0), (1, 1), (2, 0), (1, 0)),
    ((0, 1), (1, 1), (2, 1), (2, 0), (0, 0), (1, 0)),
)


class Halves(nn.Module):
    """Two parts with a weight that both use, a scalar, a frozen layer, a layer that one rank uses and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inp = nn.Linear(5, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.side = nn.Linear(WIDTH, WIDTH)
        self.idle = nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, 2)
        self.shift = nn.Parameter(torch.randn(WIDTH))
        self.factor = nn.Parameter(torch.tensor(1.5))
        self.blocks[3].up.requires_grad_(False)

    def parallel_blocks(self) -> Sequence[nn.Module]:
        return [*self.blocks, self.side, self.idle]

    def parts(self) -> list[Part]:
        return [
            Part(0, (self.inp, self.blocks[0], self.blocks[1])),
            Part(3, (self.blocks[2], self.blocks[3], self.side, self.idle, self.out)),
        ]

    def first(self, x: Tensor) -> Tensor:
        return self.blocks[1](self.blocks[0](self.inp(x) + self.shift))

    def second(self, x: Tensor, rank: int) -> Tensor:
        x = self.blocks[3](self.blocks[2](x * self.shift * self.factor.to(x.dtype)))
        if rank == 1:
            x = x + self.side(x)
        return F.softplus(self.out(x).float()).mean()

    def forward(self, x: Tensor, rank: int) -> Tensor:
        return self.second(self.first(x), rank)


@dataclass(frozen=True)
class Setting:
    """One layout; `window` schedules make an optimizer step."""

    stage: int
    dtype: torch.dtype = torch.float32
    window: int = 1
    per_microbatch: bool = False
    replicate: int = 1
    shared_memory: bool = True

    @property
    def options(self) -> ShardOptions:
        mixed = MixedPrecisionPolicy(self.dtype, torch.float32) if self.dtype != torch.float32 else None
        return ShardOptions(
            stage=self.stage,
            mp_policy=mixed,
            per_microbatch=self.per_microbatch,
            shared_memory=self.shared_memory,
        )

    @property
    def scale(self) -> float:
        return 2.0**10 if self.dtype == torch.float16 else 1.0


Gradients = dict[str, Tensor | None]


def _gradients(module: nn.Module) -> Gradients:
    return {name: None if p.grad is None else whole(p.grad) for name, p in module.named_parameters()}


def _batch(setting: Setting, step: int, position: int, microbatch: int, rank: int) -> Tensor:
    return inputs(step, MICROBATCHES * position + microbatch, rank).to(setting.dtype)


def _microbatches(
    module: Halves, setting: Setting, step: int, position: int, rank: int
) -> Iterator[tuple[int, bool, bool]]:
    """Runs all forwards, then the backwards in an odd order; yields before and after each action what it is and ended."""
    order = ORDERS[position % 2]
    sent, received, losses = [], [], []
    for microbatch in range(MICROBATCHES):
        yield 0, False, False
        sent.append(module.first(_batch(setting, step, position, microbatch, rank)))
        yield -1 - 0, False, False
        received.append(sent[-1].detach().requires_grad_())
        yield 3, False, False
        losses.append(module.second(received[-1], rank) * (setting.scale / MICROBATCHES / setting.window))
        yield -1 - 3, False, False
    for place, (microbatch, part) in enumerate(order):
        stage = 3 * part
        yield stage, False, False
        if part == 1:
            losses[microbatch].backward()
        else:
            sent[microbatch].backward(received[microbatch].grad)
        yield -1 - stage, True, all(other != part for _, other in order[place + 1 :])


def _run_schedule(engine: Engine, module: Halves, setting: Setting, step: int, position: int, rank: int) -> None:
    with engine.schedule(module.parts(), last=position == setting.window - 1, backward=True):
        for stage, gradients, complete in _microbatches(module, setting, step, position, rank):
            if stage >= 0:
                engine.part_begins(stage)
            else:
                engine.part_ends(-1 - stage, gradients=gradients, complete=complete)


def _evaluate(engine: Engine, module: Halves, setting: Setting, rank: int) -> float:
    with torch.inference_mode(), engine.schedule(module.parts(), last=False, backward=False):
        engine.part_begins(0)
        x = module.first(_batch(setting, 9, 0, 0, rank))
        engine.part_ends(0, gradients=False, complete=False)
        engine.part_begins(3)
        value = module.second(x, rank).item()
        engine.part_ends(3, gradients=False, complete=False)
    return value


@dataclass
class Run:
    gradients: list[Gradients]
    values: list[float]
    calls: list[dict[str, int]]


def _on_ranks(rank: int, ranks: int, setting: Setting, steps: int = 2) -> Run:
    torch.set_num_threads(1)
    module = Halves()
    engine = mesh_engine(module, ranks, setting.replicate, setting.options)
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.1 / setting.scale)
    run = Run([], [], [])
    for step in range(steps):
        run.values.append(_evaluate(engine, module, setting, rank))
        engine.traffic.reset()
        aside: dict[nn.Parameter, Tensor | None] = {}
        for position in range(setting.window):
            for parameter, gradient in aside.items():
                parameter.grad = gradient
            _run_schedule(engine, module, setting, step, position, rank)
            # Lightning clears gradients after the step of the window's first batch, which a schedule has to survive.
            aside = {parameter: parameter.grad for parameter in optimizer.param_groups[0]["params"]}
            module.zero_grad()
            optimizer.zero_grad()
        for parameter, gradient in aside.items():
            parameter.grad = gradient
        run.calls.append(dict(engine.traffic.calls))
        run.gradients.append(_gradients(module))
        optimizer.step()
        optimizer.zero_grad()
    run.values.append(_evaluate(engine, module, setting, rank))
    engine.close()
    return run


def _each(rank: int, ranks: int, settings: list[Setting]) -> list[Run]:
    return [_on_ranks(rank, ranks, setting) for setting in settings]


def _expected(ranks: int, setting: Setting, steps: int = 2) -> Run:
    """One process; in mixed precision gradients of a copy, added up in fp32 after each part of each microbatch."""
    torch.set_num_threads(1)
    module = Halves()
    trained = [p for p in module.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=0.1 / setting.scale)
    run = Run([], [], [])

    def values() -> None:
        for rank in range(ranks):
            copy = _copy(module, setting.dtype)
            with torch.no_grad():
                run.values.append(copy(_batch(setting, 9, 0, 0, rank), rank).item())

    for step in range(steps):
        values()
        for rank in range(ranks):
            for position in range(setting.window):
                copy = _copy(module, setting.dtype)
                for stage, gradients, _ in _microbatches(copy, setting, step, position, rank):
                    if stage < 0 and gradients:
                        for mine, other in zip(module.parameters(), copy.parameters(), strict=True):
                            if other.grad is not None:
                                mine.grad = other.grad.float() / ranks + (0 if mine.grad is None else mine.grad)
                                other.grad = None
        run.gradients.append(_gradients(module))
        optimizer.step()
        optimizer.zero_grad()
    values()
    return run


def _copy(module: Halves, dtype: torch.dtype) -> Halves:
    copy = Halves()
    copy.load_state_dict(module.state_dict())
    for name, parameter in copy.named_parameters():
        if name != "factor":  # without dimensions, and never cast
            parameter.data = parameter.data.to(dtype)
    return copy


def _assert_equal(runs: list[Run], expected: Run, setting: Setting) -> None:
    loose = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[setting.dtype]
    for rank, run in enumerate(runs):
        right = expected.values[rank :: len(runs)]
        assert run.values == [pytest.approx(value, rel=loose) for value in right], setting
        for step, (got, wanted) in enumerate(zip(run.gradients, expected.gradients, strict=True)):
            assert got.keys() == wanted.keys()
            tolerance = loose if step else 1e-5  # from the second step on, weights may be rounded to another neighbour
            for name, value in wanted.items():
                where = f"{setting}, rank {rank}, step {step}, {name}"
                if value is None or got[name] is None:
                    assert value is None, f"{where}: no gradient, but one process has one"
                    assert got[name] is None, f"{where}: one process has none"
                    continue
                size = max(float(value.abs().max()), 1.0)
                torch.testing.assert_close(
                    got[name], value, rtol=tolerance, atol=tolerance * size, msg=lambda m, w=where: f"{w}: {m}"
                )


@STAGES
def test_gradients_of_a_schedule_equal_one_process(ranks, stage):
    settings = [
        Setting(stage),
        Setting(stage, window=2),
        Setting(stage, torch.bfloat16),
        Setting(stage, torch.bfloat16, window=2),
        Setting(stage, torch.float16),
        Setting(stage, window=2, shared_memory=False),
    ]
    if stage >= 2:
        settings += [Setting(stage, window=2, per_microbatch=True), Setting(stage, torch.bfloat16, per_microbatch=True)]
    results = ranks(2, _each, 2, settings, timeout=60)
    for index, setting in enumerate(settings):
        _assert_equal([result[index] for result in results], _expected(2, setting), setting)


def test_gradients_of_a_schedule_equal_one_process_with_replicas(ranks):
    settings = [Setting(stage, replicate=2) for stage in (1, 2, 3)] + [Setting(1, torch.bfloat16, replicate=2)]
    results = ranks(4, _each, 4, settings, timeout=60)
    for index, setting in enumerate(settings):
        _assert_equal([result[index] for result in results], _expected(4, setting), setting)


@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("stage", "per_microbatch"), [(1, False), (2, False), (2, True), (3, False), (3, True)])
def test_a_schedule_sends_what_its_stage_says(ranks, stage, per_microbatch, window):
    groups, trained = 7, 6  # inp, out and shift are the root's; four blocks, side, idle
    run = ranks(2, _on_ranks, 2, Setting(stage, window=window, per_microbatch=per_microbatch), timeout=40)[0]
    reductions = {1: trained, 2: trained * window, 3: trained * window}[stage]
    gathers = groups * (window if stage == 3 else 1)
    if per_microbatch:
        # Blocks and side lie in one part each, and are reduced after each of its backwards; the root has weights of both.
        reductions = window * (MICROBATCHES * (trained - 1) + 1)
    if per_microbatch and stage == 3:
        gathers = window * (2 * MICROBATCHES * (groups - 1) + 1)
    for calls in run.calls:
        assert calls == {"all_gather": gathers, "reduce_scatter": reductions, "all_reduce": 0}


class _GivesUp(Exception):
    pass


def _fails(rank: int, stage: int) -> Run:
    """A schedule fails on all ranks in its middle, and the engine goes on."""
    module = Halves()
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    hooks = [len(block._forward_pre_hooks) for block in module.blocks]
    inside = None
    try:
        with engine.schedule(module.parts(), last=True, backward=True):
            inside = [len(block._forward_pre_hooks) + len(block._forward_hooks) for block in module.blocks]
            for action, gradients, complete in _microbatches(module, Setting(stage), 0, 0, rank):
                if gradients and complete:
                    engine.part_ends(-1 - action, gradients=True, complete=True)
                    raise _GivesUp
    except _GivesUp:
        pass
    module.zero_grad()
    assert inside == [0] * 4
    assert hooks == [len(block._forward_pre_hooks) for block in module.blocks]
    run = Run([], [], [])
    _run_schedule(engine, module, Setting(stage), 0, 0, rank)
    run.gradients.append(_gradients(module))
    engine.close()
    return run


@STAGES
def test_a_schedule_that_fails_leaves_an_engine_that_works(ranks, stage):
    expected = Run(_expected(2, Setting(stage), steps=1).gradients, [], [])
    for run in ranks(2, _fails, stage, timeout=40):
        _assert_equal([run], expected, Setting(stage))


def _evaluates(rank: int) -> list[int]:
    module = Halves()
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=1))
    gathers = []
    with engine.evaluating():
        for _ in range(3):
            engine.traffic.reset()
            _evaluate(engine, module, Setting(1), rank)
            gathers.append(engine.traffic.calls["all_gather"])
    engine.close()
    return gathers


def test_an_evaluation_gathers_once_for_all_its_schedules(ranks):
    assert ranks(2, _evaluates, timeout=40) == [[7, 0, 0]] * 2


class _Empty(nn.Module):
    """What a stage without weights may hold."""

    def __init__(self, placeholder: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Identity(), nn.Identity()])
        if placeholder:
            self.nothing = nn.Parameter(torch.empty(0))

    def parallel_blocks(self) -> Sequence[nn.Module]:
        return list(self.blocks)


def _without_weights(rank: int, stage: int, placeholder: bool) -> list[Tensor | None]:
    module = _Empty(placeholder)
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=stage))
    for last in (False, True):
        with engine.schedule([Part(0, tuple(module.blocks))], last=last, backward=True):
            engine.part_begins(0)
            x = torch.ones(2, requires_grad=True)
            module.blocks[0](x).sum().backward()
            engine.part_ends(0, gradients=True, complete=True)
    engine.close()
    return [p.grad for p in module.parameters()]


@pytest.mark.parametrize("placeholder", [False, True])
@STAGES
def test_a_stage_without_weights_runs_schedules(ranks, stage, placeholder):
    assert ranks(2, _without_weights, stage, placeholder, timeout=40) == [[None] * placeholder] * 2


def _through_the_axis(rank: int, stage: int) -> tuple[int, list[str], Gradients]:
    """`ShardedData` in place of the engine; a step that fails would tell that FSDP2's root hooks ran."""
    module = Halves()
    data = ShardedData(module, module.parallel_blocks(), init_device_mesh("cpu", (2,)), ShardOptions(stage=stage))
    after: list[str] = []
    module.register_forward_hook(lambda *_: after.append("user's"))
    hooks = list(module._forward_hooks)
    with data.scheduled(module.parts(), last=True, backward=True):
        inside = len(module._forward_hooks)
        losses = []
        for microbatch in range(MICROBATCHES):
            batch = _batch(Setting(stage), 0, 0, microbatch, rank)
            losses.append(data.call(module, (batch,), {"rank": rank}) / MICROBATCHES)
        for loss in reversed(losses):
            loss.backward()
            for part in (3, 0):
                data.part_ends(part, gradients=True, complete=loss is losses[0])
    assert list(module._forward_hooks) == hooks
    gradients = _gradients(module)
    data.close()
    return inside, after, gradients


@STAGES
def test_a_call_inside_a_schedule_is_a_plain_call(ranks, stage):
    expected = _expected(2, Setting(stage), steps=1)
    for inside, after, gradients in ranks(2, _through_the_axis, stage, timeout=40):
        assert inside == 1
        assert after == ["user's"] * MICROBATCHES
        _assert_equal([Run([gradients], [], [])], Run(expected.gradients, [], []), Setting(stage))


def test_a_part_is_reduced_while_the_rank_goes_on(ranks):
    # Its two blocks, and on the second rank the layer that only this one uses; with the other part's there are six.
    assert ranks(2, _early, timeout=40) == [(2, 6), (3, 6)]


def _early(rank: int) -> tuple[int, int]:
    module = Halves()
    engine = mesh_engine(module, 2, 1, ShardOptions(stage=1))
    begun = None
    with engine.schedule(module.parts(), last=True, backward=True):
        for action, gradients, complete in _microbatches(module, Setting(1), 0, 1, rank):
            if gradients:
                engine.part_ends(-1 - action, gradients=True, complete=complete)
            if begun is None and complete:
                begun = engine.traffic.calls["reduce_scatter"]
    total = engine.traffic.calls["reduce_scatter"]
    engine.close()
    assert begun is not None
    return begun, total


def test_modules_around_the_blocks_are_groups_of_their_own_under_a_pipeline():
    module = Halves()
    found = outer_modules(module, list(module.blocks))
    assert [id(inner) for inner in found] == [id(inner) for inner in (module.inp, module.side, module.idle, module.out)]
    wrapped = nn.ModuleDict({"model": module, "last": nn.Sequential(nn.ReLU(), nn.Linear(2, 2)), "act": nn.ReLU()})
    assert outer_modules(wrapped, list(module.blocks))[-1] is wrapped["last"]


@pytest.mark.parametrize("stage", [0, 1])
def test_a_stage_that_holds_all_gradients_is_refused_per_microbatch(stage):
    context = RunContext(2, 1, "cpu", "32-true", {"dp_shard": 2})
    (problem,) = ZeRO(stage=stage, per_microbatch=True).validate(context)
    assert f"stage={stage}, per_microbatch=True" in problem.what
    assert "stage 2 or 3" in problem.fix
    assert ZeRO(stage=2, per_microbatch=True).validate(context) == []
    with pytest.raises(ValueError, match="choose stage 2 or 3"):
        ShardOptions(stage=stage, per_microbatch=True)
