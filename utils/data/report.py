"""The data report: what training and validation pictures hold, short for the terminal, complete as JSON, and drawn.

Works on the outcome of scans only, reads no picture but those of the contact sheet, and changes nothing.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import cv2
import numpy as np

from utils.data.changes import changes, fingerprint
from utils.data.images import FILL, ImageError, imread_bgr, resize_long_side
from utils.data.listing import printable
from utils.data.overlap import find_overlap
from utils.data.scan import Problem, ScanResult
from utils.files import atomic_write, write_text_atomic
from utils.log import LOGGER

REPORT_NAME, SHEET_NAME = "data_report.json", "data_{}.jpg"
SMALL_SIDE, MEDIUM_SIDE = 32, 96  # pixels at the training size; COCO's limits of small and medium objects
LOST_SIDE = 3.0  # pixels; an object thinner than this at the training size can hardly be learnt
SHOWN_CLASSES = 20  # classes in the table of the terminal; the JSON holds all
SHOWN_KINDS = 6  # kinds of problems in that table
BACKGROUNDS = {  # title in that table -> key of the JSON
    "  background, empty label file": "empty_label_file",
    "  background, no label file": "no_label_file",
}
OTHER = "other"  # kind of what has none, and of all that are not among those
SHEET_CELLS, SHEET_CELL_SIDE, CAPTION_HEIGHT = 16, 320, 18
LINE_TYPE = cv2.LINE_AA
SHOWN_FILES = 5  # names in a warning


def write_data_report(
    scans: Mapping[str, ScanResult],
    names: Mapping[int, str],
    imgsz: int,
    folder: str | Path,
    *,
    single_cls: bool = False,
    use_sheets: bool = True,
    is_resumed: bool = False,
) -> Path:
    """Log the table of some scans ("train", "val"), write data_report.json and one contact sheet for each to folder.

    imgsz is the training size in pixels, from which the sizes of objects follow. With single_cls all classes are one.
    With is_resumed the report that lies in the folder is of the same run, and what changed since is told. Returns the
    path of the JSON file. Nothing that fails in here ends a run: one line says what was not written.
    """
    reports = {split: describe(scan, names, imgsz, single_cls=single_cls) for split, scan in scans.items()}
    LOGGER.info("\n".join(table_lines(reports, imgsz)))
    for line in hints(reports):
        LOGGER.warning(line)
    content: dict[str, object] = {"imgsz": imgsz, **reports}
    if "train" in scans and "val" in scans:
        overlap = find_overlap(scans["train"], scans["val"])
        content["overlap"] = overlap.description()
        if overlap.warning():
            LOGGER.warning(overlap.warning())
    path = Path(folder) / REPORT_NAME
    for line in changes(path, reports) if is_resumed else ():
        LOGGER.warning(line)
    try:
        write_text_atomic(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")
        for split, scan in scans.items() if use_sheets else ():
            write_contact_sheet(
                scan.taking_part(), names, Path(folder) / SHEET_NAME.format(split), single_cls=single_cls
            )
    except (OSError, ValueError, MemoryError, cv2.error) as error:
        LOGGER.warning(f"data report not written to {folder}: {error}")
    return path


def say_unread(paths: Sequence[str], total: int, prefix: str = "", *, known: int = 0) -> int:
    """Warn when more than ``known`` pictures could not be read since the scan; return their number.

    Such a picture takes no part: in training another one stands in for it, in validation its objects are not measured.
    """
    if len(paths) > known:
        named = ", ".join(paths[:SHOWN_FILES]) + (" …" if len(paths) > SHOWN_FILES else "")
        LOGGER.warning(
            f"{prefix}{len(paths)} of {total} pictures could not be read any more and take no part: {named}. "
            "Figures from before and after do not compare"
        )
    return len(paths)


def describe(scan: ScanResult, names: Mapping[int, str], imgsz: int, *, single_cls: bool = False) -> dict[str, object]:
    """Everything a scan found out, as plain data. Lists are complete.

    used, objects and what follows from the labels count the pictures that take part; what is wrong with files and rows
    is told of all.
    """
    counts, notes, part = scan.counts, scan.notes, scan.taking_part()
    background = {"empty_label_file": counts.empty, "no_label_file": counts.missing}
    none = dict.fromkeys(background, 0)
    takes_background = notes.min_items <= 0
    refused = [problem for problem in scan.problems if problem.is_refused_row]
    left_out = [problem for problem in scan.problems if problem.is_left_out]
    others = [problem for problem in scan.problems if not (problem.is_refused_row or problem.is_left_out)]
    return {
        "used": len(part),
        "objects": len(part.labels.values),
        "background": background if takes_background else none,
        "first_missing_label": printable(notes.first_missing),
        "left_out": {"count": counts.left_out, "by_reason": _by_kind(left_out), "files": _entries(left_out)},
        "left_out_by_min_items": {
            "min_items": notes.min_items,
            "count": len(scan) - len(part),
            "background": none if takes_background else background,
        },
        "rows_refused": {"count": counts.rows_refused, "by_reason": _by_kind(refused), "rows": _entries(refused)},
        "rows_clipped": {"count": counts.rows_clipped, "files": _rows_per_file(scan, 1)},
        "duplicate_rows": {"count": counts.duplicates, "files": _rows_per_file(scan, 2)},
        "remarks": _entries(others),
        "shared_label_files": [printable(path) for path in notes.shared],
        "respelt_label_files": [[printable(expected), printable(found)] for expected, found in notes.respelt],
        "unknown_suffixes": {printable(suffix): count for suffix, count in notes.unknown.items()},
        "repeated_pictures": notes.repeated,
        "network_disk": notes.network,
        "fingerprint": fingerprint(part),
        "scan": {"seconds": round(notes.seconds, 3), "pictures_from_cache": notes.from_cache},
        "picture_sizes": _picture_sizes(part.shapes),
        "objects_per_picture": _distribution(part.labels.lengths()),
        "classes": _classes(part, names, single_cls),
        "object_sizes": _object_sizes(box_pixels(part, imgsz)),
    }


def box_pixels(scan: ScanResult, imgsz: int) -> np.ndarray:
    """Width and height (sum n_i, 2) of all boxes in pixels, in pictures whose long side is scaled to imgsz."""
    shapes = np.repeat(scan.shapes, scan.labels.lengths(), axis=0).astype(np.float64)  # (boxes, 2) width, height
    return scan.labels.values[:, 3:5] * shapes * (imgsz / shapes.max(1, keepdims=True, initial=1))


def _by_kind(problems: Sequence[Problem]) -> dict[str, int]:
    return dict(Counter(problem.kind or OTHER for problem in problems).most_common())


def _entries(problems: Sequence[Problem]) -> list[dict[str, object]]:
    return [
        {"file": printable(p.path), **({"line": p.line} if p.line else {}), "reason": p.kind, "text": printable(p.text)}
        for p in problems
    ]


def _rows_per_file(scan: ScanResult, column: int) -> dict[str, int]:
    """Label file -> rows counted in one column of row_counts, files without any left out."""
    index = np.flatnonzero(scan.row_counts[:, column]) if len(scan.row_counts) else ()
    return {printable(scan.label_files[int(i)]): int(scan.row_counts[i, column]) for i in index}


def _distribution(values: np.ndarray) -> dict[str, float]:
    if not len(values):
        return {"least": 0, "median": 0, "most": 0}
    return {"least": int(values.min()), "median": float(np.median(values)), "most": int(values.max())}


def _picture_sizes(shapes: np.ndarray) -> dict[str, object]:
    """Range of widths and heights, and the most frequent sizes."""
    frequent = Counter(map(tuple, shapes.tolist())).most_common(5)
    return {
        "width": _distribution(shapes[:, 0]),
        "height": _distribution(shapes[:, 1]),
        "most_frequent": [{"width": w, "height": h, "pictures": count} for (w, h), count in frequent],
    }


def _classes(scan: ScanResult, names: Mapping[int, str], single_cls: bool) -> list[dict[str, object]]:
    """Objects and pictures of each class, classes without any included; ids beyond the names come last."""
    ids = scan.labels.values[:, 0].astype(np.int64)
    ids = np.zeros_like(ids) if single_cls else ids
    picture = np.repeat(np.arange(len(scan)), scan.labels.lengths())
    objects = Counter(ids.tolist())
    pictures = Counter(cls for cls, _ in set(zip(ids.tolist(), picture.tolist(), strict=True)))
    return [
        {"id": cls, "name": names.get(cls, ""), "objects": objects[cls], "pictures": pictures[cls]}
        for cls in sorted({*names, *objects})
    ]


def _object_sizes(pixels: np.ndarray) -> dict[str, object]:
    """Objects by area in pixels at the training size, and how many are too thin to be learnt."""
    area = pixels.prod(1)
    small, large = int((area < SMALL_SIDE**2).sum()), int((area >= MEDIUM_SIDE**2).sum())
    sides = np.sqrt(area)
    quantiles = np.quantile(sides, (0, 0.1, 0.5, 0.9, 1)).round(1).tolist() if len(sides) else []
    return {
        "small": small,
        "medium": len(area) - small - large,
        "large": large,
        "thinner_than_3_px": int((pixels.min(1, initial=math.inf) < LOST_SIDE).sum()),
        "side_quantiles_px": dict(zip(("0", "0.1", "0.5", "0.9", "1"), quantiles, strict=False)),
    }


# --------------------------------------------------------------------------------------------------- terminal


def table_lines(reports: Mapping[str, Mapping], imgsz: int) -> list[str]:
    """A compact table with one column for each split."""
    columns = list(reports.values())
    rows: list[tuple[str, list[str]]] = [("Data", list(reports))]

    def add(title: str, values: Sequence[int], *, always: bool = False) -> None:
        if always or any(values):
            rows.append((title, [f"{value:,}" for value in values]))

    add("pictures used", [r["used"] for r in columns], always=True)
    for title, key in BACKGROUNDS.items():
        add(title, [r["background"][key] for r in columns])
    _add_problems(rows, columns, "pictures left out", "left_out")
    least = max(r["left_out_by_min_items"]["min_items"] for r in columns)
    add(f"--min-items {least} leaves out", [r["left_out_by_min_items"]["count"] for r in columns])
    for title, key in BACKGROUNDS.items():
        add(title, [r["left_out_by_min_items"]["background"][key] for r in columns])
    add("objects", [r["objects"] for r in columns], always=True)
    _add_problems(rows, columns, "rows refused", "rows_refused")
    add("rows clipped at the border", [r["rows_clipped"]["count"] for r in columns])
    add("duplicate rows", [r["duplicate_rows"]["count"] for r in columns])
    limits = (
        ("small", f"under {SMALL_SIDE}²"),
        ("medium", f"under {MEDIUM_SIDE}²"),
        ("large", f"{MEDIUM_SIDE}² and more"),
    )
    for key, limit in limits:
        title = f"{key} objects, {limit} px at {imgsz}"
        rows.append((title, [_share(r["object_sizes"][key], r["objects"]) for r in columns]))
    add(f"  thinner than {LOST_SIDE:g} px", [r["object_sizes"]["thinner_than_3_px"] for r in columns])
    _add_classes(rows, columns)
    title_width = max(len(title) for title, _ in rows)
    widths = [max(len(values[i]) for _, values in rows) for i in range(len(columns))]
    return [
        f"{title:<{title_width}}  " + "  ".join(f"{v:>{w}}" for v, w in zip(values, widths, strict=True))
        for title, values in rows
    ]


def _share(part: int, whole: int) -> str:
    return f"{part:,} ({100 * part / whole:.0f}%)" if whole else "0"


def _add_problems(rows: list[tuple[str, list[str]]], columns: Sequence[Mapping], title: str, key: str) -> None:
    """Rows for a count, its most frequent reasons and all others; nothing where the count is 0 everywhere."""
    if not any(report[key]["count"] for report in columns):
        return
    rows.append((title, [f"{report[key]['count']:,}" for report in columns]))
    kinds = Counter()
    for report in columns:
        kinds.update(report[key]["by_reason"])
    kinds.pop(OTHER, None)
    shown = [kind for kind, _ in kinds.most_common(SHOWN_KINDS)]
    for kind in shown:
        rows.append((f"  {_shortened(kind, 40)}", [f"{report[key]['by_reason'].get(kind, 0):,}" for report in columns]))
    rest = [report[key]["count"] - sum(report[key]["by_reason"].get(kind, 0) for kind in shown) for report in columns]
    if any(rest):
        rows.append((f"  {OTHER}", [f"{value:,}" for value in rest]))


def _add_classes(rows: list[tuple[str, list[str]]], columns: Sequence[Mapping]) -> None:
    """Rows for the classes, the most frequent ones of the first split where there are many."""
    tables = [{entry["id"]: entry for entry in report["classes"]} for report in columns]
    ids = list(dict.fromkeys(cls for table in tables for cls in table))
    if len(ids) > SHOWN_CLASSES:
        ids = sorted(ids, key=lambda cls: -tables[0].get(cls, {}).get("objects", 0))[:SHOWN_CLASSES]
        rows.append((f"the {SHOWN_CLASSES} most frequent classes", [""] * len(columns)))
    else:
        rows.append(("objects of each class", [""] * len(columns)))
    for cls in ids:
        entries = [table.get(cls, {"objects": 0, "name": ""}) for table in tables]
        name = next((entry["name"] for entry in entries if entry["name"]), "")
        shares = [_share(e["objects"], r["objects"]) for e, r in zip(entries, columns, strict=True)]
        rows.append((f"  {cls} {_shortened(printable(str(name)))}", shares))


def _shortened(text: str, length: int = 28, end: str = "…") -> str:
    return text if len(text) <= length else text[: length - len(end)] + end


def hints(reports: Mapping[str, Mapping]) -> list[str]:
    """What deserves a second look before hours of training, one line each."""
    lines = []
    objects = {split: {e["id"]: e["objects"] for e in report["classes"]} for split, report in reports.items()}
    for split, table in objects.items():
        absent = [cls for cls, count in table.items() if not count]
        if absent and len(absent) < len(table):
            listed = ", ".join(map(str, absent[:SHOWN_CLASSES])) + (" ..." if len(absent) > SHOWN_CLASSES else "")
            lines.append(f"{split}: no object of class {listed}; nothing can be learnt or measured for them")
    for split, report in reports.items():
        lost, total = report["object_sizes"]["thinner_than_3_px"], report["objects"]
        if lost > 0.05 * total:
            lines.append(
                f"{split}: {lost} of {total} objects are thinner than {LOST_SIDE:g} px at this image size; "
                "a larger --img or training on pictures cut into tiles would help, and --slice in detection and "
                "validation"
            )
    return lines


# ----------------------------------------------------------------------------------------------- contact sheet


def write_contact_sheet(
    scan: ScanResult,
    names: Mapping[int, str],
    path: str | Path,
    *,
    cells: int = SHEET_CELLS,
    side: int = SHEET_CELL_SIDE,
    single_cls: bool = False,
) -> Path:
    """Draw some pictures as they lie on disk, with their labels, as a grid of cells of side pixels.

    Rare classes are shown first, so that each class appears as long as there are cells. Raises OSError where the
    sheet cannot be written. The name of the file stands below each picture.
    """
    chosen = choose_pictures(scan, cells)
    columns = max(math.ceil(math.sqrt(len(chosen))), 1)
    strips = []
    for start in range(0, len(chosen), columns):
        cells_drawn = [
            draw_labels(scan, index, names, side - 2, single_cls=single_cls)
            for index in chosen[start : start + columns]
        ]
        height = max(len(cell) for cell in cells_drawn)
        strip = np.full((height + CAPTION_HEIGHT, columns * side, 3), FILL[0], np.uint8)
        for position, (cell, index) in enumerate(zip(cells_drawn, chosen[start:], strict=False)):
            left = position * side
            strip[: len(cell), left : left + cell.shape[1]] = cell
            name = Path(scan.im_files[index]).name.encode("ascii", "replace").decode()
            _write_text(strip, _shortened(name, 40, "..."), (left + 2, height + 12), (255, 255, 255))
        strips.append(strip)
    done, data = cv2.imencode(".jpg", np.concatenate(strips))
    if not done:
        raise OSError(f"{path}: JPEG data cannot be made")
    with atomic_write(path) as temporary:
        temporary.write_bytes(data.tobytes())
    return Path(path)


def choose_pictures(scan: ScanResult, count: int) -> list[int]:
    """Indices of up to count pictures: one for each class from the rarest on, the rest spread over the set."""
    chosen: list[int] = []
    ids = scan.labels.values[:, 0].astype(np.int64)
    shown: set[int] = set()
    for cls, _ in sorted(Counter(ids.tolist()).items(), key=lambda item: item[1]):
        if len(chosen) == count:
            break
        if cls in shown:
            continue
        row = int(np.flatnonzero(ids == cls)[0])
        index = int(np.searchsorted(scan.labels.offsets, row, side="right")) - 1
        chosen.append(index)
        shown.update(scan.labels[index][:, 0].astype(int).tolist())
    spread = np.linspace(0, len(scan) - 1, min(count, len(scan))).round().astype(int)
    for index in (*spread.tolist(), *range(min(len(scan), 2 * count))):
        if len(chosen) < count and index not in chosen:
            chosen.append(index)
    return sorted(chosen)


def draw_labels(
    scan: ScanResult, index: int, names: Mapping[int, str], side: int, *, single_cls: bool = False
) -> np.ndarray:
    """One picture, scaled to a long side of side pixels, with its boxes, polygons and class names: (H, W, 3) BGR."""
    try:
        image = resize_long_side(imread_bgr(scan.im_files[index]), side, smooth=False)
    except (ImageError, OSError, MemoryError, cv2.error) as error:
        LOGGER.warning(printable(f"{scan.im_files[index]} cannot be drawn: {error}"))
        return np.full((side, side, 3), FILL[0], np.uint8)
    image = np.ascontiguousarray(image)
    height, width = image.shape[:2]
    outlines = scan.segments(index)
    for row, outline in zip(scan.labels[index], outlines, strict=True):
        cls = 0 if single_cls else int(row[0])
        colour = _colour(cls)
        if len(outline):
            points = np.rint(outline * (width, height)).astype(np.int32)
            cv2.polylines(image, [points], True, colour, 1, LINE_TYPE)
        x, y, w, h = row[1:].astype(np.float64) * (width, height, width, height)
        corners = (round(x - w / 2), round(y - h / 2)), (round(x + w / 2), round(y + h / 2))
        cv2.rectangle(image, *corners, colour, 2)
        name = str(names.get(cls, ""))
        text = f"{cls} {_shortened(name, 16, '.')}".strip() if name.isascii() and name.isprintable() else str(cls)
        _write_text(image, text, (corners[0][0] + 2, max(corners[0][1] - 3, 11)), colour)
    return image


def _colour(cls: int) -> tuple[int, int, int]:
    """A colour (BGR) for a class; neighbours are a golden section of the colour circle apart."""
    hue = round(180 * (cls * 0.618034 % 1))
    blue, green, red = cv2.cvtColor(np.uint8([[[hue, 220, 255]]]), cv2.COLOR_HSV2BGR)[0, 0].tolist()
    return blue, green, red


def _write_text(image: np.ndarray, text: str, origin: tuple[int, int], colour: tuple[int, int, int]) -> None:
    """Text in a colour on a dark rim, readable on any ground."""
    for shade, thickness in (((0, 0, 0), 3), (colour, 1)):
        cv2.putText(image, text, origin, cv2.FONT_HERSHEY_SIMPLEX, 0.4, shade, thickness, LINE_TYPE)
