"""The shape of the code base: layers, budgets, and documents that tell the truth. Sources are read, not run."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "finitune"

# Imports go strictly down, and never sideways into another package of the same line.
LAYERS = (
    ("errors", "package_data"),
    ("report", "progress", "codes"),
    ("numerics",),
    ("rules",),
    ("files", "machine"),
    ("adapters", "models"),
    ("namings", "precision", "config"),
    ("importers", "datasets"),
    ("training", "generation", "merging"),
    ("verbs",),
    ("api",),
    ("render",),
    ("cli",),
    ("__init__", "__main__"),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}

MAX_FILE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 7
MAX_DUPLICATION = 0.02
WINDOW = 8

LIGHT = (
    "__init__",
    "__main__",
    "cli",
    "codes",
    "errors",
    "package_data",
    "progress",
    "report",
)  # what `finitune --help` imports
HEAVY = {"torch", "torchvision", "diffusers", "transformers", "accelerate", "safetensors", "numpy", "PIL", "rich"}
SURROUNDINGS = {"open", "print", "input", "getenv", "read_text", "read_bytes", "mkdir", "manual_seed", "run", "time"}
LOOSE = ("Makefile", ".gitignore")
MACHINE_PATH = re.compile(r"(?<![\w.:/~-])/(?:home|root|work|Users|mnt)/\w")


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def place(path: Path, node: ast.AST | None = None) -> str:
    line = getattr(node, "lineno", None)
    return f"{path.relative_to(ROOT)}" + (f":{line}" if line else "")


def part_of(path: Path) -> str:
    """The top-level module or package of finitune that a file belongs to."""
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imported_parts(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """Each import of finitune in a file, as the part of finitune that it reaches into."""
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            head, _, rest = name.partition(".")
            if head == "finitune" and rest != "__version__":  # a fact about the release, not code
                part = rest.partition(".")[0]
                yield node, part if part in HEIGHT else "__init__"


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    yield from (node for node in ast.walk(tree(path)) if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)))


def test_every_part_has_a_layer():
    parts = {part_of(path) for path in sources("src/finitune")}
    assert parts <= set(HEIGHT), "give it a line in LAYERS, and in the README"


def test_imports_go_down():
    wrong = [
        f"{place(path, node)}: {part_of(path)} may not import {part}"
        for path in sources("src/finitune")
        for node, part in imported_parts(path)
        if part != part_of(path) and HEIGHT[part] >= HEIGHT[part_of(path)]
    ]
    assert not wrong


def test_no_relative_imports():
    wrong = [
        place(path, node)
        for path in sources("src/finitune", "tests")
        for node in ast.walk(tree(path))
        if isinstance(node, ast.ImportFrom) and node.level
    ]
    assert not wrong


def test_light_modules_import_nothing_heavy():
    wrong = [
        f"{place(path, node)}: {name}"
        for name in LIGHT
        for path in (sorted((PACKAGE / name).glob("*.py")) or [PACKAGE / f"{name}.py"])
        for node, name in module_level_imports(path)
        if name in HEAVY
    ]
    assert not wrong


def module_level_imports(path: Path) -> Iterator[tuple[ast.AST, str]]:
    """The top names imported when the module is (an import under TYPE_CHECKING is not)."""
    for node in tree(path).body:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node, node.module.partition(".")[0]


def test_no_work_at_import():
    wrong = [
        f"{place(path, node)}: {reason}"
        for path in sources("src/finitune")
        for node in tree(path).body
        if (reason := work(node))
    ]
    assert not wrong


def work(node: ast.stmt) -> str:
    """Why a module-level statement is work; '' for an import, a definition, or a constant."""
    if isinstance(node, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)):
        return ""
    if isinstance(node, ast.Expr):
        return "" if isinstance(node.value, ast.Constant) else "an expression for its effect"
    if isinstance(node, ast.If):
        return "" if ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'") else "a condition"
    if isinstance(node, (ast.Assign, ast.AnnAssign)):
        called = {callee(call) for call in ast.walk(node) if isinstance(call, ast.Call)}
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if called & SURROUNDINGS:
            return "a constant that depends on its surroundings"
        constant = all(re.match("_?[A-Z]", ast.unparse(target)) for target in targets)
        return "a variable made by a call" if called and not constant else ""
    return type(node).__name__


def callee(call: ast.Call) -> str:
    return ast.unparse(call.func).rpartition(".")[2]


def test_files_are_short():
    lengths = {place(path): len(path.read_text(encoding="utf-8").splitlines()) for path in sources("src", "tests")}
    assert not {name: length for name, length in lengths.items() if length > MAX_FILE_LINES}


def test_functions_are_short():
    wrong = {
        f"{place(path, function)} {function.name}": length
        for path in sources("src", "tests")
        for function in functions(path)
        if (length := (function.end_lineno or 0) - function.lineno + 1) > MAX_FUNCTION_LINES
    }
    assert not wrong


def test_functions_take_few_parameters():
    wrong = {
        f"{place(path, function)} {function.name}": count
        for path in sources("src", "tests")
        for function in functions(path)
        if (count := num_parameters(function)) > MAX_PARAMETERS
    }
    assert not wrong


def num_parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    arguments = function.args
    named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
    return len([argument for argument in named if argument.arg not in ("self", "cls", "ctx")])


def test_little_is_said_twice():
    lines = {path: code_lines(path) for path in sources("src/finitune")}
    places: dict[tuple[str, ...], list[tuple[Path, int]]] = defaultdict(list)
    for path, code in lines.items():
        for start in range(len(code) - WINDOW + 1):
            places[tuple(code[start : start + WINDOW])].append((path, start))
    repeated = {
        (path, start + offset)
        for found in places.values()
        if len(found) > 1
        for path, start in found
        for offset in range(WINDOW)
    }
    share = len(repeated) / sum(map(len, lines.values()))
    assert share < MAX_DUPLICATION, Counter(place(path) for path, _ in repeated).most_common()


def code_lines(path: Path) -> list[str]:
    """The lines that say something: no blanks, comments, imports or lone brackets."""
    imports = {
        number
        for node in ast.walk(tree(path))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for number in range(node.lineno, (node.end_lineno or node.lineno) + 1)
    }
    numbered = enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
    stripped = (line.strip() for number, line in numbered if number not in imports)
    return [line for line in stripped if line and not line.startswith("#") and line.strip("()[]{},:")]


def test_exported_names_are_true_and_lazy():
    program = (
        "import sys, finitune\n"
        "names = getattr(finitune, '__all__', None)\n"
        "if names is None: sys.exit(77)\n"
        "assert 'torch' not in sys.modules, 'import finitune imports torch'\n"
        "for name in names: getattr(finitune, name)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    if done.returncode == 77:
        pytest.skip("finitune exports no names yet")
    assert done.returncode == 0, done.stderr


def fences(text: str) -> list[tuple[str, str]]:
    """The fenced blocks of a Markdown text: (language, content)."""
    return re.findall(r"^```([^\n`]*)\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)


def readme_tree() -> str:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    start = re.search(r"^## Layout\b|<!-- tree -->", text, flags=re.MULTILINE)
    blocks = fences(text[start.start() :]) if start else []
    if not blocks:
        pytest.skip("README.md has no tree yet: a fenced block below '## Layout' or '<!-- tree -->'")
    return blocks[0][1]


def tree_paths(block: str) -> Iterator[Path]:
    """Every path that a drawn tree names; depth is read from the indentation."""
    folders: list[tuple[int, Path]] = []
    for line in block.splitlines():
        drawing, rest = re.fullmatch(r"([\s│├└─|`+-]*)(.*)", line).groups()  # type: ignore[union-attr]
        names = re.split(r"[,\s]+", re.split(r"\s{2,}|\s#", rest)[0])
        while folders and folders[-1][0] >= len(drawing):
            folders.pop()
        for name in names:
            if not re.fullmatch(r"[\w.-]+(/[\w.-]+)*(/|\.\w+)|Makefile|LICENSE", name):
                continue
            path = (folders[-1][1] if folders else Path()) / name
            yield path
            if name.endswith("/"):
                folders.append((len(drawing), path))


def test_readme_tree_is_true():
    named = set()
    for path in tree_paths(readme_tree()):
        found = [base / path for base in (ROOT, ROOT / "src", PACKAGE) if (base / path).exists()]
        assert found, f"README.md names {path}, which does not exist"
        named.add(found[0])
    parts = {path for path in PACKAGE.iterdir() if path.suffix == ".py" or any(path.glob("*.py"))}
    missing = {part.name for part in parts - named} - {"__init__.py", "__main__.py", "__pycache__"}
    assert not missing, "README.md's tree leaves these out"


def test_readmes_agree():
    translation = ROOT / "README.zh-CN.md"
    if not translation.exists():
        pytest.skip("README.zh-CN.md is not there yet")
    english, chinese = (path.read_text(encoding="utf-8") for path in (ROOT / "README.md", translation))
    assert heading_levels(english) == heading_levels(chinese)
    assert commands(english) == commands(chinese)


def heading_levels(text: str) -> list[int]:
    bare = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return [len(marks) for marks in re.findall(r"^(#+) ", bare, flags=re.MULTILINE)]


def commands(text: str) -> list[tuple[str, list[str]]]:
    """Each block's language, and what it says to the machine: prose blocks and comments may be translated."""
    return [
        (language, [re.sub(r"\s*#.*", "", line) for line in block.splitlines()] if language not in ("", "text") else [])
        for language, block in fences(text)
    ]


def test_no_machine_paths():
    files = [path for path in ROOT.iterdir() if path.suffix in (".md", ".toml", ".txt", ".yaml") or path.name in LOOSE]
    files += [
        path
        for folder in ("src", "tests", "scripts", "docs", "benchmarks", ".ci")
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".md", ".toml", ".json", ".txt", ".sh", "")
    ]
    wrong = [
        f"{place(path)}: {match.group()}"
        for path in files
        if path.is_file()
        for match in MACHINE_PATH.finditer(path.read_text(encoding="utf-8"))
    ]
    assert not wrong


def test_a_drawn_tree_is_read_by_its_indentation():
    drawing = (
        "src/finitune/\n├── errors.py, report.py   what is told\n├── models/\n│   └── anima/   one family\n└── cli.py\n"
    )
    names = [str(path) for path in tree_paths(drawing)]
    inside = ("errors.py", "report.py", "models", "models/anima", "cli.py")
    assert names == ["src/finitune", *(f"src/finitune/{name}" for name in inside)]


@pytest.mark.parametrize(
    ("statement", "reason"),
    [
        ("X = frozenset({1})", ""),
        ("__all__ = ['x']", ""),
        ("if TYPE_CHECKING: import torch", ""),
        ("torch.manual_seed(0)", "an expression for its effect"),
        ("logger = getLogger('x')", "a variable made by a call"),
        ("HOME = os.getenv('HOME')", "a constant that depends on its surroundings"),
        ("for x in y: pass", "For"),
    ],
)
def test_work_is_told_from_constants(statement: str, reason: str):
    assert work(ast.parse(statement).body[0]) == reason
