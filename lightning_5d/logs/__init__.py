"""What `self.log` records, agreed over ranks by name: nobody waits for a key that only some ranks log."""

from lightning_5d.logs.exchange import LogExchange
from lightning_5d.logs.points import attach

__all__ = ["LogExchange", "attach"]
