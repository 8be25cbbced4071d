"""Fonts for names beyond ASCII, which OpenCV cannot draw: found on this machine, never fetched.

Looked at in turn: the file named by the environment variable ``YOLO_FONT``, DejaVu, which comes with matplotlib, and
the fonts of the system. A text is drawn with the first one that has all of its characters.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from pathlib import Path

import numpy as np
from PIL import ImageFont

from utils.log import CountedWarnings

GLYPH_HEIGHT = 0.73  # of a capital letter, as a fraction of the size of a TrueType font
PROBE_SIZE = 24  # pixels at which glyphs are compared
FONT_SUFFIXES = frozenset((".ttf", ".ttc", ".otf"))
MAX_FONTS = 400  # looked at on a machine that has more
# Parts of the names of fonts that cover many scripts, so that the search ends early.
WIDE_FONTS = ("notosanscjk", "wqy", "droidsansfallback", "msyh", "simhei", "pingfang", "hiragino", "malgun", "unifont")
WIDE_FONTS += ("arialuni", "arial unicode", "gulim", "notosans", "freesans", "nirmala", "segoeui", "tahoma", "arial")
NO_GLYPH = "\U0010ffff"
_failures = CountedWarnings()


@functools.lru_cache(maxsize=1)
def font_files() -> tuple[Path, ...]:
    """Return the font files to look at, the preferred ones first."""
    chosen = os.environ.get("YOLO_FONT")
    found = [Path(chosen)] if chosen else []
    package = importlib.util.find_spec("matplotlib")  # located, not imported: import costs a second
    if package is not None and package.origin is not None:
        found.append(Path(package.origin).parent / "mpl-data" / "fonts" / "ttf" / "DejaVuSans.ttf")
    installed = [path for folder in _system_folders() for path in _fonts_below(folder)]
    return tuple([path for path in found if path == Path(chosen or "") or path.is_file()] + installed[:MAX_FONTS])


def _system_folders() -> list[Path]:
    home = Path.home()
    if sys.platform == "win32":
        return [Path(os.environ.get("WINDIR", r"C:\Windows")) / "Fonts", home / "AppData/Local/Microsoft/Windows/Fonts"]
    if sys.platform == "darwin":
        return [Path("/System/Library/Fonts"), Path("/Library/Fonts"), home / "Library/Fonts"]
    return [Path("/usr/share/fonts"), Path("/usr/local/share/fonts"), home / ".local/share/fonts", home / ".fonts"]


def _fonts_below(folder: Path) -> list[Path]:
    """Return the fonts of a folder: those of many scripts first, upright before bold and slanted ones."""
    paths = [path for path in folder.rglob("*") if path.suffix.lower() in FONT_SUFFIXES] if folder.is_dir() else []

    def rank(path: Path) -> tuple[int, bool, str]:
        name = path.stem.lower()
        place = next((number for number, part in enumerate(WIDE_FONTS) if part in name), len(WIDE_FONTS))
        is_special = any(word in name for word in ("bold", "italic", "oblique", "light", "mono", "condensed", "serif"))
        return place, is_special, str(path)

    return sorted(paths, key=rank)


@functools.lru_cache(maxsize=2 * MAX_FONTS)
def _font(path: Path, size: int) -> ImageFont.FreeTypeFont | None:
    try:
        return ImageFont.FreeTypeFont(str(path), size)  # `truetype` looks for another file of that name as well
    except OSError as error:
        _failures.warn(f"font {path}", f"font {path} cannot be used ({error})")
        return None


@functools.lru_cache(maxsize=16384)
def _has_glyph(path: Path, character: str) -> bool:
    """Return whether a font draws ``character`` as something else than its sign for a missing glyph."""
    font = _font(path, PROBE_SIZE)
    if font is None:
        return False
    glyph, missing = font.getmask(character), font.getmask(NO_GLYPH)
    return character.isspace() or glyph.size != missing.size or bytes(glyph) != bytes(missing)


@functools.lru_cache(maxsize=4096)
def font_for(text: str) -> Path | None:
    """Return the first font that has every character of ``text``; None without one."""
    characters = sorted(set(text))
    return next((path for path in font_files() if all(_has_glyph(path, letter) for letter in characters)), None)


def can_draw(text: str) -> bool:
    """Return whether every character of ``text`` can be drawn."""
    return text.isprintable() and (text.isascii() or font_for(text) is not None)


@functools.lru_cache(maxsize=1024)
def text_mask(text: str, size: int) -> tuple[np.ndarray, int]:
    """Return the opacity of ``text`` (h, w) 0 … 1, and how many pixels it starts below the top of the line."""
    path = font_for(text)
    font = _font(path, size) if path else None
    if font is None:
        return np.zeros((size, 1), np.float32), 0
    mask = font.getmask(text)
    opacity = np.frombuffer(bytes(mask), np.uint8).reshape(mask.size[::-1]).astype(np.float32) / 255
    return opacity, max(int(size * GLYPH_HEIGHT) - opacity.shape[0], 0)


def forget_fonts() -> None:
    """Look for fonts anew, for example after ``YOLO_FONT`` was changed."""
    for cached in (font_files, _font, _has_glyph, font_for, text_mask):
        cached.cache_clear()
