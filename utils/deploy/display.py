"""What a person at the screen sees: the counts of a line, and whether windows can be shown at all."""

from __future__ import annotations

import os
import re
import sys
from collections import Counter
from collections.abc import Mapping

import cv2
import numpy as np


def count_text(detections: np.ndarray, names: Mapping[int, str]) -> str:
    """Return for example ``3 squares, 1 triangle``, classes in rising order; empty without detections.

    Several of a class get an s, as programs that read upstream's lines expect, but none that would make no word of the
    user's name: behind an s (``2 Platelets``), a figure or another script than Latin.
    """
    counts = Counter(detections[:, 5].astype(int).tolist())
    return ", ".join(
        f"{count} {name}{'s' if count > 1 and re.search('[a-rt-z]$', name, re.IGNORECASE) else ''}"
        for name, count in ((names.get(number, str(number)), count) for number, count in sorted(counts.items()))
    )


def display_problem() -> str | None:
    """Return why no window can be shown, None if one can. The window system is not asked: that may end the process."""
    kind = re.search(r"GUI:\s*(\S+)", cv2.getBuildInformation())
    if kind and kind.group(1).upper() == "NONE":
        return "this OpenCV has no windows (opencv-python-headless); install opencv-python"
    is_linux = sys.platform.startswith("linux")
    if is_linux and not (os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        return "there is no display (neither DISPLAY nor WAYLAND_DISPLAY is set)"
    return None
