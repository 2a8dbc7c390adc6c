"""Running Celery workers: one that ``epsilond serve`` keeps alive, or one in the foreground."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from types import TracebackType
from typing import IO, Final, NoReturn, Self

from worker import lifeline
from worker.custody import load_sealer, load_signing_key
from worker.settings import Settings

FIRST_PAUSE_SECONDS: Final = 0.5
LONGEST_PAUSE_SECONDS: Final = 30.0
# A worker that lived this long was well, so the next restart is quick again.
HEALTHY_SECONDS: Final = 60.0
STOP_SECONDS: Final = 5.0

_log = logging.getLogger(__name__)


def celery_arguments(settings: Settings) -> list[str]:
    """Arguments of ``celery`` for a worker.

    Its threads only wait for the jobs' own processes. Gossip, mingle and heartbeats are talk
    between workers, which here meet in the database.
    """
    return [
        *("--app", "worker.tasks", "--quiet", "worker", "--pool", "threads"),
        *("--concurrency", str(settings.worker_concurrency), "--loglevel", settings.log_level),
        *("--without-gossip", "--without-mingle", "--without-heartbeat"),
    ]


class WorkerSupervisor:
    """Starts a Celery worker process, starts it again when it dies, and stops it on leaving.

    Used as a context manager, or by ``start`` and ``stop``. The worker ends with this process even
    if that is killed.

    Args:
        settings: what the worker shall see, whatever this process's environment says.
        output: where the worker's log goes; this process's standard error if None.
    """

    def __init__(self, settings: Settings, *, output: IO[bytes] | None = None) -> None:
        self._settings = settings
        self._output = output
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._restarts = 0

    @property
    def pid(self) -> int | None:
        """The worker's process id while one runs."""
        with self._lock:
            process = self._process
            return process.pid if process is not None and process.poll() is None else None

    @property
    def restarts(self) -> int:
        """How often the worker died and was started again."""
        return self._restarts

    def start(self) -> None:
        """Start the worker and the thread that watches it.

        Raises:
            RuntimeError: it was started before.
            OSError: the process could not be started.
        """
        if self._thread is not None:
            raise RuntimeError("a supervisor starts once")
        self._launch()
        self._thread = threading.Thread(target=self._watch, name="worker-supervisor", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the worker: politely, then by force. A job it was running is taken up again later."""
        self._stopping.set()
        with self._lock:
            process = self._process
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def _launch(self) -> subprocess.Popen[bytes] | None:
        with self._lock:
            # Under the lock, so that none is started after stop looked for one to end.
            if self._stopping.is_set():
                return None
            self._process = subprocess.Popen(  # noqa: S603  # the command is built here
                lifeline.command("celery", *celery_arguments(self._settings)),
                env=self._settings.environment(),
                stdin=subprocess.DEVNULL,
                stdout=self._output or sys.stderr.fileno(),
                stderr=self._output or sys.stderr.fileno(),
                # A terminal's Ctrl-C reaches this process alone, which then stops the worker.
                start_new_session=True,
            )
            return self._process

    def _watch(self) -> None:
        pause = FIRST_PAUSE_SECONDS
        process = self._process
        while process is not None:
            started = time.monotonic()
            status = process.wait()
            if self._stopping.is_set():
                return
            if time.monotonic() - started > HEALTHY_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            _log.warning("the worker ended with status %d; starting it in %.1f s", status, pause)
            if self._stopping.wait(pause):
                return
            pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
            process = self._launch()
            self._restarts += process is not None


def run_worker(settings: Settings) -> NoReturn:
    """Become a Celery worker in the foreground. Does not return.

    A worker makes no keys: one with a sealing key of its own could open no snapshot.

    Raises:
        CustodyError: the keys are missing or unusable.
    """
    load_sealer(settings)
    load_signing_key(settings)
    command = [sys.executable, "-m", "celery", *celery_arguments(settings)]
    os.execve(sys.executable, command, settings.environment())  # noqa: S606  # no shell is wanted
