"""Runs of detection with the stand-in for a model, and what they left behind."""

from __future__ import annotations

from pathlib import Path

from tests.deploy.fakes import ColourBackend
from utils.deploy.detector import DetectionSummary, Detector
from utils.deploy.record import RECORD_NAME
from utils.options import DetectOptions


def detect(
    folder: Path, source: object, batch_size: int = 1, model: ColourBackend | None = None, **options: object
) -> DetectionSummary:
    settings = {"project": str(folder / "runs"), "imgsz": [96], "video_codec": "mp4v"} | options
    model = model or ColourBackend()
    return Detector(DetectOptions(source=str(source), **settings), model=model, batch_size=batch_size).run()


def files_of(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file() and path.name != RECORD_NAME
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {name: (folder / name).read_bytes() for name in files_of(folder)}


def table_of(folder: Path) -> list[list[str]]:
    return [line.split("\t") for line in (folder / "results.txt").read_text(encoding="utf-8").splitlines()[1:]]
