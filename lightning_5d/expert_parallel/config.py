"""What a layer of experts is: sizes, how tokens choose, and what keeps the choice balanced."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

Scores = Literal["softmax", "sigmoid"]
BalanceScope = Literal["global", "microbatch", "sequence"]


@dataclass(frozen=True)
class MoEConfig:
    """Sizes and routing of an `MoE` layer.

    | model | settings |
    |---|---|
    | Mixtral | the defaults |
    | Qwen3-MoE | ``normalize`` as its ``norm_topk_prob`` |
    | DeepSeek-V3 | ``scores="sigmoid"``, ``bias_rate=0.001``, ``groups=8``, ``top_groups=4``, ``scale=2.5``, ``shared=1`` |

    A softmax over the chosen logits alone is the normalised softmax over all of them: there is no third setting for it.

    Args:
        experts: Experts, E.
        top_k: Experts that each token is sent to, K.
        intermediate_size: Width inside each expert.
        shared: Experts that every token goes to besides, computed as one of this many times the width.
        shared_gate: Whether each token weights these by a sigmoid of its own, as in Qwen2-MoE.
        scores: What the router makes of its logits.
        normalize: Whether the weights of the chosen experts are divided by their sum. Not with one of them, whose weight would be 1 whatever the
            router says, and the router would not learn.
        scale: What weights are multiplied by in the end.
        groups: Groups of neighbouring experts; a token chooses among those of its best groups only (DeepSeek-V3, arXiv:2412.19437).
        top_groups: How many those are. A group is worth the sum of its two best scores.
        balance: Coefficient of the balance loss; 0 for none.
        balance_scope: Whose tokens balance: those of all data ranks and of the microbatches of a step so far, those of each microbatch, or those
            of each sequence, which is about the best scores without bias and groups (DeepSeek-V3).
        z: Coefficient of the loss on large logits (ST-MoE); 0 for none.
        bias_rate: How far a bias on the choice moves in each optimizer step, to balance without a loss (see `balance_by_bias`); 0 for a bias that
            stays as it is loaded, ``None`` for no bias.

    Raises:
        ValueError: With everything that is wrong, and for each the nearest that works.
    """

    experts: int = 8
    top_k: int = 2
    intermediate_size: int = 256
    shared: int = 0
    shared_gate: bool = False
    scores: Scores = "softmax"
    normalize: bool = True
    scale: float = 1.0
    groups: int = 1
    top_groups: int = 1
    balance: float = 0.0
    balance_scope: BalanceScope = "global"
    z: float = 0.0
    bias_rate: float | None = None

    def __post_init__(self) -> None:
        problems = list(self._problems())
        if problems:
            raise ValueError("The experts cannot be built:\n" + "\n".join(f"  - {problem}" for problem in problems))

    @classmethod
    def of(cls, given: MoEConfig | Mapping[str, Any]) -> MoEConfig:
        """A config, or its fields by name.

        Raises:
            ValueError: If a name is unknown, or as the config itself.
            TypeError: If it is neither.
        """
        if isinstance(given, cls):
            return given
        if not isinstance(given, Mapping):
            raise TypeError(f"moe is a {type(given).__name__}; give a MoEConfig, its fields by name, or None.")
        known = [field.name for field in fields(cls)]
        strange = [_unknown_field(str(name), known) for name in given if name not in known]
        if strange:
            raise ValueError("The experts cannot be built:\n" + "\n".join(f"  - {problem}" for problem in strange))
        return cls(**given)

    @property
    def losses(self) -> tuple[str, ...]:
        """Names of the losses that a layer returns with its output."""
        return tuple(name for name in ("balance", "z") if getattr(self, name) > 0)

    def _problems(self) -> Iterator[str]:
        wrong = {
            name for name in ("experts", "top_k", "intermediate_size", "groups", "top_groups") if self._below(name, 1)
        }
        wrong |= {name for name in ("shared",) if self._below(name, 0)}
        for name in sorted(wrong):
            least = 0 if name == "shared" else 1
            yield f"{name} is {getattr(self, name)!r}; it must be a whole number of at least {least}."
        for name in ("balance", "z", "bias_rate"):
            value = getattr(self, name)
            if not (_is_number(value) and value >= 0) and not (name == "bias_rate" and value is None):
                none = " or None" if name == "bias_rate" else ""
                yield f"{name} is {value!r}; it must be a number of at least 0{none}; 0 is the nearest."
        if not (_is_number(self.scale) and self.scale > 0):
            yield f"scale is {self.scale!r}; it must be a number above 0, such as 1.0."
        for name, words in (("scores", get_args(Scores)), ("balance_scope", get_args(BalanceScope))):
            value = getattr(self, name)
            if value not in words:
                near = difflib.get_close_matches(str(value), words, 1, 0.3)
                meant = f"did you mean {near[0]!r}? There are" if near else "there are"
                yield f"{name} {value!r} is unknown; {meant} {', '.join(map(repr, words))}."
        if wrong:
            return
        if self.top_k > self.experts:
            yield f"top_k {self.top_k} is more than the {self.experts} experts there are; {self.experts} is the most."
        if self.normalize and self.top_k == 1 < self.experts:
            yield "normalize makes the weight of one chosen expert (top_k 1) 1, so the router would not learn; normalize=False works, as does top_k 2."
        yield from self._group_problems()
        if self.shared_gate and not self.shared:
            yield "shared_gate is set, and there are no shared experts; shared=1 makes one, or leave shared_gate out."

    def _group_problems(self) -> Iterator[str]:
        if self.groups == 1 and self.top_groups == 1:
            return
        size, rest = divmod(self.experts, self.groups)
        if rest or (size < 2 and self.experts > 1):
            # A group is worth the sum of its two best scores.
            possible = [n for n in range(1, self.experts + 1) if self.experts % n == 0 and self.experts // n >= 2]
            near = min(possible or [1], key=lambda n: (abs(n - self.groups), n))
            why = "does not divide" if rest else "leaves one expert in each group, and a group counts its best two, of"
            yield f"groups {self.groups} {why} {self.experts} experts; {near} is the nearest that works."
        if self.top_groups > self.groups:
            yield f"top_groups {self.top_groups} is more than the {self.groups} groups there are; {self.groups} is the most."
        elif not rest and self.top_k > self.top_groups * size and self.top_k <= self.experts:
            needed = math.ceil(self.top_k / size)
            yield (
                f"top_k {self.top_k} experts are not in top_groups {self.top_groups} groups of {size};"
                f" top_groups {needed} or top_k {self.top_groups * size} works."
            )

    def _below(self, name: str, least: int) -> bool:
        value = getattr(self, name)
        return isinstance(value, bool) or not isinstance(value, int) or value < least


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool) and isinstance(value, int | float) and math.isfinite(value)


def _unknown_field(name: str, known: list[str]) -> str:
    near = difflib.get_close_matches(name, known, 1, 0.5)
    meant = f"did you mean {near[0]!r}?" if near else f"there are {', '.join(known)}."
    return f"There is no setting {name!r}; {meant}"
