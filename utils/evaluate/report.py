"""The run report: one page that holds everything worth looking at in a run's folder, and opens without a network.

``python -m utils.evaluate.report RUN`` writes RUN/report.html; several runs are compared in one page. The page is data
(what ``run_folder`` reads) with scripts and styles of our own in the same file.
"""

from __future__ import annotations

import argparse
import os
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

from utils.cli import run_script
from utils.evaluate.run_folder import UNREADABLE, read_run
from utils.files import json_text, write_text_atomic
from utils.log import LOGGER

REPORT_NAME, COMPARISON_NAME = "report.html", "comparison.html"
ASSETS = Path(__file__).parent / "assets"
SCRIPTS = ("charts.js", "matrix.js", "page.js", "compare.js")  # in the order in which they need each other
# Nothing may be fetched: the page is complete, and names in the data cannot smuggle anything in.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<link rel="icon" href="data:,">
<title>{title}</title>
<style>
{style}</style>
</head>
<body>
<main><noscript>This report is drawn by a script inside this file; please allow it to run.</noscript></main>
<script type="application/json" id="data">{data}</script>
<script>
{script}</script>
</body>
</html>
"""


def write_report(run_folder: str | Path) -> Path | None:
    """Write report.html into the folder of a run, from what lies there, and return its path.

    Made for the end of every epoch: cheap, replaces the old file in one piece, and never ends a training. Where it
    cannot be written one line says so, and None is returned.
    """
    path = Path(run_folder) / REPORT_NAME
    try:
        write_text_atomic(path, render([read_run(run_folder)]))
    except UNREADABLE as error:
        LOGGER.warning(
            f"{path} was not written: {error}. "
            f"python -m utils.evaluate.report {shlex.quote(str(run_folder))} --output report.html writes it elsewhere"
        )
        return None
    return path


def write_comparison(run_folders: Sequence[str | Path], path: str | Path) -> Path:
    """Write one page that compares several runs; one that cannot be read is left out with a warning.

    Raises:
        ValueError: none of them can be read.
    """
    path = Path(path)
    runs = []
    for folder in _unique(run_folders):
        try:
            run = read_run(folder, path.parent)
        except UNREADABLE as error:
            LOGGER.warning(f"{folder} is left out of the comparison: {error}")
            continue
        runs.append(run)
        own = Path(folder) / REPORT_NAME
        if own.is_file():
            link = Path(os.path.relpath(own.resolve(), path.parent.resolve())).as_posix()
            run["report"] = quote(link, errors="surrogateescape")  # bytes of names that are no text too
    if not runs:
        raise ValueError("none of these runs can be read; give the folders of runs, for example runs/train/exp")
    write_text_atomic(path, render(runs))
    return path


def _unique(folders: Sequence[str | Path]) -> list[str | Path]:
    """Return the folders without those that were given before, in whatever way they are written."""
    first: dict[Path, str | Path] = {}
    for folder in folders:
        if Path(folder).resolve() in first:
            LOGGER.warning(f"{folder} is given more than once; it is shown once")
        first.setdefault(Path(folder).resolve(), folder)
    return list(first.values())


def render(runs: Sequence[dict[str, Any]]) -> str:
    """Return the page of some runs, as ``run_folder.read_run`` describes them."""
    data = {"written": time.strftime("%Y-%m-%d %H:%M:%S"), "runs": runs}
    # Inside a script element only "<" could end the data early.
    text = json_text(data).replace("<", "\\u003c")
    title = runs[0]["name"] if len(runs) == 1 else f"{len(runs)} runs"
    return PAGE.format(
        policy=POLICY,
        title=title.replace("&", "&amp;").replace("<", "&lt;"),
        style=(ASSETS / "report.css").read_text(encoding="utf-8"),
        data=text,
        script="".join((ASSETS / name).read_text(encoding="utf-8") for name in SCRIPTS),
    )


def _target(output: str, runs: Sequence[str]) -> Path:
    """Return the file to write: ``output`` itself, one in it where it is a folder, or one beside the first run."""
    if not output:
        return Path(runs[0]).resolve().parent / COMPARISON_NAME
    is_folder = output.endswith(("/", os.sep)) or Path(output).is_dir()
    return Path(output) / (REPORT_NAME if len(runs) == 1 else COMPARISON_NAME) if is_folder else Path(output)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report of one run, or the comparison of several, as the command line says."""
    parser = argparse.ArgumentParser(
        prog="python -m utils.evaluate.report", description="Write the report of a run, or compare several runs."
    )
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folder of a run, for example runs/train/exp")
    parser.add_argument(
        "--output",
        default="",
        help=f"file or folder of the page; '' = in the run, {COMPARISON_NAME} beside the first run",
    )
    options = parser.parse_args(argv)
    if len(options.runs) == 1 and not options.output:
        read_run(options.runs[0])  # says what is wrong with the folder, where write_report only warns
        path = write_report(options.runs[0])
    else:
        path = _target(options.output, options.runs)
        try:
            write_comparison(options.runs, path)
        except OSError as error:
            raise OSError(f"{path} was not written: {error.strerror or error}; choose another --output") from error
    if path is None:
        return 1
    LOGGER.info(f"Report: {path}")
    return 0


if __name__ == "__main__":
    run_script(main)
