"""Fonts for names of any script: which one is taken, and what happens where none fits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import matplotlib
import pytest

from utils.evaluate import fonts
from utils.evaluate.draw import class_name
from utils.evaluate.fonts import can_draw, font_files, font_for, text_mask

BUNDLED = Path(matplotlib.get_data_path()) / "fonts" / "ttf"
LATIN_ONLY, WIDE = BUNDLED / "cmr10.ttf", BUNDLED / "DejaVuSans.ttf"


@pytest.fixture(autouse=True)
def fresh_search() -> Iterator[None]:
    fonts.forget_fonts()
    yield
    fonts.forget_fonts()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An empty folder that takes the place of the system's fonts."""
    monkeypatch.delenv("YOLO_FONT", raising=False)
    monkeypatch.setattr(fonts, "_system_folders", lambda: [tmp_path, tmp_path / "absent"])
    return tmp_path


def test_names_are_drawn_where_a_font_has_them(installed: Path) -> None:
    assert class_name(1, ["cat", "кошка"]) == "кошка"
    assert class_name(0, {0: "Ελληνικά ğß"}) == "Ελληνικά ğß"
    assert class_name(7, {7: "行人"}) == "7"  # not among the glyphs of the bundled font
    assert not can_draw("two\nlines") and can_draw("two words")


def test_the_first_font_with_all_letters_is_taken(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "font_files", lambda: (LATIN_ONLY, WIDE))
    assert font_for("cafe") == LATIN_ONLY and font_for("кошка") == WIDE and font_for("行人") is None
    opacity, _ = text_mask("кошка 0.90", 20)
    assert opacity.shape[1] > 3 * opacity.shape[0] and opacity.max() == 1


def test_fonts_of_the_system_come_behind_the_bundled_one(installed: Path) -> None:
    for name in ("b.ttf", "NotoSansCJK-Bold.ttc", "NotoSansCJK-Regular.ttc", "deep/a.otf", "note.txt"):
        (installed / name).parent.mkdir(exist_ok=True)
        (installed / name).write_bytes(b"")
    names = [path.name for path in font_files()]
    assert names == ["DejaVuSans.ttf", "NotoSansCJK-Regular.ttc", "NotoSansCJK-Bold.ttc", "b.ttf", "a.otf"]
    assert class_name(7, {7: "行人"}) == "7"  # none of these files is a font


def test_a_font_of_ones_own_comes_first(installed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("YOLO_FONT", str(LATIN_ONLY))
    assert font_for("cafe") == LATIN_ONLY
    fonts.forget_fonts()
    monkeypatch.setenv("YOLO_FONT", str(installed / "absent.ttf"))
    assert font_for("cafe") == WIDE


def test_without_any_font_names_beyond_ascii_become_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fonts, "font_files", lambda: ())
    assert class_name(1, {1: "кошка"}) == "1" and class_name(1, {1: "cat"}) == "cat"
    assert text_mask("кошка", 20)[0].max() == 0
