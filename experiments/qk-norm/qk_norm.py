"""What each QK-norm mode costs: weights it keeps, error of the norm, perplexity after the cut.

    python experiments/qk-norm/qk_norm.py [--steps 200] [--model runs/qk-norm-model]

The model is the bundled one turned into a Qwen3: norms put between its projections and the
rotation, then trained on for a few minutes so that it uses them. It is kept beside the
directory --model (not tracked), named by its settings, for the next run. The table is qk-norm.json
beside this file.
"""

import argparse
import dataclasses
import hashlib
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

import rap
from rap import assets
from rap.calibration.dense_context import CalibrationText, DenseContext
from rap.checkpoint.files import write_json
from rap.checkpoint.provenance import provenance
from rap.evaluation.quality.perplexity import perplexity
from rap.model.layers import attention_layers
from rap.model.norms import KeptNorm

RESULT = Path(__file__).with_name("qk-norm.json")
RETAINS = (0.7, 0.5)
BATCH, TOKENS, RATE = 16, 256, 1e-3
# Its name in the table, the plan's mode, and the rows a head that only the norm sees.
MODES = (
    ("kept rows only", "constant", 1),
    ("constant", "constant", 1),
    ("4 rows", "rows", 4),
    ("8 rows", "rows", 8),
    ("16 rows", "rows", 16),
    ("exact", "exact", 1),
)
WINDOW, CALIBRATION_WINDOWS, EVALUATION_WINDOWS = 512, 32, 32


def bench_of(model: Any, num_windows: int) -> DenseContext:
    """The model with QK-norm in its context, with the tokenizer of the bundled one."""
    reading = CalibrationText(num_windows=num_windows, window=WINDOW)
    tokenizer = assets.reference_tokenizer()
    return DenseContext.open(model, tokenizer, reading=reading, progress=True)


def kept_folder(folder: Path, dense: Any, steps: int, seed: int) -> Path:
    """Where the trained model is kept: named by what it is made of, and of how it is trained."""
    asked = [rap.fingerprint_model(dense), steps, seed, BATCH, TOKENS, RATE]
    key = hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:8]
    return folder.with_name(f"{folder.name}-{key}")


def normalised_model(folder: Path, steps: int, seed: int = 0) -> Any:
    """The bundled model with QK-norm, trained on for `steps`; `kept_folder` has it if it was."""
    dense = assets.reference_model(dtype=torch.float32)
    folder = kept_folder(folder, dense, steps, seed)
    if folder.is_dir():
        return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    torch.manual_seed(seed)
    fields = dense.config.to_dict()
    for name in ("model_type", "architectures", "dtype"):
        fields.pop(name)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model("qwen3", **fields))
    missing, unexpected = model.load_state_dict(dense.state_dict(), strict=False)
    assert not unexpected, unexpected
    assert all("_norm" in name for name in missing), missing
    _start_at_dense_scale(model)
    _train(model, steps, seed)
    model.save_pretrained(folder)
    return model.eval()


@torch.no_grad()
def _start_at_dense_scale(model: Any) -> None:
    """Norm weights that give queries and keys the size they had without a norm, on average."""
    statistics = bench_of(model, 4).statistics({"energy"})
    for layer, found in zip(attention_layers(model), statistics.layers, strict=True):
        for name in ("q", "k"):
            size = found[f"raw_energy_{name}"].mean().sqrt()
            getattr(layer.module, f"{name}_norm").weight.fill_(size)


def _train(model: Any, steps: int, seed: int) -> None:
    tokenizer = assets.reference_tokenizer()
    windows = rap.load_windows(
        "bundled", tokenizer, num_windows=steps * BATCH, window=TOKENS, seed=seed
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    model.train()
    for step, ids in enumerate(windows.split(BATCH)):
        logits = model(ids, use_cache=False).logits[:, :-1]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.3f}", flush=True)


@torch.no_grad()
def norm_error(small: Any, model: Any, tokens: Tensor) -> float:
    """Root mean square of ln(estimated / true mean square) over tokens and heads, keys and queries.

    The true one is of the dense head, the estimate what the pruned head divides by.
    """
    squared, count = 0.0, 0
    for layer, dense in zip(attention_layers(small), attention_layers(model), strict=True):
        seen: dict[str, Tensor] = {}
        handles = [
            module.register_forward_hook(
                lambda module, inputs, output, key=key, seen=seen: seen.__setitem__(key, inputs[0])
            )
            for key, module in (("q", dense.module.q_norm), ("k", dense.module.k_norm))
        ]
        # Both attentions read the dense model's states, so that only the norm differs.
        inputs: list[Tensor] = []
        handles.append(
            dense.module.register_forward_pre_hook(
                lambda module, args, kwargs, inputs=inputs: inputs.append(kwargs["hidden_states"]),
                with_kwargs=True,
            )
        )
        model(tokens, use_cache=False)
        for side, norm in (("q", layer.module.q_norm), ("k", layer.module.k_norm)):
            true = seen[side].square().mean(-1).transpose(1, 2)
            states = dict(zip("qk", layer.module.project(inputs[0])[:2], strict=True))[side]
            if isinstance(norm, KeptNorm):
                found = states.square().sum(-1) * norm.ratio[:, None] / norm.head_dim
            else:
                found = states.square().mean(-1)
            squared += float((found / true).log().square().sum())
            count += true.numel()
        for handle in handles:
            handle.remove()
    return (squared / count) ** 0.5


def main() -> None:
    """Every mode at every budget."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--model", type=Path, default=Path("runs/qk-norm-model"))
    arguments = parser.parse_args()
    started = time.monotonic()
    model = normalised_model(arguments.model, arguments.steps)
    bench = bench_of(model, CALIBRATION_WINDOWS)
    tokens = bench.held_out("bundled")
    probe = tokens[: 4 * WINDOW].view(4, WINDOW)
    cut = rap.Rap(keys="pairs", score="energy", metric="output", budget="uniform")
    bench.statistics(cut.needs | {"energy", "norms"})  # one reading for what all modes need

    def measure(small: Any) -> float:
        return perplexity(small, tokens, window=WINDOW, max_windows=EVALUATION_WINDOWS).value

    whole, rows, cells = rap.footprint(model), [], []
    dense = measure(model)
    rows.append(["dense", "", "", "", f"{dense:.2f}"])
    for retain in RETAINS:
        for name, mode, extra in MODES:
            method = dataclasses.replace(cut, retain=retain, qk_norm=mode, norm_rows=extra)
            plan = bench.plan(method)
            if name == "kept rows only":
                plan = _naive(plan)
            small = method.apply(model, plan)
            cost = rap.footprint(small).attention_parameters / whole.attention_parameters
            error, value = norm_error(small, model, probe), measure(small)
            cells.append(
                {"retain": retain, "mode": name, "weights": cost, "error": error, "ppl": value}
            )
            rows.append([name, f"{retain}", f"{cost:.1%}", f"{error:.1%}", f"{value:.2f}"])
            print(rows[-1], flush=True)
    header = ["denominator", "retain", "attention weights", "error of the mean square", "ppl"]
    title = "QK-norm after pruning, by what replaces the dense head's mean square"
    note = (
        f"Bundled model made a Qwen3 and trained on for {arguments.steps} steps; whole pairs by "
        "energy, value subspaces, no recovery. The error is the root mean square of its logarithm "
        f"over tokens, heads, queries and keys; perplexity over {EVALUATION_WINDOWS} windows of "
        f"{WINDOW} held-out tokens. The cache is the same in all modes."
    )
    made = provenance(steps=arguments.steps, seed=0)
    write_json(
        RESULT,
        {
            "table": {"title": title, "note": note, "header": header, "rows": rows},
            "measured": cells,
            "command": made["command"],
            "seconds": time.monotonic() - started,
            "provenance": made,
        },
    )


def _naive(plan: rap.Plan) -> rap.Plan:
    """The norm over kept channels alone: their mean stands for that of the head."""
    layers = []
    for layer, shape in zip(plan.layers, plan.shapes, strict=True):
        ratio = shape.head_dim / layer.key_width
        layers.append(
            dataclasses.replace(
                layer,
                query_ratio_H=torch.full((shape.num_heads,), ratio),
                key_ratio_G=torch.full((shape.num_kv_heads,), ratio),
            )
        )
    return dataclasses.replace(plan, layers=tuple(layers))


if __name__ == "__main__":
    main()
