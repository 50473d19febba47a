"""What docstrings have to say, as functions from source text to a list of violations.

Kept apart from the tests so that each rule can be shown to fail on a planted source.
"""

import ast
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What says itself by its name and type alike everywhere.
PLAIN = {"self", "cls", "model", "tokenizer", "progress", "force", "seed", "output"}


def public_functions(source: str) -> Iterator[tuple[str, Function]]:
    """Public functions at the top of a module and in its public classes, by their dotted name."""
    for node in ast.parse(source).body:
        if isinstance(node, FUNCTIONS) and not node.name.startswith("_"):
            yield node.name, node
        elif isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
            for inner in node.body:
                if isinstance(inner, FUNCTIONS) and not inner.name.startswith("_"):
                    yield f"{node.name}.{inner.name}", inner


def raised(function: Function, errors: Collection[str]) -> set[str]:
    """Names of `errors` that the function itself raises, functions inside it left out."""
    found: set[str] = set()
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, (*FUNCTIONS, ast.Lambda, ast.ClassDef)):
            continue
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            name = node.exc.func
            if isinstance(name, ast.Name) and name.id in errors:
                found.add(name.id)
        waiting += ast.iter_child_nodes(node)
    return found


def silent_raises(sources: Mapping[str, str], errors: Mapping[str, str]) -> list[str]:
    """Public functions that raise one of `errors` (class to base) and do not name it, or its base.

    Commands of the command line are left out: their docstring is their help, and every error of
    theirs is one line and exit code 2.
    """
    found = []
    for module, source in sorted(sources.items()):
        for name, function in public_functions(source):
            if module.startswith("cli.") and name.endswith("_command"):
                continue
            said = ast.get_docstring(function) or ""
            for error in sorted(raised(function, errors)):
                if error not in said and errors[error] not in said:
                    found.append(f"{module}.{name}: raises {error} and does not say so")
    return found


def unsaid_parameters(name: str, docstring: str, parameters: Iterable[str]) -> list[str]:
    """Parameters that a docstring of the public API does not name, but for those in PLAIN."""
    words = set(re.findall(r"\w+", docstring))
    return [
        f"{name}: does not say what {parameter} is"
        for parameter in parameters
        if parameter not in words | PLAIN
    ]
