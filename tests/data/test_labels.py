"""Rules for rows of label files, one by one."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.data.drawing import encode, paint
from utils.data.labels import (
    REFUSED,
    LabelFile,
    LabelFinder,
    decode_text,
    image_to_label_path,
    label_paths,
    parse_label_text,
    read_label_file,
    rectangle_points,
)
from utils.data.scan import scan_dataset
from utils.log import LOGGER

GOOD = "0 0.5 0.5 0.2 0.4"
ENCODINGS = ("utf-8", "utf-8-sig", "utf-16", "utf-16-be", "latin-1")


def encoded(text: str, encoding: str) -> bytes:
    """Bytes of a text; characters that an encoding does not know are replaced."""
    return text.encode(encoding, "replace")


def boxes_of(text: str) -> list[list[float]]:
    """Boxes of a text, rounded to what six decimals can hold."""
    return np.round(parse_label_text(text).boxes.astype(np.float64), 5).tolist()


def test_plain_rows_keep_their_order() -> None:
    assert boxes_of("2 .5 .5 .2 .2\n0 .1 .2 .1 .2\n") == [[2, 0.5, 0.5, 0.2, 0.2], [0, 0.1, 0.2, 0.1, 0.2]]


@pytest.mark.parametrize(
    "text",
    [
        GOOD.replace(" ", "\t"),
        f"  {GOOD}  \r\n\r\n",
        f"# remark\n{GOOD}\n   \n",
        f"\r{GOOD}\r",
        "0.0 5e-1 +0.5 2.0E-1 .4",
        "0,0.5,0.5,0.2,0.4",
        "0, 0.5, 0.5, 0.2, 0.4",
        "0 0,5 0,5 0,2 0,4",
        f"{GOOD} 0.93",
    ],
)
def test_spellings_of_one_box(text: str) -> None:
    label = parse_label_text(text)
    assert label.error is None
    assert label.refused == 0
    np.testing.assert_allclose(label.boxes, [[0, 0.5, 0.5, 0.2, 0.4]], atol=1e-6)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ("1.7 .5 .5 .2 .2", "1.7"),
        ("-1 .5 .5 .2 .2", "integer"),
        ("cat .5 .5 .2 .2", "'cat' is not a number"),
        ("1_0 .5 .5 .2 .2", "not a number"),
        ("0 nan .5 .2 .2", "not finite"),
        ("0 .5 inf .2 .2", "not finite"),
        ("0 .5 .5 -.2 .2", "negative size"),
        ("0 .5 .5 0 .2", "zero width"),
        ("0 .5 .5 .2 0", "zero width or height"),
        ("0 1.5 .5 .2 .2", "outside the picture"),
        ("0 .5 .5 .2", "4 columns"),
        ("0", "5 columns are needed"),
        ("0 .1 .1 .2 .2 .3 .3 .4", "8 columns"),
        ("0 .1 .1 .1 .3 .1 .7", "zero width"),
        ("0 0,5 .5 0,2 .4", "commas"),
        ("0,5 0,5,1 0,2 0,4 0,1", "commas"),
    ],
)
def test_bad_row_costs_only_itself(row: str, reason: str) -> None:
    label = parse_label_text(f"{GOOD}\n\n{row}\n1 .5 .5 .2 .2\n")
    assert label.error is None
    assert label.boxes[:, 0].tolist() == [0, 1]
    assert label.lines.tolist() == [1, 4]
    assert label.refused == 1
    assert label.problems[0].line == 3
    assert reason in label.problems[-1].text


@pytest.mark.parametrize(
    ("row", "found"),
    [
        ("[0, 0.5, 0.5, 0.2, 0.2]", "brackets"),
        ("[0 0.5 0.5 0.2 0.2]", "brackets"),
        ("0 (0.5 0.5) (0.2 0.2)", "brackets"),
        ("{0 .5 .5 .2 .2}", "brackets"),
        ("0 .5 .5 .2 .2]", "brackets"),
        ("0;0.5;0.5;0.2;0.2", "semicolons"),
        ("0; 0.5; 0.5; 0.2; 0.2", "semicolons"),
        ("0;0,5;0,5;0,2;0,2", "semicolons"),
        ("0 .5 .5 .2 .2;", "semicolons"),
        ("0: .5 .5 .2 .2", "colons"),
        ("'0' .5 .5 .2 .2", "quotation marks"),
        ('"0",".5",".5",".2",".2"', "quotation marks"),
        ("0 50% 50% 20% 20%", "percent signs"),
        ("0|.5|.5|.2|.2", "bars"),
        ("0 .5 .5 .2 .2,", "a comma at the end"),
        ("0, .5, .5, .2, .2,", "a comma at the end"),
        ("0,0.5,0.5,0.2,0.2,", "a comma at the end"),
        ("0 0,5 0,5 0,2 0,2,", "a comma at the end"),
        ("0 0,5 .5 0,2 .4", "commas and points"),
        ("0,0,5,0,5,0,2,0,2", "commas"),  # nine columns, or five with decimal commas
        ("0,,0.5,0.5,0.2", "commas"),
        (",0.5,0.5,0.2,0.2", "commas"),
        ("0 0,5", "2 columns"),
        ("cat .5 .5 .2 .2", "'cat' is not a number"),
        ("0 .5 .5 .2 wide", "'wide' is not a number"),
        ("0.5", "1 column"),
    ],
)
def test_a_refused_row_tells_what_was_found_and_what_was_expected(row: str, found: str) -> None:
    label = parse_label_text(f"{GOOD}\n{row}\n")
    assert label.refused == 1
    assert found in label.problems[-1].text
    assert "expected" in label.problems[-1].text
    assert "separated by spaces" in label.problems[-1].text
    assert "0 0.5 0.5 0.2 0.4" in label.problems[-1].text
    assert len(label.problems[-1].text) < 250
    assert label.problems[-1].kind


def test_a_class_given_by_name_is_told_from_other_words() -> None:
    text = parse_label_text("traffic_light .5 .5 .2 .2\n").problems[0].text
    assert "'traffic_light' is not a number" in text
    assert "class number" in text


def test_only_bad_rows_leave_the_picture_out() -> None:
    label = parse_label_text("0\n")
    assert label.error is not None
    assert "5 columns" in label.error
    assert "line 1" in label.error


def test_pixel_values_leave_the_picture_out() -> None:
    label = parse_label_text(f"{GOOD}\n0 25.6 24.0 30.7 28.8")
    assert label.error is not None
    assert "pixels" in label.error
    assert "line 2" in label.error


def test_empty_text_is_background() -> None:
    for text in ("", "\n \n\t\n", "# nothing here\n"):
        label = parse_label_text(text)
        assert label.error is None
        assert label.boxes.shape == (0, 5)


def test_rows_are_read_each_for_itself() -> None:
    label = parse_label_text("0 .1 .1 .3 .1 .3 .4 .1 .4\n1 .7 .3 .3 .2\n2 .1 .2 .5 .2 .3 .6\n")
    np.testing.assert_allclose(
        label.boxes, [[0, 0.2, 0.25, 0.2, 0.3], [1, 0.7, 0.3, 0.3, 0.2], [2, 0.3, 0.4, 0.4, 0.4]], atol=1e-6
    )
    assert [len(points) for points in label.segments] == [4, 0, 3]
    assert label.has_polygons


def test_overshoot_is_clipped_and_counted() -> None:
    label = parse_label_text("3 .5 .5 1.0021 .4\n0 .95 .3 .3 .3\n1 .8 .4 1.0021 .4 1.0021 .6 .8 .6\n")
    wanted = [[3, 0.5, 0.5, 1, 0.4], [0, 0.9, 0.3, 0.2, 0.3], [1, 0.9, 0.5, 0.2, 0.2]]
    np.testing.assert_allclose(label.boxes, wanted, atol=1e-6)
    assert label.segments[2].max() == 1
    assert label.clipped == 3


def test_rounding_of_decimals_is_not_counted() -> None:
    label = parse_label_text("0 0.050000 0.5 0.100002 0.2")
    assert label.clipped == 0
    assert label.boxes[0, 1] - label.boxes[0, 3] / 2 >= 0


def test_duplicates_are_kept_once_other_classes_stay() -> None:
    label = parse_label_text(f"{GOOD}\n1 0.5 0.5 0.2 0.4\n{GOOD}\n0 .50 .5 .2 .4\n")
    assert label.boxes[:, 0].tolist() == [0, 1]
    assert label.duplicates == 2


def test_remarks_are_made_once() -> None:
    label = parse_label_text("0 .5 .5 .2 .2 .9\n1 .5 .5 .2 .2 .8\n")
    assert len(label.boxes) == 2
    assert len(label.problems) == 1
    assert "6 columns" in label.problems[-1].text


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be"])
def test_encodings(tmp_path: Path, encoding: str) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"{GOOD}\r\n1 .5 .5 .1 .1\r\n".encode(encoding))
    assert read_label_file(path).boxes[:, 0].tolist() == [0, 1]


def test_unknown_encoding_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(f"# größe\n{GOOD}\n".encode("latin-1"))
    assert "encoding" in (read_label_file(path).error or "")
    with pytest.raises(UnicodeDecodeError):
        decode_text(b"\xff0 .5")


@pytest.mark.parametrize(
    ("image", "label"),
    [
        ("/a/images/b/images/x.jpg", "/a/images/b/labels/x.txt"),
        ("/a/images/x.y.jpg", "/a/labels/x.y.txt"),
        ("/a/b/x.jpg", "/a/b/x.txt"),
        ("images/x.jpg", "labels/x.txt"),
        ("/a/images_2/x.jpg", "/a/images_2/x.txt"),
        ("/a/images/images.jpg", "/a/labels/images.txt"),
        ("/a/Images/x.JPG", "/a/labels/x.txt"),
    ],
)
def test_label_path(image: str, label: str) -> None:
    assert image_to_label_path(image) == Path(label)
    assert label_paths([image, image]) == [label, label]


def test_label_under_another_spelling_is_found(tmp_path: Path) -> None:
    folder = tmp_path / "Labels"
    folder.mkdir()
    (folder / "Cafe\u0301.TXT").write_text(GOOD)
    found = LabelFinder().find(str(tmp_path / "labels" / "caf\u00e9.txt"))
    assert found == str(folder / "Cafe\u0301.TXT")
    assert LabelFinder().find(str(tmp_path / "labels" / "tea.txt")) is None


def test_rectangle_goes_round_the_box() -> None:
    points = rectangle_points(np.float32((0.5, 0.4, 0.2, 0.6)))
    np.testing.assert_allclose(points, [(0.4, 0.1), (0.6, 0.1), (0.6, 0.7), (0.4, 0.7)], atol=1e-6)


@settings(max_examples=200)
@given(st.lists(st.floats(-2, 2), min_size=4, max_size=16))
def test_whatever_is_accepted_lies_in_the_picture(values: list[float]) -> None:
    label = parse_label_text("0 " + " ".join(map(repr, values)))
    for _, x, y, w, h in label.boxes.astype(np.float64):
        assert w > 0
        assert h > 0
        assert min(x - w / 2, y - h / 2) >= -1e-6
        assert max(x + w / 2, y + h / 2) <= 1 + 1e-6
    assert np.isfinite(label.boxes).all()


@settings(max_examples=200)
@given(st.text(max_size=80))
def test_no_text_is_too_strange(text: str) -> None:
    label = parse_label_text(text)
    assert label.boxes.shape[1] == 5
    assert len(label.boxes) == len(label.segments) == len(label.lines)


FIELD = st.one_of(
    st.floats(width=64).map(repr),
    st.floats(-0.5, 1.5).map(lambda value: f"{value:.6f}"),
    st.integers(-5, 10**30).map(str),
    st.sampled_from(
        ["", "0,5", "1e400", "-0", "nan", "1_0", "\u0663", "#", "\x00", "\ufeff", ".5", "5.", "1e-320", "x"]
    ),
)
ROW = st.lists(FIELD, max_size=12).map(" ".join)
TEXT = st.lists(st.one_of(ROW, st.text(max_size=30)), max_size=6).map("\n".join)


def check_outcome(label: LabelFile) -> None:
    """Either clean boxes and problems with their lines, or a reason why the picture is left out."""
    if label.error is not None:
        assert label.error and label.error_kind
        assert not len(label.boxes) or "no usable row" in label.error
        return
    boxes = label.boxes.astype(np.float64)
    assert label.boxes.dtype == np.float32
    assert boxes.shape == (len(label.segments), 5) == (len(label.lines), 5)
    assert np.isfinite(boxes).all()
    assert (boxes[:, 0] == boxes[:, 0].astype(np.int64)).all() and (boxes[:, 0] >= 0).all()
    assert ((boxes[:, 1:] >= 0) & (boxes[:, 1:] <= 1)).all()
    assert (boxes[:, 3:] > 0).all()
    edges = np.concatenate((boxes[:, 1:3] - boxes[:, 3:] / 2, boxes[:, 1:3] + boxes[:, 3:] / 2))
    assert ((edges > -1e-6) & (edges < 1 + 1e-6)).all()
    for points in label.segments:
        assert ((points >= 0) & (points <= 1)).all()
    refused = [problem for problem in label.problems if problem.text.startswith(REFUSED)]
    assert len(refused) == label.refused
    assert label.rows == label.refused + label.duplicates + len(boxes)
    assert all(problem.line >= 1 and problem.kind for problem in label.problems)


@settings(max_examples=250)
@given(TEXT)
def test_any_rows_give_clean_boxes_or_named_problems(text: str) -> None:
    check_outcome(parse_label_text(text))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    data=st.one_of(st.binary(max_size=200), st.tuples(TEXT, st.sampled_from(ENCODINGS)).map(lambda p: encoded(*p))),
)
def test_any_bytes_give_clean_boxes_or_named_problems(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(data)
    check_outcome(read_label_file(path))


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.one_of(st.binary(max_size=120), TEXT.map(lambda text: encoded(text, "utf-8"))))
def test_the_scan_names_file_and_line_of_whatever_it_refuses(tmp_path: Path, data: bytes) -> None:
    image, label = tmp_path / "a.png", tmp_path / "a.txt"
    if not image.exists():
        image.write_bytes(encode(paint(16, 16)))
    label.write_bytes(data)
    LOGGER.setLevel(logging.ERROR)
    try:
        result = scan_dataset(image, use_cache=False)
    except ValueError as error:
        assert "none of the 1 pictures" in str(error)
        return
    finally:
        LOGGER.setLevel(logging.INFO)
    assert np.isfinite(result.labels.values).all()
    refused = [problem for problem in result.problems if problem.is_refused_row]
    assert len(refused) == result.counts.rows_refused
    assert all(problem.path == str(label) and problem.line >= 1 for problem in refused)


def test_class_numbers_beyond_what_labels_can_hold_are_refused() -> None:
    assert boxes_of("16777215 .5 .5 .1 .1")[0][0] == 16777215
    label = parse_label_text(f"{GOOD}\n16777217 .5 .5 .1 .1\n1e300 .5 .5 .1 .1\n")
    assert label.refused == 2
