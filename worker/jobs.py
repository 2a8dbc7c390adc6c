"""One job, end to end: ``python -m worker.jobs JOB_ID``. Knows no Celery.

    start (committed)  ->  read the snapshot  ->  private block  ->  public hand-off
    ->  stage  ->  publish  ->  sign the certificate  ->  release (committed)

The charge is committed by ``start`` before the first private byte is read or noise is drawn. A
process killed anywhere leaves a started job whose lease runs out; the sweeper sends it again, and
the next attempt takes the same sealed seed and so repeats the same draws: the same release, one
charge. Which numbers are used is never decided here: the mechanism that was charged says so.

**Failure is an output.** What a record holds cannot make a job fail: non-finite contributions count
as zero inside the clip, and nothing else private is tested. A failure that another attempt may
mend (disk, memory, database) leaves the job to that attempt; any other ends it, charged, with the
one code that requesters see. The log names the kind of error and the lines of code, never a message
or a value, which might quote a record.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import platform
import secrets
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from numpy.typing import NDArray

from accounting import certificates, ledger
from accounting.canonical import digest
from accounting.errors import Conflict, LeaseLost, LedgerUnavailable, NotFound
from accounting.mechanisms import DenoisingBlock, mechanism_from_json
from accounting.tables import Database, JobRow, SnapshotRow
from models.denoisers import PublicDenoiser, load_public_denoiser
from models.denoising import Outputs, OutputSpec, planned_outputs, run_block
from models.handoff import refine
from models.noise import KeyedNoise
from models.schedules import refinement_levels
from worker.artifacts import ArtifactStore
from worker.catalogue import get_model
from worker.custody import Sealer, StorageUnavailable, load_sealer, load_signing_key
from worker.settings import Settings, get_settings, service_version
from worker.snapshots import Records, read_snapshot

_log = logging.getLogger("epsilond.jobs")

# Exit statuses, for whoever watches the process.
DONE: Final = 0
NOTHING_TO_DO: Final = 3
FAILED: Final = 4
TRY_AGAIN: Final = 5

SEED_BYTES: Final = 32
_MINUTE: Final = 60 * ledger.MICROSECONDS
RENOISE: Final = "handoff.renoise"
REFINE_BATCH: Final = 100

# Those whose arithmetic or keystream reaches the pixels.
_LIBRARIES: Final = ("cryptography", "diffusers", "numpy", "scipy", "torch")
_CODE_FOLDERS: Final = ("accounting", "models", "worker")


def run_job(settings: Settings, job_id: str) -> int:
    """Runs one attempt at a job, and says how it ended (an exit status).

    Raises:
        NotFound: no such job.
        LedgerUnavailable: the database did not answer, and nothing was started.
    """
    database = Database(settings.effective_database_url)
    try:
        return _attempt(settings, database, job_id)
    finally:
        database.dispose()


def _attempt(settings: Settings, database: Database, job_id: str) -> int:
    sealer = load_sealer(settings)
    if settings.torch_threads:
        torch.set_num_threads(settings.torch_threads)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with database.read() as session:
        job = session.get(JobRow, job_id)
        if job is None:
            raise NotFound
        snapshot = None if job.snapshot_id is None else session.get(SnapshotRow, job.snapshot_id)
        what = _job_digest(job, snapshot, device)
    seed = secrets.token_bytes(SEED_BYTES)
    with database.write() as session:
        started = ledger.start(
            session,
            job_id=job_id,
            job_digest=what,
            sealed_seed=sealer.seal(seed, _seed_context(job_id)),
            lease_seconds=settings.lease_seconds,
            now=_now(),
        )
    if started is None:
        _log.info("nothing to do: job=%s", job_id)
        return NOTHING_TO_DO
    _log.info("started: job=%s attempt=%d", job_id, started.attempt)
    # A retry draws from the seed of the first attempt, not from the one made above.
    seed = sealer.open(started.sealed_seed, _seed_context(job_id))
    heartbeat = _Heartbeat(settings, database, job_id, started.lease_token)
    with heartbeat:
        try:
            batch = _draw(settings, database, sealer, started, seed, device, heartbeat.progress)
            _release(settings, database, started, batch)
        except LeaseLost:
            _log.warning("another attempt holds the job: job=%s", job_id)
            return NOTHING_TO_DO
        except (OSError, MemoryError, StorageUnavailable, LedgerUnavailable) as error:
            _log_error("this attempt ends, another may follow", job_id, error)
            return TRY_AGAIN
        except Exception as error:  # noqa: BLE001 - a failure of any kind ends the job, charged
            _log_error("the job failed", job_id, error)
            return _fail(database, started)
    _log.info("released: job=%s", job_id)
    return DONE


def _fail(database: Database, started: ledger.Started) -> int:
    try:
        with database.write() as session:
            ledger.fail(
                session,
                job_id=started.job_id,
                lease_token=started.lease_token,
                code=ledger.FAILURE_CODE,
                now=_now(),
            )
    except LeaseLost:
        return NOTHING_TO_DO
    return FAILED


# --------------------------------------------------------------------------------------------------
# Drawing
# --------------------------------------------------------------------------------------------------


def _draw(
    settings: Settings,
    database: Database,
    sealer: Sealer,
    started: ledger.Started,
    seed: bytes,
    device: str,
    progress: Callable[[int], None],
) -> bytes:
    """The batch: the bytes of an npz with ``images`` (N, H, W, C) and, with classes, ``labels``."""
    # A retry must repeat the same batch to the bit.
    torch.use_deterministic_algorithms(True)
    block = mechanism_from_json(started.mechanism)
    if started.kind != "denoise" or not isinstance(block, DenoisingBlock):
        raise ValueError("this worker draws denoising blocks only")
    post = started.post_processing
    named = cast(Mapping[str, str], post["public_model"])
    entry = get_model(settings.public_models, named["name"])
    if entry.sha256 != named["sha256"]:
        raise ValueError("the catalogue holds another model under this name")
    model = load_public_denoiser(entry.folder, device)
    if model.card.sha256 != named["sha256"]:
        raise ValueError("the loaded model is another one than was charged for")
    # Dataset classes by position, as positions in the model's own class list.
    in_model = _positions_in_model(started.facts, model)

    with database.read() as session:
        row = session.get(SnapshotRow, started.snapshot_id)
        if row is None:
            raise ValueError("the job's snapshot is gone")
        stored = (row.id, row.location, row.sealed_key, row.hmac)
    records = read_snapshot(
        settings,
        sealer,
        snapshot_id=stored[0],
        location=stored[1],
        sealed_key=stored[2],
        hmac=stored[3],
    )
    low, high = cast(Sequence[float], started.facts["value_range"])
    noise = KeyedNoise(seed)
    drawn = run_block(
        block,
        _scaled(records, low, high),
        records.labels,
        None if records.units is None else np.unique(records.units, return_inverse=True)[1],
        _centres(block, model, in_model),
        planned_outputs(block),
        noise,
        device=device,
    )
    images = _hand_off(block, drawn, model, in_model, post, noise, device, progress)
    pixels = np.clip(np.rint((images + 1) / 2 * (high - low) + low), 0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    if block.classes is None:
        np.savez_compressed(buffer, images=pixels)
    else:
        labels = np.array([spec.label for spec in drawn.specs], dtype=np.int64)
        np.savez_compressed(buffer, images=pixels, labels=labels)
    return buffer.getvalue()


def _scaled(records: Records, low: float, high: float) -> NDArray[np.float32]:
    """Records in [-1, 1], float32, channels first: (n, C, H, W)."""
    channels_first = np.ascontiguousarray(records.images.transpose(0, 3, 1, 2), dtype=np.float32)
    channels_first -= np.float32(low)
    channels_first *= np.float32(2.0 / (high - low))
    channels_first -= np.float32(1.0)
    return channels_first


def _positions_in_model(facts: Mapping[str, Any], model: PublicDenoiser) -> dict[int, int]:
    names = facts.get("classes") or ()
    return {i: model.card.classes.index(str(name)) for i, name in enumerate(names)}


def _centres(
    block: DenoisingBlock, model: PublicDenoiser, in_model: Mapping[int, int]
) -> dict[int, NDArray[np.float64]] | None:
    """The public centre of each class's outputs, d values, or None for other weights."""
    if block.weight != "centred":
        return None
    if block.centre != "public_class_mean" or block.classes is None:
        raise ValueError("this worker centres on the public model's class means only")
    return {
        share.label: model.class_means[in_model[share.label]]
        .flatten()
        .to("cpu", torch.float64)
        .numpy()
        for share in block.classes
    }


def _hand_off(
    block: DenoisingBlock,
    drawn: Outputs,
    model: PublicDenoiser,
    in_model: Mapping[int, int],
    post: Mapping[str, Any],
    noise: KeyedNoise,
    device: str,
    progress: Callable[[int], None],
) -> NDArray[np.float64]:
    """Re-noises and refines the block's outputs publicly; (N, H, W, C) in about [-1, 1]."""
    height, width, channels = model.card.shape
    levels_all = block.schedule.levels()
    t0 = drawn.level
    t1 = levels_all[block.block_steps - int(post["renoise_steps"])]
    levels = refinement_levels(
        t1, block.schedule.sigma_min, int(post["refine_steps"]), block.schedule.rho
    )
    finished = []
    # Batches are of a fixed size whatever the machine, so that a retry repeats their rounding.
    for first in range(0, len(drawn.specs), REFINE_BATCH):
        specs: Sequence[OutputSpec] = drawn.specs[first : first + REFINE_BATCH]
        x = torch.from_numpy(drawn.x[first : first + REFINE_BATCH]).view(
            -1, channels, height, width
        )
        gaussian = torch.stack(
            [
                torch.from_numpy(noise.normals(RENOISE, spec.index, (channels, height, width)))
                for spec in specs
            ]
        )
        labels = torch.tensor([in_model[spec.label or 0] for spec in specs], device=device)
        done = refine(
            model.denoiser,
            x.to(device, torch.float32),
            t0,
            levels,
            labels,
            gaussian.to(device, torch.float32),
            max_batch=REFINE_BATCH,
        )
        finished.append(done.to("cpu", torch.float64).numpy().transpose(0, 2, 3, 1))
        progress(first + len(specs))
    return np.concatenate(finished)


# --------------------------------------------------------------------------------------------------
# Releasing
# --------------------------------------------------------------------------------------------------


def _release(
    settings: Settings,
    database: Database,
    started: ledger.Started,
    batch: bytes,
) -> None:
    store = ArtifactStore(settings.effective_artifacts_url)
    staged = store.stage(started.job_id, started.attempt, batch)
    location = store.publish(staged, staged.sha256)
    signing_key = load_signing_key(settings)
    certificate = certificates.sign(
        certificates.build(
            service_version=service_version(),
            signing_key_id=certificates.key_id(signing_key.public_key()),
            dataset_id=started.dataset_id,
            snapshot_id=cast(str, started.snapshot_id),
            snapshot_hmac=cast(str, started.snapshot_hmac),
            mechanism=mechanism_from_json(started.mechanism),
            post_processing=started.post_processing,
            epsilon=cast(Mapping[str, object], started.certificate_epsilon),
            artefact_sha256=staged.sha256,
            artefact_bytes=staged.size,
            ledger_sequence=started.sequence,
            ledger_hash=started.hash,
            # To the minute: more would tell how long the private part took.
            issued_at=_now() // _MINUTE * _MINUTE,
        ),
        signing_key,
    )
    with database.write() as session:
        ledger.release(
            session,
            job_id=started.job_id,
            lease_token=started.lease_token,
            location=location,
            sha256=staged.sha256,
            size=staged.size,
            certificate=certificate,
            now=_now(),
        )


class _Heartbeat:
    """Renews the lease from a thread of its own, and reports the outputs done.

    If the lease is lost the process ends at once: whatever it holds belongs to nobody.
    """

    def __init__(self, settings: Settings, database: Database, job_id: str, token: str) -> None:
        self._settings = settings
        self._database = database
        self._job_id = job_id
        self._token = token
        self._done = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)

    def progress(self, done: int) -> None:
        self._done = done

    def __enter__(self) -> _Heartbeat:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        # Progress is worth showing more often than a lease needs renewing.
        interval = min(self._settings.heartbeat_seconds, 1.0)
        while not self._stop.wait(interval):
            try:
                with self._database.write() as session:
                    ledger.heartbeat(
                        session,
                        job_id=self._job_id,
                        lease_token=self._token,
                        progress_done=self._done,
                        lease_seconds=self._settings.lease_seconds,
                        now=_now(),
                    )
            except LeaseLost:
                if not self._stop.is_set():
                    _log.warning("the lease is lost: job=%s", self._job_id)
                    os._exit(NOTHING_TO_DO)
            except LedgerUnavailable:
                # The lease outlives several heartbeats; the next one may reach the database.
                _log.warning("a heartbeat did not reach the ledger: job=%s", self._job_id)


# --------------------------------------------------------------------------------------------------
# What the draws depend on
# --------------------------------------------------------------------------------------------------


def _job_digest(job: JobRow, snapshot: SnapshotRow | None, device: str) -> str:
    """Digest of all that decides the batch: a retry under another would be another release."""
    return digest(
        {
            "mechanism": job.mechanism,
            "post_processing": job.post_processing,
            "snapshot": None if snapshot is None else snapshot.hmac,
            "code": code_digest(),
            "device": device
            if device == "cpu"
            else f"{device}:{torch.cuda.get_device_name()}:{torch.version.cuda}",
            "machine": platform.machine(),
            "libraries": {name: version(name) for name in _LIBRARIES},
            "threads": torch.get_num_threads(),
        }
    )


def code_digest() -> str:
    """SHA-256 over the source files that a job runs."""
    root = Path(__file__).resolve().parent.parent
    sha = hashlib.sha256()
    for folder in _CODE_FOLDERS:
        for path in sorted((root / folder).rglob("*.py")):
            sha.update(str(path.relative_to(root)).encode() + b"\0")
            sha.update(hashlib.sha256(path.read_bytes()).digest())
    return sha.hexdigest()


def _seed_context(job_id: str) -> bytes:
    return b"job-seed:" + job_id.encode()


def _now() -> int:
    return time.time_ns() // 1_000


def _log_error(what: str, job_id: str, error: BaseException) -> None:
    where = " < ".join(
        f"{Path(frame.filename).name}:{frame.lineno}"
        for frame in reversed(traceback.extract_tb(error.__traceback__))
    )
    _log.error("%s: job=%s error=%s at=%s", what, job_id, type(error).__name__, where)


def main(arguments: Sequence[str]) -> int:
    """The module's command line: one job id."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    if len(arguments) != 1:
        sys.stderr.write("usage: python -m worker.jobs JOB_ID\n")
        return 2
    try:
        return run_job(get_settings(), arguments[0])
    except (Conflict, NotFound, LedgerUnavailable) as error:
        _log_error("the job could not be started", arguments[0], error)
        return TRY_AGAIN


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
