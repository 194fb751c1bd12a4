"""What can be wrong with a plan of the tensor axis, in words for the person who chose it."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Sequence

from lightning_5d.parallelism import Problem
from lightning_5d.tensor_parallel.styles import WRITABLE, nearest_word

_LARGEST = 64


def generic(name: str) -> str:
    """A name with ``*`` for the numbers in it: the same for all layers."""
    return re.sub(r"(^|(?<=\.))\d+(?=\.|$)", "*", name)


def no_plan(kind: str, linears: Sequence[str]) -> Problem:
    """Nothing says what to cut."""
    example = ", ".join(f"{name!r}: ..." for name in dict.fromkeys(map(generic, linears[:40])))
    return Problem(
        f"{kind} has no plan for the tensor axis: neither it nor a model inside says which layers are cut how.",
        "Say it, as in TensorParallel(2, plan={'layers.*.mlp.up': 'colwise', 'layers.*.mlp.down': 'rowwise'}), or in a parallel_plan of"
        f" the model. Styles are {WRITABLE}. Its linear layers: {{{example}}}.",
    )


def matches_nothing(pattern: str, source: str, names: Sequence[str]) -> Problem:
    """A pattern stands for no module."""
    close = difflib.get_close_matches(pattern, list(dict.fromkeys(map(generic, names))), 3, 0.5)
    fix = f"The nearest are {', '.join(map(repr, close))}." if close else "Names are those of named_modules()."
    return Problem(f"The plan ({source}) names {pattern!r}, which matches no module.", fix)


def unknown_style(pattern: str, word: object) -> Problem:
    """A style word that nobody knows."""
    near = nearest_word(word)
    meant = f"Did you mean {near!r}? " if near else ""
    return Problem(
        f"The plan gives {pattern!r} the style {word!r}, which is unknown.", f"{meant}Styles are {WRITABLE}."
    )


def unsupported_style(pattern: str, word: str) -> Problem:
    """A style word of Hugging Face's that is not done here."""
    fix = f"Use 'replicate' for {pattern!r} and the layers that go with it, or 'vocabulary' for an embedding."
    return Problem(f"The plan gives {pattern!r} the style {word!r}, which is not supported.", fix)


def two_styles(name: str, first: str, first_word: str, second: str, second_word: str) -> Problem:
    """Two patterns want different things of one module."""
    return Problem(
        f"{generic(name)} is matched by {first!r} as {first_word!r} and by {second!r} as {second_word!r}.",
        "Let one pattern match it.",
    )


def no_linear(name: str, word: str, why: str, instead: str = "") -> Problem:
    """A module of the wrong type."""
    use = f"{instead!r} or 'replicate'" if instead else "'replicate', or cut nn.Linear layers in its place"
    return Problem(f"The plan makes {generic(name)} {word!r}, but that {why}.", f"Use {use}.")


def embedding_option(name: str, option: str) -> Problem:
    """An embedding with an option that looks at words of other ranks."""
    return Problem(
        f"The embedding {name} has {option}, which looks at words that are on other ranks.",
        f"Leave {option} out, or use 'replicate'.",
    )


def degrees_clash(size: int, what: str, fits: Sequence[Callable[[int], bool]], copied: Callable[[int], str]) -> Problem:
    """The degree divides something not; `fits` are the conditions of everything that the plan cuts."""
    good = [degree for degree in range(1, _LARGEST + 1) if all(fit(degree) for fit in fits)]
    nearest = sorted(sorted(good, key=lambda degree: (abs(degree - size), degree))[:6]) if len(good) > 8 else good
    listed = ", ".join(f"{degree}{copied(degree)}" for degree in nearest)
    return Problem(f"tp={size} does not divide {what}.", f"Degrees that work for the whole model: {listed}.")


def no_heads(name: str, why: str) -> Problem:
    """An attention of which it is not known how many heads it has."""
    return Problem(
        f"The attention {generic(name)} {why}.", "Set the attribute, or use 'replicate' for its projections."
    )


def alone(names: Iterable[str], style: str) -> Problem:
    """Column layers without a row layer, or the reverse."""
    names = list(dict.fromkeys(map(generic, names)))
    listed, it = ", ".join(names), "it" if len(names) == 1 else "them"
    if style == "column":
        return Problem(
            f"The plan cuts the outputs of {listed} ('colwise'), but no layer behind {it} takes a cut input ('rowwise').",
            "Name that layer as 'rowwise', or use 'colwise_gather_output'.",
        )
    return Problem(
        f"The plan cuts the inputs of {listed} ('rowwise'), but no layer before {it} has a cut output of that size ('colwise').",
        "Name those layers as 'colwise', or use 'rowwise_split_input'.",
    )


def adapted_head(name: str) -> Problem:
    """A module around the output head."""
    return Problem(
        f"{generic(name)} is a module around the linear layer that makes the logits (an adapter).",
        "Take the adapter off it, or write {"
        + repr(name)
        + ": 'replicate'} into the plan (and the same for the embedding).",
    )


def not_of_heads(name: str, width: int, heads: str) -> Problem:
    """A projection whose width does not come from the heads."""
    return Problem(
        f"{generic(name)} is {width} wide, which {heads} do not make.",
        "Set the numbers on the attention (num_heads, num_key_value_heads), or write them: 'fused_qkv:HEADS,KV_HEADS'.",
    )


def packed_parts(name: str, width: int, parts: int) -> Problem:
    """A packed layer whose width is no multiple of its parts."""
    return Problem(
        f"{generic(name)} has {width} features, which are not {parts} parts of one size.",
        "Write 'packed_colwise:PARTS'.",
    )


def perhaps_packed(name: str, width: int, what: str) -> Problem:
    """A column layer that is two in one, of which nothing says so."""
    return Problem(
        f"{generic(name)} is 'colwise', but its {width} outputs are twice {what}: cut in order, halves would get mixed.",
        "Use 'packed_colwise', for one half after the other.",
    )


def norm_over_cut(name: str, size: int, word: str) -> Problem:
    """A norm over features that are spread over ranks."""
    return Problem(
        f"{generic(name)} normalises over all {size} {word}, of which each rank has a part.",
        "Use 'colwise_gather_output' for the layers before it and 'rowwise_split_input' behind it, as Hugging Face does.",
    )


def adapter_on_row(name: str, weight: str) -> Problem:
    """An adapter's vector over outputs that are summands."""
    return Problem(
        f"{generic(name)} is 'rowwise' and has an adapter whose {generic(weight)} acts on outputs that are still summands.",
        "Take that vector out, or use 'replicate' for the layers of this module.",
    )


def unclear_ties(names: Sequence[str], became: Sequence[str]) -> Problem:
    """One weight under several names that are cut differently."""
    pairs = ", ".join(f"{generic(name)} {what}" for name, what in zip(names, became, strict=True))
    return Problem(
        f"One weight has several names, and the plan cuts them differently: {pairs}.",
        "Give all of them the same style.",
    )


def no_sequence(kind: str) -> Problem:
    """Nothing between which the sequence could be cut."""
    return Problem(
        f"sequence_parallel cuts the sequence between the blocks of a model, and {kind} has no list of blocks of one class.",
        "Name them, FiveD(plan=ParallelPlan(['layers.*'])), or leave sequence_parallel out.",
    )


def many_lists(lists: Sequence[str]) -> Problem:
    """Several stacks of blocks, each with a sequence of its own."""
    return Problem(
        f"sequence_parallel cuts one sequence, but layers in {len(lists)} lists of blocks are cut: {', '.join(lists)}.",
        f"Choose one, FiveD(plan=ParallelPlan(['{lists[0]}.*'])), with styles for its layers alone, or leave sequence_parallel out.",
    )


def not_a_sequence(name: str) -> Problem:
    """A region that does not see (batch, sequence, hidden)."""
    return Problem(
        f"{generic(name)} is one of several experts, and what it gets is no sequence that sequence_parallel could put together.",
        "Use 'replicate' for its layers, or leave sequence_parallel out.",
    )
