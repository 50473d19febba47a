"""The rules of the source tree, as functions from source text to a list of violations.

Kept apart from the tests so that each rule can be shown to fail on a planted source.
"""

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

PACKAGE = "rap"
FORBIDDEN_STEMS = {"utils", "helpers", "common", "misc"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_KERNEL_LINES = 120
KERNELS = "model.kernels."
MAX_ROOT_ENTRIES = 18  # fifteen rooms, what is imported, and what is run

# A module is named by its path below the package: "rope", "methods.base", "assets" for
# assets/__init__.py, "" for the package's own __init__.py.
Sources = Mapping[str, str]
Functions = (ast.FunctionDef, ast.AsyncFunctionDef)


def read_package(root: Path) -> dict[str, str]:
    """Module name to source, for every Python file below `root`."""
    return {
        _module_name(path.relative_to(root)): path.read_text("utf-8") for path in root.rglob("*.py")
    }


def _module_name(path: Path) -> str:
    parts = path.with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _is_own(dotted: str) -> bool:
    return dotted.partition(".")[0] == PACKAGE


def remote_code_violations(sources: Sources, folder: str, shipped: Iterable[str]) -> list[str]:
    """Shipped modules may import by `from .shipped import` only: transformers copies just those."""
    shipped = set(shipped)
    found = []
    for name in sorted({f"{folder}.{stem}" for stem in shipped} & set(sources)):
        for node in ast.walk(ast.parse(sources[name])):
            if isinstance(node, ast.Import):
                bad = [alias.name for alias in node.names if _is_own(alias.name)]
            elif isinstance(node, ast.ImportFrom):
                sibling = node.level == 1 and node.module in shipped
                own = node.level > 0 or _is_own(node.module or "")
                bad = [ast.unparse(node)] if own and not sibling else []
            else:
                continue
            found += [f"{name}: {text!r} would be missing from a checkpoint" for text in bad]
    return found


def size_violations(sources: Sources) -> list[str]:
    """Files over 500 lines and functions over 60 (in model/kernels/ 120)."""
    found = []
    for name, source in sorted(sources.items()):
        lines = len(source.splitlines())
        if lines > MAX_FILE_LINES:
            found.append(f"{name}: {lines} lines, at most {MAX_FILE_LINES}")
        limit = MAX_KERNEL_LINES if name.startswith(KERNELS) else MAX_FUNCTION_LINES
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, Functions):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > limit:
                    found.append(f"{name}.{node.name}: {length} lines, at most {limit}")
    return found


def docstring_violations(sources: Sources) -> list[str]:
    """Modules and public top-level functions and classes without a docstring."""
    found = []
    for name, source in sorted(sources.items()):
        tree = ast.parse(source)
        if not ast.get_docstring(tree):
            found.append(f"{name or '__init__'}: the module has no docstring")
        for node in tree.body:
            named = isinstance(node, (*Functions, ast.ClassDef))
            if named and not node.name.startswith("_") and not ast.get_docstring(node):
                found.append(f"{name}.{node.name}: no docstring")
    return found


def root_violations(root: Path) -> list[str]:
    """More entries at the root of the package than a reader takes in at a glance."""
    unread = {"__pycache__", "py.typed"}
    entries = sorted(path.name for path in root.iterdir() if path.name not in unread)
    if len(entries) <= MAX_ROOT_ENTRIES:
        return []
    return [f"{len(entries)} entries at the root, at most {MAX_ROOT_ENTRIES}: {entries}"]


def name_violations(paths: Iterable[Path]) -> list[str]:
    """Files named after nothing."""
    return [f"{path}: name it after its subject" for path in paths if path.stem in FORBIDDEN_STEMS]


def text_violations(path: Path, text: str) -> list[str]:
    """Characters outside ASCII, and notes to do later what belongs in an issue."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.isascii():
            found.append(f"{path}:{number}: not ASCII")
        if "TO" + "DO" in line:
            found.append(f"{path}:{number}: a note for later; open an issue instead")
    return found
