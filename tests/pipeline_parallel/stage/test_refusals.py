"""What cannot be cut says so: before anything is dropped where that can be known, else in the first run."""

import lightning as L
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torchmetrics import MeanMetric

from lightning_5d.pipeline_parallel.stage import layout_of, layout_problems, split_problems
from lightning_5d.plan import ParallelPlan, find_plan
from tests.modules import Block, TinyLM, batches
from tests.pipeline_parallel.stage.pipelines import Pipeline, assert_same_gradients, quiet

TWO = [(0,), (1,)]


class Net(L.LightningModule):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block(4) for _ in range(4))
        self.head = nn.Linear(4, 2)

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return self.head(self.through(self.embed(x))).square().mean()


def problems(module: nn.Module, stages: int = 2, plan: ParallelPlan | None = None, split: object = "even") -> str:
    return "\n".join(map(str, layout_problems(module, find_plan(module, plan), stages, split)))  # type: ignore[arg-type]


def run(module: nn.Module, plan: ParallelPlan | None = None, ranks: object = TWO) -> None:
    Pipeline(quiet(module), ranks, plan=plan).forward(torch.randn(3, 4), 0)  # type: ignore[arg-type]


# Before anything is dropped


class TwoLists(Net):
    def __init__(self, decoder: int) -> None:
        super().__init__()
        self.decoder = nn.ModuleList(Block(4) for _ in range(decoder))

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x = self.through(self.embed(x))
        for block in self.decoder:
            x = block(x)
        return self.head(x).square().mean()


def test_two_lists_in_sequence_are_refused_unless_the_plan_chooses() -> None:
    text = problems(TwoLists(decoder=3))
    assert "2 lists of blocks in sequence: blocks (336 weights), decoder (252 weights)" in text
    assert "ParallelPlan(blocks=['blocks.*'])" in text
    for chosen in ("blocks.*", "decoder.*"):
        # The head is registered before the decoder's blocks.
        plan = ParallelPlan((chosen,), after=("head",))
        assert not problems(TwoLists(decoder=3), plan=plan)
        assert_same_gradients(TwoLists(decoder=3), [torch.randn(3, 4)], TWO, plan=plan)


def test_blocks_of_both_lists_may_be_chosen() -> None:
    plan = ParallelPlan(("blocks.*", "decoder.*"), after=("head",))
    assert_same_gradients(TwoLists(decoder=3), [torch.randn(3, 4)], [(0, 3), (1, 2)], plan=plan)
    assert "head has weights and lies between two blocks" in problems(
        TwoLists(decoder=3), plan=ParallelPlan(("blocks.*", "decoder.*"))
    )


class SmallSecondList(Net):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(9))
        self.head = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))


def test_a_small_second_list_is_no_obstacle() -> None:
    assert_same_gradients(SmallSecondList(), [torch.randn(3, 4)], TWO)


def test_steps_by_hand_and_backwards_by_hand_are_refused() -> None:
    module = Net()
    module.automatic_optimization = False
    assert "Net optimizes by hand" in problems(module)

    class Own(Net):
        def backward(self, loss: Tensor, *args: object, **kwargs: object) -> None:
            loss.backward()

    assert "Own overrides `backward`" in problems(Own())


def test_a_module_without_blocks_is_refused() -> None:
    module = Net()
    module.blocks = nn.ModuleList([Block(4)])
    assert "has no list of blocks" in problems(module)


@pytest.mark.parametrize(
    ("split", "stages", "what", "fix"),
    [
        ("even", 5, "5 stages are more than the model's 4 blocks", "split=[1, 1, 1, 1, 0]"),
        ("blocks", 6, "6 stages are more than the model's 4 blocks", "split=[0, 1, 1, 1, 1, 0]"),
        ("equal", 2, "split='equal' is unknown", "'even', 'blocks'"),
        ([3, 3], 2, "split=[3, 3] is for 6 blocks, but the model has 4", "[2, 2]"),
        ([1, 1], 2, "split=[1, 1] is for 2 blocks, but the model has 4", "[2, 2]"),
        ([1, 4, 1], 3, "split=[1, 4, 1] is for 6 blocks, but the model has 4", "[1, 2, 1]"),
        ([5, -1], 2, "split=[5, -1] has negative entries", "[4, 0]"),
        ([2, 2], 3, "split=[2, 2] is for 2 stages, but there are 3", "[1, 1, 2]"),
        ([2.5, 1.5], 2, "split=[2.5, 1.5] has entries that are not whole numbers", "[3, 1]"),
    ],
)
def test_a_split_that_does_not_fit_is_refused_with_one_that_does(
    split: object, stages: int, what: str, fix: str
) -> None:
    (problem,) = split_problems(4, stages, split)  # type: ignore[arg-type]
    assert what in problem.what
    assert fix in problem.fix
    with pytest.raises(MisconfigurationException, match=r"split|stages"):
        layout_of(Net(), find_plan(Net()), stages, split)  # type: ignore[arg-type]


def test_a_plan_that_names_what_is_not_there_is_refused() -> None:
    assert "after='tail', which the module does not have" in problems(Net(), plan=ParallelPlan(after=("tail",)))


# In the first run


class HeadFirst(Net):
    """Registers its modules in an order that is not the one they run in."""

    def __init__(self) -> None:
        super().__init__()
        blocks, embed = self.blocks, self.embed
        del self.blocks, self.embed
        self.blocks, self.embed = blocks, embed


def test_an_order_of_registration_that_is_wrong_is_noticed_and_may_be_corrected() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"embed ran before blocks\.1 had.*ParallelPlan\(before=\['embed'\]\)"
    ):
        run(HeadFirst())
    with pytest.raises(MisconfigurationException, match=r"head ran behind block .*ParallelPlan\(after=\['head'\]\)"):
        run(HeadFirst(), ParallelPlan(before=("embed",)))
    plan = ParallelPlan(before=("embed",), after=("head",))
    for ranks in (TWO, [(0, 3), (1, 2)]):
        assert_same_gradients(HeadFirst(), [torch.randn(3, 4)] * 2, ranks, plan=plan)


class OnBothSides(Net):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return (self.through(self.embed(x)) @ self.embed.weight).square().mean()


def test_a_weight_used_on_both_sides_is_noticed_and_may_be_named_on_both() -> None:
    with pytest.raises(MisconfigurationException, match=r"computed from embed\.weight, which is on another stage"):
        run(OnBothSides())
    plan = ParallelPlan(before=("embed",), after=("embed",))
    for ranks in (TWO, [(0,), (1,), (2,)], [(0, 3), (1, 2)]):
        assert_same_gradients(OnBothSides(), [torch.randn(3, 4)], ranks, plan=plan)


class Skips(Net):
    """Every block gets the embedding's result too, which only the first stage has."""

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        first = x = self.embed(x)
        for block in self.blocks:
            x = block(x + 0.1 * first)
        return self.head(x).square().mean()


class SkipsAtTheEnd(Net):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        first = self.embed(x)
        return (self.head(self.through(first)) + (first > 0)[:, :2]).square().mean()


class KeepsAll(Net):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        x, kept = self.embed(x), []
        for block in self.blocks:
            x = block(x)
            kept.append(x)
        return self.head(x + kept[0]).square().mean()


def test_a_dependence_on_what_another_stage_has_is_named() -> None:
    with pytest.raises(
        MisconfigurationException, match=r"argument 'x' of blocks\.2 is computed from the result of embed"
    ):
        run(Skips())
    with pytest.raises(MisconfigurationException, match=r"returns on stage 1 is computed from the result of embed"):
        run(SkipsAtTheEnd())
    with pytest.raises(MisconfigurationException, match="is computed from the result of an earlier stage's block"):
        run(KeepsAll())


class Twice(Net):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        return (self.through(self.embed(x)) - self.through(self.embed(-x))).square().mean()


@pytest.mark.parametrize("ranks", [TWO, [(0, 3), (1, 2)]], ids=["two", "v"])
def test_a_model_called_twice_in_a_step_is_refused(ranks: object) -> None:
    with pytest.raises(MisconfigurationException, match=r"came a second time in one step|ran behind block"):
        run(Twice(), ranks=ranks)


class Shuffled(Net):
    def __init__(self, order: list[int]) -> None:
        super().__init__()
        self.order = order

    def through(self, x: Tensor) -> Tensor:
        for index in self.order:
            x = self.blocks[index](x)
        return x


@pytest.mark.parametrize("order", [[0, 2, 3], [2, 3, 0, 1], [1, 0, 2, 3], [1, 2, 3], [0], []], ids=str)
def test_blocks_that_are_left_out_or_run_in_another_order_are_refused(order: list[int]) -> None:
    with pytest.raises(
        MisconfigurationException, match=r"before blocks\.1 had|Stage 0 ran blocks\.1, but it has blocks\.0, blocks\.1"
    ):
        run(Shuffled(order))


class Checkpoints(Net):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return x


def test_a_reentrant_checkpoint_around_the_last_block_is_refused_and_the_other_kind_works() -> None:
    with pytest.raises(MisconfigurationException, match="inside of a reentrant checkpoint"):
        run(Checkpoints(True))
    for ranks in (TWO, [(0, 3), (1, 2)]):
        assert_same_gradients(Checkpoints(False), [torch.randn(3, 4)], ranks)


class Swallows(Net):
    def training_step(self, x: Tensor, batch_idx: int) -> Tensor | None:
        try:
            return super().training_step(x, batch_idx)
        except Exception:
            return None


def test_a_step_that_catches_everything_is_still_cut() -> None:
    assert_same_gradients(Swallows(), [torch.randn(3, 4)] * 2, TWO)


def test_a_model_called_outside_of_a_step_says_that_it_is_cut() -> None:
    pipeline = Pipeline(quiet(TinyLM(layers=4)), TWO)
    for module, missing in zip(
        pipeline.modules, (r"layers\.2 belongs to stage 1", "embed belongs to stage 0"), strict=True
    ):
        with pytest.raises(MisconfigurationException, match=missing + ".*trainer.predict"):
            module(batches(1)[0])
    with pytest.raises(AttributeError, match=r"it has no head\.weight"):
        _ = pipeline.modules[0].head.weight


class Logs(Net):
    """Logs something about what the first stage computes, in one of several ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.logged = how, dict[str, object]()
        self.mean = MeanMetric()

    def log(self, name: str, value: object) -> None:  # type: ignore[override]
        self.logged[name] = value

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        first = self.embed(x)
        last = self.through(first)
        loss = self.head(last).square().mean()
        if self.how == "metric":
            self.mean(first.abs())
        else:
            value = {"tensor": first.norm(), "number": first.norm().item(), "fine": last.norm().item()}[self.how]
            self.log("norm", value)
            self.mean(last)
        self.log("loss", loss)
        return loss


@pytest.mark.parametrize("ranks", [TWO, [(0, 3), (1, 2)]], ids=["two", "v"])
@pytest.mark.parametrize(
    ("how", "what"),
    [
        ("tensor", r"self\.log\('norm'\)"),
        ("number", r"self\.log\('norm'\)"),
        ("metric", "An update of the metric mean"),
    ],
)
def test_a_logged_value_that_depends_on_what_another_stage_has_is_named(how: str, what: str, ranks: object) -> None:
    with pytest.raises(MisconfigurationException, match=f"{what}.* is computed from the result of embed"):
        Pipeline(Logs(how), ranks).forward(torch.randn(3, 4), 0)  # type: ignore[arg-type]


def test_what_the_last_stage_logs_is_left_alone() -> None:
    pipeline = Pipeline(Logs("fine"), TWO)
    pipeline.forward(torch.randn(3, 4), 0)
    last = pipeline.modules[1]
    assert float(last.logged["norm"]) > 0  # type: ignore[operator,arg-type]
    assert set(last.logged) == {"norm", "loss"}  # type: ignore[arg-type]
    assert "log" not in vars(last)


class Balanced(Block):
    """Leaves behind what a router has to say about its own balance."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.router = nn.Linear(width, 2)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.router(x).softmax(-1)
        self.balance = shares.mean((0,)).square().sum()
        return super().forward(x) * shares[..., :1]


class Experts(Net):
    def __init__(self, weight: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Balanced(4) for _ in range(4))
        self.weight = weight

    def training_step(self, x: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(x, batch_idx)
        if self.weight:
            loss = loss + self.weight * sum(getattr(block, "balance", 0.0) for block in self.blocks)
        return loss


def test_a_loss_of_what_blocks_leave_behind_is_refused() -> None:
    for ranks in (TWO, [(0, 3), (1, 2)]):
        with pytest.raises(MisconfigurationException, match=r"depends on blocks\.\d\.router\.\w+ otherwise"):
            run(Experts(0.1), ranks=ranks)
        assert_same_gradients(Experts(0.0), [torch.randn(3, 4)], ranks)
