"""The page that compares runs, in a real browser."""

from __future__ import annotations

import json

from tests.evaluate.browser import column
from tests.evaluate.run_kit import make_run
from utils.evaluate.report import write_comparison, write_report


def test_comparison_of_runs(browser, runs, tmp_path):
    for run in runs:
        write_report(run)
    browser.problems.clear()
    browser.resize(1280, 900)
    browser.open(write_comparison(runs, tmp_path / "both.html"))
    assert browser.problems == []
    assert column(browser, "runs", 0) == ["first/exp", "second/exp"]
    link = browser.evaluate("document.querySelector('table[aria-label=\"runs\"] a').getAttribute('href')")
    assert (tmp_path / link).resolve() == runs[0] / "report.html"
    differences = browser.evaluate("document.querySelector('#differences').innerText")
    assert "imgsz" in differences and "960" in differences and "multi_scale" in differences
    assert "optimizer" not in differences
    lines = "document.querySelector('.chart').querySelectorAll('path.series').length"
    assert browser.evaluate(lines) == 2
    assert browser.evaluate("document.querySelectorAll('.chart').length") >= 12
    assert "share of the run" not in browser.evaluate("document.querySelector('#curves').textContent")
    browser.evaluate("document.querySelector('#curves .choice').click()")
    courses = (
        "[...document.querySelector('.chart').querySelectorAll('path.series')].map(path => path.getAttribute('d'))"
    )
    ends = [course.split("L")[-1].split()[0] for course in browser.evaluate(courses)]
    assert ends[0] == ends[1], "over the share of the run both end at 1"
    browser.evaluate("document.querySelector('#curves .choice').click()")
    best = browser.evaluate(
        "[...document.querySelectorAll('td.best')].map(cell => cell.closest('tr').cells[0].textContent)"
    )
    assert set(best) == {"second/exp"} or "second/exp" in best
    browser.resize(400, 800)
    browser.settle()
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400


def without_training(folder, split: str):
    """Turn a run's folder into that of a validation of ``split``; return it."""
    (folder / "opt.yaml").unlink()
    (folder / "results.csv").unlink()
    path = folder / "evaluation.json"
    settings = {"weights": "best.onnx", "data": "shapes.yaml", "split": split, "image size": 320, "batch": 7}
    content = json.loads(path.read_text(encoding="utf-8"))
    content["classes"][0]["labels"] += 3
    path.write_text(json.dumps({**content, "settings": settings}), encoding="utf-8")
    return folder


def test_comparison_of_validations_tells_how_each_was_measured(browser, runs, tmp_path):
    others = [without_training(make_run(tmp_path / split), split) for split in ("val", "test")]
    browser.open(write_comparison([runs[0], *others], tmp_path / "all.html"))
    assert [column(browser, "runs", number) for number in (1, 2, 3)] == [
        ["yolov9-s.yaml", "best.onnx", "best.onnx"],
        ["640", "320", "320"],
        ["32", "7", "7"],
    ]
    summary = browser.evaluate("document.querySelector('#summary').innerText")
    assert all(data in summary for data in ("my data/shapes.yaml (val)", "shapes.yaml (val)", "shapes.yaml (test)"))
    labels = [int(column(browser, "mAP50-95 per class", number)[0]) for number in (1, 2, 3)]
    assert labels == [labels[0], labels[0] + 3, labels[0] + 3]
    browser.open(write_report(others[1]))
    titles = (
        "[...document.querySelectorAll('table[aria-label=\"figures per class\"] th')].map(head => head.textContent)"
    )
    assert "test labels" in browser.evaluate(titles)
