"""What docstrings and comments have to say, as functions from source text to a list of violations.

Kept apart from the tests so that each rule can be shown to fail on a planted source.
"""

import ast
import io
import re
import symtable
import tokenize
from collections.abc import Collection, Iterable, Iterator, Mapping

Function = ast.FunctionDef | ast.AsyncFunctionDef
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
# What says itself by its name and type alike everywhere.
PLAIN = {"self", "cls", "model", "tokenizer", "progress", "force", "seed", "output"}
DOTTED = re.compile(r"(?<![\w./-])[a-z]\w*(?:\.\w+)+")
# Words that are names of modules, and stand for variables, records, settings or packages too.
OTHERS = {"config", "dense", "fit", "model", "vllm"}
FILES = {"css", "j2", "json", "md", "yaml"}


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


def prose(source: str) -> Iterator[str]:
    """Docstrings, those of private functions included, and comments."""
    named = (ast.Module, ast.ClassDef, *FUNCTIONS)
    nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, named))
    yield from (text for node in nodes if (text := ast.get_docstring(node)))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)


def lost_references(sources: Mapping[str, str]) -> list[str]:
    """Dotted names in prose, of a module or of what it has, that are not in the package.

    They begin with `rap`, or with the name of a folder or of a module: `planning.plan.Plan`,
    `plan.Plan`. `plan.py` is a module too.
    """
    parts, symbols = {"rap"}, {}
    for module, source in sources.items():
        parts |= {*module.split(".")}
        found = symtable.symtable(source, module, "exec").get_symbols()
        symbols[f"rap.{module}".rstrip(".")] = {
            x.get_name() for x in found if x.is_assigned() or x.is_imported()
        }

    def leads(path: list[str]) -> bool:
        return any(
            f".{module}".endswith("." + ".".join(path[:cut])) and {*path[cut : cut + 1]} <= names
            for module, names in symbols.items()
            for cut in range(1, len(path) + 1)
        )

    return [
        f"{module}: {name}"
        for module, source in sorted(sources.items())
        for text in prose(source)
        for name in DOTTED.findall(text)
        if (path := name.removesuffix(".py").split("."))[0] in parts - OTHERS
        and path[-1] not in FILES
        and not leads(path)
    ]
