"""The commands, flags and files that README and docs name exist."""

from __future__ import annotations

import dataclasses
import importlib
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from utils.data.images import IMAGE_SUFFIXES
from utils.deploy.formats import FORMATS
from utils.options import DetectOptions, ExportOptions, TrainOptions, ValOptions

REPO_ROOT = Path(__file__).resolve().parents[1]
DOCUMENTS = [REPO_ROOT / "README.md", *sorted((REPO_ROOT / "docs").glob("*.md"))]
SCRIPT_COLUMN = {"train": "train_dual.py", "val": "val_dual.py", "detect": "detect_dual.py", "export": "export.py"}
OPTIONS = {"train": TrainOptions, "val": ValOptions, "detect": DetectOptions, "export": ExportOptions}
WITHOUT_EFFECT = ("accepted without effect", "not available")  # beginnings of the help of flags that do nothing
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


def rows_by_flag() -> dict[str, set[str]]:
    """Return the scripts under which the README's table has each flag."""
    found: dict[str, set[str]] = {}
    for script, flag in flag_rows():
        found.setdefault(flag, set()).add(script)
    return found


def scripts_with(flag: str) -> set[str]:
    """Return the scripts on which a flag has an effect."""
    found = set()
    for name, options in OPTIONS.items():
        for item in dataclasses.fields(options):
            word = item.name.replace("_", "-")
            spellings = {f"--{word}", f"--no-{word}", *item.metadata["flags"], item.metadata["argument"].get("flag")}
            if flag in spellings and not item.metadata["help"].startswith(WITHOUT_EFFECT):
                found.add(SCRIPT_COLUMN[name])
    return found


def read(name: str) -> str:
    return (REPO_ROOT / name).read_text(encoding="utf-8")


def module_lines() -> list[str]:
    """Return every ``MODULE FLAGS`` of ``python -m MODULE FLAGS`` in the documents, but for other people's modules."""
    text = "\n".join(read(document) for document in DOCUMENTS)
    lines = re.findall(r"python3? -m ([\w.]+[^`\n]*)", text)
    return [line for line in lines if (REPO_ROOT / line.split(".")[0]).is_dir()]


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


@pytest.mark.parametrize(("flag", "scripts"), rows_by_flag().items())
def test_flag_table_names_every_command_that_has_the_flag(flag: str, scripts: set[str]) -> None:
    assert scripts == scripts_with(flag)


@pytest.mark.parametrize("line", module_lines())
def test_modules_exist_and_have_the_flags(line: str) -> None:
    module, *words = shlex.split(line, comments=True)
    source = (REPO_ROOT / module.replace(".", "/")).with_suffix(".py")
    assert source.is_file(), f"{module} does not exist"
    text = source.read_text(encoding="utf-8")
    missing = [word for word in words if word.startswith("--") and f'"{word}"' not in text]
    assert not missing, f"{module} has no flag {missing}"


def test_modules_named_in_code_exist() -> None:
    text = "\n".join(read(document) for document in DOCUMENTS)
    names = set(re.findall(r"`((?:bench|utils|models|scripts)\.[\w.]+)`", text))
    assert names
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not (REPO_ROOT / name.replace(".", "/")).with_suffix(".py").is_file():
            assert hasattr(importlib.import_module(module), attribute), f"{name} does not exist"


def test_lists_of_kinds_are_complete() -> None:
    """What the documents list one by one is what there is."""
    (row,) = re.findall(r"^\| `--include` .*$", read("README.md"), re.MULTILINE)
    listed = re.findall(r"`(\w+)`", row.split("formats: ")[1])
    assert set(listed) == set(FORMATS)
    assert set(FORMATS) <= set(re.findall(r"^\| `(\w+)`", read("docs/exporting.md"), re.MULTILINE))
    files = {f"hyp/{path.name}" for path in (REPO_ROOT / "hyp").glob("*.yaml")}
    assert set(re.findall(r"^\| `(hyp/[\w.-]+)`", read("docs/hyper-parameters.md"), re.MULTILINE)) == files
    endings = read("docs/data-format.md").split("Pictures are the files that end in ")[1].partition(", in\n")[0]
    assert set(re.findall(r"`(\.\w+)`", endings)) == IMAGE_SUFFIXES


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_into_pages_lead_to_a_heading(document: Path) -> None:
    for name, anchor in re.findall(r"\]\(([^)#:]*)#([^)]+)\)", document.read_text(encoding="utf-8")):
        target = document.parent / name if name else document
        headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
        assert anchor in {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}, anchor


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    names = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)
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
    scripts = set(re.findall(r"bash ((?:scripts|bench|\.ci)/[\w.]+)", text))
    assert scripts
    assert all((REPO_ROOT / name).is_file() for name in scripts), scripts
