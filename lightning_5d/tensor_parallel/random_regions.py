"""Random numbers on the tensor axis: the same on all of its ranks where they compute the same, different where they do not.

A step draws from one stream that all ranks of the axis share (`lightning_5d.random_streams`). Between the column layers and the
row layer of a region a rank has heads or features of its own and draws from a stream of its own; before and after, and so in
a residual's dropout at the end of the same module, from the shared one. With sequence parallelism everything between the
cut and the whole, blocks and the final norm, is a rank's own.
"""

# [Note: two streams in one generator]
# Which stream a generator is in, and where each of the two goes on, is a function of the seed that it was last given: `own_seed` turns a
# seed of the shared stream into one of the rank's, and `shared_seed` leads back, by undoing the first and taking the next. So
# nothing is kept beside the generators, whose states activation checkpointing restores: a block, or any piece of it, that
# runs again finds itself in the stream in which it ran first. How many numbers a rank has drawn from its own stream changes
# nothing in the shared one, and an exception leaves nothing behind, as the next step seeds the generators anyway.

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import nn

from lightning_5d.absent import Absent
from lightning_5d.tensor_parallel.layout import TensorLayout

_MARK = 0xA5 << 56
"""In the highest byte of a rank's own seeds. A step's seed has 63 bits, a shared one after a region 56."""

_WORD, _KEY = (1 << 64) - 1, (1 << 56) - 1
# The generator of the CPU, a Mersenne twister, is seeded by the lowest 32 bits alone: those of ranks must differ.
_SPREAD = 0x37_79B9_7F4A_7C15
_GATHER = pow(_SPREAD, -1, _KEY + 1)

Direction = Literal["own", "shared"]


def own_seed(seed: int, rank: int) -> int:
    """The seed of a rank's own stream, 64 bits, that belongs to a seed of the shared one."""
    key = _mixed(seed) >> 8
    return _MARK | ((key + rank + 1) * _SPREAD & _KEY)


def shared_seed(seed: int, rank: int) -> int:
    """The seed with which the shared stream goes on after a rank's own stream of this seed: the same for all ranks."""
    key = ((seed & _KEY) * _GATHER - rank - 1) & _KEY
    return _mixed(key) >> 8


def is_own(seed: int) -> bool:
    """Whether a seed is one of a rank's own stream."""
    return seed & ~_KEY == _MARK


def _mixed(value: int) -> int:
    # splitmix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
    value = (value + 0x9E37_79B9_7F4A_7C15) & _WORD
    value = (value ^ value >> 30) * 0xBF58_476D_1CE4_E5B9 & _WORD
    value = (value ^ value >> 27) * 0x94D0_49BB_1331_11EB & _WORD
    return value ^ value >> 31


class RandomRegions:
    """Puts torch's generators into a rank's own stream inside the sharded regions of a module.

    It costs two seedings of a generator for each region, and nothing else: whether a region will draw, nobody knows before.

    Args:
        module: The module, whose hooks it uses. Modules of the layout that this rank does not have are left out.
        layout: Where the regions are.
        rank: The rank's place on the axis.
        device: Where the module computes; its generator is switched as well as the CPU's.
    """

    def __init__(self, module: nn.Module, layout: TensorLayout, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._generators = tuple(generators(device))
        self._at_work = False
        self._handles: list[Any] = []
        cut = [] if layout.sequence is None else [*dict.fromkeys([*layout.sequence.blocks, layout.sequence.whole])]
        for name in cut:
            self._whole_module(module, name)
        for region in layout.regions:
            if any(region.name == name or region.name.startswith(f"{name}.") for name in cut):
                continue
            # Where features are made whole again at once, ranks go on with the same.
            columns = [name for name in region.columns if name not in layout.gathered]
            self._between_layers(module, region.name, columns, region.rows)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around a step, and around blocks of it that run again. Elsewhere all ranks draw the same numbers."""
        before, self._at_work = self._at_work, True
        try:
            yield
        finally:
            self._at_work = before

    def turn(self, direction: Direction) -> None:
        """Goes on with the other stream, unless the generators are in the wanted one."""
        if not self._at_work:
            return
        for generator in self._generators:
            seed = generator.initial_seed()
            if is_own(seed) == (direction == "own"):
                continue
            generator.manual_seed(own_seed(seed, self._rank) if direction == "own" else shared_seed(seed, self._rank))

    # Compiled code draws its seeds when it begins. With a break it begins anew here, and without one all ranks would draw alike.
    turn = torch.compiler.disable(  # type: ignore[no-untyped-call]
        turn, recursive=False, reason="ranks of the tensor axis draw different numbers here"
    )

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _whole_module(self, module: nn.Module, name: str) -> None:
        """Everything in a module that computes on its rank's part of the sequence."""
        sharded = _found(module, name)
        if sharded is None:
            return
        draws = may_draw(sharded)
        self._before(sharded, "own", draws)
        self._after(sharded, "shared", draws, always=True)
        for inner in sharded.modules():
            if inner is not sharded and _is_per_sample(inner):
                self._before(inner, "shared", draws)
                self._after(inner, "own", draws, always=True)

    def _between_layers(self, module: nn.Module, name: str, columns: Iterable[str], rows: Iterable[str]) -> None:
        """What is between column and row layers. The code before, after and around them has whole activations."""
        region = _found(module, name)
        if region is None:
            return
        draws = may_draw(region)
        for layer in filter(None, (_found(module, column) for column in columns)):
            if next(layer.children(), None) is not None:  # an adapter, whose inputs are whole
                self._before(layer, "shared", draws)
            self._after(layer, "own", draws)
        for layer in filter(None, (_found(module, row) for row in rows)):
            self._after(layer, "shared", draws)
        self._after(region, "shared", draws, always=True)  # also where it did not come to its row layer

    def _before(self, module: nn.Module, direction: Direction, draws: bool) -> None:
        self._handles.append(module.register_forward_pre_hook(_Turn(self.turn, direction, draws)))

    def _after(self, module: nn.Module, direction: Direction, draws: bool, always: bool = False) -> None:
        hook = _Turn(self.turn, direction, draws)
        self._handles.append(module.register_forward_hook(hook, always_call=always))


class _Turn:
    """A hook. A copy of the module, or a pickle of it, is nobody's rank: there it does nothing."""

    __slots__ = ("_direction", "_draws", "_turn")

    def __init__(self, turn: Callable[[Direction], None], direction: Direction, draws: bool) -> None:
        self._turn, self._direction, self._draws = turn, direction, draws

    def __call__(self, *_: Any) -> None:
        # A compiled module is not broken up where nothing in it looks like chance.
        if not self._draws and torch.compiler.is_compiling():
            return
        self._turn(self._direction)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Turn, (_stay, self._direction, False)


def _stay(direction: Direction) -> None:
    pass


def may_draw(module: nn.Module) -> bool:
    """Whether something in a module looks as if it drew random numbers: a rate of dropout above 0."""
    for inner in module.modules():
        if isinstance(inner, nn.RReLU | nn.FractionalMaxPool2d | nn.FractionalMaxPool3d):
            return True
        if isinstance(inner, nn.modules.dropout._DropoutNd) and inner.p > 0:
            return True
        if any("drop" in key and isinstance(rate, float) and rate > 0 for key, rate in vars(inner).items()):
            return True
    return False


def _is_per_sample(module: nn.Module) -> bool:
    # One number for a whole sample, on whichever rank a part of its sequence is; timm's, Hugging Face's and torchvision's.
    return type(module).__name__.endswith(("DropPath", "StochasticDepth"))


def _found(module: nn.Module, name: str) -> nn.Module | None:
    try:
        found = module.get_submodule(name)
    except AttributeError:  # it is in a block of another stage
        return None
    return None if isinstance(found, Absent) else found


class Seeded(ExitStack):
    """A context in which generators draw from a seed; afterwards they go on as if nothing had been drawn.

    Args:
        used: The generators.
        seed: The seed.
    """

    def __init__(self, used: Iterable[torch.Generator], seed: int) -> None:
        super().__init__()
        for generator in used:
            self.callback(generator.set_state, generator.get_state())
            generator.manual_seed(seed)


def generators(device: torch.device) -> Iterator[torch.Generator]:
    """The generators that operations on a device draw from: that of the CPU, and its own."""
    yield torch.default_generator
    if device.type != "cpu":
        index = torch.accelerator.current_device_index() if device.index is None else device.index
        yield torch.get_device_module(device).default_generators[index]
