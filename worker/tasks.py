"""The one Celery task: start a job's own process and watch it.

Each job runs as ``python -m worker.jobs ID`` in a new process, so that the worker never imports
torch, CUDA is never forked, memory goes back, and a time limit can end a job. The process ends with
the worker. Only its exit status is logged.
"""

from __future__ import annotations

import logging
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence
from typing import Final

from worker import lifeline
from worker.app import JOB_ID, RUN_TASK, make_celery
from worker.settings import get_settings

TIMED_OUT: Final = 124

_log = logging.getLogger(__name__)

app = make_celery(get_settings())


@app.task(name=RUN_TASK)
def run(job_id: str) -> None:
    """Run one attempt of a job. What became of it is in the database, never in a result."""
    if not isinstance(job_id, str) or not JOB_ID.fullmatch(job_id):
        # The text came from the broker and is not repeated.
        _log.error("a message without a job's id was dropped")
        return
    settings = get_settings()
    status = watch(
        lifeline.command("worker.jobs", job_id, discreet=True),
        # Threads that wait by spinning take several times as long where jobs share their cores.
        {"OMP_WAIT_POLICY": "PASSIVE", **settings.environment()},
        settings.job_seconds,
    )
    _log.info("process of %s ended with status %d", job_id, status)


def watch(command: Sequence[str], environment: Mapping[str, str], seconds: float) -> int:
    """Run a command in a process group of its own, and end the whole group when its time is up.

    Returns:
        The exit status; negative for the signal that ended it; :data:`TIMED_OUT` after the limit.
    """
    with subprocess.Popen(  # noqa: S603  # the command is built here, the id was checked
        command, env=dict(environment), stdin=subprocess.DEVNULL, start_new_session=True
    ) as process:
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return TIMED_OUT
        finally:
            # Also after a normal end: what the job itself started must not outlive it.
            _kill_group(process.pid)


def _kill_group(leader: int) -> None:
    try:
        os.killpg(leader, signal.SIGKILL)
    except ProcessLookupError:
        # The whole group is gone already, which is what was wanted.
        return
