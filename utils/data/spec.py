"""The data-set YAML: which pictures, how many classes, what they are called.

Paths are tried against the YAML file's folder, the working directory and the repository, in this order.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from utils.data.filesystem import plain_path
from utils.data.listing import entry_hint
from utils.files import REPO_ROOT, find_file
from utils.log import LOGGER
from utils.yaml_keys import refuse_repeated_keys

SPLITS = ("train", "val", "test")
NULL_WORDS = ("~", "null", "Null", "NULL")  # YAML's ways to write nothing


@dataclass(kw_only=True)
class DataSpec:
    """A checked data-set description; paths exist and are absolute, names run from 0 to nc - 1."""

    path: Path
    train: list[Path]
    val: list[Path]
    test: list[Path] = field(default_factory=list)
    nc: int
    names: dict[int, str]
    yaml_file: Path
    tried: dict[str, list[Path]] = field(default_factory=dict)  # split -> places looked at in vain

    @property
    def is_coco(self) -> bool:
        """Whether the validation set is COCO's val2017, whose predictions are written with COCO's category ids."""
        return any(path.name == "val2017.txt" for path in self.val)

    def split(self, name: str) -> list[Path]:
        """Paths of train, val or test; raises FileNotFoundError where the file declares none that exists."""
        if name not in SPLITS:
            raise ValueError(f"split {name!r} is unknown, expected one of {', '.join(SPLITS)}")
        paths = getattr(self, name)
        if not paths:
            detail = _tried_text(self.tried[name]) if self.tried.get(name) else f"there is no entry '{name}:'"
            hint = _place_hint(self.tried.get(name, []))
            raise FileNotFoundError(f"{self.yaml_file}: no '{name}' pictures: {detail}{hint}")
        return paths


def load_data_spec(path: str | Path) -> DataSpec:
    """Read and check a data-set YAML, given by path or by a name found below data/.

    Raises FileNotFoundError (file or pictures missing, with the places tried) or ValueError (contents).
    """
    yaml_file = _locate(path)
    content = _read_plain(yaml_file)
    for key in ("train", "val", "names"):
        if not content.get(key):
            state = "is empty" if key in content else "is missing"
            raise ValueError(f"{yaml_file}: entry '{key}:' {state}; needed are train, val and names")
    names = parse_names(content["names"], yaml_file)
    _check_nc(content.get("nc"), names, yaml_file)
    root_text = content.get("path") or ""
    if not isinstance(root_text, str):
        raise ValueError(f"{yaml_file}: path: must be one folder, got {root_text!r}")
    bases = _roots(root_text, yaml_file)
    found: dict[str, list[Path]] = {}
    tried: dict[str, list[Path]] = {}
    for split in SPLITS:
        found[split], tried[split] = _resolve_split(content.get(split), bases, yaml_file, split)
        if tried[split] and split != "test":
            hint = " (download entries are not carried out)" if content.get("download") else ""
            places = _tried_text(tried[split])
            raise FileNotFoundError(
                f"{yaml_file}: '{split}: {content[split]}' was not found{hint}; {places}{_place_hint(tried[split])}"
            )
    root = next((base for base in bases if base.exists()), bases[0])
    return DataSpec(path=root, **found, nc=len(names), names=names, yaml_file=yaml_file, tried=tried)


check_dataset = load_data_spec


def _locate(path: str | Path) -> Path:
    roots = [REPO_ROOT / name for name in ("data", "models", "utils")]
    return Path(find_file(str(path), roots=roots, suffixes=(".yaml", ".yml"))).absolute()


def _read_plain(yaml_file: Path) -> dict[str, object]:
    """Load the YAML with every value as the text that was written, so that `no` and `007` stay names."""
    try:
        text = yaml_file.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{yaml_file}: is not UTF-8 text ({error}); save it as UTF-8") from error
    try:
        refuse_repeated_keys(text, yaml_file)
        content = yaml.load(text, Loader=yaml.BaseLoader)  # builds text, lists and dictionaries only
    except yaml.YAMLError as error:
        raise ValueError(f"{yaml_file}: is no valid YAML: {error}") from error
    except RecursionError:
        raise ValueError(f"{yaml_file}: lists or mappings are nested too deep; is it a data file?") from None
    if not isinstance(content, Mapping):
        found = type(content).__name__ if content else "nothing"
        raise ValueError(f"{yaml_file}: expected 'key: value' entries (train, val, names), found {found}")
    return {key: "" if value in NULL_WORDS else value for key, value in content.items()}


def parse_names(value: object, origin: object = "data") -> dict[int, str]:
    """Turn a list or a dictionary of names into {0: name, ...}; raises ValueError on gaps and other forms."""
    if isinstance(value, Mapping):
        entries = {}
        for key, name in value.items():
            if not str(key).strip().isdecimal():
                raise ValueError(f"{origin}: names: key {key!r} is no class number; keys must be integers from 0")
            if int(key) in entries:
                raise ValueError(f"{origin}: names: class {int(key)} is named twice")
            entries[int(key)] = name
        missing = sorted(set(range(len(entries))) - set(entries))
        if missing:
            raise ValueError(
                f"{origin}: names: {len(entries)} entries, but no class {missing[0]}; number from 0 without gaps"
            )
    elif isinstance(value, (list, tuple)):
        entries = dict(enumerate(value))
    else:
        raise ValueError(f"{origin}: names must be a list or a dictionary of class names, got the text {value!r}")
    for number, name in entries.items():
        if isinstance(name, (Mapping, list, tuple)) or name is None:
            raise ValueError(f"{origin}: names: class {number} must be a text, got {name!r}")
    names = {number: str(entries[number]) for number in sorted(entries)}
    doubles = sorted({name for name in names.values() if list(names.values()).count(name) > 1})
    if doubles:
        LOGGER.warning(f"{origin}: class name(s) used more than once: {', '.join(doubles)}; the ids are kept apart")
    return names


def _check_nc(value: object, names: dict[int, str], yaml_file: Path) -> None:
    if value in (None, ""):
        return
    try:
        nc = int(str(value))
    except ValueError:
        raise ValueError(f"{yaml_file}: nc must be a whole number, got {value!r}") from None
    if nc != len(names):
        raise ValueError(f"{yaml_file}: nc is {nc}, but there are {len(names)} names; make them agree or remove nc")


def _roots(root_text: str, yaml_file: Path) -> list[Path]:
    """Folders against which the entries are tried, best first, without repeats."""
    bases = (yaml_file.parent, Path.cwd(), REPO_ROOT)
    return list(dict.fromkeys(base / Path(root_text).expanduser() for base in bases))


def _resolve_split(value: object, bases: list[Path], yaml_file: Path, split: str) -> tuple[list[Path], list[Path]]:
    """Paths found for one entry (text or list of texts), and the places tried for the first one that was not."""
    if value in (None, "", []):
        return [], []
    entries = value if isinstance(value, list) else [value]
    found = []
    for entry in entries:
        if not isinstance(entry, str):
            raise ValueError(f"{yaml_file}: {split}: must be a path or a list of paths, got {entry!r}")
        if not entry.strip():
            raise ValueError(f"{yaml_file}: {split}: an entry of the list is empty; delete it or name a folder")
        candidates = list(dict.fromkeys(place for base in bases for place in _places(base, entry)))
        existing = next((place for place in candidates if place.exists()), None)
        if existing is None:
            return [], candidates
        found.append(existing)
    return found, []


def _places(base: Path, entry: str) -> list[Path]:
    """Where one entry may lie below a base; exporters write '../train/images' though the folder is beside the file."""
    text = str(Path(entry).expanduser())
    places = [Path(plain_path(base / text))]
    if entry.startswith("../"):
        places.append(Path(plain_path(base / entry[3:])))
    return places


def _place_hint(places: list[Path]) -> str:
    """What to write instead of a pattern and of other usual slips; nothing for plain paths."""
    slip = next((hint for place in places if (hint := entry_hint(str(place)))), "")
    if slip:
        return f"; {slip}"
    if not any(set("*?[") & set(place.name) or "*" in str(place) for place in places):
        return ""
    return (
        ". Patterns with *, ? or [] are not expanded: name the folder (its sub-folders are searched as well), a text "
        "file that lists the pictures, or a list of these"
    )


def _tried_text(places: list[Path]) -> str:
    return "tried " + ", ".join(str(place) for place in places)
