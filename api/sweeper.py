"""The sweeper: what makes a lost message, a killed worker and a forgotten reservation harmless.

Every API process runs this loop, and a lease in the database lets one of them work at a time. It is
no Celery task, because it is what stands in for the broker when the broker fails. Each round ends
what is overdue in one transaction and sends messages after its commit; a message too many ends at
the ledger's compare-and-set.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable
from typing import Final

from accounting import ledger
from accounting.errors import LedgerUnavailable
from accounting.tables import Database
from api.problems import report

log = logging.getLogger("epsilond.sweeper")

LEASE_NAME: Final = "sweeper"
_SHORTEST_LEASE_SECONDS: Final = 10.0
_STOP_SECONDS: Final = 30.0


class Sweeper:
    """A thread that sweeps until it is stopped.

    Args:
        database: the ledger's database.
        send: hands one job's id to the broker; False if it was not taken.
        sweep_seconds: the pause between two rounds.
        resend_seconds: the shortest wait before a job's message is sent again.
        clock: microseconds since 1970 in UTC.
    """

    def __init__(
        self,
        database: Database,
        send: Callable[[str], bool],
        *,
        sweep_seconds: float,
        resend_seconds: float,
        clock: Callable[[], int],
    ) -> None:
        self._database = database
        self._send = send
        self._sweep_seconds = sweep_seconds
        self._resend_seconds = resend_seconds
        self._clock = clock
        self._token = secrets.token_hex(16)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="sweeper", daemon=True)

    def start(self) -> None:
        """Begins to sweep in a thread of its own."""
        self._thread.start()

    def stop(self) -> None:
        """Ends the loop; a round in progress is finished first."""
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join(_STOP_SECONDS)

    def sweep(self) -> tuple[str, ...]:
        """One round; the ids of the jobs that were sent.

        Raises:
            LedgerUnavailable: the database did not answer; nothing was changed.
        """
        now = self._clock()
        with self._database.write() as session:
            # Several rounds long, so that a slow round does not lose it.
            held = ledger.take_lease(
                session,
                name=LEASE_NAME,
                token=self._token,
                seconds=max(_SHORTEST_LEASE_SECONDS, 5 * self._sweep_seconds),
                now=now,
            )
            if not held:
                return ()
            job_ids = ledger.sweep(session, now=now, resend_after_seconds=self._resend_seconds)
        sent = []
        for job_id in job_ids:
            if not self._send(job_id):
                # A later round sends it again; the others would most likely fail likewise.
                break
            sent.append(job_id)
        return tuple(sent)

    def _run(self) -> None:
        while not self._stopping.wait(self._sweep_seconds):
            try:
                self.sweep()
            except LedgerUnavailable:
                log.warning("a sweep did not reach the database")
            except Exception as error:  # noqa: BLE001  (the loop must outlive any one round)
                report(error)
