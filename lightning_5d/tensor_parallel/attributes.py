"""Attributes of modules that say how many heads or features they have, and what they are on one rank."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from lightning_5d.tensor_parallel.groups import Group
from lightning_5d.tensor_parallel.heads import ATTENTION_WIDTHS, GROUPS, KV_HEADS, QUERY_HEADS, Heads, role_of

_WIDTHS = (
    "intermediate_size", "inner_dim", "inner_size", "ffn_dim", "d_ff", "d_inner", "ffn_hidden_size", "hidden_dim", "dim_ff",
    "dim_feedforward", "n_inner",
)  # fmt: skip


def local_attributes(root: nn.Module, group: Group, heads: Heads | None, size: int) -> Mapping[tuple[str, str], int]:
    """What attributes of a region's modules are set to while the axis is at work.

    Only those that hold the whole number, on modules around the column layers, and, of a region that is a block, only numbers of heads.
    """
    if heads is None:
        features = {layer.linear.out_features for layer in group.columns}
        features |= {row.linear.in_features for row in group.rows}
        local = {(name, width): width // size for name in _WIDTHS for width in features}
    elif heads.fits(size):
        local = _of_heads(group, heads, size)
    else:
        return {}
    found: dict[tuple[str, str], int] = {}
    for place in _around(group):
        own = vars(root.get_submodule(place))
        counts_only = place == group.name and group.door == "layers"
        for (name, whole), part in local.items():
            value = own.get(name)
            if type(value) is not int or value != whole or part == whole:
                continue
            if not counts_only or name in (*QUERY_HEADS, *KV_HEADS, *GROUPS):
                found[place, name] = part
    return found


def _of_heads(group: Group, heads: Heads, size: int) -> dict[tuple[str, int], int]:
    query, kv = heads.local(size)
    local = {(name, heads.query): query for name in QUERY_HEADS}
    local |= {(name, heads.kv): kv for name in KV_HEADS}
    local |= {(name, heads.query // heads.kv): query // kv for name in GROUPS}
    for layer in group.columns:
        width, role = layer.linear.out_features, role_of(layer.name)
        part = width // heads.kv * kv if role in ("k", "v") else width // size
        local |= {(name, width): part for name in ATTENTION_WIDTHS if (name, width) not in local}
    for row in group.rows:
        local |= {(name, row.linear.in_features): row.linear.in_features // size for name in ATTENTION_WIDTHS}
    return local


def _around(group: Group) -> list[str]:
    """Modules from those that hold column layers up to the region's."""
    places: dict[str, None] = {group.name: None}
    for layer in group.columns:
        parent = layer.name.rpartition(".")[0]
        while parent != group.name and len(parent) > len(group.name):
            places[parent] = None
            parent = parent.rpartition(".")[0]
    return list(places)
