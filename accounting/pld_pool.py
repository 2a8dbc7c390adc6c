"""Asks questions of :mod:`accounting.pld_process` under a time and a memory limit.

Starting that process takes over a second (dp_accounting imports most of SciPy), so one that has
answered for dp_accounting's distributions is kept for the next such question; for any other method
one is started and ended, so that no library counts against another's memory. A process that runs
out of its time is killed and replaced. No process outlives its owner: it ends when its input
closes, and kills itself when a question outlives its time.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, Final, cast

_ROOT: Final = Path(__file__).resolve().parent.parent
_KEPT_METHOD: Final = "dp_accounting_pld"


class OutOfLimits(Exception):
    """The process gave no answer; the text says why: "time", "memory", or what was raised."""


class _Process:
    def __init__(self) -> None:
        self._popen = subprocess.Popen(
            [sys.executable, "-m", "accounting.pld_process"],
            cwd=_ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,  # errors come back in the answer
            bufsize=0,
        )
        stdin, stdout = self._popen.stdin, self._popen.stdout
        if stdin is None or stdout is None:
            raise OutOfLimits("the process has no pipes")
        self._stdin, self._stdout = stdin, stdout
        os.set_blocking(stdin.fileno(), False)

    @property
    def pid(self) -> int:
        return self._popen.pid

    def ask(self, question: dict[str, Any], seconds: float) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        left = json.dumps(question | {"seconds": seconds}).encode() + b"\n"
        while left:
            self._wait_for((), (self._stdin,), deadline)
            try:
                left = left[os.write(self._stdin.fileno(), left) :]
            except BrokenPipeError:
                raise OutOfLimits("the process ended") from None
        answer = b""
        while not answer.endswith(b"\n"):
            self._wait_for((self._stdout,), (), deadline)
            piece = os.read(self._stdout.fileno(), 1 << 16)
            if not piece:
                raise OutOfLimits("the process ended")
            answer += piece
        return cast(dict[str, Any], json.loads(answer))

    @staticmethod
    def _wait_for(read: tuple[Any, ...], write: tuple[Any, ...], deadline: float) -> None:
        ready = select.select(read, write, (), max(0.0, deadline - time.monotonic()))
        if not ready[0] and not ready[1]:
            raise OutOfLimits("time")

    def end(self) -> None:
        self._popen.kill()
        self._popen.wait()
        self._stdin.close()
        self._stdout.close()

    def abandon(self) -> None:
        """In a forked child: closes the copies of the pipes and leaves the process to its owner."""
        self._stdin.close()
        self._stdout.close()
        self._popen.returncode = 0  # it isn't ours to wait for


class Pool:
    """At most ``size`` processes at work, and one kept between questions. Thread-safe."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._places = threading.BoundedSemaphore(self._size)
        self._idle: list[_Process] = []

    def ask(self, question: dict[str, Any], *, seconds: float, megabytes: int) -> dict[str, Any]:
        """The process's answer to a question in the form that :mod:`accounting.pld_process` reads.

        Raises:
            OutOfLimits: no answer within the limits, or the process raised.
        """
        begin = time.monotonic()
        if not self._places.acquire(timeout=seconds):
            raise OutOfLimits("time")
        reusable = question.get("method", _KEPT_METHOD) == _KEPT_METHOD
        try:
            with self._lock:
                process = self._idle.pop() if reusable and self._idle else None
            if process is None:
                process = _Process()
            try:
                left = max(0.0, seconds - (time.monotonic() - begin))
                answer = process.ask(question | {"megabytes": megabytes}, left)
            except BaseException:
                process.end()
                raise
            with self._lock:
                keep = reusable and not self._idle
                if keep:
                    self._idle.append(process)
            if not keep:
                process.end()
        finally:
            self._places.release()
        if "error" in answer:
            raise OutOfLimits(str(answer["error"]))
        return answer

    def idle_pids(self) -> tuple[int, ...]:
        """The process ids that wait for a question."""
        with self._lock:
            return tuple(p.pid for p in self._idle)

    def close(self) -> None:
        """Ends the processes that wait for a question."""
        with self._lock:
            idle, self._idle = self._idle, []
        for process in idle:
            process.end()

    def after_fork_in_child(self) -> None:
        """A fork shares the pipes; the child must neither use them nor hold them open."""
        idle = self._idle
        self._reset()
        for process in idle:
            process.abandon()


POOL: Final = Pool(max(1, min(4, os.cpu_count() or 1)))
atexit.register(POOL.close)
os.register_at_fork(after_in_child=POOL.after_fork_in_child)
