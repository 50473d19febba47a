"""Lint of documents and of texts in the package: terms, spelling, sentence length, numbers, links.

    python docs/prose.py                # PAGES and src/rap; exit code 1 if something is found
    python docs/prose.py --stats README.md

docs/reference/glossary.md defines the terms. Code, tables, formulas and generated parts (between
`<!-- measured: ... -->` and `<!-- end of what is measured -->`) are not sentences; in tables only
terms are checked. In src/rap, terms and spelling of error messages and of the first lines of public
docstrings are checked, and the sentence length of the latter.
"""

import ast
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

REPOSITORY = Path(__file__).parents[1]
MAX_LINE, MAX_WORDS, MAX_NUMBERS = 100, 25, 2
PAGES = (
    "*.md",
    "docs/*.md",
    "docs/explanation/*.md",
    "docs/how-to/**/*.md",
    "docs/measurements/*.md",
    "docs/reference/*.md",
    "docs/tutorials/*.md",
    "experiments/README.md",
    "src/rap/assets/README.md",
)
SKIPPED = (
    "docs/log.md",  # a log of experiments, frozen
    "docs/reference/commands.md",  # built with the site, not committed: tests/test_prose.py
)
MADE = ("runs", "build", "dist")  # folders that commands write: nothing to link to

# Not our words, and the term to use instead. Case does not matter; code is not looked at.
DENIED = {
    r"cuts?|cutting": "prune, pruned",
    r"fitted|fitting|(?:the|a|its|short) fit": "layer-wise distillation, distilled",
    r"w[io]ns? back|brings? back|brought back": "recover",
    r"kinds? of texts?|(?<!help )texts|text like": "calibration data, dataset, domain",
    r"idle": "near-zero variance on the calibration data",
    r"rebuil(?:d|ds|t)|rebuilding": "reconstruct at decode time",
    r"whole pairs?": "RoPE pairs",
    r"turns? (?:nearly )?alike|turns? nearly": "similar frequencies",
    r"expected loss(?:es)?": "estimated loss increase",
    r"residual streams?|streams": "hidden states",
    r"drift(?:s|ed)?": "accumulated error",
    r"from files to files": "layer by layer (out of core)",
    r"given back|gives back": "recall accuracy",
    r"fidelity|(?<!Leibler )divergences?|near(?:er)? (?:to )?(?:the )?dense": "KL to dense",
    r"stands?|stood": "is, replaces",
    r"judged?|judges|judging": "evaluate",
    r"in turns": "interleaved",
    r"(?:the )?real model|really pretrained": "SmolLM2, pretrained models",
    r"toys?": "bundled test model",
    r"in (?:fewer|\d+|four|eight) bits": "n-bit quantized",
    r"pads? the narrower": "zero-padded",
    r"stock": "uniform layout (`stock` is the flag's value)",
    r"go(?:es)? on|went on|same bytes": "resumes, bit-identical",
    r"whole or not at all": "atomic",
    r"mend(?:s|ed|ing)?": "fix",
    r"tells?|told|says?|said": "prints, reports, states",
    r"cells?": "run",
    r"refus(?:e|es|ed|al|als|ing)": "raises an error, unsupported",
    r"beside": "compared with, alongside",
    r"of its own|by itself|that is there": "separate, automatically, existing",
    r"hub names?": "Hub ID",
    r"the dense one|the (?:cut|pruned) one": "the dense layer, the pruned layer",
    r"becomes it|knows|wants?": "executes, supports, requires",
    r"per cent|\d+ %": "70%",
    r"(?:nats|bytes|tokens|steps?|seconds|times|one) an? (?:token|layer|head|page|step|sample)": (
        "nats/token, one per layer"
    ),
}
BRITISH = (
    r"\w*(?:minim|normal|recogn|optim|initial|organ|summar|special)is(?:e|es|ed|ing|ation)",
    r"behaviours?|colours?|coloured|licen[c]es?|neighbour\w*|centres?|modell\w+|labell\w+",
)
TERMS = [
    *((re.compile(rf"(?<![\w`-])(?:{p})(?![\w`-])", re.I), f"use: {i}") for p, i in DENIED.items()),
    *((re.compile(rf"\b(?:{pattern})\b", re.I), "use US spelling") for pattern in BRITISH),
]

# In error messages: quoted values, and flags with a value that is a word of the left column.
VALUE = re.compile(r"(?<!\w)'[^' ]*'(?!\w)|--[\w-]+(?: (?:stock|fidelity)\b)?")
INTERNAL = re.compile(r"'cells?'", re.I)  # of `rap compare`, in src/rap/studies alone
GENERATED = re.compile(r"<!-- measured:.*?<!-- end of what is measured -->", re.DOTALL)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
FENCE = re.compile(r"^( *)(```+|~~~+)(?!\{).*?^\1\2 *$", re.MULTILINE | re.DOTALL)
DIRECTIVE = re.compile(r"^ *(?:```+\{.*?^ *```+ *$|:{3,}.*?$|:[\w-]+:.*?$)", re.M | re.S)
FRONT = re.compile(r"\A---\n.*?^---\n", re.MULTILINE | re.DOTALL)
FORMULA = re.compile(r"\$\$.*?\$\$", re.DOTALL)
SHORT_FORMULA = re.compile(r"\$(?:[^$\n]|\n(?!\s*\n))+\$")
CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)", re.DOTALL)
# A method as commands take it, in the first column of a table: rap:merge=all:profile=stock.
METHOD = re.compile(r"\b\w+(?::\w+=[\w.]+)+")
LINK = re.compile(r"!?\[([^\]]*)\]\(([^)]*)\)")
ITEM = re.compile(r"^ *(?:[*+-]|\d+\.) +")
# A number that is not part of a name (SmolLM2, Llama-3-8B, int8), of an address, or n=16.
NUMBER = re.compile(r"(?<![\w.:/=-])\d[\d,.]*\d(?![\w-])|(?<![\w.:/=-])\d(?![\w-]|\.\d)")
ENDS = re.compile(r"(?<=[.!?])[)\"'*_]*\s+(?=[\"'(*_\[]*[A-Z`\[(0-9])|(?<=[.!?]\*\*)\s+")
NO_END = re.compile(r"\b(e\.g|i\.e|vs|al|cf|approx|No)\. ")
WORD = re.compile(r"[\w`][\w'`./%-]*")


class Found(NamedTuple):
    """A violation: the line it begins in, the rule, and what is wrong."""

    line: int
    rule: str
    what: str


def blank(pattern: re.Pattern[str], text: str) -> str:
    """The text with what matches made blank, line by line, so that line numbers stay."""
    return pattern.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def prose(text: str) -> str:
    """A document's prose and tables, without code, methods by name, formulas and directives."""
    for pattern in (FRONT, GENERATED, COMMENT, FENCE, DIRECTIVE, FORMULA, METHOD):
        text = blank(pattern, text)
    return SHORT_FORMULA.sub(lambda found: "x" + "\n" * found[0].count("\n"), text)


def is_row(line: str) -> bool:
    """Whether a line is of a table."""
    return line.lstrip().startswith("|")


def paragraphs(text: str) -> Iterator[tuple[int, str]]:
    """Runs of lines that are read as one, with the number of the first."""
    start, lines = 0, []
    for number, line in enumerate([*text.splitlines(), ""], start=1):
        begins = ITEM.match(line) is not None
        ends = not line.strip() or is_row(line) or line.startswith(("#", "    "))
        if lines and (begins or ends):
            yield start, " ".join(lines)
            lines = []
        if begins or (line.strip() and not ends) or (lines and not ends):
            start = start if lines else number
            lines.append(ITEM.sub("", line).strip())


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph; code is one word, links are what they show."""
    text = LINK.sub(r"\1", CODE.sub("`x`", paragraph))
    text = NO_END.sub(r"\1 ", text)
    return [one for one in ENDS.split(text) if one.strip()]


def words(sentence: str) -> int:
    """How many words a sentence has."""
    return len(WORD.findall(sentence))


def numbers(sentence: str) -> list[str]:
    """The numbers of a sentence that are no part of a name."""
    return NUMBER.findall(sentence)


def _terms(text: str) -> Iterator[Found]:
    for number, line in enumerate(text.splitlines(), start=1):
        shown = LINK.sub(r"\1", CODE.sub("`x`", line))
        for pattern, instead in TERMS:
            for found in pattern.finditer(shown):
                yield Found(number, "term", f"{found[0]!r}; {instead}")


def _sentences(text: str) -> Iterator[Found]:
    for number, paragraph in paragraphs(text):
        for sentence in sentences(paragraph):
            if (length := words(sentence)) > MAX_WORDS:
                yield Found(number, "sentence", f"{length} words: {sentence[:60]}...")
            if len(found := numbers(sentence)) > MAX_NUMBERS:
                yield Found(number, "numbers", f"{', '.join(found)}: {sentence[:60]}...")


def _links(text: str, repository: Path) -> Iterator[Found]:
    linked = blank(LINK, text)
    for found in CODE.finditer(linked):
        path = found[0].strip("`").rstrip("/")
        named = re.fullmatch(r"[\w.-]+(?:/[\w.-]+)*", path) and (path[-3:] == ".md" or "/" in path)
        made = path.partition("/")[0] in MADE
        if named and not made and (repository / path).exists():
            yield Found(text[: found.start()].count("\n") + 1, "link", f"{found[0]}; link to it")


def violations(text: str, repository: Path = REPOSITORY) -> list[Found]:
    """What of a document breaks the rules, in the order of its lines."""
    unmeasured = blank(FORMULA, blank(GENERATED, text))
    found = [
        Found(number, "line", f"{len(line)} characters")
        for number, line in enumerate(unmeasured.splitlines(), start=1)
        if len(line) > MAX_LINE and not is_row(line) and " " in line.strip(" *-")
    ]
    found += [
        Found(number, "ascii", f"{line!r}"[:60])
        for number, line in enumerate(text.splitlines(), start=1)
        if not line.isascii()
    ]
    read = prose(text)
    return sorted([*found, *_terms(read), *_sentences(read), *_links(read, repository)])


def _public(body: Iterable[ast.stmt]) -> Iterator[ast.ClassDef | ast.FunctionDef]:
    """Public classes and functions of a module, and the public methods of these classes."""
    for node in body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef) and not node.name.startswith("_"):
            yield node
            if isinstance(node, ast.ClassDef):
                yield from _public(node.body)


def summaries(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """First lines of the docstrings of a module and of what is public in it, with their lines."""
    for node in (tree, *_public(tree.body)):
        if text := ast.get_docstring(node):
            yield node.body[0].lineno, text.splitlines()[0]


def message(node: ast.expr) -> str:
    """The text of a string, with values as code; both branches of a conditional one."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(message(part) or "`x`" for part in parts)
        case ast.BinOp(left=left, right=right):
            return message(left) + message(right)
        case ast.IfExp(body=body, orelse=other):
            return f"{message(body)} {message(other)}"
    return ""


def messages(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Texts that errors are raised with, with their lines; quoted values are code."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            for one in (*node.exc.args, *(keyword.value for keyword in node.exc.keywords)):
                yield node.lineno, VALUE.sub("`x`", message(one))


def source_violations(path: Path) -> list[Found]:
    """Terms and spelling in a module's error messages and docstrings, and long first lines."""
    tree = ast.parse(path.read_text("utf-8"))
    checked = [(line, text, {"term"}) for line, text in messages(tree)]
    checked += [(line, text, {"term", "sentence"}) for line, text in summaries(tree)]
    allowed = INTERNAL if "studies" in path.parts else None
    found = [
        Found(line, one.rule, one.what)
        for line, text, rules in checked
        for one in violations(text)
        if one.rule in rules and not (allowed and allowed.match(one.what))
    ]
    return sorted(found)


def modules(repository: Path = REPOSITORY) -> list[Path]:
    """The modules whose texts are checked."""
    return sorted(repository.glob("src/rap/**/*.py"))


def pages(repository: Path = REPOSITORY) -> list[Path]:
    """The documents that are checked."""
    found = {path for pattern in PAGES for path in repository.glob(pattern)}
    return sorted(found - {repository / name for name in SKIPPED})


def stats(text: str) -> dict[str, float]:
    """Lines, numbers per 100 words of prose, links, first block of commands, longest sentence."""
    told = [s for _, part in paragraphs(prose(text)) for s in sentences(part)]
    counted = sum(words(one) for one in told)
    fence = re.search(r"^```(?:sh|console|bash)$", text, re.MULTILINE)
    return {
        "lines": len(text.splitlines()),
        "numbers per 100 words": round(100 * sum(len(numbers(s)) for s in told) / counted, 2),
        "links": len(LINK.findall(text)),
        "first command, line": text[: fence.start()].count("\n") + 2 if fence else 0,
        "longest sentence, words": max(words(one) for one in told),
    }


def main(arguments: list[str]) -> int:
    """The exit code: 1 if something is found, which is printed."""
    if arguments[:1] == ["--stats"]:
        for name in arguments[1:]:
            print(name, stats((REPOSITORY / name).read_text("utf-8")))
        return 0
    chosen = [Path(name).resolve() for name in arguments] or [*pages(), *modules()]
    count = 0
    for path in chosen:
        of_source = path.suffix == ".py"
        for found in source_violations(path) if of_source else violations(path.read_text("utf-8")):
            count += 1
            print(f"{path.relative_to(REPOSITORY)}:{found.line}: {found.rule}: {found.what}")
    print(f"{len(chosen)} documents and modules, {count} violations")
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
