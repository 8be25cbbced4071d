"""The commands, flags and files that README and docs name exist."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").glob("*.md"))]
SCRIPT_COLUMN = {"train": "train_dual.py", "val": "val_dual.py", "detect": "detect_dual.py", "export": "export.py"}
# Files that a user brings along or that a run writes; the documents may name them all the same.
BROUGHT_BY_USER = r"^(runs|mydata|path|\.venv|labels|weights|crops|images|\.\./)|^[\w-]+\.(pt|csv|png|jpg)$|[*…N]"


@cache
def help_text(script: str) -> str:
    run = subprocess.run(
        [sys.executable, script, "--help"], cwd=REPO_ROOT, capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout


def commands() -> list[str]:
    """Return every ``python FILE.py ...`` line of the documents, in fences and in code spans."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        found += re.findall(r"^python (\w[\w/]*\.py.*)$", text, re.MULTILINE)
        found += re.findall(r"`python (\w[\w/]*\.py[^`]*)`", text)
    return found


def flag_rows() -> list[tuple[str, str]]:
    """Return (script, flag) pairs of the README's flag table."""
    table = (REPO_ROOT / "README.md").read_text(encoding="utf-8").split("## Important flags")[1].split("\n## ")[0]
    pairs = []
    for row in re.findall(r"^\| (`--.*?) \| (.*?) \|", table, re.MULTILINE):
        scripts = SCRIPT_COLUMN if row[1] == "all" else row[1].split(", ")
        pairs += [(SCRIPT_COLUMN[name], flag) for name in scripts for flag in re.findall(r"--[\w-]+", row[0])]
    return pairs


def has_flag(script: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text(script)) is not None


def test_there_is_something_to_check() -> None:
    assert len(commands()) >= 6
    assert len(flag_rows()) >= 30


@pytest.mark.parametrize("command", commands())
def test_commands_parse(command: str) -> None:
    script, *words = shlex.split(command)
    assert (REPO_ROOT / script).is_file(), f"{script} does not exist"
    for word in words:
        if word.startswith("--"):
            assert has_flag(script, word), f"{script} has no flag {word}"
        if word.endswith(".yaml") and not word.startswith("mydata/"):
            assert any(REPO_ROOT.rglob(Path(word).name)), f"{word} does not exist"


@pytest.mark.parametrize(("script", "flag"), flag_rows())
def test_flag_table(script: str, flag: str) -> None:
    assert has_flag(script, flag), f"{script} has no flag {flag}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    names = re.findall(r"\]\(([^)#:]+)\)", text)
    targets = [document.parent / name for name in names]
    spans = re.findall(r"`([\w./-]+\.(?:py|sh|md|yaml|txt)|[\w-]+/)`", text)
    known_names = {path.name for folder in ("models", "hyp", "data") for path in (REPO_ROOT / folder).rglob("*.yaml")}
    written_by_runs = {"results.txt", "opt.yaml", "hyp.yaml", "mydata.yaml", "train2017.txt", "val2017.txt"}
    targets += [
        REPO_ROOT / name
        for name in spans
        if not re.search(BROUGHT_BY_USER, name) and name not in known_names | written_by_runs
    ]
    missing = [str(target) for target in targets if not target.exists()]
    assert not missing, f"{document.name} names what does not exist: {missing}"


def test_shell_commands_exist() -> None:
    text = "\n".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    scripts = set(re.findall(r"bash ((?:scripts|\.ci)/[\w.]+)", text))
    assert scripts
    assert all((REPO_ROOT / name).is_file() for name in scripts), scripts
