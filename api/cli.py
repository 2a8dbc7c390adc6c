"""The command line: ``epsilond COMMAND``. Each command prints JSON; each error is a problem's JSON.

epsilond init                      keys, tables and the first admin key, which is shown once
epsilond migrate                   tables to this version's revision
epsilond serve                     the API, with a worker of its own on the embedded default
epsilond worker                    a worker alone
epsilond epsilon --delta D FILE    what POST /v1/accounting/epsilon answers; - reads stdin
epsilond delta --epsilon E FILE    likewise, as the four that follow
epsilond profile FILE              delta at each --epsilon, or the whole curve
epsilond tradeoff FILE             type II error at each --alpha, or the whole curve
epsilond compare --delta D FILE    epsilon by every method
epsilond calibrate --free PATH --epsilon E --delta D FILE
                                   the parameter that meets a target
epsilond allocate --epsilon E --delta D FILE
                                   noise for the stages [{"mechanism", "weight"}, ...] of FILE
epsilond verify FILE               checks a certificate, without a service if --keys is given
epsilond verify-ledger DATASET     checks a dataset's chain in the local database
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from accounting import bounds, calibrate
from accounting.calibrate import METHODS
from accounting.errors import EpsilondError, InvalidRequest, NotFound
from accounting.mechanisms import Mechanism, mechanism_from_json
from api import questions
from api.kinds import BY_CODE, problem_body
from api.strict import MAX_JSON_BYTES, strict_json
from worker.settings import Settings, get_settings

# The web, the database and the worker are imported by the commands that need them: a question is
# answered sooner than they would be loaded.
if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    from accounting import chain
    from accounting.tables import Database

OPERATOR: Final = "operator"
# A certificate that does not hold, or a chain that is broken.
NOT_OK: Final = 1
PROBLEM: Final = 2
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, 1 for a failed check, 2 for a problem."""
    parsed = _parser().parse_args(arguments)
    # Whatever is made from here on, the database included, is its owner's alone.
    os.umask(0o077)
    settings = get_settings()
    try:
        status: int = parsed.run(parsed, settings)
    except EpsilondError as error:
        kind = BY_CODE.get(error.code)
        status = kind.status if kind is not None else error.status
        _print(problem_body(error.code, status=status, detail=error.detail, extra=error.extra))
        return PROBLEM
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="epsilond", description=__doc__.split("\n", 1)[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    command = commands.add_parser("init", help="keys, tables and the first admin key")
    command.set_defaults(run=_init)

    command = commands.add_parser("migrate", help="tables to this version's revision")
    command.set_defaults(run=_migrate)

    command = commands.add_parser("rotate-signing-key", help="a new key for certificates to come")
    command.set_defaults(run=_rotate)

    command = commands.add_parser("serve", help="the API, and a worker on the embedded default")
    command.add_argument("--host", help="address to listen on")
    command.add_argument("--port", type=int, help="port to listen on")
    workers = command.add_mutually_exclusive_group()
    workers.add_argument("--with-worker", action="store_true", help="with a worker in any case")
    workers.add_argument("--without-worker", action="store_true", help="the API alone")
    command.set_defaults(run=_serve)

    command = commands.add_parser("worker", help="a worker alone")
    command.set_defaults(run=_worker)

    command = commands.add_parser("epsilon", help="epsilon of a mechanism at a delta")
    command.add_argument("--delta", type=float, required=True)
    command.add_argument("--tolerance", type=float, help="wanted width of the bracket")
    _takes_mechanism(command, _epsilon)

    command = commands.add_parser("delta", help="delta of a mechanism at an epsilon")
    command.add_argument("--epsilon", type=float, required=True)
    _takes_mechanism(command, _delta)

    command = commands.add_parser("profile", help="the curve of delta over epsilon")
    command.add_argument("--epsilon", type=float, action="append", help="a point; may be repeated")
    _takes_mechanism(command, _profile)

    command = commands.add_parser("tradeoff", help="type II error over type I error")
    command.add_argument("--alpha", type=float, action="append", help="a point; may be repeated")
    _takes_mechanism(command, _tradeoff)

    command = commands.add_parser("compare", help="epsilon of a mechanism by every method")
    command.add_argument("--delta", type=float, required=True)
    _takes_mechanism(command, _compare)

    command = commands.add_parser("calibrate", help="the parameter that meets a target")
    command.add_argument("--free", required=True, help="its path in the mechanism's JSON, or delta")
    command.add_argument("--epsilon", type=float, required=True)
    command.add_argument("--delta", type=float, help="needed unless delta is free")
    command.add_argument("--method", choices=METHODS, default="certified")
    _takes_mechanism(command, _calibrate)

    command = commands.add_parser("allocate", help="noise for stages that share a target by weight")
    command.add_argument("--epsilon", type=float, required=True)
    command.add_argument("--delta", type=float, required=True)
    command.add_argument("--method", choices=METHODS, default="certified")
    command.add_argument("file", metavar="FILE", help="a list of stages; - reads standard input")
    command.set_defaults(run=_allocate)

    command = commands.add_parser("verify", help="checks a certificate")
    command.add_argument("--keys", help="file or address of the signing keys; else the local ones")
    command.add_argument(
        "--no-recompute", action="store_true", help="check the signature, not the bound"
    )
    command.add_argument(
        "--rigorous", action="store_true", help="prove the upper end again in ball arithmetic"
    )
    command.add_argument("file", metavar="FILE", help="a certificate; - reads standard input")
    command.set_defaults(run=_verify)

    command = commands.add_parser("verify-ledger", help="checks a dataset's chain")
    books = command.add_mutually_exclusive_group(required=True)
    books.add_argument("dataset", metavar="DATASET", nargs="?", help="the dataset's id")
    books.add_argument("--export", metavar="FILE", help="an exported ledger; needs no database")
    command.add_argument(
        "--certificate",
        metavar="FILE",
        action="append",
        default=[],
        help="a certificate that must stand in the export; may be repeated",
    )
    command.add_argument("--head", help="a hash noted earlier, which the export must hold")
    command.add_argument("--keys", help="file or address of the signing keys; else the local ones")
    command.add_argument(
        "--rigorous", action="store_true", help="prove each distinct charge in ball arithmetic too"
    )
    command.set_defaults(run=_verify_ledger)
    return parser


def _takes_mechanism(
    command: argparse.ArgumentParser, run: Callable[[argparse.Namespace, Settings], int]
) -> None:
    command.add_argument("file", metavar="FILE", help="a mechanism's JSON; - reads standard input")
    command.set_defaults(run=run)


def _print(value: object) -> None:
    print(json.dumps(value, indent=2, allow_nan=False))


def _log_to_stderr(settings: Settings) -> None:
    logging.basicConfig(
        level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s %(message)s"
    )


# --------------------------------------------------------------------------------------------------
# Running the service
# --------------------------------------------------------------------------------------------------


def _init(_: argparse.Namespace, settings: Settings) -> int:
    from accounting.tables import Database
    from worker.custody import ensure_keys

    ensure_keys(settings)
    database = Database(settings.effective_database_url)
    try:
        database.upgrade()
        key = first_admin_key(database)
    finally:
        database.dispose()
    _print(
        {
            "home": str(settings.home),
            "admin_key": key,
            "note": "this key is shown once: keep it"
            if key is not None
            else "nothing to do: keys, tables and an admin key were there already",
        }
    )
    return 0


def _rotate(_: argparse.Namespace, settings: Settings) -> int:
    from worker.custody import rotate_signing_key

    _print({"key_id": rotate_signing_key(settings)})
    return 0


def first_admin_key(database: Database) -> str | None:
    """Makes the operator's organisation and admin key; None if an admin key was made before."""
    from sqlalchemy.exc import IntegrityError

    from accounting.tables import KeyRow, OrganisationRow
    from api.auth import admin_key_exists, key_sha256, new_key
    from api.deps import new_id, now

    key = new_key()
    made = now()
    try:
        with database.write() as session:
            if admin_key_exists(session):
                return None
            operator = OrganisationRow(id=new_id("org"), name=OPERATOR, created_at=made)
            session.add(operator)
            session.flush()
            session.add(
                KeyRow(
                    id=new_id("key"),
                    organisation_id=operator.id,
                    sha256=key_sha256(key),
                    scopes=["admin"],
                    created_at=made,
                    revoked_at=None,
                )
            )
    except IntegrityError:
        return None  # another process was first
    return key


def _migrate(_: argparse.Namespace, settings: Settings) -> int:
    from accounting.tables import Database

    database = Database(settings.effective_database_url)
    try:
        database.upgrade()
        _print({"revision_ok": database.revision_ok()})
    finally:
        database.dispose()
    return 0


def _serve(arguments: argparse.Namespace, settings: Settings) -> int:
    import uvicorn

    from api.app import create_app
    from worker.custody import ensure_keys
    from worker.serve import WorkerSupervisor

    _log_to_stderr(settings)
    changed = {
        name: value for name in ("host", "port") if (value := getattr(arguments, name)) is not None
    }
    if changed:
        settings = Settings.model_validate({**dict(settings), **changed})
    embedded = not settings.broker_url
    with ExitStack() as stack:
        if arguments.with_worker or (embedded and not arguments.without_worker):
            # The worker looks for both from its first moment on.
            ensure_keys(settings)
            stack.enter_context(WorkerSupervisor(settings))
        # After its own shutdown uvicorn raises the signal again, for whoever handled it before:
        # by default that would end the process before the worker is stopped.
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        uvicorn.run(
            create_app(settings),
            host=settings.host,
            port=settings.port,
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=30,
        )
    return 0


def _worker(_: argparse.Namespace, settings: Settings) -> int:
    from worker.serve import run_worker

    _log_to_stderr(settings)
    run_worker(settings)


# --------------------------------------------------------------------------------------------------
# Questions and checks
# --------------------------------------------------------------------------------------------------


def _read_json(name: str) -> Any:
    """The JSON in a file, or on standard input for ``-``."""
    try:
        if name == "-":
            raw = sys.stdin.buffer.read(MAX_JSON_BYTES + 1)
        else:
            with Path(name).open("rb") as file:
                raw = file.read(MAX_JSON_BYTES + 1)
    except OSError as error:
        raise InvalidRequest("FILE", f"can't be read: {error.strerror}") from None
    if len(raw) > MAX_JSON_BYTES:
        raise InvalidRequest("FILE", f"is larger than {MAX_JSON_BYTES} bytes")
    return strict_json(raw)


def _limits(settings: Settings) -> bounds.Limits:
    return bounds.Limits(
        seconds=settings.accountant_seconds, megabytes=settings.accountant_megabytes
    )


def _mechanism(arguments: argparse.Namespace) -> Mechanism:
    return mechanism_from_json(_read_json(arguments.file))


def _epsilon(arguments: argparse.Namespace, settings: Settings) -> int:
    mechanism, limits = _mechanism(arguments), _limits(settings)
    _print(questions.ask_epsilon(mechanism, arguments.delta, arguments.tolerance, limits))
    return 0


def _delta(arguments: argparse.Namespace, settings: Settings) -> int:
    _print(questions.ask_delta(_mechanism(arguments), arguments.epsilon, _limits(settings)))
    return 0


def _profile(arguments: argparse.Namespace, settings: Settings) -> int:
    _print(questions.ask_profile(_mechanism(arguments), arguments.epsilon, _limits(settings)))
    return 0


def _tradeoff(arguments: argparse.Namespace, settings: Settings) -> int:
    _print(questions.ask_tradeoff(_mechanism(arguments), arguments.alpha, _limits(settings)))
    return 0


def _compare(arguments: argparse.Namespace, settings: Settings) -> int:
    limits = replace(_limits(settings), seconds=settings.peer_seconds)
    _print(questions.ask_compare(_mechanism(arguments), arguments.delta, limits))
    return 0


def _calibrate(arguments: argparse.Namespace, settings: Settings) -> int:
    mechanism = calibrate.read(_read_json(arguments.file), arguments.free)
    _print(
        questions.ask_calibrate(
            mechanism,
            arguments.free,
            arguments.epsilon,
            arguments.delta,
            arguments.method,
            _limits(settings),
        )
    )
    return 0


def _allocate(arguments: argparse.Namespace, settings: Settings) -> int:
    stages = calibrate.stages_of(_read_json(arguments.file))
    _print(
        questions.ask_allocate(
            stages, arguments.epsilon, arguments.delta, arguments.method, _limits(settings)
        )
    )
    return 0


def _verify(arguments: argparse.Namespace, settings: Settings) -> int:
    from accounting import certificates

    certificate = _read_json(arguments.file)
    if not isinstance(certificate, dict):
        raise InvalidRequest("FILE", "a certificate is a JSON object")
    found = certificates.verify(
        certificate,
        _keys(arguments.keys, settings),
        recompute=not arguments.no_recompute,
        rigorous=arguments.rigorous,
        limits=_limits(settings),
    )
    _print(found.to_json())
    return 0 if found.ok else NOT_OK


def _keys(where: str | None, settings: Settings) -> dict[str, Ed25519PublicKey]:
    import httpx

    from worker.custody import load_public_keys, parse_public_keys

    if where is None:
        return load_public_keys(settings)
    if where.startswith("http://") and httpx.URL(where).host not in _LOOPBACK:
        raise InvalidRequest("--keys", "keys from another host need https")
    if where.startswith(("http://", "https://")):
        try:
            answer = httpx.get(where, timeout=30.0).raise_for_status()
        except httpx.HTTPError as error:
            raise InvalidRequest("--keys", f"no answer: {type(error).__name__}") from None
        return parse_public_keys(strict_json(answer.content))
    return parse_public_keys(_read_json(where))


def _verify_ledger(arguments: argparse.Namespace, settings: Settings) -> int:
    from accounting import chain
    from accounting.tables import Database, DatasetRow

    limits = _limits(settings)

    def epsilon_bound(mechanism: Mechanism, delta: float) -> bounds.Bracket:
        return bounds.confirming_epsilon(mechanism, delta, limits=limits)

    rigorous_seconds = limits.seconds if arguments.rigorous else None
    if arguments.export is not None:
        return _verify_export(arguments, settings, epsilon_bound, rigorous_seconds)
    if arguments.certificate or arguments.head:
        raise InvalidRequest("--export", "certificates and heads are compared with an export")
    database = Database(settings.effective_database_url)
    try:
        with database.read() as session:
            if session.get(DatasetRow, arguments.dataset) is None:
                raise NotFound("no such dataset")
            found = chain.verify(
                session,
                arguments.dataset,
                epsilon_bound=epsilon_bound,
                rigorous_seconds=rigorous_seconds,
            )
    finally:
        database.dispose()
    _print({"dataset": arguments.dataset, **found.to_json()})
    return 0 if found.ok else NOT_OK


def _verify_export(
    arguments: argparse.Namespace,
    settings: Settings,
    epsilon_bound: chain.EpsilonBound,
    rigorous_seconds: float | None,
) -> int:
    from accounting import certificates, chain

    named = [_read_json(name) for name in arguments.certificate]
    problems: list[str] = []
    for name, certificate in zip(arguments.certificate, named, strict=True):
        if not isinstance(certificate, dict):
            raise InvalidRequest("--certificate", "a certificate is a JSON object")
        # Its epsilon, at its reader's delta, is what `epsilond verify` computes again.
        signed = certificates.verify(
            certificate, _keys(arguments.keys, settings), recompute=False, limits=_limits(settings)
        )
        problems += [f"{name}: {problem}" for problem in signed.problems]
    try:
        with Path(arguments.export).open(encoding="utf-8", errors="surrogateescape") as lines:
            found = chain.verify_export(
                lines,
                certificates=named,
                head=arguments.head,
                epsilon_bound=epsilon_bound,
                rigorous_seconds=rigorous_seconds,
            )
    except OSError as error:
        raise InvalidRequest("--export", f"can't be read: {error.strerror}") from None
    _print({**found.to_json(), "certificate_problems": problems})
    return 0 if found.ok and not problems else NOT_OK


if __name__ == "__main__":
    sys.exit(main())
