"""Runs into folders that exist: what detection did not write stays, and so do results of other inputs."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from tests.deploy.fakes import ColourBackend, picture, write_picture, write_video
from tests.deploy.runs import contents, detect, files_of, table_of
from utils.deploy import run_folder
from utils.deploy.record import RECORD_NAME, Input, replace_file
from utils.deploy.run_folder import SaveOptions, claimed, make_folder, plan_run
from utils.deploy.writers import RunWriter
from utils.files import lock_folder

EVERYTHING = {"save_txt": True, "save_crop": True, "save_csv": True, "save_json": True}


def run_into(folder: Path, source: Path, **options: object) -> None:
    """Detect with ``folder`` as the run's own."""
    detect(folder.parent, source, project=str(folder.parent), name=folder.name, exist_ok=True, **options)


def refused(folder: Path, source: Path, reason: str, **options: object) -> None:
    """Check that a run is refused and everything in its folder as it was."""
    before = contents(folder)
    with pytest.raises(ValueError, match=reason) as told:
        run_into(folder, source, **options)
    assert str(told.value).count("choose another") == 1
    assert contents(folder) == before and not (folder / ".lock").exists()


# --- files of the user ---


@pytest.fixture
def data_set(tmp_path: Path) -> Path:
    for name in "ab":
        write_picture(tmp_path / "my/valid/images" / f"{name}.jpg")
    (tmp_path / "my/valid/labels").mkdir()
    (tmp_path / "my/valid/labels/a.txt").write_text("0 0.5 0.5 1 1\n")
    return tmp_path / "my/valid"


def test_a_data_set_is_no_folder_for_results(data_set: Path) -> None:
    """Neither at once nor after a run of another kind, nor with a table that looks like one's own."""
    refused(data_set, data_set / "images", "perhaps a data set", save_txt=True)
    refused(data_set, data_set / "images", "perhaps a data set", conf_thres=0.5)
    (data_set / "results.txt").write_text("# file\tframe\tclass\tname\tconfidence\tx1\ty1\tx2\ty2\n")
    refused(data_set, data_set / "images", "perhaps a data set", save_txt=True)
    refused(data_set / "images", data_set / "images", "its own source")


@pytest.mark.parametrize("kept", ["images", "labels"])
def test_labels_of_a_user_stay_after_a_run_without_labels(data_set: Path, tmp_path: Path, kept: str) -> None:
    source = tmp_path / "elsewhere"
    write_picture(source / "a.jpg")
    (data_set / ("labels" if kept == "images" else "images")).rename(tmp_path / "aside")
    run_into(data_set, source, nosave=True)  # is let through, since nothing is in its way
    refused(data_set, source, f"{kept} is not in the record", save_txt=True)


def test_a_label_that_was_corrected_by_hand_stays(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    run_into(tmp_path / "out", tmp_path / "a.jpg", save_txt=True)
    label = tmp_path / "out/labels/a.txt"
    label.write_text(label.read_text().replace("0 ", "1 ", 1))  # of the same length
    refused(tmp_path / "out", tmp_path / "a.jpg", r"labels/a\.txt was changed since", save_txt=True)


@pytest.mark.parametrize(
    "name", ["a.jpg", "v.mp4", "labels/a.txt", "labels/v_2.txt", "results.txt", "detections.csv", "detections.json"]
)
@pytest.mark.parametrize("is_link", [False, True])
def test_no_foreign_file_is_replaced(tmp_path: Path, name: str, is_link: bool) -> None:
    """Files that a user put where results go, also behind links, also after an earlier run."""
    write_picture(tmp_path / "in" / "a.jpg")
    write_video(tmp_path / "in" / "v.mp4", 3)
    run_into(tmp_path / "out", tmp_path / "in" / "a.jpg")
    place = tmp_path / "out" / name
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    if is_link:
        (tmp_path / "precious").write_text("mine")
        place.symlink_to(tmp_path / "precious")
    else:
        place.write_text("mine")
    refused(tmp_path / "out", tmp_path / "in", "is not in the record|was changed since", **EVERYTHING)
    assert place.read_text() == "mine"


def test_crops_go_round_foreign_files(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    mine = tmp_path / "out/crops/red/a.jpg"
    mine.parent.mkdir(parents=True)
    mine.write_text("mine")
    run_into(tmp_path / "out", tmp_path / "a.jpg", save_crop=True)
    assert mine.read_text() == "mine" and (mine.parent / "a2.jpg").is_file()


def test_feature_maps_replace_those_of_the_same_input_only(tmp_path: Path) -> None:
    """In a folder that pictures share; what no run wrote ends the run before it is touched."""
    (tmp_path / "out").mkdir()
    (tmp_path / "maps").mkdir()
    inputs = [Input(name, name, Path(name), False) for name in ("a.jpg", "a/b.jpg")]

    def write(*files: str) -> None:
        for path in (tmp_path / "maps").iterdir():
            path.unlink()
        for name in files:
            (tmp_path / "maps" / name).write_text("map")
        with RunWriter(plan_run(tmp_path / "out", inputs, SaveOptions(visualize=True)), {}) as writer:
            writer.write(1, 0, picture(), picture(), np.zeros((0, 6), np.float32), 0)
            writer.write_maps(0, tmp_path / "maps", writer.outputs[0].maps_folder(0))

    write("x_features.png", "x_features.npy")
    assert files_of(tmp_path / "out") == ["a/b.jpg", "a/x_features.npy", "a/x_features.png", "results.txt"]
    write("y_features.png")
    assert files_of(tmp_path / "out") == ["a/b.jpg", "a/y_features.png", "results.txt"]
    (tmp_path / "out/a/z_features.png").write_text("mine")
    with pytest.raises(OSError, match=r"a/z_features\.png could not be written: a file of this name is not in the rec"):
        write("z_features.png")
    assert (tmp_path / "out/a/z_features.png").read_text() == "mine"


def test_a_file_with_the_name_of_the_lock_or_the_record_stays(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    for name in (".lock", RECORD_NAME):
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out" / name).write_text("mine")
        with pytest.raises(ValueError, match=f"{name} is not"):
            run_into(tmp_path / "out", tmp_path / "a.jpg")
        assert (tmp_path / "out" / name).read_text() == "mine"
        (tmp_path / "out" / name).unlink()


def test_a_record_is_known_by_its_format(tmp_path: Path) -> None:
    """Not by its wording; what another version wrote is left alone."""
    write_picture(tmp_path / "a.jpg")
    run_into(tmp_path / "out", tmp_path / "a.jpg", save_txt=True)
    record = tmp_path / "out" / RECORD_NAME
    header, *rest = record.read_text().splitlines(keepends=True)
    assert json.loads(header)["format"] == 1
    record.write_text('{"format": 1, "yolov9 detection": "other words"}\n' + "".join(rest))
    run_into(tmp_path / "out", tmp_path / "a.jpg", save_txt=True)
    for odd in ('"format": 2, ', ""):
        record.write_text("{" + odd + '"yolov9 detection": "words"}\n' + "".join(rest))
        refused(tmp_path / "out", tmp_path / "a.jpg", "from another version .its format is (2|None), here 1 is read")


def test_results_of_a_version_without_record_are_named_as_such(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    run_into(tmp_path / "out", tmp_path / "a.jpg", save_txt=True)
    (tmp_path / "out" / RECORD_NAME).unlink()
    refused(tmp_path / "out", tmp_path / "a.jpg", r"a\.jpg is not in the record .*perhaps of an older version")
    refused(tmp_path / "out", tmp_path / "a.jpg", "labels is not in the record .*older version", save_txt=True)


# --- sources ---


def videos_of_one_name(folder: Path) -> Path:
    for suffix in ("avi", "mp4"):
        write_video(folder / f"clip.{suffix}", 3)
    return folder


def pictures_of_a_list(folder: Path) -> Path:
    for name in ("0/a.jpg", "a.jpg"):
        write_picture(folder / name)
    (folder.parent / "lists").mkdir()
    (folder.parent / "lists" / "l.txt").write_text(f"{folder}/0/a.jpg\n{folder}/a.jpg\n")
    return folder.parent / "lists" / "l.txt"


def a_list_in_the_way(folder: Path) -> Path:
    write_picture(folder / "in" / "b.jpg")
    (folder / "results.txt").write_text("in/b.jpg\n")
    return folder / "results.txt"


def behind_a_link(folder: Path) -> Path:
    write_picture(folder / "a.jpg")
    (folder.parent / "linked").symlink_to(folder)
    return folder.parent / "linked"


@pytest.mark.parametrize("make", [videos_of_one_name, pictures_of_a_list, a_list_in_the_way, behind_a_link])
def test_no_source_is_replaced(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    source = make(tmp_path / "set")
    refused(tmp_path / "set", source, "source|is not in the record", **EVERYTHING)


def test_results_that_are_sources_are_not_deleted(tmp_path: Path) -> None:
    """Crops of an earlier run, looked at with what they were cut from, would be deleted before they are read."""
    write_picture(tmp_path / "in/a.jpg")
    run_into(tmp_path / "out", tmp_path / "in/a.jpg", save_crop=True)
    (tmp_path / "list.txt").write_text("in/a.jpg\nout/crops/red/a.jpg\n")
    refused(tmp_path / "out", tmp_path / "list.txt", "another source, .*crops/red/a.jpg", save_crop=True)


def test_in_a_fresh_folder_no_place_is_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Thousands of inputs would wait seconds for their first detection."""

    def refuse(*about: object, **_: object) -> str:
        raise AssertionError(f"looked up: {about}")

    inputs = [Input(name, name, Path(name), False) for name in ("a.jpg", "b.jpg")]
    sources = [tmp_path / one.title for one in inputs]
    options = SaveOptions(save_txt=True, save_crop=True)
    (tmp_path / "out").mkdir()
    with monkeypatch.context() as patch, claimed(tmp_path / "out"):
        patch.setattr(os.path, "realpath", refuse)
        patch.setattr(run_folder, "_planned_places", refuse)
        run = plan_run(tmp_path / "out", inputs, options, sources)
    assert [names.media.name for names in run.outputs] == ["a.jpg", "b.jpg"]
    (tmp_path / "out/notes.txt").write_text("mine")  # is in no one's way
    asked: list[str] = []
    monkeypatch.setattr(os.path, "realpath", lambda path, **_: asked.append(str(path)) or str(path))
    plan_run(tmp_path / "out", inputs, options, sources)
    assert asked == []


def test_media_stay_out_of_the_folders_of_other_kinds(tmp_path: Path) -> None:
    """A source with folders named like those of the results, looked at twice."""
    for name in ("a.jpg", "crops/red/a.jpg", "labels/a.jpg", "a/b.jpg"):
        write_picture(tmp_path / "in" / name)
    for _ in range(2):
        run_into(tmp_path / "out", tmp_path / "in", **EVERYTHING)
        files = files_of(tmp_path / "out")
        assert [name for name in files if name.startswith("crops/")] == [
            f"crops/red/{name}.jpg" for name in ("a", "a/b", "crops_/red/a", "labels_/a")
        ]
        assert sum(name.startswith("labels/") and name.endswith(".txt") for name in files) == 4
        crop = cv2.imread(str(tmp_path / "out/crops/red/a.jpg"))
        assert crop.shape == (41, 51, 3)
        assert {"a.jpg", "a/b.jpg", "crops_/red/a.jpg", "labels_/a.jpg"} <= set(files)


# --- one rule for repeated runs ---


def test_results_of_other_inputs_stay_and_those_of_the_same_are_replaced(tmp_path: Path) -> None:
    """As if the latest run over each input had been the only one, whatever ran in between."""
    first, second, out = tmp_path / "i1/p.jpg", tmp_path / "i2/p.jpg", tmp_path / "out"
    write_picture(first, picture(green=True))
    write_picture(second)
    run_into(out, first.parent, **EVERYTHING)
    before = contents(out)
    run_into(out, second.parent, **EVERYTHING)  # a file of the same name
    both = contents(out)
    tables = {"results.txt", "detections.csv", "detections.json"}
    assert {name: both[name] for name in before if name not in tables} == {
        name: data for name, data in before.items() if name not in tables
    }
    assert set(both) - set(before) == {"p_jpg.jpg", "labels/p_jpg.txt", "crops/red/p_jpg.jpg"}
    run_into(out, first.parent, conf_thres=0.85, **EVERYTHING)  # without the green one
    assert set(both) - set(contents(out)) == {"crops/green/p.jpg"}
    assert [row[0] for row in table_of(out)] == [str(second), str(first)]
    objects = json.loads((out / "detections.json").read_text())
    assert [(one["file"], one["name"]) for one in objects] == [(str(second), "red"), (str(first), "red")]
    assert len((out / "labels/p.txt").read_text().splitlines()) == 1
    run_into(out, first.parent, conf_thres=0.95, nosave=True, save_txt=True)  # crops and pictures are not asked for
    assert not (out / "labels/p.txt").exists() and (out / "crops/red/p.jpg").exists() and (out / "p.jpg").exists()
    assert [row[0] for row in table_of(out)] == [str(second)]


def test_one_input_seen_from_two_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An input is known by its place, not by what was typed; two of the same typed name are two."""
    out = tmp_path / "out"
    for folder in ("x", "y"):
        write_picture(tmp_path / folder / "in/a.jpg")
        monkeypatch.chdir(tmp_path / folder)
        run_into(out, Path("in"), save_txt=True)
    run_into(out, tmp_path / "y/in", save_txt=True)
    assert files_of(out) == ["a.jpg", "a_jpg.jpg", "labels/a.txt", "labels/a_jpg.txt", "results.txt"]
    assert [row[0] for row in table_of(out)] == ["in/a.jpg", str(tmp_path / "y/in/a.jpg")]


def test_tables_that_a_run_in_between_left_out_hold_an_input_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Named in another way by each run, and beside another input that has one of these names now."""
    out = tmp_path / "out"
    for folder in ("x", "y"):
        write_picture(tmp_path / folder / "in/a.jpg")
    monkeypatch.chdir(tmp_path / "x")
    run_into(out, Path("in"), save_csv=True, save_json=True)
    run_into(out, tmp_path / "x/in")
    monkeypatch.chdir(tmp_path / "y")
    run_into(out, Path("in"), save_csv=True, save_json=True)  # the rows of the other one stay where it has this name
    assert csv_files(out) == ["in/a.jpg", str(tmp_path / "y/in/a.jpg")]
    for _ in range(2):
        run_into(out, tmp_path / "x/in", save_csv=True, save_json=True)
        wanted = [str(tmp_path / folder / "in/a.jpg") for folder in "yx"]
        assert csv_files(out) == wanted == [row[0] for row in table_of(out)]
        assert [one["file"] for one in json.loads((out / "detections.json").read_text())] == wanted


def test_an_earlier_title_of_an_input_goes_to_no_other(tmp_path: Path) -> None:
    """Also where both are in the same run; the next run of the first would take away the rows of the second."""
    titles = []
    for inputs in ([("/x/a.jpg", "a.jpg")], [("/x/a.jpg", "/x/a.jpg"), ("/y/a.jpg", "a.jpg")]):
        run = plan_run(tmp_path, [Input(*one, Path("a.jpg"), False) for one in inputs], SaveOptions())
        RunWriter(run, {}).close()
        titles.append([one.title for one in run.inputs])
    assert titles == [["a.jpg"], ["/x/a.jpg", "/y/a.jpg"]]


def test_a_stream_that_is_given_twice_keeps_its_name_in_tables(tmp_path: Path) -> None:
    inputs = [Input(key, "rtsp://c", Path("c.mp4"), True) for key in ("rtsp://c", "rtsp://c (2)")]
    for _ in range(2):
        run = plan_run(tmp_path, inputs, SaveOptions())
        assert [one.title for one in run.inputs] == ["rtsp://c"] * 2
        RunWriter(run, {}).close()


def csv_files(folder: Path) -> list[str]:
    with open(folder / "detections.csv", encoding="utf-8", newline="") as handle:
        return [row[0] for row in csv.reader(handle)][1:]


def test_a_picture_that_needs_another_format_leaves_no_old_one(tmp_path: Path) -> None:
    for width, names in ((16500, ["a.webp.png"]), (96, ["a.webp"]), (16500, ["a.webp.png"])):
        image = np.full((64, width, 3), 20, np.uint8)
        write_picture(tmp_path / "b.png", image)
        (tmp_path / "b.png").rename(tmp_path / "a.webp")  # read by its content
        run_into(tmp_path / "out", tmp_path / "a.webp")
        assert files_of(tmp_path / "out") == [*names, "results.txt"]


def test_a_record_cut_by_a_kill_knows_the_rest(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    run_into(tmp_path / "out", tmp_path / "a.jpg", **EVERYTHING)
    record = tmp_path / "out" / RECORD_NAME
    record.write_bytes(record.read_bytes() + b'{"of": 0, "kind": "cro')
    before = contents(tmp_path / "out")
    run_into(tmp_path / "out", tmp_path / "a.jpg", **EVERYTHING)
    assert contents(tmp_path / "out") == before


def test_a_video_is_noted_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the two leaves no video that the next run takes for one of the user."""
    write_video(tmp_path / "v.mp4", 3)
    looks: list[set[str]] = []
    replace_real = os.replace

    def looking(source: object, target: object) -> None:
        if Path(str(target)) == tmp_path / "out/v.mp4":
            lines = map(json.loads, (tmp_path / "out" / RECORD_NAME).read_text().splitlines())
            sizes = {line["size"] for line in lines if line.get("file") == "v.mp4"}
            looks.append(sizes & {Path(str(source)).stat().st_size})
        replace_real(source, target)

    monkeypatch.setattr(os, "replace", looking)
    run_into(tmp_path / "out", tmp_path / "v.mp4")
    assert looks == [{(tmp_path / "out/v.mp4").stat().st_size}]
    run_into(tmp_path / "out", tmp_path / "v.mp4")
    assert files_of(tmp_path / "out") == ["results.txt", "v.mp4"]


def test_two_threads_write_into_one_folder(tmp_path: Path) -> None:
    """Feature maps and pictures under way never share a passing name."""
    failures: list[OSError] = []
    contents_of = {f"{letter}.bin": letter.encode() * 200_000 for letter in "ab"}

    def work(name: str) -> None:
        try:
            for _ in range(100):
                replace_file(tmp_path / name, contents_of[name])
                if (tmp_path / name).read_bytes() != contents_of[name]:
                    raise OSError(f"{name} holds something else")
        except OSError as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(name,)) for name in contents_of]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures and contents(tmp_path) == contents_of


# --- no single picture ends a run ---


@pytest.mark.parametrize("shape", [(3, 70000), (70000, 3)])
def test_a_picture_beyond_every_format_ends_no_run(tmp_path: Path, shape: tuple[int, int], lines: list[str]) -> None:
    class Everywhere(ColourBackend):
        def __call__(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
            rows = torch.zeros(len(images), 7, 1)
            rows[:, :5, 0] = torch.tensor([images.shape[3] / 2, images.shape[2] / 2, 1e6, 1e6, 0.9])
            return rows

    write_picture(tmp_path / "in/a.png", np.full((*shape, 3), 20, np.uint8))
    write_picture(tmp_path / "in/b.png")
    summary = detect(tmp_path, tmp_path / "in", model=Everywhere(), **EVERYTHING)
    assert summary.frames == 2
    crops = [name for name in files_of(summary.save_dir) if name.startswith("crops")]
    assert crops == ["crops/red/a.png", "crops/red/b.jpg"]
    assert any("do not fit into .jpg; written as a.png" in line for line in lines)


def test_what_fits_into_no_format_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    encode = cv2.imencode

    def narrow(suffix: str, image: np.ndarray, options: list[int]) -> object:
        if image.shape[1] > 500 or image.shape[:2] == (41, 51):
            raise cv2.error("too wide")
        return encode(suffix, image, options)

    write_picture(tmp_path / "in/a.jpg", picture(600, 400, (10, 10, 500, 300)))
    write_picture(tmp_path / "in/b.png")
    write_picture(tmp_path / "in/..jpg")
    monkeypatch.setattr(cv2, "imencode", narrow)
    summary = detect(tmp_path, tmp_path / "in", save_crop=True)
    assert summary.frames == 3 and files_of(summary.save_dir) == ["..jpg", "b.png", "results.txt"]
    assert sum("left out" in line for line in lines) == 4


# --- two at once ---


def test_a_folder_belongs_to_one_process(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    run_into(tmp_path / "out", tmp_path / "a.jpg")
    before = contents(tmp_path / "out")
    lock = lock_folder(tmp_path / "out")
    with pytest.raises(ValueError, match="is being written by another process"):
        run_into(tmp_path / "out", tmp_path / "a.jpg")
    assert contents(tmp_path / "out") == before | {".lock": b""}
    lock.close()
    run_into(tmp_path / "out", tmp_path / "a.jpg")
    assert contents(tmp_path / "out") == before


def test_the_lock_is_held_during_the_run_and_gone_after_it(tmp_path: Path) -> None:
    write_picture(tmp_path / "a.jpg")
    code = "import sys; from pathlib import Path; from utils.files import lock_folder; lock_folder(Path(sys.argv[1]))"

    class Looking(ColourBackend):
        def __call__(self, images: torch.Tensor, augment: bool = False) -> torch.Tensor:
            done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "runs/exp")], capture_output=True)
            assert b"is being written by another process" in done.stderr
            seen.append(done.returncode)
            raise RuntimeError("and also after an error")

    seen: list[int] = []
    with pytest.raises(RuntimeError):
        detect(tmp_path, tmp_path / "a.jpg", model=Looking())
    assert seen == [1] and not (tmp_path / "runs/exp/.lock").exists()


def test_only_one_of_many_holds_a_folder(tmp_path: Path) -> None:
    """Also where one deletes the lock's file while another one opens it."""
    inside, most, refusals = [], [], []

    def work() -> None:
        for _ in range(200):
            try:
                with claimed(tmp_path):
                    inside.append(1)
                    most.append(len(inside))
                    inside.pop()
            except ValueError:
                refusals.append(1)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max(most) == 1 and len(most) + len(refusals) == 800 and not os.listdir(tmp_path)


def test_a_lock_whose_file_was_deleted_meanwhile_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one who held the folder deletes the file between the opening and the locking by the next one."""
    calls: list[Path] = []

    def late(folder: Path) -> object:
        handle = lock_folder(folder)
        if not calls:
            (folder / ".lock").unlink()
        calls.append(folder)
        return handle

    monkeypatch.setattr(run_folder, "lock_folder", late)
    with claimed(tmp_path), pytest.raises(ValueError, match="another process"):
        lock_folder(tmp_path)
    assert len(calls) == 2


# --- told ---


@pytest.mark.parametrize("name", ["afile", "afile/exp"])
@pytest.mark.parametrize("exist_ok", [False, True])
def test_a_remedy_is_told_once(tmp_path: Path, name: str, exist_ok: bool) -> None:
    (tmp_path / "afile").write_text("mine")
    if name == "afile" and not exist_ok:
        assert make_folder(tmp_path / name, exist_ok=False).name == "afile2"
        return
    with pytest.raises(OSError, match="afile.*; choose another --project") as told:
        make_folder(tmp_path / name, exist_ok=exist_ok)
    assert str(told.value).count("choose another") == 1 and str(told.value).count("--project") == 1
    assert (tmp_path / "afile").read_text() == "mine"
