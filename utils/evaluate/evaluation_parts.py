"""The form of ``evaluation.json``, part by part, so that a damaged one costs the report that part and is named."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NUMBER = (int, float, type(None))
LINES = {"mean": [NUMBER], "classes": [[NUMBER]]}
# A tuple or type: of that kind; a list: all of its one form; a mapping: at least these keys, or ``str`` for all keys.
FORMS: dict[str, Any] = {
    **dict.fromkeys(("images", "instances", "precision", "recall", "map50", "map"), NUMBER),
    **dict.fromkeys(("operating_confidence", "worst_confidence"), NUMBER),
    "settings": {str: (str, *NUMBER)},
    "coco": {str: NUMBER},
    "sizes": {"labels": [NUMBER]},
    "classes": [{"class": int, "name": (str, *NUMBER), "labels": NUMBER}],
    "confusion": {"size": int, "cells": [[int]]},
    "curves": {
        "axis": [NUMBER],
        "classes": [int],
        **dict.fromkeys(("precision", "recall", "f1", "precision_at_recall"), LINES),
    },
    "worst": {str: [{"file": str, "missed": NUMBER, "false": NUMBER, "objects": NUMBER}]},
}
NEEDED = {"confusion": "classes", "curves": "classes", "coco": "sizes"}  # which part cannot be shown without another


def without_damage(evaluation: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parts of an evaluation that have their form, and the names of those that have not."""
    damaged = [name for name, form in FORMS.items() if name in evaluation and not _has_form(evaluation[name], form)]
    damaged += [name for name, other in NEEDED.items() if other in damaged and name in evaluation]
    damaged = list(dict.fromkeys(damaged))
    return {name: value for name, value in evaluation.items() if name not in damaged}, damaged


def _has_form(value: Any, form: Any) -> bool:
    if isinstance(form, list):
        return isinstance(value, list) and all(_has_form(item, form[0]) for item in value)
    if not isinstance(form, dict):
        return isinstance(value, form)
    if not isinstance(value, Mapping):
        return False
    if str in form:
        return all(_has_form(item, form[str]) for item in value.values())
    return not value or all(key in value and _has_form(value[key], part) for key, part in form.items())
