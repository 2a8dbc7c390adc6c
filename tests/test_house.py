"""Promises about the tree itself."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from worker.settings import Settings

ROOT = Path(__file__).resolve().parent.parent
DOCS = [str(page.relative_to(ROOT)) for page in (ROOT / "docs").glob("*.md")]


def _project() -> dict[str, object]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        project: dict[str, object] = tomllib.load(file)["project"]
    return project


def _requirements() -> list[str]:
    project = _project()
    extras = project["optional-dependencies"]
    assert isinstance(extras, dict)
    found = project["dependencies"]
    assert isinstance(found, list)
    return [*found, *(r for extra in extras.values() for r in extra)]


def test_every_dependency_is_pinned_and_has_its_reason() -> None:
    reasons = (ROOT / "docs" / "dependencies.md").read_text()
    for requirement in _requirements():
        match = re.fullmatch(r"([A-Za-z0-9_-]+)(\[[a-z]+\])?==[0-9][0-9a-z.]*", requirement)
        assert match, f"{requirement} is not pinned"
        assert re.search(rf"^\|[^|]*\b{re.escape(match[1])}\b", reasons, re.MULTILINE), match[1]


def test_importing_the_api_leaves_torch_out() -> None:
    code = (
        "import sys, api.app, api.cli, api.client;"
        "bad = {'torch', 'diffusers', 'models', 'worker.jobs'} & set(sys.modules);"
        "sys.exit(f'imported: {sorted(bad)}' if bad else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_import_contracts_hold() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "from importlinter.cli import lint_imports_command as c; c()"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"[1-9]\d* kept, 0 broken", done.stdout), done.stdout


def test_the_words_of_the_project_name_no_machine() -> None:
    """No path of a machine, and no package registry's host, in anything that is committed."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [name for name in listed.split("\0") if name]
    assert len(files) > 20
    words = [b"/" + b"work/", b"/" + b"root/", b"pypi" + b".org", b"files.python" + b"hosted"]
    for name in files:
        path = ROOT / name
        if path.suffix in {".safetensors", ".png"} or not path.is_file():
            continue
        content = path.read_bytes()
        for word in words:
            assert word not in content, f"{name} holds {word!r}"


def test_every_setting_that_is_named_somewhere_exists() -> None:
    named: set[str] = set()
    for name in ("docker-compose.yml", "Dockerfile", "README.md", *sorted(DOCS)):
        named |= set(re.findall(r"\bEPSILOND_([A-Z_]+)\b", (ROOT / name).read_text()))
    assert {"DATABASE_URL", "BROKER_URL", "HOME"} <= named
    assert {name.lower() for name in named} <= set(Settings.model_fields)


def test_the_links_of_the_pages_lead_somewhere() -> None:
    for name in ("README.md", *sorted(DOCS)):
        page = ROOT / name
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            if not target.startswith(("http:", "https:")):
                assert (page.parent / target).exists(), f"{name} links to {target}"
