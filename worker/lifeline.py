"""Runs a module as a program that ends with its parent, and optionally says nothing.

    python -m worker.lifeline [--silent] PARENT_PID MODULE [ARGUMENT ...]

A worker killed with SIGKILL can't stop what it started, so what it started watches it. Polling the
parent's id works on every POSIX system; Linux's death signal is tied to the parent's *thread*.

With ``--silent`` the program's standard output and error go nowhere, because the text of an error
or a warning may hold a value computed from private data. An uncaught error is still reported to
the original standard error: its type and the lines it passed through, never its message.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
import traceback
from types import TracebackType
from typing import Final

POLL_SECONDS: Final = 0.5


def command(module: str, *arguments: str, silent: bool = False) -> list[str]:
    """The command line that runs ``module`` as a program tied to this process."""
    flags = ["--silent"] if silent else []
    # -u: what a killed process printed is in the log.
    return [
        *(sys.executable, "-u", "-m", "worker.lifeline"),
        *(*flags, str(os.getpid()), module, *arguments),
    ]


def end_with_parent(parent: int) -> None:
    """Watch from a thread until ``parent`` is no longer this process's parent, then end at once.

    If this process leads its own group, the whole group ends.
    """

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_SECONDS)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def be_silent() -> None:
    """Send standard output and error nowhere, and report uncaught errors without their text."""
    report = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.dup2(nowhere, sys.stderr.fileno())
    os.close(nowhere)

    def report_error(
        kind: type[BaseException], _value: BaseException, trace: TracebackType | None
    ) -> None:
        lines = [
            f"  {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}\n"
            for frame in traceback.extract_tb(trace, limit=-12)
        ]
        report.write(f"uncaught {kind.__name__} (its text is withheld)\n{''.join(lines)}")

    sys.excepthook = report_error


def main() -> None:
    arguments = sys.argv[1:]
    if arguments[0] == "--silent":
        be_silent()
        arguments = arguments[1:]
    parent, module, *rest = arguments
    end_with_parent(int(parent))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
