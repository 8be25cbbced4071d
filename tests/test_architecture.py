"""Rules of structure, checked on the source text: directions of imports, homes of heavy packages, sizes, calls."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

REPO_ROOT = Path(__file__).resolve().parents[1]
MAX_FUNCTION_LINES = 60
MAX_FILE_LINES = 450
MAX_REEXPORT_LINES = 20

# Old import paths that users know; our own code goes to the real homes instead.
REEXPORTS = {
    "models.common",
    "models.experimental",
    "models.yolo",
    "utils.augmentations",
    "utils.dataloaders",
    "utils.general",
    "utils.loss_tal",
    "utils.loss_tal_dual",
    "utils.metrics",
    "utils.plots",
    "utils.tal.anchor_generator",
    "utils.tal.assigner",
    "utils.torch_utils",
}

# Imports point downwards or stay on a level; the first pattern that fits a module gives its level.
LEVELS = (
    (r"utils\.(log|driver|files|yaml_keys|runtime|boxes|anchors|threads|kernels(\.\w+)*)|models\.upstream", 0),
    (r"(models|utils)(\.\w+)?\.__init__", 0),
    (r"models\.(fast_paths|blocks|stages)|utils\.(nms|slicing|cli|preflight|options(\.\w+)?)", 1),
    (r"models\.heads|utils\.data\..*", 2),
    (r"models\.(backend|runners)|utils\.evaluate\.validator|utils\.train\.monitor", 5),
    (
        r"utils\.train\.(trainer|profiling|setup|state|saving|loaders|autobatch)|utils\.evaluate\.tasks|utils\.deploy\..*",
        6,
    ),
    (r"models\.(checkpoint|safe_reader|published|transfer|upstream_file)", 4),
    (r"models\..*|utils\.train\..*|utils\.evaluate\..*", 3),
    (r"\w+|scripts\..*|bench\..*", 7),
)

# (importer, imported): pairs of packages that never meet, whatever their levels.
FORBIDDEN_PAIRS = (
    (r"models\.", r"utils\.(data|train|evaluate|deploy)\b"),
    (r"utils\.data\.", r"models\b|utils\.(train|evaluate|deploy)\b"),
    (r"utils\.train\.(loss|assigner)\b", r"models\b|utils\.data\b"),
    (r"utils\.evaluate\.", r"utils\.train\b"),
    (r"utils\.deploy\.", r"utils\.train\b|utils\.data\.dataset\b"),
)

# Packages that are optional or slow to load, and the files that may load them.
HEAVY_HOMES = {
    "matplotlib": r"utils/evaluate/",
    "seaborn": r"utils/evaluate/",
    "pandas": r"utils/evaluate/",
    "scipy": r"utils/evaluate/",
    "tensorboard": r"utils/train/monitor",
    "pycocotools": r"utils/evaluate/coco",
    "onnx": r"utils/deploy/|models/runners",
    "onnxruntime": r"utils/deploy/|models/runners",
    "openvino": r"utils/deploy/|models/runners",
    "onnxslim": r"utils/deploy/",
    "tensorrt": r"utils/deploy/|models/runners",
    "triton": r"utils/kernels/programs/",
    "mss": r"utils/data/screen",
}
# May be imported inside functions: the above, and what only some machines have or only some commands need.
LAZY_PACKAGES = {*HEAVY_HOMES, "torch.utils.tensorboard", "PIL", "pynvml", "torchvision", "resource"}
LAZY_OWN = r"utils\.(evaluate|deploy)\b|utils\.kernels\.programs\b"  # the latter loads Triton


@dataclass(frozen=True)
class Import:
    """One import statement target: its dotted name, line, and whether it stands inside a function."""

    name: str
    line: int
    is_nested: bool


@cache
def library_files() -> tuple[Path, ...]:
    """Source files of the repository without its tests."""
    files = [*REPO_ROOT.glob("*.py")]
    for folder in ("models", "utils", "scripts", "bench"):
        files += (REPO_ROOT / folder).rglob("*.py")
    return tuple(sorted(files))


@cache
def tree_of(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"), filename=str(file))


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(REPO_ROOT).with_suffix("").parts)


def location(file: Path, line: int) -> str:
    return f"{file.relative_to(REPO_ROOT)}:{line}"


@cache
def known_modules() -> frozenset[str]:
    return frozenset(module_name(file) for file in library_files())


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def imports_of(file: Path) -> Iterator[Import]:
    """Yield every import of a file; ``from a import b`` counts as module ``a.b`` if there is such a module."""

    def walk(node: ast.AST, is_nested: bool) -> Iterator[Import]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.Import):
                yield from (Import(alias.name, child.lineno, is_nested) for alias in child.names)
            elif isinstance(child, ast.ImportFrom):
                assert child.level == 0, f"{location(file, child.lineno)}: relative import, write the full name"
                for alias in child.names:
                    deeper = f"{child.module}.{alias.name}"
                    yield Import(deeper if deeper in known_modules() else child.module, child.lineno, is_nested)
            elif not is_type_checking(child):
                in_function = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
                yield from walk(child, is_nested or in_function)

    yield from walk(tree_of(file), False)


def is_own(name: str) -> bool:
    return name in known_modules() or name.split(".")[0] in ("models", "utils", "scripts", "bench", "tests")


def level_of(name: str) -> int:
    return next(level for pattern, level in LEVELS if re.fullmatch(pattern, name))


def own_imports() -> Iterator[tuple[Path, str, Import]]:
    """Yield (file, module, import) for every import between modules of the repository, re-exports left out."""
    for file in library_files():
        module = module_name(file)
        if module in REEXPORTS or module.endswith("__init__"):
            continue
        yield from ((file, module, target) for target in imports_of(file) if is_own(target.name))


def is_inside(file: Path, home: str) -> bool:
    return re.match(home, file.relative_to(REPO_ROOT).as_posix()) is not None


def is_package_of(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def functions_of(tree: ast.AST) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_imports_point_downwards() -> None:
    faults = [
        f"{location(file, target.line)}: {module} (level {level_of(module)}) imports {target.name} "
        f"(level {level_of(target.name)})"
        for file, module, target in own_imports()
        if target.name in known_modules() and level_of(target.name) > level_of(module)
    ]
    assert not faults, "\n".join(faults)


def test_packages_that_never_meet() -> None:
    faults = [
        f"{location(file, target.line)}: {module} imports {target.name}"
        for file, module, target in own_imports()
        for importer, imported in FORBIDDEN_PAIRS
        if re.match(importer, module) and re.match(imported, target.name)
    ]
    assert not faults, "\n".join(faults)


def test_no_import_cycle() -> None:
    graph: dict[str, set[str]] = {}
    for _, module, target in own_imports():
        graph.setdefault(module, set()).add(target.name)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, "import cycle: " + " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for target in sorted(graph.get(module, ())):
                visit(target, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def test_no_library_module_imports_a_script() -> None:
    scripts = {module_name(file) for file in REPO_ROOT.glob("*.py")} | {
        module_name(file) for file in (REPO_ROOT / "scripts").glob("*.py")
    }
    faults = [
        f"{location(file, target.line)}: imports the script {target.name}"
        for file, module, target in own_imports()
        if target.name in scripts and not module.startswith("scripts.")
    ]
    assert not faults, "\n".join(faults)


def test_reexports_are_small_and_for_users_only() -> None:
    for module in sorted(REEXPORTS & known_modules()):
        text = (REPO_ROOT / (module.replace(".", "/") + ".py")).read_text(encoding="utf-8")
        assert len(text.splitlines()) <= MAX_REEXPORT_LINES, f"{module} has more than {MAX_REEXPORT_LINES} lines"
        assert "__all__" in text, f"{module} has no __all__"
    faults = [
        f"{location(file, target.line)}: imports {target.name}, which is there for users; import from its real home"
        for file, _, target in own_imports()
        if target.name in REEXPORTS
    ]
    assert not faults, "\n".join(faults)


def test_no_star_imports() -> None:
    faults = [
        location(file, node.lineno)
        for file in library_files()
        if module_name(file) not in REEXPORTS
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.ImportFrom) and any(alias.name == "*" for alias in node.names)
    ]
    assert not faults, f"star imports: {faults}"


def test_heavy_packages_stay_at_home() -> None:
    faults = [
        f"{location(file, target.line)}: {package} belongs to {home}"
        for file in library_files()
        for target in imports_of(file)
        for package, home in HEAVY_HOMES.items()
        if is_package_of(target.name.removeprefix("torch.utils."), package) and not is_inside(file, home)
    ]
    assert not faults, "\n".join(faults)


def test_imports_inside_functions_are_optional_or_heavy() -> None:
    faults = [
        f"{location(file, target.line)}: {target.name} should be imported at the top"
        for file in library_files()
        for target in imports_of(file)
        if target.is_nested
        and not any(is_package_of(target.name, package) for package in LAZY_PACKAGES)
        and not re.match(LAZY_OWN, target.name)
        and not (file.parent == REPO_ROOT and is_own(target.name))  # lets --help answer before torch is loaded
    ]
    assert not faults, "\n".join(faults)


@pytest.mark.slow
@pytest.mark.parametrize("script", ["train_dual.py", "val_dual.py", "detect_dual.py", "export.py"])
def test_help_loads_no_heavy_package(script: str) -> None:
    code = (
        "import runpy, sys\n"
        f"sys.argv = [{script!r}, '--help']\n"
        "try:\n"
        f"    runpy.run_path({script!r}, run_name='__main__')\n"
        "except SystemExit as end:\n"
        "    assert not end.code, end.code\n"
        f"print('LOADED', sorted(set(sys.modules) & {set(HEAVY_HOMES)!r}))\n"
    )
    run = subprocess.run([sys.executable, "-c", code], cwd=REPO_ROOT, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert "LOADED []" in run.stdout, run.stdout.splitlines()[-1]


def test_functions_and_files_are_short() -> None:
    faults = [
        f"{file.relative_to(REPO_ROOT)}: {count} lines"
        for file in library_files()
        if (count := len(file.read_text(encoding="utf-8").splitlines())) > MAX_FILE_LINES
    ]
    faults += [
        f"{location(file, node.lineno)}: {node.name} has {node.end_lineno - node.lineno + 1} lines"
        for file in library_files()
        for node in functions_of(tree_of(file))
        if node.end_lineno - node.lineno + 1 > MAX_FUNCTION_LINES
    ]
    assert not faults, "\n".join(faults)


def test_public_names_have_docstrings() -> None:
    faults = []
    for file in library_files():
        tree = tree_of(file)
        if not ast.get_docstring(tree):
            faults.append(f"{file.relative_to(REPO_ROOT)}: module")
        for node in tree.body:
            is_public = isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
            if is_public and not ast.get_docstring(node):
                faults.append(f"{location(file, node.lineno)}: {node.name}")
    assert not faults, "no docstring:\n" + "\n".join(faults)


def test_public_functions_are_typed() -> None:
    faults = []
    for file in library_files():
        for node in functions_of(tree_of(file)):
            arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
            untyped = [a.arg for a in arguments if a.annotation is None and a.arg not in ("self", "cls")]
            if not node.name.startswith("_") and untyped:
                faults.append(f"{location(file, node.lineno)}: {node.name}({', '.join(untyped)})")
    assert not faults, "arguments without a type:\n" + "\n".join(faults)


def called_name(node: ast.Call) -> str:
    """Return the dotted name of what is called, or an empty text where it has none."""
    parts, target = [], node.func
    while isinstance(target, ast.Attribute):
        parts.append(target.attr)
        target = target.value
    return ".".join([*([target.id] if isinstance(target, ast.Name) else [""]), *reversed(parts)])


def keyword_value(node: ast.Call, name: str) -> object:
    return next((getattr(k.value, "value", None) for k in node.keywords if k.arg == name), None)


def call_faults(file: Path, node: ast.Call) -> Iterator[str]:
    """Yield what is wrong with one call."""
    name = called_name(node)
    if name in ("eval", "exec", "compile", "__import__", "os.system", "os.popen"):
        yield f"{name}() runs text as a program"
    if keyword_value(node, "shell"):
        yield "a shell runs the command"
    if name == "torch.load" and keyword_value(node, "weights_only") is not True:
        yield "torch.load without weights_only=True executes what the file says"
    if keyword_value(node, "allow_pickle"):
        yield "allow_pickle executes what the file says"
    in_script = file.parent in (REPO_ROOT, REPO_ROOT / "scripts", REPO_ROOT / "bench")
    if name == "print" and not in_script:
        yield "print in a library module; use LOGGER"
    if name in ("sys.exit", "exit", "quit") and not in_script and module_name(file) != "utils.cli":
        yield f"{name}() below the scripts; raise an exception"


def test_no_dangerous_or_noisy_calls() -> None:
    faults = [
        f"{location(file, node.lineno)}: {fault}"
        for file in library_files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Call)
        for fault in call_faults(file, node)
    ]
    assert not faults, "\n".join(faults)


def test_pickle_is_read_by_the_safe_reader_only() -> None:
    faults = [
        location(file, target.line)
        for file in library_files()
        for target in imports_of(file)
        if target.name.split(".")[0] in ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal")
        and module_name(file) not in ("models.safe_reader", "models.upstream_file")  # the latter writes only
    ]
    assert not faults, f"pickle outside models/safe_reader.py: {faults}"


def test_no_bare_except_and_no_assert() -> None:
    faults = [
        f"{location(file, node.lineno)}: {'except without a type' if isinstance(node, ast.ExceptHandler) else 'assert'}"
        for file in library_files()
        for node in ast.walk(tree_of(file))
        if isinstance(node, ast.Assert) or (isinstance(node, ast.ExceptHandler) and node.type is None)
    ]
    assert not faults, "\n".join(faults)


def text_files() -> Iterator[Path]:
    """Yield the text files of the repository, without what git ignores and without this file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=REPO_ROOT,
        capture_output=True,
        check=False,
    )
    names = listed.stdout.decode("utf-8", "surrogateescape").split("\0") if listed.returncode == 0 else []
    files = [REPO_ROOT / name for name in names if name] or [*library_files(), *REPO_ROOT.glob("*.md")]
    text_suffixes = {"", ".py", ".md", ".sh", ".yaml", ".yml", ".toml", ".txt", ".json", ".cfg"}
    for file in files:
        if file.is_file() and file.suffix in text_suffixes and file.name != "LICENSE" and file != Path(__file__):
            yield file


def test_text_stands_on_its_own() -> None:
    """No notes of a workplace, no numbers of rows and no paths of one machine in what others read."""
    patterns = (
        r"/work/\w+",
        r"(?<![\w.])/tmp/\w+",
        r"\b(train|data|model|val|loss|detect|export|checkpoint|style|deviations|architectures)\.md\b",
        r"§",
        r"(?-i:\b[SD]\d{1,2}\b)",
    )
    joined = re.compile("|".join(patterns), re.IGNORECASE)
    faults = [
        f"{location(file, number)}: {match.group()}"
        for file in text_files()
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), 1)
        if (match := joined.search(line))
    ]
    assert not faults, "\n".join(faults)
