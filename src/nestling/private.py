"""A private run's account: opened before the first round, charged by the server, summed up in the result."""

import warnings

from nestling.config.schema import RunConfig
from nestling.core.errors import WireError
from nestling.runs.folder import RunFolder
from nestling.runs.ledger import LEDGER, Ledger
from nestling.runs.recorder import Recorder
from nestling.strategies.privacy import epsilon, spent

FEW_CLIENTS = 100


class PrivacyWarning(UserWarning):
    """Noise for few clients: the guarantee holds, and little is left of what they learn."""


def open_ledger(config: RunConfig, folder: RunFolder, recorder: Recorder, *, charged: int) -> Ledger:
    """The ledger of the run's folder; what the run will spend if no round is repeated is logged.

    `charged` is how many charges its checkpoint knows of. Raises `WireError` if the ledger has fewer, `ContextError` if
    the accounting is not installed: now, and not when the run is over.
    """
    p, asked = config.privacy, config.server.clients_per_round or config.task.clients
    if asked < FEW_CLIENTS:
        warnings.warn(
            f"privacy for {asked} clients a round: the noise on their mean is {p.noise / asked:.2g} of a clip in every "
            "number; client-level privacy is meant for hundreds and more",
            PrivacyWarning,
            stacklevel=2,
        )
    rate = config.sampling_rate
    planned = epsilon(p.noise, config.rounds, p.delta, sampling_rate=rate)
    drawn = f", each client drawn with probability {rate:.4g}" if rate < 1 else ""
    recorder.log(f"private: epsilon {planned:.4g} at delta {p.delta:g} planned for {config.rounds} rounds{drawn}")
    ledger = Ledger(folder.path)
    if len(ledger.charges) < charged:
        ledger.close()
        raise WireError(
            "ledger",
            f"has {len(ledger.charges)} of {charged} charges",
            where=str(folder.path / LEDGER),
            remedy="Put the file back: without it nobody knows what has been spent.",
        )
    return ledger


def spent_so_far(config: RunConfig, ledger: Ledger | None) -> dict[str, float]:
    """A result's `epsilon`, `delta` and, of a secret draw, `sampling_rate`, and the ledger closed; nothing for a run
    that is not private."""
    if ledger is None:
        return {}
    ledger.close()
    delta = config.privacy.delta
    sampled = {"sampling_rate": config.sampling_rate} if config.sampling_rate < 1 else {}
    return {"epsilon": spent([charge.mechanism for charge in ledger.charges], delta), "delta": delta, **sampled}
