"""The run report in a real browser: drawn without an error, with its curves, sorting, zooming, also when narrow."""

from __future__ import annotations

import json
import re
import time

import pytest

from tests.evaluate.browser import column
from tests.evaluate.run_kit import NAMES, make_run
from utils.evaluate import report
from utils.evaluate.report import ASSETS, SCRIPTS, main, write_comparison, write_report

SECTIONS = ["Summary", "Notes", "Data", "Curves", "AP by object size", "Classes", "Confusion matrix"]
SECTIONS += ["Curves over confidence", "Worst pictures", "Monitor", "Files"]


@pytest.fixture
def page(browser, runs):
    """The report of the first run, opened in a window of 1280 pixels."""
    browser.problems.clear()
    browser.requests.clear()
    browser.resize(1280, 900)
    browser.open(write_report(runs[0]))
    return browser


# --- without a browser ------------------------------------------------------------------------------------------------


def test_page_is_one_file_that_fetches_nothing(runs):
    text = write_report(runs[0]).read_text(encoding="utf-8")
    code = re.sub(r'<script type="application/json" id="data">.*?</script>', "", text, flags=re.DOTALL)
    assert not re.search(
        r"""(src|href)\s*=\s*["']?(https?:|//)|@import|url\((?!#|`|\$)|fetch\(|XMLHttp|import\(""", code
    )
    assert "default-src 'none'" in text
    assert "dog <b>" not in text, "names cannot end the data or become markup"
    assert sum(len((ASSETS / name).read_text().splitlines()) for name in SCRIPTS) < 1000


def test_page_is_written_quickly_and_whole(runs, monkeypatch, log):
    path = write_report(runs[0])
    before = path.read_bytes()
    started = time.process_time()
    write_report(runs[0])
    assert time.process_time() - started < 0.5, "meant to take a tenth of a second"

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(report, "write_text_atomic", fail)
    assert write_report(runs[0]) is None and "disk full" in log.text
    assert path.read_bytes()[:1000] == before[:1000]


def test_command_line(runs, tmp_path, log):
    assert main([str(runs[0])]) == 0 and (runs[0] / "report.html").is_file()
    target = tmp_path / "both.html"
    assert main([*map(str, runs), "--output", str(target)]) == 0 and target.is_file()
    assert main(list(map(str, runs))) == 0 and (runs[0].parent / "comparison.html").is_file()
    with pytest.raises(FileNotFoundError, match="runs/train/exp"):
        main([str(tmp_path / "absent")])


def test_a_run_that_cannot_be_read_costs_a_comparison_only_itself(runs, tmp_path, monkeypatch, log):
    (tmp_path / "empty").mkdir()
    original = report.read_run

    def read(folder, page_folder=None):
        if folder == runs[1]:
            raise TypeError("of a kind nobody expected")
        return original(folder, page_folder)

    monkeypatch.setattr(report, "read_run", read)
    path = write_comparison([tmp_path / "empty", runs[0], runs[1], tmp_path / "absent"], tmp_path / "page.html")
    assert "<title>exp</title>" in path.read_text(encoding="utf-8")
    left_out = [record.message for record in log.records if "is left out of the comparison" in record.message]
    assert [line.split(" is left out")[0] for line in left_out] == [
        str(folder) for folder in (tmp_path / "empty", runs[1], tmp_path / "absent")
    ]
    with pytest.raises(ValueError, match="none of these runs can be read"):
        write_comparison([tmp_path / "empty", tmp_path / "absent"], tmp_path / "none.html")
    assert not (tmp_path / "none.html").exists()


def test_a_run_given_twice_is_compared_once(runs, tmp_path, log):
    again = runs[0].parent / "." / "exp"
    page = write_comparison([runs[0], runs[1], f"{again}/", runs[1]], tmp_path / "page.html").read_text(
        encoding="utf-8"
    )
    data = json.loads(page.split('id="data">')[1].split("</script>")[0])
    assert [run["folder"] for run in data["runs"]] == list(map(str, runs))
    assert f"{again}/ is given more than once" in log.text


def test_a_comparison_that_cannot_be_written_names_the_option(runs, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"file/page\.html was not written: .*; choose another --output"):
        main([*map(str, runs), "--output", str(tmp_path / "file" / "page.html")])


def test_the_output_may_be_a_folder(runs, tmp_path, log):
    assert main([str(runs[0]), "--output", str(tmp_path)]) == 0 and (tmp_path / "report.html").is_file()
    assert main([*map(str, runs), "--output", f"{tmp_path}/new/"]) == 0
    assert (tmp_path / "new" / "comparison.html").is_file()


def test_a_report_that_cannot_be_written_says_where_else_to_write_it(runs, monkeypatch, log):
    def fail(*_):
        raise PermissionError(13, "Permission denied", "report.html")

    monkeypatch.setattr(report, "write_text_atomic", fail)
    assert main([str(runs[0])]) == 1
    assert f"python -m utils.evaluate.report {runs[0]} --output" in log.text


# --- in a browser -----------------------------------------------------------------------------------------------------


def test_everything_is_drawn_without_an_error(page):
    assert page.problems == []
    assert [address for address in page.requests if not address.startswith(("data:", "file:"))] == []
    assert page.evaluate("[...document.querySelectorAll('section')].map(part => part.dataset.title)") == SECTIONS
    titles = page.evaluate("[...document.querySelectorAll('.chart')].map(part => part.getAttribute('aria-label'))")
    wanted = {"Accuracy, YOLO's definition", "AP by object size, COCO's definition", "Box loss", "Learning rate"}
    wanted |= {"Precision over recall", "F1", "Pictures per second", "Gradient norm before clipping"}
    assert wanted <= set(titles)
    paths = page.evaluate("[...document.querySelectorAll('.chart path.series')].map(path => path.getAttribute('d'))")
    assert len(paths) > 25 and not [path for path in paths if "NaN" in path or "Infinity" in path or len(path) < 10]
    text = page.evaluate("document.body.innerText")
    assert "NaN" not in text and "undefined" not in text and "[object" not in text
    assert "python train_dual.py --cfg yolov9-s.yaml" in text
    pictures = "[...document.querySelectorAll('.examples img')]"
    assert page.evaluate(f"{pictures}.length") >= 8
    assert page.evaluate(f"{pictures}.every(image => image.complete && image.naturalWidth === 400)")
    links = page.evaluate("[...document.querySelectorAll('#files a')].map(link => link.getAttribute('href'))")
    assert "weights/best.pt" in links and "results.csv" in links


def test_class_table_sorts_both_ways(page):
    assert column(page, "figures per class", 0) == list(NAMES.values())
    heads = "document.querySelectorAll('table[aria-label=\"figures per class\"] th button')"
    titles = page.evaluate(f"[...{heads}].map(button => button.textContent)")
    number = titles.index("val labels")
    for direction in (-1, 1):
        page.evaluate(f"{heads}[{number}].click()")
        values = [float(value) for value in column(page, "figures per class", number)]
        assert values == sorted(values, reverse=direction < 0) and len(set(values)) > 1
    recall = titles.index("R")
    for _ in range(2):
        page.evaluate(f"{heads}[{recall}].click()")
        assert column(page, "figures per class", recall)[-1] == "–", "what is not known stays last"
    page.evaluate(f"{heads}[0].click()")
    assert column(page, "figures per class", 0)[0] == "bird"


def box_of(page, title: str) -> dict[str, float]:
    chart = f"[...document.querySelectorAll('.chart')].find(c => c.getAttribute('aria-label') === \"{title}\")"
    page.evaluate(f"{chart}.scrollIntoView({{block: 'center'}})")
    page.settle()
    return page.evaluate(f"(({{x, y, width, height}}) => ({{x, y, width, height}}))({chart}.getBoundingClientRect())")


def drag(page, box, start: float, end: float) -> None:
    y = box["y"] + box["height"] / 2
    page.mouse("moved", box["x"] + start * box["width"], y)
    page.mouse("pressed", box["x"] + start * box["width"], y)
    page.mouse("moved", box["x"] + (start + end) / 2 * box["width"], y)
    page.mouse("moved", box["x"] + end * box["width"], y)
    page.mouse("released", box["x"] + end * box["width"], y)
    page.settle()


def test_hovering_shows_values_and_dragging_zooms(page):
    box = box_of(page, "Box loss")
    page.mouse("moved", box["x"] + box["width"] * 0.95, box["y"] + 60)
    page.settle()
    tip = "[...document.querySelectorAll('.tip')].filter(tip => !tip.hidden).map(tip => tip.innerText).join('|')"
    shown = page.evaluate(tip)
    assert "epoch 7" in shown and "training" in shown and "validation" in shown
    assert re.search(r"training 1\.66\d", shown), shown  # 4 exp(-7/8) of the table

    labels = "[...[...document.querySelectorAll('.chart')].find(c => c.getAttribute('aria-label') === 'Class loss')"
    labels += ".querySelectorAll('text')].map(text => text.textContent).join(' ')"
    before = page.evaluate(labels)
    drag(page, box, 0.4, 0.7)
    zoomed = page.evaluate(labels)
    assert zoomed != before, "charts over epochs zoom together"
    assert page.evaluate("document.querySelectorAll('.reset:not([hidden])').length") > 3
    page.evaluate("document.querySelector('.reset:not([hidden])').click()")
    assert page.evaluate(labels) == before
    assert page.problems == []


def test_legend_hides_a_line_and_pictures_grow(page):
    count = "document.querySelectorAll('.chart path.series').length"
    before = page.evaluate(count)
    page.evaluate("document.querySelector('.legend button').click()")
    assert page.evaluate(count) == before - 1
    page.evaluate("document.querySelector('.examples img').click()")
    assert page.evaluate("document.querySelectorAll('.examples .card.large').length") == 1
    page.evaluate("document.querySelector('.choice').click()")
    cells = page.evaluate("[...document.querySelectorAll('.matrix td')].map(cell => cell.textContent).filter(Boolean)")
    assert all(cell.isdigit() for cell in cells)
    assert page.problems == []


@pytest.mark.parametrize("width", [400, 320])
def test_narrow_windows_need_no_sideways_scrolling(page, width):
    page.resize(width, 800)
    page.settle()
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    outside = (
        "[...document.querySelectorAll('main *')].filter(node => !node.closest('.scroll, nav, svg, .tip') && "
        f"node.getBoundingClientRect().right > {width} + 1).map(node => node.tagName + '.' + node.className)"
    )
    assert page.evaluate(outside) == []
    small = (
        "[...document.querySelectorAll('p, li, td, .name, .legend button')]"
        ".filter(node => parseFloat(getComputedStyle(node).fontSize) < 12).length"
    )
    assert page.evaluate(small) == 0
    assert page.evaluate("document.querySelector('.chart svg').getBoundingClientRect().width") > width * 0.8
    assert page.problems == []


def test_a_run_that_has_just_begun(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    for name in ("evaluation.json", "monitor.csv", "data_report.json"):
        (folder / name).unlink()
    header = (folder / "results.csv").read_text().splitlines()[0]
    for text in ("", header + "\n", "\n".join((folder / "results.csv").read_text().splitlines()[:2]) + "\n"):
        (folder / "results.csv").write_text(text)
        browser.problems.clear()
        browser.open(write_report(folder))
        assert browser.problems == []
        assert browser.evaluate("document.querySelector('h1').textContent") == "Training report: exp"


def test_many_classes(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    path = folder / "evaluation.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["classes"] = [{**content["classes"][0], "class": number, "name": f"class {number}"} for number in range(80)]
    content["confusion"] = {"size": 81, "confidence": 0.25, "iou": 0.45, "cells": [[n, n, 5] for n in range(81)]}
    path.write_text(json.dumps(content), encoding="utf-8")
    browser.problems.clear()
    browser.open(write_report(folder))
    assert browser.evaluate("document.querySelectorAll('canvas').length") == 1
    assert browser.problems == []
    assert browser.evaluate("document.querySelectorAll('.choice').length") == 0, "a picture shows shares only"


@pytest.mark.parametrize(
    "part", ["classes", "confusion", "curves", "worst", "coco", "sizes", "settings", "operating_confidence"]
)
@pytest.mark.parametrize("value", [None, 3, "text", [1], {"a": {"b": 1}}])
def test_data_of_an_unexpected_form_cost_their_section_only(browser, damaged, part, value):
    path = damaged / "evaluation.json"
    content = json.loads((damaged / "whole.json").read_text(encoding="utf-8"))
    path.write_text(json.dumps({**content, part: value}), encoding="utf-8")
    browser.problems.clear()
    browser.open(write_report(damaged))
    assert browser.problems == []
    titles = browser.evaluate("[...document.querySelectorAll('section')].map(part => part.dataset.title)")
    assert {"Summary", "Data", "Curves", "Monitor", "Files"} <= set(titles)
    assert browser.evaluate("document.querySelectorAll('#summary .tile').length") > 5 or part == "settings"


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    folder = make_run(tmp_path_factory.mktemp("damaged") / "exp", epochs=2)
    (folder / "evaluation.json").rename(folder / "whole.json")
    return folder


def test_damaged_files_and_columns_are_told_on_the_page(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    table = (folder / "results.csv").read_text()
    (folder / "evaluation.json").write_text("{")
    (folder / "results.csv").write_text(table.replace("epoch", "other", 1))
    browser.problems.clear()
    browser.open(write_report(folder))
    notes = browser.evaluate("document.querySelector('#notes').innerText")
    assert "evaluation.json could not be read" in notes and "'epoch'" in notes
    assert browser.problems == []


def test_axes_of_epochs_have_whole_numbers_and_huge_values_fit(browser, tmp_path):
    folder = make_run(tmp_path / "exp", epochs=2)
    head, *rows = (folder / "results.csv").read_text().splitlines()
    rows = [row.split(",") for row in rows]
    rows[1][1] = "1e308"
    (folder / "results.csv").write_text("\n".join([head, *map(",".join, rows)]) + "\n")
    browser.problems.clear()
    browser.open(write_report(folder))
    texts = "[...document.querySelectorAll('#curves svg')].flatMap(svg => [...svg.querySelectorAll('text')])"
    below = f"{texts}.filter(text => text.getAttribute('text-anchor') === 'middle').map(text => text.textContent)"
    assert set(browser.evaluate(below)) == {"0", "1"}
    assert browser.evaluate(f"{texts}.filter(text => text.getBBox().x < 0).map(text => text.textContent)") == []
    assert browser.problems == []


@pytest.mark.parametrize(("lowest", "highest"), [(990, 1010), (400, 3000), (3, 80), (1e-4, 1e4)])
def test_logarithmic_axes_have_round_numbers(browser, tmp_path, lowest, highest):
    folder = make_run(tmp_path / "exp", epochs=2)
    (folder / "monitor.csv").write_text(f"step,train/grad_norm\n1,{lowest}\n2,{highest}\n")
    browser.open(write_report(folder))
    charts = "[...document.querySelectorAll('#monitor .chart')]"
    chart = f"{charts}.find(chart => chart.getAttribute('aria-label').startsWith('Gradient norm'))"
    beside = f"[...{chart}.querySelectorAll('text[text-anchor=end]')].slice(0, -1)"  # the last is the name of the axis
    texts = browser.evaluate(f"{beside}.map(text => text.textContent.replace(/ /g, ''))")
    assert len(texts) >= 2
    for value in map(float, texts):
        digits = f"{value:.6e}".split("e")[0].replace(".", "").rstrip("0")
        assert len(digits) == 1 or highest / lowest < 2, f"{value} is not round"


def test_long_names_stay_inside_their_cards(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    for name in ("evaluation.json", "data_report.json"):
        text = (folder / name).read_text(encoding="utf-8")
        (folder / name).write_text(text.replace('"cat"', '"' + "a very long name " * 8 + '"'), encoding="utf-8")
    for width in (1400, 400):
        browser.resize(width, 800)
        browser.open(write_report(folder))
        outside = (
            "[...document.querySelectorAll('.card *')].filter(node => !node.closest('.scroll, svg, .tip') && "
            "node.getBoundingClientRect().right > node.closest('.card').getBoundingClientRect().right + 1)"
            ".map(node => node.outerHTML.slice(0, 80))"
        )
        assert browser.evaluate(outside) == []
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
    assert browser.problems == []


def test_without_labels_nothing_is_called_zero(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    path = folder / "evaluation.json"
    content = {**json.loads(path.read_text(encoding="utf-8")), "instances": 0, "map": 0, "map50": 0}
    path.write_text(json.dumps(content), encoding="utf-8")
    (folder / "results.csv").unlink()
    browser.open(write_report(folder))
    assert browser.evaluate("document.querySelector('#summary .tile.main .value').textContent") == "–"
    assert "has a label" in browser.evaluate("document.querySelector('#notes').innerText")


def test_curves_that_say_nothing_are_replaced_by_a_sentence(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    path = folder / "evaluation.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    content["curves"]["f1"]["mean"] = [0] * 101
    content["operating_confidence"] = 0
    path.write_text(json.dumps(content), encoding="utf-8")
    browser.open(write_report(folder))
    text = browser.evaluate("document.body.innerText")
    assert "No detection is right" in text and "confidence 0, where" not in text


def test_figures_beside_a_table_without_epochs_say_where_they_are_from(browser, tmp_path):
    folder = make_run(tmp_path / "exp")
    (folder / "results.csv").write_text("epoch,a\n0,1\n")
    browser.open(write_report(folder))
    text = browser.evaluate("document.body.innerText")
    assert "Figures of the last validation" in text and "No epoch was validated" not in text
    assert "results.csv has no column" in text
