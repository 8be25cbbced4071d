"""What the figures of a run suggest to do next. Rules of thumb: each says what it saw, and what to try."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Columns = Mapping[str, Sequence[float]]

PATIENCE = 5  # validated epochs at mAP 0 before it is called strange
ALMOST_ZERO = 0.001
RISE = 1.05  # of the validation loss over its lowest value
EARLY = 0.7  # share of the run before which that lowest value lies
SMALL_SHARE = 0.2  # of the labels, from which small objects matter
FEW_LABELS = 20
MIXED_UP, MIXED_UP_COUNT = 0.1, 5  # share and number of a class's labels taken for one other class
LOSSES = ("box_loss", "cls_loss", "dfl_loss")


def advise(results: Columns, evaluation: Mapping[str, Any], *, epochs: int, last: str = "last.pt") -> list[str]:
    """Return advice on a run, the most important first.

    Args:
        results: columns of results.csv.
        evaluation: content of evaluation.json, or nothing.
        epochs: epochs that were asked for.
        last: path of the checkpoint from which the run can go on.
    """
    lines = [*_on_no_labels(evaluation), *_on_nothing_found(results, evaluation), *_on_zero(results)]
    lines += [*_on_overfitting(results), *_on_the_end(results, epochs, last)]
    return [*lines, *_on_small_objects(evaluation), *_on_mixed_up_classes(evaluation), *_on_rare_classes(evaluation)]


def validated(results: Columns) -> list[int]:
    """Return the rows of epochs that were validated: the others hold zeros in all columns of the validation."""
    columns = [results.get(name, ()) for name in (*(f"val/{loss}" for loss in LOSSES), "metrics/recall")]
    return [row for row, values in enumerate(zip(*columns, strict=False)) if any(value for value in values)]


def _on_no_labels(evaluation: Mapping[str, Any]) -> list[str]:
    if not evaluation.get("images") or evaluation.get("instances") != 0:
        return []
    return [
        f"none of the {evaluation['images']} validation pictures has a label, so nothing could be measured: labels are "
        "looked for beside the pictures, in a folder 'labels' instead of 'images', one .txt file for each picture"
    ]


def _on_nothing_found(results: Columns, evaluation: Mapping[str, Any]) -> list[str]:
    """Advise on a finished model that finds nothing; a training has advice of its own."""
    if results or not evaluation.get("instances") or (evaluation.get("map50") or 0) >= ALMOST_ZERO:
        return []
    return [
        f"mAP@0.5 is {evaluation.get('map50') or 0:.2g}: are these the data and the class order the weights were "
        "trained with, and is --img the size of their training? Compare val_batch0_labels.jpg with val_batch0_pred.jpg"
    ]


def _on_zero(results: Columns) -> list[str]:
    rows = validated(results)
    best = max((results["metrics/mAP_0.5"][row] for row in rows), default=1.0)
    if len(rows) < PATIENCE or best >= ALMOST_ZERO:
        return []
    return [
        f"mAP@0.5 is still {best:.2g} after {len(rows)} validated epochs. Look at train_batch0.jpg and data_train.jpg: "
        "are the boxes where the objects are, and are the class names right? Compare objects and classes of train and "
        "val above. Where both are right the run may be too short: a new model needs some hundred optimizer steps, "
        "which small sets reach with more --epochs, --accumulate 1 or pretrained --weights"
    ]


def _total_loss(results: Columns, kind: str, rows: Sequence[int]) -> list[float]:
    return [sum(results[f"{kind}/{loss}"][row] for loss in LOSSES) for row in rows]


def _on_overfitting(results: Columns) -> list[str]:
    rows = validated(results)
    if len(rows) < 2 * PATIENCE:
        return []
    losses = _total_loss(results, "val", rows)
    lowest = min(range(len(rows)), key=losses.__getitem__)
    training = _total_loss(results, "train", rows)
    is_early, has_risen = lowest < EARLY * len(rows), losses[-1] > RISE * losses[lowest]
    if not (is_early and has_risen and training[-1] < training[lowest]):
        return []
    epoch, rise = int(results["epoch"][rows[lowest]]), losses[-1] / losses[lowest] - 1
    return [
        f"the validation loss was lowest in epoch {epoch} and has risen by {rise:.0%} since, "
        "while the training loss fell: the model learns its pictures by heart. More pictures, more mosaic, mixup or "
        "copy_paste in the --hyp file, or a smaller --cfg help; best.pt keeps the best epoch"
    ]


def _on_the_end(results: Columns, epochs: int, last: str) -> list[str]:
    rows = validated(results)
    is_over = len(results.get("epoch", ())) >= epochs
    if not is_over or len(rows) < PATIENCE:
        return []
    maps = [results["metrics/mAP_0.5:0.95"][row] for row in rows]
    if max(maps) < ALMOST_ZERO or maps[-1] < max(maps):
        return []
    return [
        "the last epoch was the best one: more may be gained with more epochs, "
        f"python train_dual.py --resume {last} --epochs {2 * epochs} extends this run"
    ]


def _on_small_objects(evaluation: Mapping[str, Any]) -> list[str]:
    coco, sizes = evaluation.get("coco", {}), evaluation.get("sizes", {}).get("labels", [0, 0, 0, 0])
    small, medium = coco.get("ap_small"), coco.get("ap_medium")
    if (
        small is None
        or medium is None
        or medium < ALMOST_ZERO
        or sizes[1] < SMALL_SHARE * max(sizes[0], 1)
        or small > medium / 2
    ):
        return []
    return [
        f"small objects (under 32x32 pixels, {sizes[1]} of {sizes[0]} labels) reach AP {small:.3f}, medium ones "
        f"{medium:.3f}: a larger --img shows them with more pixels; cutting large pictures into tiles does the same"
    ]


def _on_mixed_up_classes(evaluation: Mapping[str, Any]) -> list[str]:
    confusion, classes = evaluation.get("confusion", {}), evaluation.get("classes", [])
    cells, background = confusion.get("cells", []), confusion.get("size", 1) - 1
    names = {row["class"]: row["name"] for row in classes}
    labels = {row["class"]: row["labels"] for row in classes}
    mixed = [
        (count / labels[true], f"{count} of {labels[true]} '{names[true]}' were taken for '{names[found]}'")
        for found, true, count in cells
        if found != true and background not in (found, true) and labels.get(true) and found in names
        if count >= MIXED_UP_COUNT and count > MIXED_UP * labels[true]
    ]
    mixed.sort(key=lambda item: -item[0])
    return [f"{text}: look at both for labels that are swapped or drawn by different rules" for _, text in mixed[:3]]


def _on_rare_classes(evaluation: Mapping[str, Any]) -> list[str]:
    rare = [row["name"] for row in evaluation.get("classes", []) if 0 < row.get("labels", 0) < FEW_LABELS]
    if not rare:
        return []
    named = ", ".join(map(str, rare[:5])) + (" …" if len(rare) > 5 else "")
    return [
        f"{len(rare)} class(es) have fewer than {FEW_LABELS} labels in the validation set ({named}): their figures, "
        "and the mean over classes with them, move by chance from epoch to epoch"
    ]


def best_row(results: Columns) -> int | None:
    """Return the row of the best fitness, 0.1 mAP@0.5 + 0.9 mAP@0.5:0.95; None where no epoch was validated."""
    rows = validated(results)
    scores = {row: 0.1 * results["metrics/mAP_0.5"][row] + 0.9 * results["metrics/mAP_0.5:0.95"][row] for row in rows}
    known = {row: score for row, score in scores.items() if not math.isnan(score)}
    # Among equals the last one, as for best.pt and early stopping.
    return max(known, key=lambda row: (known[row], row)) if known else None
