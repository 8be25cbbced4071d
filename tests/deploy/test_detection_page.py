"""The page on detection: its Python runs, and the flags and files it names exist."""

from __future__ import annotations

import re
import sys
import types
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.deploy.fakes import ColourBackend, picture, write_picture
from utils.cli import make_parser
from utils.deploy import predictor as predictor_module
from utils.options import DetectOptions

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "detection.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


def test_every_flag_on_the_page_is_known() -> None:
    known = set(make_parser(DetectOptions, "")._option_string_actions)
    own = re.sub(r"`python -m bench[^`]*`", "", PAGE)
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", own))
    assert named <= known and {"--slice", "--save-csv", "--batch-size", "--video-codec"} <= named


def test_three_lines_and_the_conversion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass
    class Detections:
        xyxy: np.ndarray
        confidence: np.ndarray
        class_id: np.ndarray
        data: dict

    load, convert = SNIPPETS
    load_lines, convert_lines = ([line for line in text.splitlines() if line.strip()] for text in (load, convert))
    assert len(load_lines) == 3 and len(convert_lines) <= 10
    package = types.ModuleType("supervision")
    package.Detections = Detections
    monkeypatch.setitem(sys.modules, "supervision", package)
    monkeypatch.setattr(predictor_module, "DetectMultiBackend", lambda *_, **__: ColourBackend())
    monkeypatch.setattr(predictor_module, "select_device", lambda device: "cpu")
    write_picture(tmp_path / "street.jpg", picture(192, 128, green=True))
    monkeypatch.chdir(tmp_path)
    scope: dict[str, object] = {}
    exec(load + convert, scope)  # text of our own page
    converted = scope["to_supervision"](scope["found"])
    assert converted.xyxy.shape == (2, 4) and converted.xyxy.dtype == np.float32
    assert converted.class_id.tolist() == [0, 1] and converted.data["class_name"].tolist() == ["red", "green"]


def test_with_the_package_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("supervision", reason="the package supervision is not installed (pip install supervision)")
    found = predictor_module.Predictor(ColourBackend(), imgsz=96)([picture(green=True), picture(box=None)])
    scope: dict[str, object] = {}
    exec(SNIPPETS[1], scope)
    full, empty = (scope["to_supervision"](one) for one in found)
    assert len(full) == 2 and len(empty) == 0 and full["class_name"].tolist() == ["red", "green"]
