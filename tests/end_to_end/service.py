"""The whole service as processes, for tests that kill them."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parent.parent.parent
READY_SECONDS = 120.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(what: str, happened: Callable[[], bool], seconds: float) -> None:
    """Polls until it happened; a test that waits in vain says what for."""
    end = time.monotonic() + seconds
    while not happened():
        if time.monotonic() > end:
            raise AssertionError(f"waited {seconds:g} s in vain for {what}")
        time.sleep(0.25)


def processes_with(*words: str) -> list[int]:
    """The ids of the processes whose command line holds all the words."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            command = (
                (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            )
            state = (folder / "stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if state != "Z" and all(word in command for word in words):
            found.append(int(folder.name))
    return found


@dataclass
class Service:
    """An installation in a folder of its own; each process has a name and a log file."""

    home: Path
    database_url: str
    broker_url: str
    port: int = field(default_factory=free_port)
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    admin_key: str = ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def environment(self) -> dict[str, str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith("EPSILOND_")}
        return clean | {
            "EPSILOND_HOME": str(self.home),
            "EPSILOND_DATABASE_URL": self.database_url,
            "EPSILOND_BROKER_URL": self.broker_url,
            "EPSILOND_PORT": str(self.port),
            "EPSILOND_LEASE_SECONDS": "6",
            "EPSILOND_HEARTBEAT_SECONDS": "1",
            "EPSILOND_SWEEP_SECONDS": "0.5",
            "EPSILOND_RESEND_SECONDS": "2",
            **self.settings,
        }

    def command(self, *arguments: str) -> dict[str, Any]:
        """Runs ``epsilond`` to its end and reads the JSON that it prints."""
        done = subprocess.run(
            [sys.executable, "-m", "api.cli", *arguments],
            cwd=ROOT,
            env=self.environment(),
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def start(self, name: str, *arguments: str) -> None:
        """Starts ``epsilond`` with these arguments, in a process group of its own."""
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home.parent / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "api.cli", *arguments],
                cwd=ROOT,
                env=self.environment(),
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        def ready() -> bool:
            for name, process in self.processes.items():
                assert process.poll() is None, f"{name} ended\n{self.log(name)}"
            try:
                return httpx.get(f"{self.url}/readyz", timeout=5).status_code == 200
            except httpx.TransportError:
                return False

        wait_until("the service to be ready", ready, READY_SECONDS)

    def log(self, name: str) -> str:
        return (self.home.parent / f"{name}.log").read_text(errors="replace")

    def stop(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            try:
                process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def init(self) -> None:
        """``epsilond init``: keys, tables, and the first admin key, which is printed once."""
        self.admin_key = str(self.command("init")["admin_key"])

    def admin(self) -> httpx.Client:
        return self.client(self.admin_key)

    def client(self, key: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=120
        )


@contextmanager
def installation(home: Path, *, database_url: str, broker_url: str) -> Iterator[Service]:
    service = Service(home, database_url, broker_url)
    service.init()
    try:
        yield service
    finally:
        service.stop()
