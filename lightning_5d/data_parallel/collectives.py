"""All-gather and reduce-scatter over a transport, with the meaning of torch's own."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lightning_5d.data_parallel.transport import Transport, sum_in_rank_order

# Apart from the tags of an engine that uses the same transport.
_TAG = (1 << 20) - 2


def all_gather(transport: Transport, output: torch.Tensor, input: torch.Tensor) -> None:
    """Fills flat ``output`` with the flat ``input`` of every rank, in rank order.

    Raises:
        ValueError: If ``output`` is not as many times ``input`` as there are ranks.
    """
    _check(transport, output.numel(), input.numel(), "all_gather output", "input")
    arrival = transport.share(input, _TAG)
    for target, part in zip(output.chunk(transport.size), arrival.wait(), strict=True):
        target.copy_(part)
    arrival.release()


def reduce_scatter(
    transport: Transport,
    output: torch.Tensor,
    input: torch.Tensor,
    op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM,
) -> None:
    """Fills flat ``output`` with this rank's part of the sum (or mean) of every rank's flat ``input``.

    Parts are added in rank order, half precision in fp32.

    Raises:
        ValueError: If ``input`` is not as many times ``output`` as there are ranks, or ``op`` is neither SUM nor AVG.
    """
    _check(transport, input.numel(), output.numel(), "reduce_scatter input", "output")
    if op not in (dist.ReduceOp.SUM, dist.ReduceOp.AVG):
        raise ValueError(f"reduce_scatter does not do {op}; it does SUM and AVG.")
    arrival = transport.scatter(input, _TAG + 1)
    sum_in_rank_order(arrival.wait(), output, transport.size if op == dist.ReduceOp.AVG else 1.0)
    arrival.release()


def _check(transport: Transport, whole: int, part: int, whole_name: str, part_name: str) -> None:
    if whole != part * transport.size:
        raise ValueError(
            f"The {whole_name} has {whole} elements; with {transport.size} ranks and {part} elements of {part_name} "
            f"it needs {part * transport.size}."
        )
