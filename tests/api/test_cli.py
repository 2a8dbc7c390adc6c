"""The command line."""

from __future__ import annotations

import io
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from accounting import bounds
from accounting.mechanisms import mechanism_from_json
from accounting.tables import Database
from api.app import bring_tables
from api.cli import NOT_OK, PROBLEM, first_admin_key, main
from tests.api.world import World, release_of
from worker.settings import Settings, get_settings

MECHANISM = {"kind": "gaussian", "noise_multiplier": 2.0, "count": 3}


@pytest.fixture
def home(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The command line's own settings, as the environment gives them."""
    use(settings, monkeypatch)
    return settings.home


def use(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    get_settings.cache_clear()
    monkeypatch.setattr("api.cli.get_settings", lambda: settings)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    status = main(arguments)
    return status, json.loads(capsys.readouterr().out)


def test_init_makes_the_first_key_once(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, first = run(capsys, "init")
    assert status == 0
    assert first["admin_key"].startswith("epk_")
    assert (home / "keys" / "sealing.key").stat().st_mode & 0o077 == 0
    kept = (home / "keys" / "sealing.key").read_bytes()
    status, second = run(capsys, "init")
    assert (status, second["admin_key"]) == (0, None)
    assert "nothing to do" in second["note"]
    assert (home / "keys" / "sealing.key").read_bytes() == kept


def test_migrate_brings_the_tables(
    settings: Settings,
    empty_database_url: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(settings.model_copy(update={"database_url": empty_database_url}), monkeypatch)
    assert run(capsys, "migrate") == (0, {"revision_ok": True})
    assert run(capsys, "migrate") == (0, {"revision_ok": True})


@pytest.mark.usefixtures("home")
def test_questions_print_what_the_service_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mechanism.json"
    file.write_text(json.dumps(MECHANISM))
    mechanism = mechanism_from_json(MECHANISM)
    status, body = run(capsys, "epsilon", "--delta", "1e-5", str(file))
    assert (status, body) == (0, bounds.epsilon(mechanism, 1e-5).to_json())
    status, body = run(capsys, "delta", "--epsilon", "1", str(file))
    assert (status, body) == (0, bounds.delta(mechanism, 1.0).to_json())
    stdin = io.TextIOWrapper(io.BytesIO(json.dumps(MECHANISM).encode()))
    monkeypatch.setattr("sys.stdin", stdin)
    status, body = run(capsys, "epsilon", "--delta", "1e-5", "-")
    assert (status, body) == (0, bounds.epsilon(mechanism, 1e-5).to_json())


COMMANDS: list[tuple[str, list[str], dict[str, Any]]] = [
    ("epsilon", ["--delta", "1e-5", "--tolerance", "0.01"], {"delta": 1e-5, "tolerance": 0.01}),
    ("delta", ["--epsilon", "0.5"], {"epsilon": 0.5}),
    ("profile", [], {}),
    ("profile", ["--epsilon", "0", "--epsilon", "2"], {"epsilons": [0.0, 2.0]}),
    ("tradeoff", [], {}),
    ("tradeoff", ["--alpha", "0.1"], {"alphas": [0.1]}),
    (
        "calibrate",
        ["--free", "count", "--epsilon", "3", "--delta", "1e-5"],
        {"free": "count", "target": {"epsilon": 3.0, "delta": 1e-5}},
    ),
    (
        "calibrate",
        ["--free", "delta", "--epsilon", "3"],
        {"free": "delta", "target": {"epsilon": 3.0}},
    ),
    (
        "calibrate",
        ["--free", "noise_multiplier", "--epsilon", "3", "--delta", "1e-5", "--method", "rdp"],
        {"free": "noise_multiplier", "target": {"epsilon": 3.0, "delta": 1e-5}, "method": "rdp"},
    ),
]


@pytest.mark.parametrize(("command", "options", "body"), COMMANDS, ids=str)
def test_a_command_prints_what_the_call_answers(
    calm: World,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    command: str,
    options: list[str],
    body: dict[str, Any],
) -> None:
    use(calm.settings, monkeypatch)
    file = tmp_path / "mechanism.json"
    file.write_text(json.dumps(MECHANISM))
    answer = calm.stranger.post(f"/v1/accounting/{command}", json={"mechanism": MECHANISM, **body})
    assert answer.status_code == 200, answer.text
    assert run(capsys, command, *options, str(file)) == (0, answer.json())


def test_a_comparison_prints_what_the_call_answers(
    calm: World,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(calm.settings, monkeypatch)
    file = tmp_path / "mechanism.json"
    file.write_text(json.dumps(MECHANISM))
    answer = calm.stranger.post(
        "/v1/accounting/compare", json={"mechanism": MECHANISM, "delta": 1e-5}
    ).json()
    status, printed = run(capsys, "compare", "--delta", "1e-5", str(file))
    assert status == 0
    for row in [*answer["methods"], *printed["methods"]]:
        assert row.pop("milliseconds") >= 0.0
    assert printed == answer


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("{", "malformed_json"),
        ('{"kind": "gaussian", "noise_multiplier": 9, "noise_multiplier": 1}', "malformed_json"),
        ('{"kind": "gaussian", "noise_multiplier": NaN}', "invalid_request"),
        ('{"kind": "gaussian", "noise_multiplier": -1}', "invalid_mechanism"),
        ("[]", "invalid_mechanism"),
        (None, "invalid_request"),
    ],
)
def test_a_wrong_file_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | None, code: str
) -> None:
    file = tmp_path / "mechanism.json"
    if text is not None:
        file.write_text(text)
    for command in (
        ["epsilon", "--delta", "1e-5"],
        ["delta", "--epsilon", "1"],
        ["profile"],
        ["tradeoff"],
        ["compare", "--delta", "1e-5"],
        ["calibrate", "--free", "count", "--epsilon", "1", "--delta", "1e-5"],
    ):
        status, body = run(capsys, *command, str(file))
        assert (status, body["code"]) == (PROBLEM, code), command


@pytest.mark.usefixtures("home")
@pytest.mark.parametrize(
    "command",
    [
        "epsilon --delta nan",
        "epsilon --delta 0",
        "epsilon --delta 1e-5 --tolerance nan",
        "epsilon --delta 1e-5 --tolerance -1",
        "delta --epsilon inf",
        "delta --epsilon=-1",
        "profile --epsilon nan",
        "tradeoff --alpha 2",
        "tradeoff --alpha nan",
        "compare --delta nan",
        "compare --delta 1",
        "calibrate --free count --epsilon nan --delta 1e-5",
        "calibrate --free count --epsilon 1 --delta inf",
        "calibrate --free count --epsilon 1",
        "calibrate --free count --epsilon 1e-320 --delta 1e-5",
        "calibrate --free sigma --epsilon 1 --delta 1e-5",
        "calibrate --free delta --epsilon 1 --delta 1e-5",
    ],
)
def test_a_wrong_option_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    file = tmp_path / "mechanism.json"
    file.write_text(json.dumps(MECHANISM))
    status, body = run(capsys, *command.split(), str(file))
    assert (status, body["code"]) == (PROBLEM, "invalid_request")


def test_certificates_and_books_are_checked_without_the_service(
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    use(world.settings, monkeypatch)
    dataset = world.dataset()
    release = release_of(world, world.order(dataset, "k").json()["id"])
    certificate = world.requester.get(f"/v1/releases/{release}/certificate").json()
    file = tmp_path / "certificate.json"
    file.write_text(json.dumps(certificate))
    keys = tmp_path / "keys.json"
    keys.write_text(world.nobody.get("/.well-known/epsilond-keys.json").text)
    url = f"{world.address}/.well-known/epsilond-keys.json"
    for options in ((), ("--keys", str(keys)), ("--keys", url), ("--no-recompute",)):
        status, body = run(capsys, "verify", *options, str(file))
        assert (status, body["ok"], body["signature_ok"]) == (0, True, True), options
        assert "rigorous" not in body
    status, body = run(capsys, "verify", "--no-recompute", "--rigorous", str(file))
    assert (status, body["bound_ok"], body["rigorous"]["result"]) == (0, None, "confirmed")
    file.write_text(json.dumps({**certificate, "dataset": "ds_" + "0" * 32}))
    status, body = run(capsys, "verify", "--no-recompute", str(file))
    assert (status, body["ok"], body["signature_ok"]) == (NOT_OK, False, False)

    status, body = run(capsys, "verify-ledger", dataset)
    assert status == 0
    assert body == world.owner.get(f"/v1/datasets/{dataset}/ledger/verify").json()
    status, body = run(capsys, "verify-ledger", "ds_" + "0" * 32)
    assert (status, body["code"]) == (PROBLEM, "not_found")


def test_a_rotated_key_signs_and_the_old_certificate_still_verifies(
    capsys: pytest.CaptureFixture[str], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(world.settings, monkeypatch)
    dataset = world.dataset()
    first = release_of(world, world.order(dataset, "1").json()["id"])
    status, body = run(capsys, "rotate-signing-key")
    assert status == 0
    second = release_of(world, world.order(dataset, "2").json()["id"])
    signers = []
    for release in (first, second):
        certificate = world.owner.get(f"/v1/releases/{release}/certificate").json()
        signers.append(certificate["service"]["key_id"])
        check = world.owner.post("/v1/certificates/verify", json={"certificate": certificate})
        assert check.json()["ok"] is True
    assert signers[0] != signers[1] == body["key_id"]
    published = world.nobody.get("/.well-known/epsilond-keys.json").json()["keys"]
    assert {key["key_id"] for key in published} >= set(signers)


def test_an_exported_ledger_is_verified_without_the_service(
    capsys: pytest.CaptureFixture[str],
    world: World,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    use(world.settings, monkeypatch)
    dataset = world.dataset()
    job = world.order(dataset, "k").json()["id"]
    release = release_of(world, job)
    export, certificate, keys = (tmp_path / name for name in ("books.jsonl", "c.json", "k.json"))
    export.write_text(world.owner.get(f"/v1/datasets/{dataset}/ledger/export").text)
    certificate.write_text(world.owner.get(f"/v1/releases/{release}/certificate").text)
    keys.write_text(world.nobody.get("/.well-known/epsilond-keys.json").text)
    head = json.loads(export.read_text().splitlines()[-1])["hash"]
    command = ("verify-ledger", "--export", str(export), "--keys", str(keys), "--head", head)
    status, body = run(capsys, *command, "--certificate", str(certificate), "--rigorous")
    assert (status, body["ok"], body["certificates"]) == (0, True, 1), body
    assert (body["dataset"], body["rows"], body["certificate_problems"]) == (dataset, 4, [])
    lines = export.read_text().splitlines(keepends=True)
    export.write_text("".join(lines[:2] + lines[3:]))
    status, body = run(capsys, *command)
    assert (status, body["ok"], body["first_bad"]) == (NOT_OK, False, 3)
    export.write_text("".join(lines))
    certificate.write_text(json.dumps({**json.loads(certificate.read_text()), "dataset": "ds_x"}))
    status, body = run(capsys, *command, "--certificate", str(certificate))
    assert (status, body["ok"]) == (NOT_OK, False)
    assert len(body["certificate_problems"]) == 1
    for wrong in (("--export", "no such file"), (dataset, "--head", head)):
        status, body = run(capsys, "verify-ledger", *wrong)
        assert (status, body["code"]) == (PROBLEM, "invalid_request")


@pytest.mark.parametrize("options", [(), ("--without-worker",)], ids=["worker", "alone"])
def test_serve_runs_until_it_is_told_to_stop(settings: Settings, options: tuple[str, ...]) -> None:
    """As a process of its own, the way it is meant to be run."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "api.cli", "serve", "--port", str(port), *options]
    with subprocess.Popen(
        command, env={**os.environ, **settings.environment()}, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            deadline = time.monotonic() + 60
            while True:
                assert process.poll() is None
                assert time.monotonic() < deadline
                try:
                    answer = httpx.get(f"http://127.0.0.1:{port}/readyz")
                except httpx.TransportError:
                    time.sleep(0.05)
                else:
                    break
            assert answer.status_code == 200, answer.text
            process.send_signal(signal.SIGTERM)
            _, log = process.communicate(timeout=30)
        finally:
            process.kill()
    # Not ended by the signal: everything was stopped in order.
    assert process.returncode == 0
    assert "Traceback" not in log
    assert '"route": "/readyz"' in log


def test_a_service_that_nobody_can_call_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    database = Database(f"sqlite:///{tmp_path}/ledger.db")
    try:
        bring_tables(database)
        assert "epsilond init" in caplog.text
        caplog.clear()
        assert first_admin_key(database) is not None
        bring_tables(database)
        assert caplog.text == ""
    finally:
        database.dispose()


QUESTION_PATH = """
import io, json, sys
from api.cli import main
sys.stdin = io.TextIOWrapper(io.BytesIO(b'{"kind": "gaussian", "noise_multiplier": 2.0}'))
assert main(["epsilon", "--delta", "1e-5", "-"]) == 0
sys.stdin = io.TextIOWrapper(io.BytesIO(b'{"kind": "nothing"}'))
assert main(["epsilon", "--delta", "1e-5", "-"]) == 2
heavy = ["fastapi", "starlette", "celery", "kombu", "sqlalchemy", "alembic", "uvicorn", "httpx",
         "cryptography", "torch", "dp_accounting", "flint"]
print(json.dumps([name for name in heavy if name in sys.modules]), file=sys.stderr)
"""


def test_a_question_loads_the_accountant_and_no_service(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", QUESTION_PATH],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(__file__).parents[2],
        env=os.environ | {"EPSILOND_HOME": str(tmp_path)},
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stderr.splitlines()[-1]) == []
