"""How ranks come to be, find each other, and end together."""

from lightning_5d.launch.failure import Failure, RankFailure
from lightning_5d.launch.selection import launcher_for
from lightning_5d.launch.supervisor import Supervisor

__all__ = ["Failure", "RankFailure", "Supervisor", "launcher_for"]
