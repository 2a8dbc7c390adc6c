"""Cost of the keyed noise: nanoseconds a value, beside the ordinary generators, in one run.

    python -m bench.noise [--values N] [--repeats K]

Each figure is the best of K runs on one thread. The ratio to torch's own float64 normals, measured
in the same run, is what carries over from one machine to another.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from models.noise import KeyedNoise, normals_of_words


def best_seconds(run: Callable[[], object], repeats: int) -> float:
    """The least wall time of ``repeats`` calls, after one call that is not counted."""
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--values", type=int, default=1 << 20)
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    n, repeats = arguments.values, arguments.repeats
    torch.set_num_threads(1)

    noise = KeyedNoise(bytes(32))
    words = noise.stream("bench", 0).words(n)
    zeros, buffer = bytes(8 * n), bytearray(8 * n + 16)
    generator = np.random.default_rng(0)

    def keystream(cipher: Cipher[modes.CTR] | Cipher[None]) -> None:
        cipher.encryptor().update_into(zeros, buffer)

    aes = Cipher(algorithms.AES(bytes(32)), modes.CTR(bytes(16)))
    chacha = Cipher(algorithms.ChaCha20(bytes(32), bytes(16)), None)
    outputs, steps, d = 64, 20, 784

    def block_noise() -> None:
        streams = [noise.stream("bench", i) for i in range(outputs)]
        for _ in range(steps):
            for stream in streams:
                stream.normals(d)

    cases: list[tuple[str, Callable[[], object], int]] = [
        ("AES-256-CTR keystream, a word", lambda: keystream(aes), n),
        ("ChaCha20 keystream, a word", lambda: keystream(chacha), n),
        ("map of words to normals", lambda: normals_of_words(words), n),
        ("keyed normals, one long stream", lambda: noise.normals("bench", 0, n), n),
        (f"keyed normals, {outputs} outputs x {steps} x {d}", block_noise, outputs * steps * d),
        ("Poisson mask, a unit", lambda: noise.poisson_mask("bench", 0, n, 0.001), n),
        ("a new stream", lambda: [noise.stream("bench", i) for i in range(1000)], 1000),
        ("25 of 1,000,000, a subset", lambda: noise.fixed_size("bench", 0, 10**6, 25), 1),
        ("torch.randn, float64", lambda: torch.randn(n, dtype=torch.float64), n),
        ("numpy Generator.standard_normal", lambda: generator.standard_normal(n), n),
    ]
    found = {name: best_seconds(run, repeats) / count * 1e9 for name, run, count in cases}
    unit = found["torch.randn, float64"]
    print(f"{'':44} {'ns':>10} {'/ torch.randn':>14}")
    for name, nanoseconds in found.items():
        print(f"{name:44} {nanoseconds:10.2f} {nanoseconds / unit:14.2f}")


if __name__ == "__main__":
    main()
