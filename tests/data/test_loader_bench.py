"""The programs that measure loading: they run, and their figures mean what they say."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import numpy as np
import pytest

from bench import loader as bench
from bench import pictures, records
from tests.data.loader_kit import loader_of, probe_loader
from utils.data.images import imread_bgr
from utils.data.labels import read_label_file
from utils.log import LOGGER


def test_made_pictures_have_one_size_and_weight(tmp_path: Path, shapes_dataset: Path) -> None:
    for number, sources in enumerate(([], [shapes_dataset.parent])):
        folder = pictures.make_pictures(tmp_path / str(number), 2, sources)
        files = sorted(folder.iterdir())
        assert len(files) == 2
        for file in files:
            assert imread_bgr(file).shape == (480, 640, 3)
            assert file.stat().st_size <= pictures.TARGET_BYTES
            rows = read_label_file(Path(str(file).replace("images", "labels")).with_suffix(".txt"))
            assert len(rows.boxes) >= 1
            assert not rows.problems
    noise = sorted((tmp_path / "0" / "images" / "train").iterdir())
    assert all(file.stat().st_size > 0.7 * pictures.TARGET_BYTES for file in noise)


def test_drawn_and_cut_pictures_follow_from_the_generator() -> None:
    first, second = (pictures.clouds(np.random.default_rng(3)) for _ in range(2))
    assert np.array_equal(first, second)
    small = np.arange(30 * 50 * 3, dtype=np.uint8).reshape(30, 50, 3)
    assert pictures.cut(small, np.random.default_rng(0)).shape == (480, 640, 3)
    assert pictures.random_rows(np.random.default_rng(1)) == pictures.random_rows(np.random.default_rng(1))
    assert len(pictures.encode_to_size(first, 40_000)) <= 40_000
    assert pictures.read_sources([Path("no such folder")]) == []


def test_records_are_added_below_the_header(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "RECORDS.md"
    folder = tmp_path / "pictures"
    monkeypatch.setattr(sys, "argv", [str(records.REPO_ROOT / "bench" / "loader.py"), "--pictures", str(folder)])
    records.append_record("1 | 2", 3, file=file)
    row = records.append_record("4 img/s", 5, command="another", file=file)
    text = file.read_text(encoding="utf-8")
    assert text.startswith(records.HEADER)
    assert text.endswith(row)
    assert text.splitlines()[-2].count("|") == text.splitlines()[-1].count("|") == 8
    assert "`python -m bench.loader --pictures pictures` | 1 / 2 | 3 |" in text
    assert str(tmp_path) not in text
    assert f"Python {sys.version.split()[0]}" in records.versions()
    assert "cores" in records.hardware()
    assert records.commit()


def test_the_stage_clock_counts_each_second_once() -> None:
    clock = bench.StageClock()

    def burn(seconds: float) -> None:
        end = time.thread_time() + seconds
        while time.thread_time() < end:
            pass

    inner = clock.wrap("inner", lambda: burn(0.04))

    def outer() -> None:
        burn(0.02)
        inner()

    clock.wrap("outer", outer)()
    assert clock.seconds["inner"] == pytest.approx(0.04, abs=0.01)
    assert clock.seconds["outer"] == pytest.approx(0.02, abs=0.01)


def test_stages_cover_most_of_a_sample(shapes_dataset: Path) -> None:
    dataset = loader_of(shapes_dataset).dataset
    stages = bench.measure_stages(dataset, 8)
    assert {"read and decode", "mosaic", "affine", "HSV, planes", "collate", "other", "total"} <= set(stages)
    assert sum(stages.values()) == pytest.approx(2 * stages["total"])
    assert stages["other"] < 0.7 * stages["total"]


def test_announcing_takes_away_the_wait_between_epochs() -> None:
    loader = probe_loader(1, length=8)
    assert len(list(zip(range(12), bench.endless(loader), strict=False))) == 12
    speed = bench.measure_speed(loader, 0.05, 2)
    assert speed.rate > 0
    assert speed.processor_ms > 0
    assert bench.measure_gap(loader, 0.02, announce=True) < 0.02
    loader.close()


@pytest.mark.slow
def test_the_program_prints_a_table_and_records_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[str] = []
    monkeypatch.setattr(bench, "append_record", lambda figures, runs: rows.append(f"{figures} {runs}") or "row")
    level = LOGGER.level
    words = "--make 12 --workers 0 1 --cache none ram --mosaic-cache 4 --imgsz 64 --batch 4 --seconds 0.1 --runs 2"
    try:
        assert bench.main([*words.split(), "--gap", "--record"]) == 0
    finally:
        LOGGER.setLevel(level)
    out = capsys.readouterr().out
    assert "12 pictures of" in out
    assert "read and decode" in out
    assert "none + 4 mosaics" in out
    assert "announced" in out
    assert len(rows) == 1
    assert "cache none: 0 workers" in rows[0]
    with pytest.raises(SystemExit):
        bench.parse(["--workers", "0"])
