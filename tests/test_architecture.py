"""The shape of the source tree: small files, what a checkpoint ships, imports without side effects.

Each rule is applied to the package and shown to fail on a planted source. Which folder may import
which is checked by import-linter (`make lint`).
"""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from cases.architecture import (
    docstring_violations,
    name_violations,
    read_package,
    remote_code_violations,
    root_violations,
    size_violations,
    text_violations,
)

REPOSITORY = Path(__file__).parents[1]
PACKAGE_ROOT = REPOSITORY / "src" / "rap"

# Copied into every pruned checkpoint as remote code, so they may need only each other.
SHIPPED_FROM = "model"
SHIPPED = {
    "errors",
    "fingerprint",
    "rope",
    "projections",
    "specs",
    "families",
    "refusals",
    "layers",
    "norms",
}
SHIPPED |= {"cache_layout", "attention", "factored", "kv_sharing", "modeling"}
IN_OUT = ("In: ", "Out: ")

SOURCES = read_package(PACKAGE_ROOT)


def _texts() -> list[Path]:
    """Sources and documents written by hand, generated and bundled ones left out."""
    folders = ("src", "tests", "examples", "benchmarks", "experiments", "docs", "recipes", ".ci")
    suffixes = {".py", ".md", ".yaml", ".toml", ".sh"}
    below = [path for folder in folders for path in (REPOSITORY / folder).rglob("*")]
    top = [path for path in REPOSITORY.iterdir() if path.suffix in suffixes]
    return [path for path in below if path.suffix in suffixes] + top


def test_documents_and_settings_name_files_that_exist():
    named = {
        path: re.findall(r"src/rap/[\w./]+|(?<=`)[\w/]+\.py(?=`)", path.read_text("utf-8"))
        for path in (
            REPOSITORY / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml")
        )
    }
    folders = (REPOSITORY, PACKAGE_ROOT)
    missing = [
        f"{path.name}: {name}"
        for path, names in named.items()
        for name in names
        if not any((folder / name).exists() for folder in folders)
    ]
    assert sum(map(len, named.values())) > 10
    assert missing == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/how-to/extend/family.md"])
def test_documents_name_the_file_with_the_rows_of_the_families(name):
    module = next(module for module, text in SOURCES.items() if "\nFAMILIES:" in text)
    text = " ".join((REPOSITORY / name).read_text("utf-8").split())
    sentences = r"one row (?:of `FAMILIES` )?in \[`?([\w/]+)\.py`?\]"
    rows = re.findall(sentences, text)
    assert rows, "no sentence says where a family is a row"
    assert {name.replace("/", ".") for name in rows} == {module}


def test_the_package_runs_as_a_module():
    found = subprocess.run(
        [sys.executable, "-m", "rap", "--version"], capture_output=True, text=True
    )
    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith("rap ")


def test_modeling_can_be_shipped_in_a_checkpoint():
    assert remote_code_violations(SOURCES, SHIPPED_FROM, SHIPPED) == []


def test_the_root_is_taken_in_at_a_glance():
    assert root_violations(PACKAGE_ROOT) == []


def test_folders_say_what_comes_in_and_what_goes_out():
    folders = {name for name in SOURCES if any(other.startswith(f"{name}.") for other in SOURCES)}
    stages = {name for name in folders if "kernels" not in name}
    silent = {"assets", "cli", "methods", "serving.vllm"}
    missing = [
        name
        for name in sorted(stages - silent)
        if not all(word in (ast.get_docstring(ast.parse(SOURCES[name])) or "") for word in IN_OUT)
    ]
    assert missing == []


def test_files_and_functions_are_small():
    assert size_violations(SOURCES) == []


def test_public_names_have_docstrings():
    assert docstring_violations(SOURCES) == []


def test_files_are_named_after_a_subject():
    assert name_violations(path.relative_to(REPOSITORY) for path in _texts()) == []


def test_texts_are_ascii_without_notes_for_later():
    found = [
        text_violations(path.relative_to(REPOSITORY), path.read_text("utf-8")) for path in _texts()
    ]
    assert [violation for violations in found for violation in violations] == []


# Prints the names whose value `import rap` replaced in transformers and torch, and whether CUDA was
# started. Values are held, so that no identity can be reused by a new object.
_SIDE_EFFECTS = """
import importlib, inspect, json
import torch
NAMES = (
    "torch.nn.functional torch.nn.modules.linear transformers.cache_utils "
    "transformers.masking_utils transformers.modeling_utils transformers.modeling_rope_utils "
    "transformers.generation.utils "
    "transformers.integrations.sdpa_attention transformers.models.llama.modeling_llama "
    "transformers.models.mistral.modeling_mistral transformers.models.qwen2.modeling_qwen2"
).split()

def snapshot():
    found = {}
    for name in NAMES:
        module = importlib.import_module(name)
        for key, value in vars(module).items():
            found[f"{name}.{key}"] = value
            if inspect.isclass(value):
                found |= {f"{name}.{key}.{inner}": item for inner, item in vars(value).items()}
    attention = importlib.import_module("transformers.modeling_utils").ALL_ATTENTION_FUNCTIONS
    return found | {f"attention function {key}": attention[key] for key in attention}

before = snapshot()
PLANTED
import rap
after = snapshot()
changed = sorted(key for key, value in before.items() if after.get(key) is not value)
print(json.dumps({"changed": changed, "cuda": torch.cuda.is_initialized(), "seen": len(before)}))
"""


def _side_effects(planted: str = "") -> dict:
    code = _SIDE_EFFECTS.replace("PLANTED", planted)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    return json.loads(result.stdout.splitlines()[-1])


def test_import_patches_nothing_and_starts_no_cuda():
    effects = _side_effects()
    assert effects["seen"] > 1000
    assert (effects["changed"], effects["cuda"]) == ([], False)


def test_side_effects_are_seen():
    name = "transformers.models.llama.modeling_llama"
    planted = f"import {name} as m; m.LlamaAttention.forward = m.apply_rotary_pos_emb = print"
    changed = [f"{name}.LlamaAttention.forward", f"{name}.apply_rotary_pos_emb"]
    assert _side_effects(planted)["changed"] == changed


def test_root_rule_fails_on_one_entry_too_many(tmp_path):
    for number in range(18):
        (tmp_path / f"m{number}.py").touch()
    assert root_violations(tmp_path) == []
    (tmp_path / "one_more").mkdir()
    assert len(root_violations(tmp_path)) == 1


@pytest.mark.parametrize(
    "source",
    [
        "import rap.model.rope",
        "from rap.model.rope import f",
        "from . import rope",
        "from .kinds import f",
    ],
)
def test_remote_code_rule_fails_on_what_transformers_would_not_copy(source):
    allowed = "import torch\nfrom transformers import AutoConfig\nfrom .rope import f\n"
    for text, count in ((allowed, 0), (allowed + source, 1)):
        found = remote_code_violations({"model.modeling": text}, SHIPPED_FROM, SHIPPED)
        assert len(found) == count


def test_size_rule_fails_on_one_line_too_many():
    function = "def f():\n" + "    x = 1\n" * 59
    assert (
        size_violations({"rope": function, "model.kernels.a": function + "    x = 1\n" * 60}) == []
    )
    assert size_violations({"rope": function + "    x = 1\n"}) == ["rope.f: 61 lines, at most 60"]
    assert size_violations({"model.kernels.a": function + "    x = 1\n" * 61}) == [
        "model.kernels.a.f: 121 lines, at most 120"
    ]
    assert size_violations({"rope": "x = 1\n" * 501}) == ["rope: 501 lines, at most 500"]


def test_docstring_rule_fails_without_one():
    source = '"""Module."""\ndef f(): pass\nclass C: pass\ndef _private(): pass\n'
    assert docstring_violations({"m": source}) == ["m.f: no docstring", "m.C: no docstring"]
    assert docstring_violations({"": ""}) == ["__init__: the module has no docstring"]


def test_name_and_text_rules_fail():
    assert len(name_violations([Path("src/rap/utils.py"), Path("src/rap/rope.py")])) == 1
    text = "fine\n" + "caf\u00e9\n" + "# TO" + "DO later\n"
    assert [line.split(":")[1] for line in text_violations(Path("a.py"), text)] == ["2", "3"]


# What a package that is required brings along, and what an extra of pyproject.toml installs.
BROUGHT = {"numpy": "transformers", "huggingface_hub": "transformers", "markupsafe": "jinja2"}
OPTIONAL = {"lm_eval", "vllm", "triton", "xllamacpp", "torchao", "bitsandbytes", "kvpress"}


def _undeclared(sources, dependencies: list[str]) -> set[str]:
    """What the package imports, and neither requires nor names as optional."""
    required = {re.split(r"[^\w-]", line)[0].replace("-", "_") for line in dependencies}
    required |= {"yaml"} if "pyyaml" in required else set()
    used = {
        name.partition(".")[0]
        for tree in sources
        for node in ast.walk(tree)
        for name in _imported(node)
    }
    brought = {name for name, by in BROUGHT.items() if by in required}
    return used - required - brought - OPTIONAL - set(sys.stdlib_module_names) - {"rap"}


def _imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []


def test_whatever_is_imported_is_required():
    """An environment with only the wheel runs README: `rap fetch` once asked for gguf there."""
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    trees = [ast.parse(path.read_text()) for path in PACKAGE_ROOT.rglob("*.py")]
    assert _undeclared(trees, project["dependencies"]) == set()
    without = [line for line in project["dependencies"] if line != "gguf"]
    assert _undeclared(trees, without) == {"gguf"}
