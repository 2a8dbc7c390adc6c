"""Sending, the worker process, its supervisor and the jobs' processes, over real brokers."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from celery import Celery

from worker import lifeline, tasks
from worker.app import QUEUE, RUN_TASK, make_celery, send
from worker.custody import CustodyError, ensure_keys
from worker.serve import WorkerSupervisor, run_worker
from worker.settings import Settings

ROOT = Path(__file__).resolve().parents[2]
UNKNOWN = "job_" + "0" * 32
DROPPED = "without a job's id was dropped"


def _wait(condition: Callable[[], bool], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


def _alive(pid: int) -> bool:
    """Whether a process runs. One that ended and was not collected yet does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def _pid(supervisor: WorkerSupervisor) -> int:
    pid = supervisor.pid
    assert pid is not None, "no worker runs"
    return pid


def _children(pid: int) -> list[int]:
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        return [
            int(child) for thread in threads for child in (thread / "children").read_text().split()
        ]
    except (FileNotFoundError, ProcessLookupError):
        return []


@pytest.fixture
def embedded(tmp_path: Path) -> Settings:
    """Settings of a service with the embedded broker and an empty ledger."""
    settings = Settings(home=tmp_path / "home", broker_url="", database_url="")
    ensure_keys(settings)
    return settings


@pytest.fixture(params=["filesystem", "redis"])
def broker(request: pytest.FixtureRequest, tmp_path: Path) -> Settings:
    """The same on each broker."""
    url = request.getfixturevalue("redis_url") if request.param == "redis" else ""
    settings = Settings(home=tmp_path / "home", broker_url=url, database_url="")
    ensure_keys(settings)
    return settings


class _Log:
    """A worker's log in a file."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("wb")
        self._path = path

    def text(self) -> str:
        return self._path.read_text()

    def wait_for(self, text: str, count: int = 1) -> None:
        try:
            _wait(lambda: self.text().count(text) >= count)
        except AssertionError:
            raise AssertionError(f"no {text!r} in the log:\n{self.text()}") from None


@pytest.fixture
def log(tmp_path: Path) -> Iterator[_Log]:
    made = _Log(tmp_path / "worker.log")
    with made.file:
        yield made


# --------------------------------------------------------------------------------------------------
# Sending
# --------------------------------------------------------------------------------------------------


def test_the_application_asks_nothing_of_the_broker(embedded: Settings) -> None:
    conf = make_celery(embedded).conf
    assert conf.task_acks_late is False
    assert conf.task_reject_on_worker_lost is False
    assert conf.worker_prefetch_multiplier == 1
    assert conf.task_ignore_result is True
    assert not conf.result_backend
    assert list(conf.accept_content) == ["json"]
    assert conf.task_serializer == "json"


def test_a_message_holds_a_jobs_id_and_nothing_else_of_it(embedded: Settings) -> None:
    assert send(make_celery(embedded), UNKNOWN)
    (path,) = (embedded.broker_folder / "messages").iterdir()
    message = json.loads(path.read_text())
    assert message["headers"]["task"] == RUN_TASK
    assert message["headers"]["argsrepr"] == f"['{UNKNOWN}']"
    assert message["headers"]["kwargsrepr"] == "{}"


def test_several_applications_share_the_embedded_broker(embedded: Settings) -> None:
    for application in (make_celery(embedded), make_celery(embedded)):
        assert send(application, UNKNOWN)
    assert len(list((embedded.broker_folder / "messages").iterdir())) == 2
    (binding,) = (embedded.broker_folder / "control").iterdir()
    assert binding.name == f"{QUEUE}.exchange"


@pytest.mark.parametrize("job_id", ["", "job_1", "../x", UNKNOWN + "\n", "ent_" + "0" * 32])
def test_only_a_jobs_id_is_sent(embedded: Settings, job_id: str) -> None:
    with pytest.raises(ValueError, match="id"):
        send(make_celery(embedded), job_id)
    assert list((embedded.broker_folder / "messages").iterdir()) == []


@pytest.mark.parametrize("scheme", ["redis", "amqp"])
@pytest.mark.parametrize("kind", ["refuses", "is silent"])
def test_a_dead_broker_does_not_hold_up_the_sender(tmp_path: Path, scheme: str, kind: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "is silent":
            listener.listen()  # connections are made, and never answered
        port = listener.getsockname()[1]
        celery = make_celery(Settings(home=tmp_path, broker_url=f"{scheme}://127.0.0.1:{port}"))
        started = time.monotonic()
        assert send(celery, UNKNOWN) is False
        assert send(celery, UNKNOWN) is False
        assert time.monotonic() - started < 20


def test_a_broken_embedded_broker_does_not_fail_the_sender(embedded: Settings) -> None:
    celery = make_celery(embedded)
    messages = embedded.broker_folder / "messages"
    messages.rmdir()
    messages.write_text("not a folder")
    assert send(celery, UNKNOWN) is False
    messages.unlink()
    messages.mkdir()
    assert send(celery, UNKNOWN) is True


# --------------------------------------------------------------------------------------------------
# The worker
# --------------------------------------------------------------------------------------------------


def test_a_worker_outlives_its_jobs_and_its_own_death(broker: Settings, log: _Log) -> None:
    """A message reaches a job's process; whatever that does, the next message does too; and a
    worker that was killed is started again."""
    celery = make_celery(broker)
    with WorkerSupervisor(broker, output=log.file) as supervisor:
        # A job that the ledger does not know ends its process with an error.
        assert send(celery, UNKNOWN)
        log.wait_for(f"process of {UNKNOWN} ended with status ")
        assert f"{UNKNOWN} ended with status 0" not in log.text()
        first = _pid(supervisor)

        # A message that is no job's reaches no process, and its text no log.
        celery.send_task(RUN_TASK, args=["job_; secret"])
        log.wait_for(DROPPED)
        assert supervisor.pid == first

        os.kill(first, signal.SIGKILL)
        _wait(lambda: supervisor.pid not in (None, first))
        assert supervisor.restarts == 1
        celery.send_task(RUN_TASK, args=["job_; secret"])
        log.wait_for(DROPPED, count=2)
        second = _pid(supervisor)
    assert not _alive(second)
    with pytest.raises(AssertionError):
        _pid(supervisor)
    assert "secret" not in log.text()


def test_a_worker_waits_for_its_broker(tmp_path: Path, log: _Log) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{closed.getsockname()[1]}"
        settings = Settings(home=tmp_path / "home", broker_url=url)
        with WorkerSupervisor(settings, output=log.file) as supervisor:
            log.wait_for("Cannot connect")
            log.wait_for("Trying again")
            assert supervisor.restarts == 0


def test_a_supervisor_starts_once_and_stops_twice(embedded: Settings, log: _Log) -> None:
    supervisor = WorkerSupervisor(embedded, output=log.file)
    supervisor.start()
    with pytest.raises(RuntimeError, match="once"):
        supervisor.start()
    pid = _pid(supervisor)
    supervisor.stop()
    supervisor.stop()
    assert not _alive(pid)
    assert supervisor.restarts == 0


def test_a_worker_that_can_not_start_is_tried_again_more_and_more_slowly(
    embedded: Settings, log: _Log, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.serve.celery_arguments", lambda _: ["--no-such-option"])
    with WorkerSupervisor(embedded, output=log.file) as supervisor:
        _wait(lambda: supervisor.restarts >= 2)
    pauses = [record.args[1] for record in caplog.records if isinstance(record.args, tuple)]
    assert pauses[:2] == [0.5, 1.0]


def test_the_worker_and_its_job_end_with_a_killed_server(embedded: Settings, log: _Log) -> None:
    """A server that is killed leaves no worker behind, though it could not stop it."""
    script = (
        "import sys, time\n"
        "from worker.serve import WorkerSupervisor\n"
        "from worker.settings import get_settings\n"
        "supervisor = WorkerSupervisor(get_settings())\n"
        "supervisor.start(); print(supervisor.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=embedded.environment(),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=log.file,
    ) as server:
        assert server.stdout is not None
        worker = int(server.stdout.readline())
        log.wait_for("ready")
        assert send(make_celery(embedded), UNKNOWN)
        _wait(lambda: bool(_children(worker)))
        jobs = _children(worker)
        server.kill()
        server.wait()
        _wait(lambda: not _alive(worker), 20)
        _wait(lambda: not any(_alive(job) for job in jobs), 20)


def test_a_lone_worker_needs_keys_and_makes_none(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path / "home")
    with pytest.raises(CustodyError, match=r"sealing\.key"):
        run_worker(settings)
    assert not settings.home.exists()


def test_a_lone_worker_runs_in_the_foreground(embedded: Settings, log: _Log) -> None:
    script = (
        "from worker.serve import run_worker; from worker.settings import get_settings\n"
        "run_worker(get_settings())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=embedded.environment(),
        cwd=ROOT,
        stdout=log.file,
        stderr=log.file,
    ) as worker:
        log.wait_for("ready")
        make_celery(embedded).send_task(RUN_TASK, args=["job_; secret"])
        log.wait_for(DROPPED)
        worker.terminate()
        assert worker.wait(20) == 0


# --------------------------------------------------------------------------------------------------
# A job's process
# --------------------------------------------------------------------------------------------------


def test_the_task_is_registered_under_its_name() -> None:
    assert isinstance(tasks.app, Celery)
    assert RUN_TASK in tasks.app.tasks


def test_a_job_over_its_time_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"pathlib.Path({str(tmp_path / 'pids')!r}).write_text(f'{{os.getpid()}} {{child.pid}}')\n"
        "time.sleep(600)"
    )
    started = time.monotonic()
    status = tasks.watch([sys.executable, "-c", script], Settings().environment(), 3)
    assert status == tasks.TIMED_OUT
    assert 3 <= time.monotonic() - started < 20
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(pids) == 2
    _wait(lambda: not any(_alive(pid) for pid in pids), 10)


@pytest.mark.parametrize(
    ("script", "status"),
    [
        ("", 0),
        ("raise SystemExit(3)", 3),
        ("import os; os.abort()", -signal.SIGABRT),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL),
    ],
)
def test_a_jobs_exit_status_is_reported(script: str, status: int) -> None:
    assert tasks.watch([sys.executable, "-c", script], Settings().environment(), 60) == status


def _run_module(folder: Path, source: str, *flags: bool) -> subprocess.CompletedProcess[str]:
    (folder / "some_job.py").write_text(source)
    return subprocess.run(
        lifeline.command("some_job", "argument", discreet=bool(flags)),
        env=Settings().environment() | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}"},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_a_module_runs_as_a_program(tmp_path: Path) -> None:
    done = _run_module(
        tmp_path, "import sys; print(__name__, sys.argv[1:]); sys.stderr.write('log'); sys.exit(4)"
    )
    assert (done.returncode, done.stdout, done.stderr) == (4, "__main__ ['argument']\n", "log")


@pytest.mark.parametrize(
    "statement",
    [
        "raise ValueError('private 31337')",
        "warnings.warn('private 31337')",
        "t = threading.Thread(target=lambda: 1 / len('') or 'private 31337'); t.start(); t.join()",
        "print('private 31337')",
        "os.write(1, b'private 31337')",
        "os.write(2, b'private 31337')",
        "os.system('echo private 31337; echo private 31337 >&2')",
        "raise ValueError('private 31337') from KeyError('private 31337')",
        "warnings.warn('private 31337', type('Odd', (Warning,), {}))",
        "Failing()",
    ],
)
def test_a_discreet_program_withholds_every_text(tmp_path: Path, statement: str) -> None:
    source = (
        "import os, sys, threading, warnings\n"
        "class Failing:\n"
        "    def __del__(self): raise ValueError('private 31337')\n"
        f"sys.stderr.write('its own log\\n')\n{statement}\n"
    )
    done = _run_module(tmp_path, source, True)
    assert "31337" not in done.stdout + done.stderr
    assert "its own log" in done.stderr
    assert done.returncode == (1 if statement.startswith("raise") else 0)
    if not statement.startswith(("print", "os.")):
        assert "some_job.py:" in done.stderr
        assert "withheld" in done.stderr


def test_a_program_ends_with_its_parent(tmp_path: Path) -> None:
    """The job's process is found out by its own watch, whatever signal ended the parent."""
    (tmp_path / "some_job.py").write_text("import time; time.sleep(600)")
    script = (
        "import subprocess, time; from worker import lifeline\n"
        "p = subprocess.Popen(lifeline.command('some_job'), start_new_session=True)\n"
        "print(p.pid, flush=True); time.sleep(600)"
    )
    with subprocess.Popen(
        [sys.executable, "-c", script],
        env=Settings().environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        stdout=subprocess.PIPE,
    ) as parent:
        assert isinstance(parent.stdout, io.BufferedReader)
        job = int(parent.stdout.readline())
        time.sleep(0.5)
        assert _alive(job)
        parent.kill()
        parent.wait()
        _wait(lambda: not _alive(job), 20)


def test_a_program_whose_parent_is_gone_already_ends(tmp_path: Path) -> None:
    (tmp_path / "some_job.py").write_text("import time; time.sleep(600)")
    command = lifeline.command("some_job")
    command[command.index(str(os.getpid()))] = "1"
    done = subprocess.run(
        command,
        env=Settings().environment() | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
        start_new_session=True,
        timeout=30,
    )
    assert done.returncode == -signal.SIGKILL
