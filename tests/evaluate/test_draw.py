"""Drawing: colours, boxes, labels of several scripts, picture grids. Pixels are looked at, not only files."""

from __future__ import annotations

import cv2
import numpy as np
import pytest
import torch

from utils.evaluate import draw
from utils.evaluate.draw import (
    Annotator,
    Colors,
    class_name,
    colors,
    draw_boxes,
    output_to_target,
    plot_images,
)


def test_twenty_colours_that_carry_white_text():
    assert len(set(colors.palette)) == colors.n == 20
    assert colors(3) == colors(23) == colors(3, bgr=True)[::-1]
    for red, green, blue in Colors().palette:
        assert all(0 <= part <= 255 for part in (red, green, blue))
        assert 0.299 * red + 0.587 * green + 0.114 * blue <= Colors.LIMIT + 2


def test_frame_and_label_strip_above_the_box():
    annotator = Annotator(np.zeros((100, 200, 3), np.uint8), line_width=2)
    annotator.box_label((50, 50, 150, 90), "cat", color=(0, 0, 200))
    image = annotator.result()
    assert image[70, 50].tolist() == [0, 0, 200]  # left edge
    assert image[90, 100].tolist() == [0, 0, 200]  # lower edge
    assert image[70, 100].tolist() == [0, 0, 0]  # inside
    strip = image[50 - annotator.text_size("cat")[1] : 48, 50:80]
    assert (strip == 255).all(2).any(), "white letters"
    assert (strip == (0, 0, 200)).all(2).any(), "on the colour of the box"


@pytest.mark.parametrize("box", [(0, 0, 60, 40), (180, 5, 199, 40), (-50, -50, 400, 300), (10, 10, 10, 10)])
def test_labels_stay_inside_the_image(box):
    image = draw_boxes(np.zeros((60, 200, 3), np.uint8), torch.tensor([[*box, 0.5, 0.0]]), {0: "a rather long name"})
    assert (image == 255).all(2).sum() > 50


def test_the_array_is_drawn_on_in_place_unless_it_cannot_be():
    image = np.zeros((40, 40, 3), np.uint8)
    assert Annotator(image).result() is image
    frozen = np.zeros((40, 40, 3), np.uint8)
    frozen.flags.writeable = False
    annotator = Annotator(frozen)
    annotator.rectangle((5, 5, 20, 20), fill=(1, 2, 3), outline=(9, 9, 9))
    assert frozen.max() == 0 and annotator.result()[10, 10].tolist() == [1, 2, 3]


def test_the_most_confident_box_is_on_top():
    rows = torch.tensor([[10.0, 10, 90, 90, 0.9, 0], [10, 10, 90, 90, 0.3, 1]])
    for order in ([0, 1], [1, 0]):
        image = draw_boxes(np.zeros((100, 100, 3), np.uint8), rows[order], {0: "a", 1: "b"}, hide_labels=True)
        assert image[50, 10].tolist() == list(colors(0, bgr=True))


def test_labels_can_be_hidden():
    row = torch.tensor([[10.0, 40, 90, 90, 0.9, 0]])

    def ink(**keywords):
        return int((draw_boxes(np.zeros((100, 200, 3), np.uint8), row, {0: "abc"}, **keywords) == 255).all(2).sum())

    assert ink(hide_labels=True) == 0
    assert 0 < ink(hide_conf=True) < ink()


def test_nothing_to_draw_changes_nothing():
    assert draw_boxes(np.zeros((9, 9, 3), np.uint8), torch.zeros(0, 6)).max() == 0


def test_letters_beyond_ascii_leave_ink():
    annotator = Annotator(np.zeros((60, 200, 3), np.uint8), line_width=2)
    annotator.box_label((5, 30, 190, 58), "кошка 0.90", color=(90, 0, 0))
    image = annotator.result()
    assert (image[:30].min(2) > 200).sum() > 60
    width, height = annotator.text_size("кошка 0.90")
    assert width > 5 * height


def test_classes_without_a_name_are_drawn_as_numbers():
    assert class_name(5, {0: "cat"}) == "5" and class_name(0, {0: ""}) == "0" and class_name(2, ()) == "2"
    assert class_name(1, ["cat", "dog\n"]) == "1"


def test_grid_is_filled_column_by_column(tmp_path):
    images = torch.zeros(3, 3, 64, 64, dtype=torch.uint8)
    for index, value in enumerate((60, 120, 180)):
        images[index, 0] = value  # red
    plot_images(images, torch.zeros(0, 6), None, tmp_path / "grid.png")
    grid = cv2.imread(str(tmp_path / "grid.png"))
    assert grid.shape == (128, 128, 3)
    assert [grid[y, x].tolist() for y, x in ((32, 32), (96, 32), (32, 96))] == [[0, 0, 60], [0, 0, 120], [0, 0, 180]]
    assert grid[96, 96].tolist() == [255, 255, 255]


@pytest.mark.parametrize("as_pixels", [False, True])
def test_grid_draws_boxes_where_they_are(tmp_path, as_pixels):
    images = torch.zeros(2, 3, 100, 200)
    size = torch.tensor([200, 100, 200, 100]) if as_pixels else torch.ones(4)
    box = (torch.tensor([0.5, 0.5, 0.5, 0.4]) * size).tolist()
    rows = torch.tensor([[1, 2, *box, 0.9], [1, 3, *box, 0.2], [0, 3, *box, 0.25]])
    plot_images(images, rows, ("a.jpg", "имя.jpg"), tmp_path / "grid.png", {2: "bird"})
    grid = cv2.imread(str(tmp_path / "grid.png"))
    assert grid[100 + 50, 50].tolist() == list(colors(2, bgr=True))
    assert grid[100 + 70, 100].tolist() == list(colors(2, bgr=True))
    assert grid[50, 50].tolist() == [0, 0, 0], "predictions of little confidence are left out"


def test_grid_is_limited_in_images_and_size(tmp_path):
    plot_images(torch.zeros(20, 3, 640, 640, dtype=torch.uint8), np.zeros((0, 7)), None, tmp_path / "grid.jpg")
    assert cv2.imread(str(tmp_path / "grid.jpg")).shape == (1920, 1920, 3)


def test_a_plot_that_fails_ends_in_one_warning(monkeypatch, tmp_path):
    told = []
    monkeypatch.setattr(draw._failures, "counts", type(draw._failures.counts)())
    monkeypatch.setattr("utils.log.LOGGER.warning", told.append)
    for _ in range(3):
        plot_images(torch.zeros(1, 3, 8, 8), torch.zeros(0, 6), None, tmp_path / "a" / "grid.unknown")
    assert len(told) == 1 and "the run goes on" in told[0]


def test_detections_become_rows_for_the_grid():
    rows = output_to_target(
        [torch.zeros(0, 6), torch.tensor([[0.0, 0, 10, 20, 0.5, 3], [0, 0, 2, 2, 0.4, 1]])], max_det=1
    )
    assert rows.tolist() == [[1, 3, 5, 10, 10, 20, 0.5]]


def test_images_are_written_under_names_of_any_script(tmp_path):
    draw.write_image(tmp_path / "行人.png", np.full((4, 4, 3), 7, np.uint8))
    assert (tmp_path / "行人.png").stat().st_size > 0
    with pytest.raises(ValueError, match="cannot be encoded"):
        draw.write_image(tmp_path / "a.jpg", np.zeros((0, 0, 3), np.uint8))
