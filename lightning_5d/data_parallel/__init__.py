"""The data axis: ZeRO stages 0 to 3 on FSDP2, and collectives that make it fast on CPU."""

from lightning_5d.data_parallel.engine import Engine
from lightning_5d.data_parallel.options import ShardOptions
from lightning_5d.data_parallel.sharding import shard
from lightning_5d.data_parallel.traffic import Traffic

__all__ = ["Engine", "ShardOptions", "Traffic", "shard"]
