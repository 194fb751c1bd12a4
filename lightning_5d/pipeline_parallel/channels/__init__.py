"""Messages between the ranks of a pipeline."""

from lightning_5d.pipeline_parallel.channels.channels import Arriving, Channels
from lightning_5d.pipeline_parallel.channels.choice import open_channels

__all__ = ["Arriving", "Channels", "open_channels"]
