"""docs/results-folder.md names every file that training and validation leave behind."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

import val_dual
from utils.options import TrainOptions
from utils.train.trainer import Trainer

PAGE = Path(__file__).resolve().parents[2] / "docs" / "results-folder.md"


def named(section: str) -> list[re.Pattern[str]]:
    """Patterns of the files that a section of the page names; 0 and N stand for any number, * for anything."""
    text = PAGE.read_text(encoding="utf-8").split(f"\n## {section}")[1].split("\n## ")[0]
    words = re.findall(r"`([\w./*-]+)`", text)
    numbered = (re.sub(r"(?<=[a-z])[0N](?=[._])", "#", word) for word in words)
    return [re.compile(re.escape(word).replace(r"\#", r"\d+").replace(r"\*", ".*")) for word in numbered]


def files_below(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def unnamed(files: set[str], patterns: list[re.Pattern[str]]) -> set[str]:
    return {file for file in files if not any(pattern.fullmatch(file) for pattern in patterns)}


@pytest.mark.slow
def test_every_file_of_a_run_is_named(make_options: Callable[..., TrainOptions]) -> None:
    options = make_options(noplots=False, save_period=1)
    Trainer(options).fit()
    folder = Path(options.project) / options.name
    files = files_below(folder)
    assert {"results.csv", "report.html", "weights/last.pt", "weights/epoch1.pt", "train_batch1.jpg"} <= files
    training = named("Training")
    assert not unnamed(files, training)
    assert unnamed({"results.txt", "weights/other.pt"}, training) == {"results.txt", "weights/other.pt"}

    words = ["--weights", str(folder / "weights" / "best.pt"), "--data", options.data, "--img", "64", "--save-txt"]
    words += ["--save-json", "--device", "cpu", "--workers", "0", "--project", options.project, "--name", "val"]
    val_dual.main(words)
    files = files_below(Path(options.project) / "val")
    assert {"report.html", "data_report.json"} <= files
    written_on_demand = [re.compile(r"labels/.*\.txt"), re.compile(r".*_predictions\.json")]
    assert not unnamed(files, [*training, *named("Validation"), *written_on_demand])
