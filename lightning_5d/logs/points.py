"""The points of a run at which Lightning's loops tell the logger connector where they are, on every rank."""

from __future__ import annotations

from datetime import timedelta
from functools import wraps
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch.trainer.connectors.logger_connector.logger_connector import _LoggerConnector
from typing_extensions import override

from lightning_5d.logs.exchange import LogExchange
from lightning_5d.logs.values import LoggedValues
from lightning_5d.mesh import ParallelMesh

if TYPE_CHECKING:
    import lightning.pytorch as pl

_HOOK = "on_train_epoch_end"


class ExchangingConnector(_LoggerConnector):
    """Lightning's logger connector, which has ranks agree before anyone reads.

    Args:
        trainer: Its Trainer.
        exchange: The agreement.
    """

    # Written against lightning 2.6.6.

    def __init__(self, trainer: pl.Trainer, exchange: LogExchange) -> None:
        super().__init__(trainer)
        self.exchange = exchange
        self._hooked: tuple[pl.LightningModule, Any] | None = None

    @override
    def on_batch_end(self) -> None:
        self.exchange.batch_end()
        super().on_batch_end()

    @override
    def epoch_end_reached(self) -> None:
        self.trainer.strategy.settle_step()  # type: ignore[attr-defined]
        super().epoch_end_reached()
        self.exchange.epoch_end()
        results = self.trainer._results
        if results is not None and results.training:
            self._exchange_after_hook()

    @override
    def on_epoch_end(self) -> None:
        self._restore_hook()
        self.exchange.epoch_end()
        super().on_epoch_end()

    def _exchange_after_hook(self) -> None:
        # Callbacks that monitor a metric run between the module's hook, which may log it, and `on_epoch_end`.
        self._restore_hook()
        module = self.trainer.lightning_module
        hook = module.on_train_epoch_end

        @wraps(hook)
        def then_exchange() -> None:
            hook()
            self.exchange.epoch_end()

        self._hooked = module, vars(module).get(_HOOK)
        object.__setattr__(module, _HOOK, then_exchange)

    def _restore_hook(self) -> None:
        if self._hooked is None:
            return
        (module, own), self._hooked = self._hooked, None
        object.__delattr__(module, _HOOK)
        if own is not None:
            object.__setattr__(module, _HOOK, own)


def attach(trainer: pl.Trainer, mesh: ParallelMesh, device: torch.device, timeout: timedelta) -> LogExchange:
    """Has the ranks of `trainer` agree on what they log; all ranks call it, before its loops run.

    Args:
        trainer: A Trainer of several ranks.
        mesh: The ranks by axis.
        device: Where a collective's tensor may live.
        timeout: Longest wait for a message.
    """
    exchange = LogExchange(trainer, mesh, device, timeout)
    connector = ExchangingConnector(trainer, exchange)
    connector.__dict__.update({**vars(trainer._logger_connector), "exchange": exchange, "_hooked": None})
    trainer._logger_connector = connector
    fit = trainer.fit_loop.epoch_loop
    for loop in (fit, fit.val_loop, trainer.validate_loop, trainer.test_loop):
        if not isinstance(loop._results, LoggedValues):
            loop._results = LoggedValues(training=loop is fit)
    return exchange
