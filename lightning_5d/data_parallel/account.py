"""What the data axis keeps in memory outside the module, by category: see `Parallelized.memory`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from lightning_5d.data_parallel.exchange import Exchange
from lightning_5d.data_parallel.param_group import RecordingParamGroup
from lightning_5d.data_parallel.transport import Transport
from lightning_5d.memory.categories import COMMUNICATION, ELSEWHERE, GRADIENTS, MASTER_WEIGHTS, WEIGHTS


def of_transport(transport: Transport) -> Iterator[tuple[str, Tensor]]:
    """The memory for exchanges, this rank's own and what it maps of its peers."""
    yield from ((COMMUNICATION, tensor) for tensor in transport.memory())
    yield from ((ELSEWHERE, tensor) for tensor in transport.mapped())


def of_exchange(exchange: Exchange) -> Iterator[tuple[str, Tensor]]:
    """The same of all transports, and the memory in which reduced gradients lie."""
    yield from ((COMMUNICATION, tensor) for tensor in exchange.results.views())
    for peers in exchange.peers:
        for transport in peers.transports:
            yield from of_transport(transport)


def of_group(group: RecordingParamGroup) -> Iterator[tuple[str, Tensor]]:
    """Full and sharded parameters, and gradients that have not been reduced (private names of FSDP2 in torch 2.13)."""
    compute_dtype = group.mp_policy.param_dtype
    for param in group.fsdp_params:
        mixed = compute_dtype is not None and compute_dtype != param.sharded_param.dtype
        yield MASTER_WEIGHTS if mixed else WEIGHTS, param._sharded_param_data
        if hasattr(param, "_unsharded_param"):
            yield WEIGHTS, param._unsharded_param
            for grad in (param._unsharded_param.grad, param.unsharded_accumulated_grad):
                if grad is not None:
                    yield GRADIENTS, grad
