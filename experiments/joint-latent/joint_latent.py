"""What a latent that slow keys share with values would buy beside two latents, by estimated loss.

    python experiments/joint-latent/joint_latent.py --text wikitext2-valid-tokenized.txt

Merged heads cache slots that rotate and a latent of values. Pairs that hardly turn over the context
need no rotation: they could be read from one latent with the values, which then counts what both
have in common once, as latent attention does. For every layer the least estimated loss of slow key
channels and values at r cached numbers is computed twice, both exactly: with two latents of any
split of r, and with one joint latent of rank r. The difference bounds what a joint latent can gain,
for slots that rotate are free to be better. Values count as tokens have them, scaled to the energy
that attention's averages have.

With `--measure TEXT` the pruned model is also read: `rap:merge=all`, and joint latents of what so
many slots of the other pairs leave of the same cache, beside two latents of the best split of the
same. Writes joint_latent.json beside this file.
"""

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rap.calibration.run import calibrate
from rap.calibration.statistics import Statistics
from rap.checkpoint.files import write_json
from rap.checkpoint.load import load, load_tokenizer
from rap.checkpoint.provenance import provenance
from rap.data.text import load_windows
from rap.methods.dense import DenseLayers, dense_layers
from rap.methods.naming import parse_method
from rap.methods.trials import Trials
from rap.model.kinds.base import WeightsPlan
from rap.model.kinds.mla import MlaEntry
from rap.model.layers import attention_layers
from rap.planning.folding import fold_head, usual_reach
from rap.planning.merging import merged_keys, refine_slots
from rap.planning.subspace import hermitian_root

RETAINS = (0.5, 0.35, 0.25)
TURNED = {"1 radian over 1,024 tokens": 1 / 1024, "1 radian over 8,192 tokens": 1 / 8192}
MERGED = "rap:merge=all"
SLOTS = (16, 24)


def real(moment: Tensor) -> Tensor:
    """The second moment [2n, 2n] of first and second channels of pairs with a complex [n, n]."""
    c = torch.view_as_complex(moment.double().contiguous())
    return torch.cat([torch.cat([c.real, -c.imag], 1), torch.cat([c.imag, c.real], 1)]) / 2


def tail(matrix: Tensor) -> Tensor:
    """Half of what is lost at every rank, 0 ... all of them."""
    squares = torch.linalg.svdvals(matrix).square()
    lost = squares.sum() - squares.cumsum(0)
    return torch.cat([squares.sum()[None], lost]).clamp(min=0) / 2


def parts(layer: Any, found: Any, slow: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Slow rows of W_k, W_v, the roots of what reads them, and that of the inputs' moment."""
    shape, module = layer.shape, layer.module
    heads, dim, pairs = shape.num_kv_heads, shape.head_dim, shape.geometry.num_pairs
    inputs = hermitian_root(found["input_moment"].double())
    rows = torch.cat([slow, slow + pairs])
    keys = module.k_proj.weight.detach().double().unflatten(0, (heads, dim))[:, rows].flatten(0, 1)
    values = module.v_proj.weight.detach().double()
    blocks = [real(c[slow][:, slow]) for c in found["key_gradient"]]
    gradient = found["value_gradient"].double().unflatten(0, (heads, -1)).sum(1)
    averaged = torch.diagonal(found["averaged_moment"].double(), dim1=-2, dim2=-1).sum(-1).mean()
    energy = (values @ inputs).square().sum()
    reader = torch.block_diag(*map(hermitian_root, gradient)) * (averaged / energy).sqrt()
    return keys, values, torch.block_diag(*map(hermitian_root, blocks)), reader, inputs


def layer_losses(layer: Any, found: Any, slow: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Losses by rank of slow keys, of values, and of both in one latent, in nats/token."""
    keys, values, key_reader, value_reader, inputs = parts(layer, found, slow)
    key_part, value_part = key_reader @ keys @ inputs, value_reader @ values @ inputs
    return tail(key_part), tail(value_part), tail(torch.cat([key_part, value_part]))


def best_split(keys: Tensor, values: Tensor, rank: int) -> float:
    """The least loss of two latents that cache `rank` numbers together."""
    first = max(0, rank - len(values) + 1)
    return min(
        float(keys[k] + values[rank - k]) for k in range(first, min(rank, len(keys) - 1) + 1)
    )


def joint_layer(
    layer: Any, found: Any, dense: DenseLayers, slow: Tensor, slots: int, rank: int, *, apart: bool
) -> WeightsPlan:
    """Slots of pairs that turn, and one latent of the others and of values, or two (`apart`)."""
    shape, module = layer.shape, layer.module
    heads, dim, pairs = shape.num_kv_heads, shape.head_dim, shape.geometry.num_pairs
    fast = torch.tensor([p for p in range(pairs) if p not in slow.tolist()])
    key_SS, reader_SS = (m[0] for m in merged_keys(found, shape, heads, "loss"))
    chosen = (torch.arange(heads)[:, None] * pairs + fast).flatten()
    frequencies = dense.frequencies[layer.index]
    reach = usual_reach(dense.context)
    moments = reader_SS[chosen][:, chosen], key_SS[chosen][:, chosen]
    few = frequencies[fast]
    folded = fold_head(*moments, few, slots, dense.context, reach=reach, turned=True)
    folded = refine_slots(folded, *moments, few, reach, turned=True)
    keys, values, key_reader, value_reader, inputs = parts(layer, found, slow)
    reader = torch.block_diag(key_reader, value_reader)
    read = reader @ torch.cat([keys, values]) @ inputs
    u, s, vh = torch.linalg.svd(read, full_matrices=False)
    if apart:
        halves = torch.linalg.svd(read[: len(keys)], full_matrices=False)
        others = torch.linalg.svd(read[len(keys) :], full_matrices=False)
        s, order = torch.cat([halves.S, others.S]).sort(descending=True)
        u = torch.block_diag(halves.U, others.U)[:, order]
        vh = torch.cat([halves.Vh, others.Vh])[order]
    up = torch.linalg.pinv(reader) @ (u[:, :rank] * s[:rank])
    down = vh[:rank] @ torch.linalg.pinv(inputs)
    key_up = torch.zeros(heads, dim, rank, dtype=torch.float64)
    key_up[:, torch.cat([slow, slow + pairs])] = up[: len(keys)].unflatten(0, (heads, -1))
    query = module.q_proj.weight.detach().double().unflatten(0, (heads, -1, dim))
    mixed = torch.stack([mixes(folded.query_mix, fast, g, heads, dim) for g in range(heads)])
    rows = torch.einsum("gmd,grde->grme", mixed, query)
    key_mix = torch.cat([mixes(folded.key_mix, fast, g, heads, dim) for g in range(heads)], 1)
    tensors = {
        "frequency_index": fast[folded.frequency].to(torch.int32).expand(heads, -1).clone(),
        "q_proj.weight": torch.cat([rows, query], 2).flatten(0, 2),
        "k_proj.weight": key_mix @ module.k_proj.weight.detach().double(),
        "v_proj.weight": down,
        "k_up.weight": key_up.flatten(0, 1),
        "v_up.weight": up[len(keys) :],
        "o_proj.weight": module.o_proj.weight.detach(),
    }
    return WeightsPlan(MlaEntry(slots, rank), tensors)


def mixes(mix_MS: Tensor, fast: Tensor, head: int, heads: int, dim: int) -> Tensor:
    """The real rows [2M, D] that make slots of a head's channels, first halves first."""
    mix = mix_MS.unflatten(1, (heads, -1))[:, head]
    rows = torch.zeros(2, len(mix), dim, dtype=torch.float64)
    rows[0][:, fast], rows[0][:, fast + dim // 2] = mix.real, -mix.imag
    rows[1][:, fast], rows[1][:, fast + dim // 2] = mix.imag, mix.real
    return rows.flatten(0, 1)


def measured(model: Any, statistics: Statistics, test: Tensor, retain: float) -> Iterator[Any]:
    """Perplexity of the dense, the merged and the joint models of one cache."""
    trials = Trials(model, replace(statistics, windows=test))
    yield {"name": "dense", "retain": 1.0, "perplexity": trials.perplexity({})}
    plan = parse_method(MERGED, retain).plan(model, statistics)
    cuts = dict(enumerate(plan.layers))
    yield {"name": MERGED, "retain": retain, "perplexity": trials.perplexity(cuts)}
    dense, layers = dense_layers(model), attention_layers(model)
    for name, angle in TURNED.items():
        slow = torch.nonzero(model.model.rotary_emb.inv_freq <= angle).flatten()
        for slots in SLOTS:
            rank = round(2 * retain * layers[0].shape.num_kv_heads * layers[0].shape.head_dim)
            rank -= 2 * slots
            about = {"retain": retain, "slow": name, "slots": slots, "latent": rank}
            for apart in (False, True):
                how = (dense, slow, slots, rank)
                cuts = {
                    i.index: joint_layer(i, statistics.layers[i.index], *how, apart=apart)
                    for i in layers
                }
                name_of = "two latents" if apart else "joint latent"
                yield {"name": name_of, **about, "perplexity": trials.perplexity(cuts)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--text", default="wikitext2-valid-tokenized.txt")
    parser.add_argument("--measure", default="")
    parser.add_argument("--retain", type=float, default=0.5)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--window", type=int, default=1024)
    given = parser.parse_args()
    model = load(given.model, dtype=torch.float32)
    tokenizer = load_tokenizer(given.model)
    windows = load_windows(
        given.text, tokenizer, num_windows=given.windows, window=given.window, seed=0
    )
    needs = parse_method(MERGED, given.retain).needs_for(model) | {"inputs"}
    statistics = calibrate(model, windows, needs, progress=True)
    frequencies = model.model.rotary_emb.inv_freq
    rows = []
    for name, angle in TURNED.items():
        slow = torch.nonzero(frequencies <= angle).flatten()
        losses = [
            layer_losses(layer, found, slow)
            for layer, found in zip(attention_layers(model), statistics.layers, strict=True)
        ]
        for retain in RETAINS:
            ranks = [round(retain * (len(keys) + len(values) - 2)) for keys, values, _ in losses]
            two = sum(best_split(k, v, r) for (k, v, _), r in zip(losses, ranks, strict=True))
            one = sum(float(joint[r]) for (_, _, joint), r in zip(losses, ranks, strict=True))
            rows.append(
                {
                    "slow": name,
                    "slow_pairs": len(slow),
                    "retain": retain,
                    "two_latents": two,
                    "joint_latent": one,
                    "gain": two - one,
                    "gain_share": 1 - one / two,
                }
            )
            print({k: round(x, 4) if isinstance(x, float) else x for k, x in rows[-1].items()})
    found = []
    if given.measure:
        how = {"num_windows": 4, "window": 2048, "seed": 0}
        test = load_windows(given.measure, tokenizer, **how)
        for row in measured(model, statistics, test, given.retain):
            found.append(row)
            print(row, flush=True)
    record = provenance(**vars(given))
    result = {"command": record["command"], "rows": rows, "measured": found, "provenance": record}
    write_json(Path(__file__).with_name("joint_latent.json"), result)


if __name__ == "__main__":
    main()
