"""The interface of messages between the ranks of a pipeline."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lightning_5d.pipeline_parallel.channels.message import Shape

if TYPE_CHECKING:
    from lightning_5d.mesh import ParallelMesh


class Arriving(ABC):
    """A message that is expected."""

    @abstractmethod
    def wait(self) -> list[Tensor]:
        """Blocks until it is here, and gives its tensors, which belong to the caller. Call it once.

        Raises:
            RuntimeError: If the sender is gone, or does not send within the time limit.
        """


class Channels(ABC):
    """Messages to and from the other ranks of this rank's pipeline, who are known by their places in it.

    Messages from one rank to another arrive in the order in which they are sent, and are received in that order. Nobody waits
    for a message to be taken; nobody waits for longer than the run's time limit, or for a rank that is gone.
    """

    @classmethod
    def open(
        cls,
        mesh: ParallelMesh,
        device: torch.device,
        timeout: timedelta,
        pairs: Iterable[tuple[int, int]] | None = None,
    ) -> Channels:
        """Connects the ranks of every pipeline; all ranks of the world call it.

        Args:
            mesh: The ranks by axis.
            device: Where this rank's tensors are.
            timeout: The longest wait.
            pairs: Places of ranks that send each other messages, the same on every rank; ``None`` for neighbours, the last and the
                first among them. Only matters on accelerators.
        """
        from lightning_5d.pipeline_parallel.channels.choice import open_channels

        return open_channels(mesh, device, timeout, pairs)

    @abstractmethod
    def send(self, tensors: Sequence[Tensor], to: int) -> None:
        """Sends tensors as one message and does not wait.

        Args:
            tensors: What to send; not to be written to before it has arrived, unless it is in the memory of a CPU.
            to: The receiver's place in the pipeline.
        """

    @abstractmethod
    def receive(self, shapes: Sequence[Shape], source: int) -> Arriving:
        """Expects the next message of a rank and does not wait.

        Args:
            shapes: Shape and dtype of each tensor, as sent.
            source: The sender's place in the pipeline.
        """

    @abstractmethod
    def send_object(self, value: Any, to: int) -> None:
        """Sends anything that can be pickled, as a message among the others."""

    @abstractmethod
    def receive_object(self, source: int) -> Any:
        """Waits for the next message of a rank, which has to be an object."""

    @abstractmethod
    def finish(self) -> None:
        """Ends a step: waits for messages that are still on their way out.

        Raises:
            RuntimeError: If one could not be delivered.
        """

    @abstractmethod
    def close(self) -> None:
        """Gives connections and memory back. Messages on their way are lost; those that have arrived stay."""

    def memory(self) -> list[Tensor]:
        """The memory that this rank keeps for messages to others, whole."""
        return []

    def mapped(self) -> list[Tensor]:
        """The memory of other ranks that messages from them are read in, whole."""
        return []
