"""Docstrings say what is raised and what parameters are; their references and examples hold."""

import ast
import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import rap
from cases.architecture import read_package
from cases.docstrings import lost_references, silent_raises, unsaid_parameters
from rap.model import errors

SOURCES = read_package(Path(rap.__file__).parent)
# Every error of the package, with the base that may stand for it.
ERRORS = {
    name: "RapError"
    for name, kind in vars(errors).items()
    if inspect.isclass(kind) and issubclass(kind, errors.RapError)
}
# Say where parameters are described: `distillation.distill`, `windows_from_text`.
ELSEWHERE = {"recover", "load_windows"}
EXAMPLES = sorted(name for name, source in SOURCES.items() if ">>> " in source)


def test_errors_that_are_raised_are_named():
    assert silent_raises(SOURCES, ERRORS) == []


@pytest.mark.parametrize(
    ("source", "violations"),
    [
        ('def f():\n    """Does."""\n    raise RapError("x")\n', 1),
        ('def f():\n    """Does. Raises RapError."""\n    raise RapError("x")\n', 0),
        ('def f():\n    """Does. Raises a RapError."""\n    raise PlanError("x")\n', 0),
        ('def f():\n    """Does. Raises PlanError."""\n    raise RapError("x")\n', 1),
        ('class C:\n    def f(self):\n        """Does."""\n        raise PlanError("x")\n', 1),
        ('def _f():\n    """Does."""\n    raise RapError("x")\n', 0),
        ('def f():\n    """Does."""\n    def g():\n        raise RapError("x")\n', 0),
        ('def f():\n    """Does."""\n    raise KeyError("x")\n', 0),
    ],
)
def test_an_error_that_is_not_named_is_seen(source, violations):
    assert len(silent_raises({"m": source}, ERRORS)) == violations


def _public() -> dict[str, object]:
    found = {name: getattr(rap, name) for name in rap.__all__}
    return {name: one for name, one in found.items() if inspect.isfunction(one)}


@pytest.mark.parametrize("name", sorted(_public().keys() - ELSEWHERE))
def test_every_parameter_of_the_public_functions_is_said(name):
    function = _public()[name]
    assert unsaid_parameters(name, function.__doc__, inspect.signature(function).parameters) == []


def test_a_parameter_that_is_not_said_is_seen():
    said = unsaid_parameters("f", "Cuts `model` to `retain`.", ["model", "retain", "window"])
    assert said == ["f: does not say what window is"]


def test_what_comments_and_docstrings_refer_to_is_there():
    assert lost_references(SOURCES) == []


@pytest.mark.parametrize(
    ("reference", "lost"),
    [
        ("planning.plan", False),
        ("rap.planning.plan.Plan", False),
        ("plan.Plan.load", False),
        ("plan.py", False),
        ("planning.mixing", True),
        ("rap.model.gone", True),
        ("plan.Gone", True),
        ("config.json, numpy.array, dense.configs", False),
    ],
)
def test_a_reference_to_what_is_gone_is_seen(reference, lost):
    sources = {
        "planning": "",
        "model": "",
        "methods.dense": "",
        "planning.plan": "class Plan: pass",
    }
    for source in (f"x = 1  # as {reference}", f'def _f():\n    """As {reference}."""'):
        assert len(lost_references(sources | {"m": source})) == lost


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_true(name):
    result = doctest.testmod(importlib.import_module(f"rap.{name}"))
    assert result.attempted > 0
    assert result.failed == 0


def test_there_are_examples_and_a_false_one_is_seen():
    assert len(EXAMPLES) >= 4
    module = ast.parse('def f():\n    """Adds.\n\n    >>> 1 + 1\n    3\n    """\n')
    text = ast.get_docstring(module.body[0])
    parsed = doctest.DocTestParser().get_doctest(text, {}, "f", None, 0)
    assert doctest.DocTestRunner(verbose=False).run(parsed, out=lambda line: None).failed == 1
