"""Pictures of the screen as a live source: ``screen``, ``screen 1`` or ``screen 1 LEFT TOP WIDTH HEIGHT``.

Needs the optional package mss and a running window system.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass

import cv2
import numpy as np

SCREEN_RATE = 30.0  # pictures per second at most: screens rarely show more, and grabbing costs the network its cores


@dataclass(frozen=True)
class ScreenArea:
    """Monitor number (0 = all of them together) and, in pixels from its corner, the part to look at."""

    monitor: int = 0
    part: tuple[int, int, int, int] | None = None  # left, top, width, height


def parse_screen(text: str) -> ScreenArea:
    """Read the words after ``screen``: nothing, a monitor, four numbers of the part, or all five.

    Raises:
        ValueError: other words.
    """
    words = text.split()[1:]
    numbers = [int(word) for word in words if word.isdecimal()]
    if len(numbers) != len(words) or len(numbers) not in (0, 1, 4, 5) or (len(numbers) > 1 and 0 in numbers[-2:]):
        raise ValueError(f"--source '{text}': write 'screen', 'screen N', or 'screen N LEFT TOP WIDTH HEIGHT'")
    part = tuple(numbers[-4:]) if len(numbers) >= 4 else None
    return ScreenArea(numbers[0] if len(numbers) in (1, 5) else 0, part)


def is_screen(text: str) -> bool:
    """Return whether a source means the screen."""
    return text.lower().split()[:1] == ["screen"]


def check_screen(text: str) -> None:
    """Raise ValueError for wrong words, ImportError where the package for grabbing is missing."""
    parse_screen(text)
    if importlib.util.find_spec("mss") is None:
        raise ImportError(f"--source '{text}' needs a package that grabs the screen: pip install mss")


class ScreenCapture:
    """The screen behind the calls of OpenCV's ``VideoCapture``. Use it in the thread that made it.

    Raises:
        ValueError: there is no such monitor.
    """

    def __init__(self, text: str) -> None:
        import mss

        area = parse_screen(text)
        self._grabber = mss.mss()
        monitors = self._grabber.monitors
        if area.monitor >= len(monitors):
            self._grabber.close()
            raise ValueError(f"--source '{text}': monitors 0 (all) to {len(monitors) - 1} are there")
        self._place = dict(monitors[area.monitor])
        if area.part:
            left, top, width, height = area.part
            self._place = {
                "left": self._place["left"] + left,
                "top": self._place["top"] + top,
                "width": width,
                "height": height,
            }
        self._next = time.monotonic()

    def isOpened(self) -> bool:  # noqa: N802 - OpenCV's name
        return True

    def grab(self) -> bool:
        """Wait until the next picture is due."""
        time.sleep(max(self._next - time.monotonic(), 0))
        self._next = max(self._next, time.monotonic() - 1) + 1 / SCREEN_RATE
        return True

    def retrieve(self) -> tuple[bool, np.ndarray]:
        """Return True and the picture (H, W, 3) BGR."""
        return True, cv2.cvtColor(np.asarray(self._grabber.grab(self._place)), cv2.COLOR_BGRA2BGR)

    def get(self, propId: int) -> float:  # noqa: N803 - OpenCV's name
        return SCREEN_RATE if propId == cv2.CAP_PROP_FPS else 0.0

    def release(self) -> None:
        self._grabber.close()
