"""The scan of a whole set: counts, messages, label cache, stops."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest

from tests.data.drawing import BOXES, encode, label_text, paint, write_set
from utils.data import file_scan, filesystem, scan_cache
from utils.data import scan as scan_module
from utils.data.dataset import LoadImagesAndLabels
from utils.data.filesystem import Mount, mount_of, network_mount, parse_mounts
from utils.data.scan import check_classes, printable, require_objects, scan_dataset, with_min_items
from utils.data.scan_cache import FORMAT_VERSION, UNREACHABLE, Stamp
from utils.data.spec import load_data_spec

REPO_ROOT = Path(scan_module.__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def user_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    return folder


def make(root: Path) -> Path:
    """A set with one of everything."""
    good = encode(paint(), ".jpg")
    return write_set(
        root,
        {
            "good.jpg": (good, label_text()),
            "polygon.jpg": (good, "0 .1 .1 .3 .1 .3 .4\n1 .5 .5 .2 .2\n"),
            "none.jpg": (good, None),
            "empty.jpg": (good, "\n\n"),
            "cut.jpg": (good[: len(good) // 2], label_text()),
            "zero.jpg": (b"", label_text()),
            "pixels.jpg": (good, "0 30 20 10 10\n"),
            "rows.jpg": (good, label_text() + "0 .5 .5 -.1 .1\n" + label_text(BOXES[:1]) + "1 .5 .5 1.2 .1\n"),
        },
    )


def test_counts_and_messages(tmp_path: Path, messages: list[str]) -> None:
    result = scan_dataset(make(tmp_path), prefix="train: ")
    assert [Path(path).stem for path in result.im_files] == ["empty", "good", "none", "polygon", "rows"]
    assert [len(rows) for rows in result.labels] == [0, 3, 0, 2, 4]
    counts = result.counts
    assert (counts.used, counts.empty, counts.missing, counts.background, counts.left_out) == (5, 1, 1, 2, 3)
    assert (counts.rows_refused, counts.rows_clipped, counts.duplicates, counts.objects) == (1, 1, 1, 9)
    assert result.shapes.tolist() == [[96, 64]] * 5
    assert [len(points) for points in result.segments(3)] == [3, 0]
    text = "\n".join(messages)
    for words in ("cut.jpg: left out: JPEG is cut off", "zero.jpg: left out: empty", "pixels", "rows.txt, line 4: row"):
        assert words in text
    assert "5 pictures used with 9 objects, 2 background" in messages[-1]
    assert "1 refused, 1 clipped, 1 duplicates" in messages[-1]


def test_second_scan_comes_from_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path)
    first = scan_dataset(images)
    assert (tmp_path / "labels" / "train.scan.cache").is_file()
    monkeypatch.setattr(file_scan, "scan_one", lambda *_: pytest.fail("looked at a file again"))
    second = scan_dataset(images)
    assert second.counts == first.counts
    assert second.problems == first.problems
    assert list(second.im_files) == list(first.im_files)
    for name in ("shapes", "point_counts"):
        assert np.array_equal(getattr(second, name), getattr(first, name))
    for name in ("labels", "points"):
        assert np.array_equal(getattr(second, name).values, getattr(first, name).values)


def test_changes_are_noticed_file_by_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path)
    scan_dataset(images)
    label = tmp_path / "labels" / "train" / "good.txt"
    label.write_text(label_text().replace("0 0.2", "3 0.2", 1))  # same size, another class
    os.utime(label, ns=(1, 1))
    (tmp_path / "labels" / "train" / "none.txt").write_text("1 .5 .5 .1 .1\n")
    (images / "empty.jpg").unlink()
    looked_at = []
    real = file_scan.scan_one
    monkeypatch.setattr(file_scan, "scan_one", lambda i, lb: (looked_at.append(Path(i).name), real(i, lb))[1])
    result = scan_dataset(images)
    assert sorted(looked_at) == ["good.jpg", "none.jpg"]
    assert result.labels[0][0, 0] == 3
    assert [Path(path).stem for path in result.im_files] == ["good", "none", "polygon", "rows"]


def test_edit_that_keeps_size_and_time_is_seen(tmp_path: Path) -> None:
    images = make(tmp_path)
    scan_dataset(images)
    label = tmp_path / "labels" / "train" / "good.txt"
    times = label.stat()
    label.write_text(label_text().replace("0 0.2", "3 0.2", 1))
    os.utime(label, ns=(times.st_atime_ns, times.st_mtime_ns))
    assert scan_dataset(images).labels[1][0, 0] == 3


def test_replaced_picture_is_seen(tmp_path: Path) -> None:
    images = make(tmp_path)
    scan_dataset(images)
    times = (images / "good.jpg").stat()
    other = images / "new.tmp"
    other.write_bytes(encode(paint(48, 32), ".jpg").ljust(times.st_size, b"\0"))
    os.utime(other, ns=(times.st_atime_ns, times.st_mtime_ns))
    os.replace(other, images / "good.jpg")
    assert scan_dataset(images).shapes[1].tolist() == [48, 32]


def inside_a_member(cache: Path, data: bytes) -> int:
    """Return the position of a byte in the middle of what the cache holds, not in the archive's own headers."""
    with zipfile.ZipFile(cache) as archive:
        member = max(archive.infolist(), key=lambda info: info.compress_size)
    start = member.header_offset
    name_length, extra_length = struct.unpack("<HH", data[start + 26 : start + 30])
    return start + 30 + name_length + extra_length + member.compress_size // 2


@pytest.mark.parametrize(
    "damage", [b"", b"PK\x03\x04 rubbish", bytes(2000), b"\x93NUMPY\x01\x00v\x00{'descr'", "cut", "bit"]
)
def test_damaged_cache_is_replaced(tmp_path: Path, damage: bytes | str, messages: list[str]) -> None:
    images = make(tmp_path)
    wanted = scan_dataset(images).counts
    cache = tmp_path / "labels" / "train.scan.cache"
    data = bytearray(cache.read_bytes())
    data[inside_a_member(cache, data)] ^= 4
    cache.write_bytes(damage if isinstance(damage, bytes) else bytes(data) if damage == "bit" else data[:-200])
    messages.clear()
    assert scan_dataset(images).counts == wanted
    assert sum("is not used, all files are scanned again" in message for message in messages) == 1
    assert len(cache.read_bytes()) > 2000
    messages.clear()
    scan_dataset(images)
    assert not any("scanned again" in message for message in messages)
    assert "8 from the label cache of" in messages[-1]


@pytest.mark.parametrize("part", ["stamps", "figures", "point_counts", "labels", "boxes", "texts", "images_lengths"])
def test_cache_whose_parts_do_not_fit_is_replaced(tmp_path: Path, part: str, messages: list[str]) -> None:
    images = make(tmp_path)
    wanted = scan_dataset(images).counts
    cache = tmp_path / "labels" / "train.scan.cache"
    with np.load(cache) as stored:
        arrays = {name: stored[name] for name in stored.files}
    arrays[part] = arrays.get(part, np.zeros(0))[:-1]
    with open(cache, "wb") as file:
        np.savez(file, **arrays)
    assert scan_dataset(images).counts == wanted


def test_other_format_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    images = make(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(scan_cache, "FORMAT_VERSION", FORMAT_VERSION + 1)
        wanted = scan_dataset(images).counts
    looked_at = []
    real = file_scan.scan_one
    monkeypatch.setattr(file_scan, "scan_one", lambda i, lb: (looked_at.append(i), real(i, lb))[1])
    assert scan_dataset(images).counts == wanted
    assert len(looked_at) == 8
    assert sum(f"format {FORMAT_VERSION + 1} of another version" in message for message in messages) == 1


def test_stamps_tell_files_from_folders(tmp_path: Path) -> None:
    (tmp_path / "a.txt").mkdir()
    assert Stamp.of(str(tmp_path / "a.jpg"), str(tmp_path / "a.txt")).label_size == UNREACHABLE
    assert not Stamp.of(str(tmp_path / "a.jpg"), str(tmp_path / "b.txt")).has_label


SLOW_SCAN = """
import sys, time
from utils.data import file_scan, scan
file_scan.SAVE_INTERVAL_S, file_scan.SAVE_SHARE, file_scan.CHUNK, scan.SCAN_THREADS = 0.05, 1.0, 2, 1
real = file_scan.scan_one
def slow(image, label):
    time.sleep(0.05)
    return real(image, label)
file_scan.scan_one = slow
print("started", flush=True)
scan.scan_dataset(sys.argv[1])
"""


def test_killed_scan_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    number = 200  # ten seconds' worth: the process is killed long before
    images = write_set(tmp_path, {f"{i:03d}.jpg": (paint(), label_text()) for i in range(number)})
    cache = tmp_path / "labels" / "train.scan.cache"
    with subprocess.Popen(
        [sys.executable, "-c", SLOW_SCAN, str(images)], cwd=REPO_ROOT, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        end = time.monotonic() + 30
        while not cache.exists() and process.poll() is None and time.monotonic() < end:
            time.sleep(0.02)
        process.kill()
    assert cache.exists()
    looked_at = []
    real = file_scan.scan_one
    monkeypatch.setattr(file_scan, "scan_one", lambda i, lb: (looked_at.append(i), real(i, lb))[1])
    result = scan_dataset(images)
    assert result.counts.objects == 3 * number
    assert 0 < len(looked_at) < number
    assert result.notes.from_cache == number - len(looked_at)


def test_interrupted_scan_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = write_set(tmp_path, {f"{i:03d}.jpg": (paint(), label_text()) for i in range(40)})
    calls = []
    real = file_scan.scan_one

    def interrupted(image: str, label: str | None) -> object:
        calls.append(image)
        if Path(image).stem == "020":
            raise KeyboardInterrupt
        return real(image, label)

    monkeypatch.setattr(file_scan, "CHUNK", 4)
    with monkeypatch.context() as patch:
        patch.setattr(file_scan, "scan_one", interrupted)
        with pytest.raises(KeyboardInterrupt):
            scan_dataset(images)
    calls.clear()
    monkeypatch.setattr(file_scan, "scan_one", lambda i, lb: (calls.append(Path(i).stem), real(i, lb))[1])
    assert scan_dataset(images).counts.used == 40
    assert "020" in calls
    assert len(calls) == 20


def test_network_disks_are_told_from_local_ones() -> None:
    text = (
        "/dev/sda1 / ext4 rw 0 0\nnas:/data /mnt/my\\040data nfs4 rw 0 0\n//win/share /mnt/win cifs rw 0 0\n"
        "sshfs /mnt/ssh fuse.sshfs rw 0 0\n/dev/sdb1 /mnt/usb fuseblk rw 0 0\n/dev/sdc1 /mnt/win/disk xfs rw 0 0\n"
        "lxcfs /proc/cpuinfo fuse.lxcfs rw 0 0\nrubbish\ntmpfs /mnt/ssh tmpfs rw 0 0\n"
    )
    assert len(parse_mounts(text)) == 8
    assert mount_of("/mnt/my data/set/a.jpg", text) == Mount("/mnt/my data", "nfs4")
    for path, kind, is_network in (
        ("/mnt/my data", "nfs4", True),
        ("/mnt/my data2/a", "ext4", False),
        ("/mnt/win/a.jpg", "cifs", True),
        ("/mnt/win/disk/a.jpg", "xfs", False),
        ("/mnt/ssh/x", "tmpfs", False),  # mounted over the other one
        ("/mnt/usb/x", "fuseblk", False),
        ("/proc/cpuinfo", "fuse.lxcfs", False),
        ("/home", "ext4", False),
    ):
        mount = mount_of(path, text)
        assert mount is not None
        assert (mount.kind, mount.is_network) == (kind, is_network), path
    assert mount_of("/a", "") is None
    assert Mount("/m", "fuse.s3fs").is_network


def test_network_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    images = make(tmp_path / "set")
    mounts = tmp_path / "mounts"
    mounts.write_text(f"d / ext4 rw 0 0\nnas:/x {os.path.realpath(tmp_path / 'set')} nfs rw 0 0\n")
    monkeypatch.setattr(filesystem, "MOUNTS_FILE", mounts)
    assert scan_dataset(images, prefix="train: ").notes.network == "nfs"
    assert sum("lie on a network disk (nfs at" in message for message in messages) == 1
    monkeypatch.setattr(filesystem, "MOUNTS_FILE", tmp_path / "absent")
    assert network_mount(images) is None


def test_no_labels_at_all(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), None), "b.jpg": (paint(), None)})
    result = scan_dataset(images)
    where = str(tmp_path / "labels" / "train" / "a.txt")
    assert any("no label file found at all" in message and where in message for message in messages)
    with pytest.raises(ValueError, match="any of the 2 pictures") as caught:
        require_objects(result, "train: ")
    assert where in str(caught.value)
    (tmp_path / "labels" / "train" / "a.txt").write_text("")
    with pytest.raises(ValueError, match="1 of 2 pictures, the others are empty.*b.txt"):
        require_objects(scan_dataset(images))
    (tmp_path / "labels" / "train" / "b.txt").write_text("# nothing\n")
    with pytest.raises(ValueError, match="label files of all 2 pictures are empty"):
        require_objects(scan_dataset(images))
    (tmp_path / "labels" / "train" / "b.txt").write_text(label_text())
    require_objects(scan_dataset(images))


def test_many_backgrounds_are_questioned(tmp_path: Path, messages: list[str]) -> None:
    files = {f"{i}.jpg": (paint(), label_text() if i < 6 else "" if i < 8 else None) for i in range(10)}
    scan_dataset(write_set(tmp_path, files))
    (line,) = [message for message in messages if "is that meant?" in message]
    assert "4 of 10 pictures hold no object: 2 empty label files, 2 without" in line
    assert str(tmp_path / "labels" / "train" / "8.txt") in line


def test_min_items_says_how_many_backgrounds_are_left_out(tmp_path: Path, messages: list[str]) -> None:
    counts = [0, 0, None, 1, 2, 3]  # objects of each picture; None = no label file
    files = {f"{i}.jpg": (paint(), None if n is None else label_text(BOXES[:n])) for i, n in enumerate(counts)}
    result = scan_dataset(write_set(tmp_path, files))
    for least, words in (
        (1, "--min-items 1: 3 of 6 pictures kept, 3 left out, 3 of them background"),
        (2, "--min-items 2: 2 of 6 pictures kept, 4 left out, 3 of them background"),
    ):
        assert len(with_min_items(result, least, "train: ")) == 4 - least
        assert messages[-1] == f"train: {words}"
    with pytest.raises(ValueError, match="--min-items 4 leaves no picture; the fullest one holds 3 objects"):
        with_min_items(result, 4)


def test_printed_problems_are_limited_and_complete_in_the_result(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {f"{i:02d}.jpg": (paint(), "0 .5 .5 .1 .1\n0 .5 .5 0 0\n") for i in range(50)})
    result = scan_dataset(images)
    assert len(result.problems) == 50
    assert sum("row refused" in message for message in messages) == scan_module.MAX_NAMED
    assert any("and 30 more, all named in data_report.json" in message for message in messages)


def test_read_only_set(tmp_path: Path, messages: list[str], user_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make(tmp_path)
    (tmp_path / "labels").chmod(0o555)
    wanted = scan_dataset(images).counts
    assert not list((tmp_path / "labels").glob("*.cache"))
    assert sum("label cache kept in" in message for message in messages) == 1
    monkeypatch.setattr(file_scan, "scan_one", lambda *_: pytest.fail("looked at a file again"))
    assert scan_dataset(images).counts == wanted


def test_no_place_for_the_cache(tmp_path: Path, messages: list[str], user_cache: Path) -> None:
    images = make(tmp_path)
    (tmp_path / "labels").chmod(0o555)
    (user_cache / "yolov9").write_text("a file in the way")
    assert scan_dataset(images).counts.used == 5
    assert sum("cannot be written" in message for message in messages) == 1


# --- two sets with files in common ------------------------------------------------------------------------------------


def warnings_of(messages: list[str], prefix: str) -> list[str]:
    """What was said of one set, without its prefix and the closing line of figures."""
    said = [line.removeprefix(prefix) for line in messages if line.startswith(prefix)]
    return [line for line in said if " pictures used with " not in line]


def test_what_is_wrong_with_files_of_both_sets_is_told_once(tmp_path: Path, messages: list[str]) -> None:
    images = make(tmp_path)
    (images / "notes.docx").write_bytes(b"x")
    (images / "good.png").write_bytes(encode(paint()))  # shares the label of good.jpg
    (images.parents[1] / "labels" / "train" / "rows.txt").rename(images.parents[1] / "labels" / "train" / "ROWS.txt")
    first = scan_dataset(images, prefix="train: ")
    told = warnings_of(messages, "train: ")
    assert len(told) >= 6
    messages.clear()
    second = scan_dataset(images, prefix="val: ", told=first)
    (line,) = warnings_of(messages, "val: ")
    assert line == f"{len(first.problems)} problem(s) with files of both sets are told above"
    assert second.counts == first.counts and second.problems == first.problems
    assert (second.notes.unknown, second.notes.shared) == (first.notes.unknown, first.notes.shared)
    assert second.notes.respelt == first.notes.respelt
    messages.clear()
    scan_dataset(images, prefix="train: ")
    assert warnings_of(messages, "train: ") == told  # by itself it says it all


def test_only_what_both_sets_hold_is_passed_over(tmp_path: Path, messages: list[str]) -> None:
    images = make(tmp_path)
    everything = sorted(images.iterdir())
    (tmp_path / "part.txt").write_text("\n".join(str(path) for path in everything if path.stem not in ("zero", "good")))
    first = scan_dataset(tmp_path / "part.txt", prefix="train: ")
    messages.clear()
    second = scan_dataset(images, prefix="val: ", told=first)
    said = warnings_of(messages, "val: ")
    fresh = [line for line in said if line.startswith(str(tmp_path))]
    assert [line.split(":")[0] for line in fresh] == [str(images / "zero.jpg")]
    assert f"{len(first.problems)} problem(s) with files of both sets are told above" in said
    assert any("hold no object" in line for line in said)  # of another number of pictures
    assert second.counts.left_out == 3 and second.counts.used == 5 and len(second.problems) == len(first.problems) + 1


def test_other_files_with_the_same_faults_are_told(tmp_path: Path, messages: list[str]) -> None:
    first = scan_dataset(make(tmp_path / "a"), prefix="train: ")
    told = warnings_of(messages, "train: ")
    scan_dataset(make(tmp_path / "b"), prefix="val: ", told=first)
    assert [line.replace(f"{tmp_path}/b", f"{tmp_path}/a") for line in warnings_of(messages, "val: ")] == told


def test_the_limit_of_printed_problems_counts_those_that_are_new(tmp_path: Path, messages: list[str]) -> None:
    faulty = (paint(), label_text() + "nonsense\n")
    images = write_set(tmp_path, {f"{i:02}.png": faulty for i in range(scan_module.MAX_NAMED + 10)})
    first = scan_dataset(images, prefix="train: ")
    write_set(tmp_path, {"new.png": faulty})
    messages.clear()
    scan_dataset(images, prefix="val: ", told=first)
    fresh = [line for line in messages if "row refused" in line]
    assert len(fresh) == 1 and "new.txt" in fresh[0] and not any("more, all named" in line for line in messages)


def test_a_network_disk_is_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, messages: list[str]) -> None:
    images = make(tmp_path / "nas" / "a")
    mounts = {"a": Mount("/mnt/nas", "nfs4"), "b": Mount("/mnt/other", "nfs4")}
    monkeypatch.setattr(scan_module, "network_mount", lambda path: mounts["b" if "/b/" in str(path) else "a"])
    first = scan_dataset(images)
    scan_dataset(make(tmp_path / "nas" / "c"), told=first)
    assert sum("network disk" in line for line in messages) == 1
    scan_dataset(make(tmp_path / "nas" / "b"), told=first)
    assert sum("network disk" in line for line in messages) == 2


# --- what is left alone -----------------------------------------------------------------------------------------------


def test_nothing_but_the_cache_is_written(tmp_path: Path) -> None:
    images = make(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    scan_dataset(images)
    after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert set(after) - set(before) == {tmp_path / "labels" / "train.scan.cache"}
    assert all(after[path] == data for path, data in before.items())


def test_class_beyond_nc_stops(tmp_path: Path) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text()), "b.jpg": (paint(), "# x\n0 .5 .5 .1 .1\n")})
    with pytest.raises(ValueError, match=r"a\.txt, line 3: class 2, .* 2 classes") as caught:
        scan_dataset(images, nc=2)
    with pytest.raises(ValueError) as again:  # from the cache
        scan_dataset(images, nc=2)
    assert str(caught.value) == str(again.value)
    check_classes(scan_dataset(images, nc=3), 3)


def test_nothing_usable_stops(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="none of the 1 pictures"):
        scan_dataset(write_set(tmp_path, {"a.jpg": (b"", None)}))


def test_missing_and_odd_files_are_left_out(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text())})
    (images / "dead.jpg").symlink_to(tmp_path / "nowhere.jpg")
    (tmp_path / "list.txt").write_text("images/train/a.jpg\nimages/train/gone.jpg\nimages/train/dead.jpg\nimages\n")
    result = scan_dataset(tmp_path / "list.txt")
    assert (result.counts.used, result.counts.left_out) == (1, 3)
    text = "\n".join(messages)
    assert "gone.jpg: left out: file is not there" in text
    assert "images: left out: is a folder" in text
    assert "the data file" in text  # where folders can be named


def test_label_of_another_spelling_is_used_unless_it_belongs_elsewhere(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"A.jpg": (paint(), None), "b.jpg": (paint(), label_text()), "B.jpg": (paint(), None)})
    (tmp_path / "labels" / "train" / "a.TXT").write_text(label_text())
    result = scan_dataset(images)
    assert dict(zip([Path(path).name for path in result.im_files], map(len, result.labels), strict=True)) == {
        "A.jpg": 3, "B.jpg": 0, "b.jpg": 3,
    }  # fmt: skip
    assert any("differs in case" in message for message in messages)


def test_twins_share_a_label_and_are_reported(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text()), "a.png": (paint(), None)})
    assert scan_dataset(images).counts.objects == 6
    assert any("shared by pictures of the same stem" in message for message in messages)


def test_names_that_are_no_text(tmp_path: Path, messages: list[str]) -> None:
    images = write_set(tmp_path, {"a.jpg": (paint(), label_text())})
    os.rename(os.fsencode(images / "a.jpg"), os.fsencode(images) + b"/\xff\xfe.jpg")
    os.rename(os.fsencode(tmp_path / "labels/train/a.txt"), os.fsencode(tmp_path / "labels/train") + b"/\xff\xfe.txt")
    (images / os.fsdecode(b"\xfd.jpg")).write_bytes(b"")
    for _ in range(2):
        assert scan_dataset(images).counts.objects == 3
    "\n".join(messages).encode()
    assert printable("ok ä") == "ok ä"


def test_names_with_control_characters_stay_on_their_line(tmp_path: Path, messages: list[str]) -> None:
    names = ["new\nline.png", "tab\t.png", "\x1b[31mred.png", "back\rwards.png", "next\x85.png", "sep\u2028.png"]
    images = write_set(tmp_path, {name: (b"", None) for name in names} | {"good.png": (paint(), label_text())})
    data = LoadImagesAndLabels(images, 64)
    text = "\n".join(messages)
    for name in names:
        assert name not in text
        assert f"{images}/{repr(name)[1:-1]}: left out" in text
    (images / "good.png").rename(images / "a\nb.png")
    (tmp_path / "labels" / "train" / "good.txt").rename(tmp_path / "labels" / "train" / "a\nb.txt")
    data = LoadImagesAndLabels(images, 64)
    assert data.im_files[0].endswith("a\nb.png")
    (images / "a\nb.png").unlink()
    with pytest.raises(RuntimeError):
        data[0]
    assert "a\\nb.png cannot be read" in messages[-1]


def test_blood_cells(shared_dir: Path, tmp_path: Path) -> None:
    folder = shared_dir / "datasets" / "bccd"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    path = tmp_path / "bccd.yaml"
    path.write_text(f"path: {folder}\ntrain: images/train\nval: images/val\nnames: [RBC, WBC, Platelets]\n")
    spec = load_data_spec(path)
    train, val = (scan_dataset(spec.split(name), nc=spec.nc) for name in ("train", "val"))
    assert (train.counts.used, train.counts.objects, val.counts.used, val.counts.objects) == (205, 2804, 87, 1137)
