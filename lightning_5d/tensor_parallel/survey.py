"""What a plan's patterns stand for in a module: its column and row layers, its vocabulary, and what stays whole."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor, nn

from lightning_5d.parallelism import Problem
from lightning_5d.plan import ParallelPlan, name_pattern
from lightning_5d.tensor_parallel import problems as say
from lightning_5d.tensor_parallel.adapters import Layer, read_layer
from lightning_5d.tensor_parallel.problems import generic
from lightning_5d.tensor_parallel.styles import Style, read_style

_HEAD_NAMES = frozenset({"lm_head", "embed_out", "unembed"})


@dataclass
class Survey:
    """The modules that a plan names, sorted by what becomes of them.

    Attributes:
        styles: The style of each layer in `columns` and `rows`.
        columns: Layers whose outputs are cut, by name.
        rows: Layers whose inputs are cut, by name.
        embeddings: `nn.Embedding` modules to be cut along the vocabulary.
        heads: Linear layers to be cut along the vocabulary, by name.
        parameters: Parameters that a pattern names by themselves, with their styles.
        notes: Modules that stay whole because the plan says so, and how that is reported.
        summed: Modules that stay whole and of whose gradients the plan says that they are summands.
        problems: What is wrong.
    """

    styles: dict[str, Style] = field(default_factory=dict)
    columns: dict[str, Layer] = field(default_factory=dict)
    rows: dict[str, Layer] = field(default_factory=dict)
    embeddings: list[str] = field(default_factory=list)
    heads: dict[str, Layer] = field(default_factory=dict)
    parameters: dict[str, Style] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    summed: set[str] = field(default_factory=set)
    problems: list[Problem] = field(default_factory=list)


def survey(module: nn.Module, plan: ParallelPlan, blocks: list[str]) -> Survey:
    """Finds what a plan's patterns stand for.

    Args:
        module: The whole module.
        plan: Its plan.
        blocks: Names of its blocks.
    """
    result = Survey()
    words = _words(module, plan, result)
    layers: dict[str, tuple[Style, Layer]] = {}
    for name, (word, style) in words.items():
        if style.kind == "whole":
            result.notes[name] = "replicated"
            if word == "replicated_with_grad_allreduce":
                result.summed.add(name)
        elif style.kind == "experts":
            result.notes[name] = "replicated: experts have an axis of their own"
        elif (table := _table(module, name)) is not None:
            if style.kind == "vocabulary":
                result.embeddings.append(table)
            else:
                result.problems.append(say.no_linear(name, word, "is an nn.Embedding", "vocabulary"))
        else:
            read = read_layer(module, name)
            if isinstance(read, str):
                result.problems.append(say.no_linear(name, word, read))
            else:
                layers[name] = (style, read)
    _sort(module, layers, blocks, result)
    _complete_vocabulary(module, words, blocks, result)
    return result


def _words(module: nn.Module, plan: ParallelPlan, result: Survey) -> dict[str, tuple[str, Style]]:
    """The style of each module that a pattern names; those of parameters go into the survey."""
    first: dict[int, str] = {}
    modules = dict(module.named_modules(remove_duplicate=False))
    canonical = {name: first.setdefault(id(child), name) for name, child in modules.items() if name}
    parameters = dict(module.named_parameters(remove_duplicate=False))
    words: dict[str, tuple[str, Style]] = {}
    chosen: dict[str, str] = {}
    for pattern, word in plan.tensor.items():
        style = read_style(word)
        if style is None:
            result.problems.append(say.unknown_style(pattern, word))
            continue
        if style.kind == "unsupported":
            result.problems.append(say.unsupported_style(pattern, word))
            continue
        matches = name_pattern(pattern).fullmatch
        hits = list(dict.fromkeys(canonical[name] for name in canonical if matches(name)))
        for name in [name for name in parameters if matches(name)]:
            owner, _, own = name.rpartition(".")
            if own in ("weight", "bias") and isinstance(modules[owner], nn.Linear | nn.Embedding):
                hits.append(canonical[owner])
            else:
                hits.append(name)
        if not hits:
            result.problems.append(say.matches_nothing(pattern, plan.tensor_source, list(canonical)))
        for name in hits:
            if read_style(words.get(name, (word, style))[0]) != style:
                result.problems.append(say.two_styles(name, chosen[name], words[name][0], pattern, word))
                continue
            words[name], chosen[name] = (word, style), pattern
    for name in [name for name in words if name in parameters]:
        result.parameters[name] = words.pop(name)[1]
    return words


def _sort(module: nn.Module, layers: dict[str, tuple[Style, Layer]], blocks: list[str], result: Survey) -> None:
    vocabularies = _vocabularies(module, blocks)
    tied = {id(m.weight) for m in module.modules() if isinstance(m, nn.Embedding)}
    rows_outside = [n for n, (style, _) in layers.items() if style.kind == "row" and not _inside(n, blocks)]
    for name, (style, layer) in layers.items():
        head = style.kind == "vocabulary" or (
            not _inside(name, blocks)
            and (
                id(layer.linear.weight) in tied
                or name.rpartition(".")[2] in _HEAD_NAMES
                or ((layer.linear.out_features, layer.linear.in_features) in vocabularies and not rows_outside)
            )
        )
        if head:
            result.heads[name] = layer
            continue
        result.styles[name] = style
        (result.columns if style.kind == "column" else result.rows)[name] = layer


def _complete_vocabulary(
    module: nn.Module, words: dict[str, tuple[str, Style]], blocks: list[str], result: Survey
) -> None:
    """Adds the embedding to a head that the plan names, and the head to an embedding: they share a weight, or might."""
    modules = dict(module.named_modules())
    weights: dict[int, Tensor] = {}
    sizes: set[tuple[int, int]] = set()
    for name in [*result.embeddings, *(layer.base for layer in result.heads.values())]:
        weight = modules[name].weight
        weights[id(weight)] = weight
        sizes.add((weight.shape[0], weight.shape[1]))
    for name, child in modules.items():
        if (
            name in words
            or name in result.embeddings
            or not isinstance(child, nn.Embedding | nn.Linear)
            or _inside(name, blocks)
        ):
            continue
        if any(name.startswith(f"{outer}.") for outer in [*result.heads, *words]):
            continue
        shape = (child.weight.shape[0], child.weight.shape[1]) if child.weight.ndim == 2 else (0, 0)
        if id(child.weight) not in weights and shape not in sizes:
            continue
        if isinstance(child, nn.Embedding):
            result.embeddings.append(name)
        elif not isinstance(read := read_layer(module, name), str):
            result.heads[name] = read
    order = list(modules)
    result.embeddings = sorted(dict.fromkeys(result.embeddings), key=order.index)
    for name in result.embeddings:
        embedding = modules[name]
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(embedding, option):
                text = f"{option}={getattr(embedding, option)}"
                result.problems.append(say.embedding_option(generic(name), text))


def _table(module: nn.Module, name: str) -> str | None:
    """The embedding that a name stands for: the module itself, or the one inside of an adapter."""
    tables = [n for n, m in module.get_submodule(name).named_modules(prefix=name) if isinstance(m, nn.Embedding)]
    linear = any(isinstance(m, nn.Linear) for m in module.get_submodule(name).modules())
    return tables[0] if len(tables) == 1 and not linear else None


def _vocabularies(module: nn.Module, blocks: list[str]) -> set[tuple[int, int]]:
    return {
        (m.num_embeddings, m.embedding_dim)
        for name, m in module.named_modules()
        if isinstance(m, nn.Embedding) and not _inside(name, blocks)
    }


def _inside(name: str, blocks: list[str]) -> bool:
    return any(name.startswith(f"{block}.") for block in blocks)
