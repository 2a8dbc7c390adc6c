"""Runs a module as a program that ends with its parent and, if asked, is discreet.

    python -m worker.lifeline [--discreet] PARENT_PID MODULE [ARGUMENT ...]

A worker killed with SIGKILL can't stop what it started, so what it started watches it. Polling the
parent's id works on every POSIX system; Linux's death signal is tied to the parent's *thread*.

With ``--discreet`` no text that a library made up reaches the log, because the text of an error or
of a warning may hold a value computed from private data. Standard output and error go nowhere;
what the program writes to ``sys.stderr`` itself, its own log, still arrives. Uncaught errors and
warnings are reported by their type and the lines they came from, never by their message.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
import time
import traceback
import warnings
from types import TracebackType
from typing import Final, TextIO

POLL_SECONDS: Final = 0.5
MOST_FRAMES: Final = 12


def command(module: str, *arguments: str, discreet: bool = False) -> list[str]:
    """The command line that runs ``module`` as a program tied to this process."""
    flags = ["--discreet"] if discreet else []
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


def be_discreet() -> None:
    """Keep the texts of errors, warnings and foreign code out of the log."""
    report = os.fdopen(os.dup(sys.stderr.fileno()), "w", buffering=1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
        os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
    sys.stderr = report

    def report_error(kind: type[BaseException], trace: TracebackType | None) -> None:
        lines = [
            f"  {os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}\n"
            for frame in traceback.extract_tb(trace, limit=-MOST_FRAMES)
            if not frame.filename.startswith("<frozen") and frame.filename != __file__
        ]
        report.write(f"uncaught {kind.__name__} (its text is withheld)\n{''.join(lines)}")

    def report_warning(
        message: Warning | str,  # noqa: ARG001  # withheld
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,  # noqa: ARG001  # the signature is warnings' own
        line: str | None = None,  # noqa: ARG001
    ) -> None:
        report.write(
            f"{category.__name__} at {os.path.basename(filename)}:{lineno} (its text is withheld)\n"
        )

    sys.excepthook = lambda kind, _error, trace: report_error(kind, trace)
    sys.unraisablehook = lambda raised: report_error(raised.exc_type, raised.exc_traceback)
    threading.excepthook = lambda raised: report_error(raised.exc_type, raised.exc_traceback)
    warnings.showwarning = report_warning


def main() -> None:
    os.umask(0o077)
    arguments = sys.argv[1:]
    if arguments[0] == "--discreet":
        be_discreet()
        arguments = arguments[1:]
    parent, module, *rest = arguments
    end_with_parent(int(parent))
    sys.argv = [module, *rest]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
