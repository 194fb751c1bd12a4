"""How many heads an attention has, and which rank gets which of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from lightning_5d.tensor_parallel.adapters import Layer

Role = Literal["qkv", "kv", "q", "k", "v"]

_ROLES: Sequence[tuple[Role, re.Pattern[str]]] = (
    ("qkv", re.compile(r"qkv|query_key_value|c_attn|w_pack|att_proj")),
    ("kv", re.compile(r"(^|_|w)kv(_|$|lin|proj)|key_value")),
    ("q", re.compile(r"(^|_|w)q(_|$|lin|proj|norm)|^quer")),
    ("k", re.compile(r"(^|_|w)k(_|$|lin|proj|norm)|^key")),
    ("v", re.compile(r"(^|_|w)v(_|$|lin|proj|norm)|^value")),
)

QUERY_HEADS = (
    "num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_q_heads", "num_query_heads",
    "n_local_heads", "decoder_attention_heads", "encoder_attention_heads",
)  # fmt: skip
KV_HEADS = (
    "num_key_value_heads", "num_kv_heads", "n_kv_heads", "n_kv_head", "kv_heads", "kv_n_heads", "n_local_kv_heads", "num_query_groups",
)  # fmt: skip
GROUPS = ("num_key_value_groups", "num_queries_per_kv", "n_rep", "q_per_kv", "kv_groups", "queries_per_kv")
HEAD_SIZES = ("head_dim", "head_size", "attention_head_size", "d_head", "dim_head", "d_kv", "key_value_proj_dim")
ATTENTION_WIDTHS = (
    "all_head_size", "hidden_size", "embed_dim", "inner_dim", "n_embd", "d_model", "width", "dim", "q_size", "split_size",
    "attn_hidden_size", "kv_size", "kv_dim",
)  # fmt: skip


def role_of(name: str) -> Role | None:
    """What a projection (or a norm behind one) computes, by its own name; ``None`` for layers that are no attention's."""
    own = name.rpartition(".")[2].lower()
    return next((role for role, pattern in _ROLES if pattern.search(own)), None)


@dataclass(frozen=True)
class Heads:
    """The heads of an attention.

    Attributes:
        query: Query heads.
        kv: Key and value heads; each serves ``query / kv`` query heads.
        copied: Whether several ranks may hold the same key and value heads.
    """

    query: int
    kv: int
    copied: bool = True

    def fits(self, size: int) -> bool:
        """Whether so many ranks can share them: whole query heads each, and a whole number of key and value heads, or of ranks for each."""
        return self.query % size == 0 and (self.kv % size == 0 or (self.copied and size % self.kv == 0))

    def copies(self, size: int) -> int:
        """How many neighbouring ranks hold the same key and value heads."""
        return max(1, size // self.kv)

    def local(self, size: int) -> tuple[int, int]:
        """Query heads, and key and value heads, of one rank."""
        return self.query // size, max(1, self.kv // size)

    def kv_of(self, rank: int, size: int) -> range:
        """The key and value heads of a rank."""
        count = max(1, self.kv // size)
        first = rank * self.kv // size
        return range(first, first + count)

    def __str__(self) -> str:
        return (
            f"{self.query} query heads, {self.kv} key/value heads" if self.query != self.kv else f"{self.query} heads"
        )


def find_heads(root: nn.Module, region: str, columns: Iterable[Layer], given: tuple[int, int] | None) -> Heads | str:
    """The heads of an attention, or what it would take to know them, as the end of a sentence that begins with its name.

    Numbers are taken from attributes of the attention (those of the module that holds the projections first), then from
    its config and those of modules around it, and have to agree with the widths of the projections.
    """
    roles: dict[Role, Layer] = {}
    for layer in columns:
        role = role_of(layer.name)
        if role is not None:
            roles.setdefault(role, layer)
    places = list(_places(root, region, [layer.name for layer in roles.values()]))
    fused = roles.get("qkv")
    if given is not None:
        return Heads(*given, copied=fused is None)
    sizes = [n for place in places for n in _numbers(place, HEAD_SIZES)] + list(_norm_sizes(root, region))
    counts = [n for place in places for n in _numbers(place, QUERY_HEADS)]
    query = roles.get("q") or roles.get("kv")
    if fused is not None or query is None:
        if not counts:
            return "does not say how many heads it has (an attribute such as num_heads, or its config)"
        kv = next((n for place in places for n in _numbers(place, KV_HEADS) if counts[0] % n == 0), counts[0])
        return Heads(counts[0], kv, copied=False)
    width = query.linear.out_features
    heads = _agreed(counts, width, sizes) or next((width // n for n in sizes if width % n == 0), None)
    if heads is None:
        return f"does not say how many heads its {width} queries make (an attribute such as num_heads or head_dim, or its config)"
    return Heads(heads, _kv_heads(roles, places, sizes, heads, width))


def _kv_heads(roles: Mapping[Role, Layer], places: Sequence[Any], sizes: Sequence[int], heads: int, width: int) -> int:
    keys = roles.get("k") or roles.get("v")
    if keys is None:
        return heads
    kv_width = keys.linear.out_features
    said = [n for place in places for n in _numbers(place, KV_HEADS)]
    said += [heads // n for place in places for n in _numbers(place, GROUPS) if heads % n == 0]
    said += [kv_width // n for n in [*sizes, width // heads] if kv_width % n == 0]
    return _agreed([n for n in said if heads % n == 0], kv_width, [*sizes, width // heads]) or heads


def _agreed(counts: Sequence[int], width: int, sizes: Sequence[int]) -> int | None:
    """The first of several numbers of heads that makes heads of a known size; else the first that divides the width."""
    fitting = [n for n in counts if width % n == 0]
    return next((n for n in fitting if width // n in sizes), fitting[0] if fitting else None)


def _places(root: nn.Module, region: str, names: Sequence[str]) -> Iterator[Any]:
    """Where numbers of heads may stand: the modules that hold projections, up to the region's, their configs, and those around."""
    own: dict[str, None] = {}
    for name in names:
        parent = name.rpartition(".")[0]
        while len(parent) >= len(region):
            own[parent] = None
            if parent == region:
                break
            parent = parent.rpartition(".")[0]
    modules = [root.get_submodule(name) for name in own or {region: None}]
    yield from modules
    above, name = [], region
    while name:
        name = name.rpartition(".")[0]
        above.append(root.get_submodule(name))
    for module in [*modules, *above]:
        config = vars(module).get("config")
        if config is not None:
            yield config


def _numbers(place: Any, names: Sequence[str]) -> Iterator[int]:
    for name in names:
        value = vars(place).get(name) if isinstance(place, nn.Module) else _of_config(place, name)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield value


def _of_config(config: Any, name: str) -> Any:
    return config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)


def _norm_sizes(root: nn.Module, region: str) -> Iterator[int]:
    """Sizes of norms of queries and keys, which are those of a head."""
    for name, module in root.get_submodule(region).named_modules():
        if "norm" in type(module).__name__.lower() and role_of(name) in ("q", "k"):
            yield from (weight.numel() for weight in module.parameters(recurse=False) if weight.ndim == 1)
