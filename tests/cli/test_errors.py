"""Wrong input of every kind: one line that says why, exit code 2, and nothing left on disk."""

import json
import os
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch
from safetensors import safe_open
from transformers import GPT2Config

import rap
from cases.command import Result, error_violations, run
from cases.models import tiny_model
from cases.plans import random_plan
from rap import assets
from rap.model.errors import RapError

QUICK = ("--windows", 1, "--window", 64, "--evaluate", "none")
SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def _copy(folder: Path) -> Path:
    shutil.copytree(assets.reference_path(), folder)
    return folder


def _quantized(folder: Path) -> None:
    path = _copy(folder) / "config.json"
    config = json.loads(path.read_text())
    path.write_text(
        json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}})
    )


def _lacking_a_shard(folder: Path) -> None:
    weights = _copy(folder) / "model.safetensors"
    with safe_open(weights, "pt") as file:
        names = sorted(file.keys())
    weights.rename(folder / SHARDS[0])
    weight_map = {name: SHARDS[number % 2] for number, name in enumerate(names)}
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


@pytest.fixture(scope="module")
def place(tmp_path_factory) -> Path:
    """A directory with one of every wrong input, which no test may change."""
    place = tmp_path_factory.mktemp("place")
    (place / "empty").mkdir()
    (place / "file").write_text("")
    (place / "notes").mkdir()
    (place / "notes" / "keep.txt").write_text("mine")
    (place / "empty.txt").write_text(" \n")
    (place / "short.txt").write_text("hello")
    (place / "bad.jsonl").write_text("{")
    (place / "unknown.yaml").write_text("retains: 0.5")
    (place / "list.yaml").write_text("- retain")
    (place / "words.yaml").write_text("retain: much")
    (place / "open.yaml").write_text("retain: [0.5")
    weights = _copy(place / "truncated") / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    _lacking_a_shard(place / "lacking")
    shutil.copytree(place / "lacking", place / "badindex")
    (place / "badindex" / "model.safetensors.index.json").write_text("{")
    _quantized(place / "quantized")
    GPT2Config(n_layer=1, n_embd=8, n_head=2).save_pretrained(place / "gpt2")
    dense = tiny_model()
    plan = random_plan(dense, [(3, 6), (3, 6)])
    plan.save(place / "other.rap")
    (place / "other").mkdir()
    plan.save(place / "other" / "plan.rap")
    rap.apply(dense, plan).save_pretrained(place / "pruned")
    plan.save(place / "pruned" / "plan.rap")
    rap.apply(dense, plan).save_pretrained(place / "trained")
    four = tiny_model(layers=6, heads=4, kv_heads=2, head_dim=64, hidden=256)
    random_plan(four, [(8, 16)] * 6).save(place / "same-shape.rap")
    whole = (place / "same-shape.rap").read_bytes()
    (place / "cut.rap").write_bytes(whole[: len(whole) // 2])
    return place


def _listing(place: Path) -> dict[str, int]:
    return {str(path): path.lstat().st_mtime_ns for path in sorted(place.rglob("*"))}


BUNDLED = ("compress", "bundled", "-o", "x", *QUICK)
TAUGHT = ("recover", "pruned", "-o", "x", "--teacher", "bundled")
STREAM = (*BUNDLED, "--stream", "--statistics")
WEIGHTS = [
    ("truncated", "model.safetensors is truncated or damaged"),
    ("lacking", f"{SHARDS[1]}"),
    ("badindex", "badindex"),
    ("quantized", "is quantized: compress the unquantized weights first"),
    ("pruned", "is already pruned: start again from the dense checkpoint"),
    ("gpt2", "'gpt2' is not supported: it adds learned absolute positions"),
    ("empty", "empty is a directory without a model: config.json is missing"),
    ("./nowhere", "there is no directory ./nowhere"),
    ("file", "file is a file; give its directory"),
]
METHOD_TEXTS = [
    ("rap:nothing", "method 'rap' has no recipe 'nothing'; it has: general, paper"),
    ("heads:paper", "method 'heads' has no recipe 'paper'; it has: none"),
    ("elitekv:plus:plus", "asks for 2 recipes: name one"),
    (
        "palu:group=1",
        "method 'palu' has no setting 'group'; it has: group_size, layers, multiple, ranks",
    ),
    ("palu:group_size=", "cannot set 'group_size=': write name=value"),
    ("palu:group_size=1:group_size=2", "group_size is set twice"),
    ("palu:group_size=few", "group_size cannot be 'few': it should be a valid integer"),
    ("palu:group_size=1.5", "group_size cannot be 1.5: it should be a valid integer"),
    ("rap:retain=0.5", "method 'rap' has no setting 'retain'"),
    ("rap:qk_norm=no", "qk_norm cannot be 'no'"),
    ("kvpruner:rotation=twice", "rotation cannot be 'twice': it should be 'narrow' or 'first'"),
    ("elitekv:pairs=some", "pairs cannot be 'some': it should be a valid integer or 'sweep'"),
    ("elitekv:whiten=1", "whiten cannot be 1: it should be a valid boolean"),
    (":", "unknown method ''"),
]
CASES = [
    *[
        ((*BUNDLED, "--retain", r), f"retain cannot be {float(r)}: it should be")
        for r in ("0", "1.5", "nan")
    ],
    ((*BUNDLED, "--calibration", "empty.txt"), "the calibration text is empty"),
    ((*BUNDLED, "--calibration", "nowhere.txt"), "there is no file nowhere.txt"),
    ((*BUNDLED, "--calibration", "short.txt"), "one window needs 64: give a longer text"),
    ((*BUNDLED, "--calibration", "bad.jsonl"), "bad.jsonl line 1 is not JSON"),
    ((*BUNDLED, "--calibration", "file"), "file is neither .txt nor .jsonl"),
    ((*BUNDLED, "--evaluate", "empty.txt"), "the evaluation text is empty"),
    ((*BUNDLED, "--evaluate", "short.txt"), "the evaluation text has 3 tokens, one window needs"),
    ((*BUNDLED, "--evaluate", "nowhere.txt"), "there is no file nowhere.txt"),
    ((*BUNDLED, "--window", 4096), "the model was made for 2048: use windows of at most 2048"),
    *[
        ((*BUNDLED, *how, "--dry-run"), "there is no file nowhere.txt")
        for how in (("--calibration", "nowhere.txt"), ("--evaluate", "nowhere.txt"))
    ],
    ((*BUNDLED, "--windows", 0), "cannot take 0 windows"),
    ((*BUNDLED, "--windows", -1, "--dry-run"), "cannot take -1 windows"),
    ((*BUNDLED, "--method", "no"), "unknown method 'no': use one of rap"),
    ((*BUNDLED, "--score", "no"), "unknown score 'no': use one of energy, fisher, gate"),
    (
        (*BUNDLED, "--budget", "no"),
        "budget cannot be 'no': it should be 'auto', 'adaptive', 'uniform', 'error'",
    ),
    ((*BUNDLED, "--keys", "no"), "keys cannot be 'no': it should be 'pairs' or 'fold'"),
    ((*BUNDLED, "--align", -3), "align cannot be -3"),
    ((*BUNDLED, "--key-share", 3), "key_share cannot be 3"),
    ((*BUNDLED, "--key-share", "no"), "key_share cannot be 'no'"),
    ((*BUNDLED, "--key-share", 0), "key_share cannot be 0"),
    *[((*BUNDLED, "--method", text), message) for text, message in METHOD_TEXTS],
    ((*BUNDLED, "--method", "rap:align=4", "--align", 4), "set it once"),
    ((*BUNDLED, "--method", "rap:align=4", "--target", "vllm"), "--target vllm decides align"),
    *[
        ((*BUNDLED, "--method", method, "--target", target), f"needs a method with {what}, which")
        for method, target, what in (
            ("palu", "vllm", "widths to align (align)"),
            ("palu", "llamacpp", "widths to align (align)"),
            ("kvpruner", "llamacpp", "one width for all heads (profile)"),
        )
    ],
    ((*BUNDLED, "--target", "no"), "unknown target 'no': use one of any"),
    ((*BUNDLED, "--method", "palu", "--target", "no"), "unknown target 'no': use one of any"),
    ((*BUNDLED, "--method", "heads", "--keys", "fold"), "method 'heads' has no setting 'keys'"),
    (("plan", "bundled", "-o", "x", "--method", "palu:x=1"), "'palu' has no setting 'x'"),
    ((*BUNDLED, "--context", 0), "context cannot be 0: it should be greater than or equal to 1"),
    ((*BUNDLED, "--recover", "no"), "unknown recovery 'no'"),
    ((*BUNDLED, "--recover", "projections"), "trains the bases of method matryoshka: rap has none"),
    ((*BUNDLED, "--recover", "projections", "--dry-run"), "rap has none"),
    *[((*BUNDLED, "--seed", seed), "Invalid value for '--seed'") for seed in (-1, 2**31)],
    ((*BUNDLED, "--dtype", "no"), "unknown dtype 'no': use auto, float32"),
    ((*BUNDLED, "--device-map", "no"), "cannot load weights from"),
    ((*BUNDLED, "--stream", "--dry-run"), "prints its memory at start-up; remove --dry-run"),
    ((*BUNDLED, "-o", "pruned"), "pruned exists: pass --force to replace it"),
    ((*BUNDLED, "-o", "file", "--force"), "file is a file: name a directory"),
    ((*BUNDLED, "-o", "file/x"), "file/x cannot be made inside it"),
    ((*BUNDLED, "--no-such-flag"), "No such option: --no-such-flag"),
    ((*BUNDLED, "--retain", "much"), "Invalid value for '--retain'"),
    ((*BUNDLED, "--config", "unknown.yaml"), "unknown options: retains; this command has: align"),
    ((*BUNDLED, "--config", "list.yaml"), "must hold `option: value` lines, not a list"),
    ((*BUNDLED, "--config", "words.yaml"), "Invalid value for '--retain'"),
    ((*BUNDLED, "--config", "open.yaml"), "--config open.yaml is not YAML: "),
    ((*BUNDLED, "--config", "nowhere.yaml"), "--config nowhere.yaml: no such file"),
    (("compress",), "Missing argument 'model'"),
    (("compress", "bundled"), "Missing option '--output' / '-o'"),
    (("no-such-command",), "No such command 'no-such-command'"),
    (("plan", "bundled", "-o", "file"), "file exists: pass --force to replace it"),
    (("plan", "bundled", "-o", "empty", "--force"), "empty is a directory: name a file"),
    ((*BUNDLED, "-o", ".", "--force"), ". is the directory you work in, or one above it"),
    ((*BUNDLED, "-o", "/", "--force", "--target", "plain"), "/ is the directory you work in"),
    (("analyze", "probe", "bundled", "--evaluate", "none"), "an analysis evaluates: name a"),
    ((*BUNDLED, "-o", "..", "--force", "--dry-run"), ".. is the directory you work in"),
    ((*BUNDLED, "-o", "notes", "--force"), "notes has files in the way (keep.txt) and is no check"),
    (("apply", "bundled", "empty", "-o", "x"), "cannot read a plan from empty/plan.rap: there is"),
    ((*STREAM, "empty"), "calibration statistics from empty: it is a directory, name the file"),
    ((*STREAM, "file"), "calibration statistics from file: it is of another kind, or damaged"),
    (("sample", "bundled", "-o", "x.jsonl", "--tokens", 2049), "use at most 2048 tokens"),
    (("export", "gguf", "bundled", "-o", "x.txt"), "x.txt must end in .gguf"),
    (("apply", "bundled", "file", "-o", "x"), "cannot read a plan from file"),
    (("apply", "bundled", "cut.rap", "-o", "x"), "cannot read a plan from cut.rap"),
    (("apply", "bundled", "nowhere.rap", "-o", "x"), "cannot read a plan from nowhere.rap"),
    (("apply", "bundled", "truncated/model.safetensors", "-o", "x"), "cannot read a plan"),
    (
        ("apply", "bundled", assets.reference_path() / "model.safetensors", "-o", "x"),
        "does not hold a plan: write one with `rap plan`",
    ),
    *[
        (("apply", "bundled", plan, "-o", "x", *how), message)
        for how in ((), ("--stream",))
        for plan, message in (
            ("other.rap", "the plan has 2 layers, the model 6: make a new plan for this model"),
            ("other", "the plan has 2 layers, the model 6"),
            ("same-shape.rap", "the plan was made from other weights"),
        )
    ],
    *[(("compress", source, "-o", "x", *QUICK), message) for source, message in WEIGHTS],
    *[(("plan", source, "-o", "x.rap"), message) for source, message in WEIGHTS],
    *[
        (("apply", source, "same-shape.rap", "-o", "x", "--stream"), message)
        for source, message in WEIGHTS
    ],
    (
        ("apply", "bundled", "other.rap", "-o", "x", "--stream", "--device", "cpu"),
        "--stream copies weights without a device; remove --device",
    ),
    (("inspect", "plan"), "name the plan file: rap inspect plan FILE"),
    (("inspect", "plan", "file", "--retain", "0.5"), "a plan has its own ratio"),
    (("inspect", "plan", "file"), "cannot read a plan from file"),
    (("inspect", "bundled", "pruned"), "one target at a time"),
    *[(("inspect", source), message) for source, message in WEIGHTS[5:]],
    (("evaluate", "perplexity", "bundled", "--text", "short.txt"), "the text has 3 tokens"),
    (("evaluate", "perplexity", "bundled", "--text", "empty.txt"), "text is empty"),
    (("evaluate", "perplexity", "bundled", "-o", "empty"), "empty is a directory: name a file"),
    (("evaluate", "perplexity", "truncated"), "is truncated or damaged"),
    (
        ("evaluate", "retrieval", "bundled", "--task", "recall", "--wording", "odd"),
        "unknown wording 'odd': use plain, nat",
    ),
    (
        ("evaluate", "retrieval", "bundled", "--task", "needle", "--wording", "odd"),
        "unknown wording 'odd': use plain, nat",
    ),
    (
        ("evaluate", "retrieval", "bundled", "--task", "recall", "--documents", 0),
        "cannot evaluate on 0 documents",
    ),
    (
        ("evaluate", "retrieval", "bundled", "--task", "recall", "--facts", 0),
        "there cannot be 0 facts: use 1 to",
    ),
    (
        ("evaluate", "retrieval", "bundled", "--task", "recall", "--text", "short.txt"),
        "give a longer text or",
    ),
    (
        ("evaluate", "retrieval", "bundled", "--task", "recall", "--distance", 3),
        "use a distance of that many or more",
    ),
    (
        ("bench", "bundled", "--device", "nowhere"),
        "no device 'nowhere' on this machine; use auto",
    ),
    *[
        ((*who, *how), message)
        for how in ((), ("--dry-run",))
        for who, message in (
            (("recover", "bundled", *TAUGHT[2:]), "bundled is not a pruned checkpoint"),
            (
                ("recover", "trained", *TAUGHT[2:]),
                "trained has no plan.rap: copy it from the checkpoint that it was trained from",
            ),
            (TAUGHT, "bundled is not the dense model of this pruned checkpoint"),
            ((*TAUGHT, "--teacher-dtype", "no"), "unknown dtype 'no': use auto, float32, bfloat16"),
            ((*TAUGHT, "--text", "nowhere.txt"), "there is no file nowhere.txt"),
            ((*TAUGHT, "--preset", "fit", "--set", "steps=abc"), "it should be a valid integer"),
            ((*TAUGHT, "--preset", "fit", "--set", "steps=2.5"), "it should be a valid integer"),
        )
    ],
    (("evaluate", "perplexity", "quantized"), "cannot load weights from quantized"),
    (("demo", "bundled", "-o", "file"), "file is a file: name a directory"),
    (("demo", "gpt2"), "there is no demo of 'gpt2'"),
]


@pytest.mark.parametrize(
    ("arguments", "message"), CASES, ids=[" ".join(map(str, case[0])) for case in CASES]
)
def test_wrong_input_is_refused_in_one_line(place, monkeypatch, arguments, message):
    monkeypatch.chdir(place)
    before = _listing(place)
    result = run(*arguments)
    assert error_violations(result) == []
    assert message in result.err
    assert _listing(place) == before, "something was left on disk"


EVALUATIONS = [
    ("perplexity bundled --max-windows 0", "max_windows must be at least 1, not 0"),
    ("perplexity bundled --max-windows -1", "max_windows must be at least 1, not -1"),
    ("perplexity bundled --batch-size 0", "batch_size must be at least 1, not 0"),
    ("perplexity bundled --window 1", "a window of 1 tokens predicts nothing: give 2 or more"),
    ("fidelity bundled --dense bundled --window 1", "a window of 1 tokens predicts nothing"),
    ("fidelity bundled --dense bundled --max-windows 0", "max_windows must be at least 1, not 0"),
    (
        "retrieval bundled --task recall --documents 0",
        "cannot evaluate on 0 documents; use at least one",
    ),
    (
        "retrieval bundled --task recall --distance 64 --distance 0",
        "nothing in 0 tokens: use at least one",
    ),
    ("retrieval bundled --task recall --facts 0", "there cannot be 0 facts: use 1 to"),
    (
        "retrieval bundled --task needle --documents 0",
        "cannot evaluate on 0 documents; use at least one",
    ),
    ("retrieval bundled --task needle --length -5", "nothing in -5 tokens: use at least one"),
    ("retrieval bundled --task needle --facts 0", "there cannot be 0 facts: use 1 to"),
    ("retrieval bundled --task needle --depth 1.5", "depth 1.5 is outside [0, 1]"),
    ("retrieval bundled --documents 0", "cannot evaluate on 0 documents; use at least one"),
    ("retrieval bundled --length 0", "nothing in 0 tokens: use at least one"),
    ("retrieval bundled --batch-size 0", "batch_size must be at least 1, not 0"),
    ("cache bundled --press knorm:0.5 --prefix 0", "a prefix of 0 tokens and pieces of 32 cannot"),
    ("cache bundled --press knorm:0.5 --max-windows 0", "max_windows must be at least 1, not 0"),
    ("cache bundled --press knorm:0.5 --documents -1", "cannot evaluate on -1 documents"),
    ("cache bundled --press knorm:0.5 --distance 0", "nothing in 0 tokens: use at least one"),
    ("zero-shot bundled --limit 0", "limit 0 leaves nothing to read"),
    ("zero-shot bundled --batch-size 0", "batch_size must be at least 1, not 0"),
    ("generation bundled --dense bundled --tokens 0", "at least 1"),
    (
        "generation bundled --dense bundled --chat bundled --temperature -1",
        "temperature cannot be -1.0: it should be greater than 0",
    ),
]


@pytest.mark.parametrize(("arguments", "message"), EVALUATIONS)
def test_numbers_are_checked_before_a_model_or_a_text_is_read(monkeypatch, arguments, message):
    monkeypatch.setattr("rap.cli.checkpoints.resolve_source", lambda _: pytest.fail("looked for"))
    monkeypatch.setattr("rap.cli.evaluate.CacheCompression.check", lambda _: None)  # a package
    result = run("evaluate", *arguments.split())
    assert error_violations(result) == []
    assert message in result.err


@pytest.mark.parametrize(
    "arguments",
    [
        "--retain 0.01",
        "--retain 0.01 --budget search",
        "--retain 0.01 --method rap:paper",
        "--retain 0.01 --budget uniform",
        "--retain 0.01 --method random",
        "--retain 0.01 --stream",
    ],
)
def test_a_budget_that_no_layer_can_keep_is_refused_before_calibration(
    tmp_path, monkeypatch, arguments
):
    never = mock.Mock(side_effect=AssertionError("calibrated"))
    monkeypatch.setattr("rap.calibration.dense_context.calibrate", never)
    result = run(*BUNDLED[:2], "-o", tmp_path / "out", *QUICK, *arguments.split())
    assert error_violations(result) == []
    assert "retain 0.01" in result.err
    assert list(tmp_path.iterdir()) == []


def test_debug_shows_the_traceback(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for position in (0, len(BUNDLED)):
        arguments = [*BUNDLED, "--retain", "0"]
        arguments.insert(position, "--debug")
        with pytest.raises(RapError, match="retain cannot be"):
            run(*arguments)
    assert os.listdir(tmp_path) == []


def test_markup_in_a_name_is_printed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "[red]x").write_text("")
    assert run("plan", "bundled", "-o", "[red]x").err.startswith("error: [red]x exists")


@pytest.mark.parametrize(
    "result",
    [
        Result(1, "", "error: why\n"),
        Result(2, "{}", "error: why\n"),
        Result(2, "", "error: why\nand more\n"),
        Result(2, "", "why\n"),
        Result(2, "", ""),
    ],
)
def test_refusals_that_are_not_clean_are_seen(result):
    assert len(error_violations(result)) == 1
    assert error_violations(Result(2, "", "error: why\n")) == []


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to"),
        MemoryError(),
    ],
    ids=repr,
)
def test_memory_that_does_not_suffice_is_one_line(error, tmp_path):
    with mock.patch("rap.cli.compress.compress", side_effect=error):
        result = run("compress", "bundled", "-o", tmp_path / "out")
    assert error_violations(result) == []
    assert "out of memory: give fewer or shorter windows" in result.err


def test_other_errors_keep_their_traceback(tmp_path):
    """A fault of the program must not look like one of the input."""
    with (
        mock.patch("rap.cli.compress.compress", side_effect=RuntimeError("shapes differ")),
        pytest.raises(RuntimeError, match="shapes differ"),
    ):
        run("compress", "bundled", "-o", tmp_path / "out")
