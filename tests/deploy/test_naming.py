"""Names of the files of a detection: whatever the inputs are called, no two files meet, and naming ends."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path, PurePosixPath

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from utils.deploy.naming import MAPS_END, OutputNames, plan_outputs

FRAMES = range(12)
MAPS_FILES = ("stage0_Conv_features.png", "stage0_Conv_features.npy")


def files_of(names: OutputNames) -> list[str]:
    """All files that may be written of an input, but for the crops, whose names are looked for beside what is there."""
    frames = FRAMES if names.is_video else (0,)
    files = [names.media.as_posix()]
    files += [names.fallback.as_posix()] if names.fallback != names.media else []
    files += [f"labels/{names.label_stem(frame).as_posix()}.txt" for frame in frames]
    folders = [names.maps_folder(frame) for frame in frames]
    files += [(folder / part / name).as_posix() for folder in folders for part in ("", "part0") for name in MAPS_FILES]
    return files


def check(planned: Sequence[OutputNames]) -> None:
    files = [file for names in planned for file in files_of(names)]
    files += ["results.txt", "detections.csv", "detections.json", ".lock", ".written.jsonl"]
    assert len(set(files)) == len(files), sorted(first for first, second in pairwise(sorted(files)) if first == second)
    folders = {parent.as_posix() for file in files for parent in PurePosixPath(file).parents}
    # of a crop only where it lies: its own name has a number and a suffix that no folder has
    folders |= {parent.as_posix() for names in planned for parent in ("crops" / names.stem).parents}
    assert not folders & set(files)
    media = [names.media for names in planned] + [names.fallback for names in planned]
    assert not any(path.parts[0].lower() in ("crops", "labels") for path in media)
    for file in files:
        assert ".." not in PurePosixPath(file).parts and not file.startswith("/")
        assert all(len(part.encode("utf-8", "surrogateescape")) <= 255 for part in file.split("/"))


PIECES = st.sampled_from(
    ["a", "a_2", "a-2", "a_jpg", "a_mp4", "a.jpg", "A", "..", ".", "part0", "x_features", "stage0_Conv_features",
     "labels", "crops", "results", "", "a_3\n", "caf\udce9", "长" * 80, "b" * 250, "b" * 251, "a.txt", "labels_"]
)  # fmt: skip
SUFFIXES = st.sampled_from([".jpg", ".png", ".JPG", ".dng", ".webp", ".mp4", ".txt", ""])


def _is_name(name: str) -> bool:
    return name not in ("", ".", "..") and len(name.encode("utf-8", "surrogateescape")) <= 255


FILES = st.tuples(PIECES, SUFFIXES).map("".join).filter(_is_name)
FOLDERS = st.lists(st.tuples(PIECES, SUFFIXES).map("".join).filter(_is_name), max_size=2)
INPUTS = st.tuples(st.builds(lambda folders, file: Path(*folders, file), FOLDERS, FILES), st.booleans())


@settings(max_examples=60)
@given(st.lists(INPUTS, min_size=1, max_size=12), st.lists(INPUTS, max_size=6), st.integers(1, 4))
def test_no_two_files_meet(first: list, second: list, copies: int) -> None:
    """Also in a second run into the same folder, where the inputs of the first keep their names."""
    inputs = first * copies
    planned = plan_outputs(inputs, with_maps=True)
    check(planned)
    half = len(planned) // 2
    known = [*planned[:half], *[None] * len(second)]
    again = plan_outputs([*inputs[:half], *second], known, planned[half:], with_maps=True)
    assert again[:half] == planned[:half]
    check([*again, *planned[half:]])


@pytest.mark.parametrize("name", ["video.mp4", "video", "video_2.mp4", "video.mp4.mp4", "..mp4", "v" * 251 + ".mp4"])
@pytest.mark.parametrize("is_video", [True, False])
def test_many_inputs_of_one_name(name: str, is_video: bool) -> None:
    """Naming takes no longer for the last one than for the first: 3000 of a name are quick."""
    planned = plan_outputs([(Path(name), is_video)] * 3000)
    assert len({names.media for names in planned}) == len({names.stem for names in planned}) == 3000


def test_pictures_and_videos_of_one_name() -> None:
    inputs = [(Path("v.mp4"), True), *[(Path("v.jpg"), False)] * 3, *[(Path("v.mp4"), True)] * 3]
    check(plan_outputs(inputs))
    assert [names.stem.name for names in plan_outputs(inputs[4:])] == ["v", "v_mp4", "v-2"]


@pytest.mark.parametrize(
    ("name", "media", "label", "maps"),
    [
        ("..jpg", "..jpg", "_", "_"),
        ("...jpg", "...jpg", "__", "__"),
        ("a.jpg.png", "a.jpg.png", "a.jpg", "a.jpg" + MAPS_END),
        ("labels/a.jpg", "labels_/a.jpg", "labels_/a", "labels_/a"),
        ("crops/red/a.jpg", "crops_/red/a.jpg", "crops_/red/a", "crops_/red/a"),
        ("x.jpg/a.jpg", "x_jpg/a.jpg", "x_jpg/a", "x_jpg/a"),
        ("crops.jpg", "crops.jpg", "crops", "crops" + MAPS_END),
        ("results.txt", "results.jpg", "results", "results"),
    ],
)
def test_names_that_mean_something_else(name: str, media: str, label: str, maps: str) -> None:
    (names,) = plan_outputs([(Path(name), False)])
    assert (names.media.as_posix(), names.label_stem(0).as_posix(), names.maps_folder(0).as_posix()) == (
        media,
        label,
        maps,
    )
