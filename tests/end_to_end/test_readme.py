"""The README's calls, run as they stand there."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np

from accounting.mechanisms import mechanism_from_json
from tests.end_to_end.service import ROOT, installation
from tests.end_to_end.test_kill import digits_npz


def _blocks() -> tuple[str, str]:
    """The block of curl calls, and the question to the command line."""
    text = (ROOT / "README.md").read_text()
    curls = re.search(r"```bash\n(URL=.*?)```", text, re.DOTALL)
    question = re.search(r"```\n(echo '\{\"kind\".*?)```", text, re.DOTALL)
    assert curls is not None
    assert question is not None
    return curls[1], question[1]


def test_the_curl_calls_of_the_readme(tmp_path: Path) -> None:
    script, _ = _blocks()
    (tmp_path / "digits.npz").write_bytes(digits_npz())
    (tmp_path / "home").mkdir(mode=0o755)
    with installation(tmp_path / "home", database_url="", broker_url="") as service:
        service.start("serve", "serve")
        service.wait_ready()
        script = script.replace("http://127.0.0.1:8000", service.url)
        script = script.replace("epk_...", service.admin_key)
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", script],
            cwd=tmp_path,
            env=_environment(tmp_path, service.environment()),
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
    assert done.returncode == 0, done.stdout + done.stderr
    # Whatever the folder's own mode, what it holds is its owner's alone.
    for path in (tmp_path / "home").rglob("*"):
        assert path.stat().st_mode & 0o077 == 0, path
    with np.load(io.BytesIO((tmp_path / "batch.npz").read_bytes())) as batch:
        assert batch["labels"].tolist() == [3] * 50 + [7] * 50
    certificate = json.loads((tmp_path / "certificate.json").read_text())
    assert mechanism_from_json(certificate["mechanism"]).kind == "denoising_block"
    # The last answers: signature and bound hold, from the certificate alone; and so do the books,
    # from their export, with the certificate's place in them.
    answers = done.stdout[done.stdout.rindex('{\n  "ok"') :]
    check, end = json.JSONDecoder().raw_decode(answers)
    assert check["ok"] is True
    assert check["bracket_same"] is True
    books = json.loads(answers[end:])
    assert (books["ok"], books["certificates"], books["certificate_problems"]) == (True, 1, [])


def test_the_question_of_the_readme(tmp_path: Path) -> None:
    _, question = _blocks()
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", question],
        cwd=tmp_path,
        env=_environment(tmp_path, dict(os.environ)),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert 0 < answer["lower"] <= answer["upper"] < 10


def _environment(folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """With an ``epsilond`` on the path that runs this tree."""
    tools = folder / "bin"
    tools.mkdir(exist_ok=True)
    command = tools / "epsilond"
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m api.cli "$@"\n')
    command.chmod(0o755)
    return environment | {
        "PATH": f"{tools}{os.pathsep}{environment['PATH']}",
        "PYTHONPATH": str(ROOT),
    }
