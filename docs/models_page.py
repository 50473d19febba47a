"""`python docs/models_page.py` writes docs/models.md: the table of families, for people.

Everything in it is read from `model.families` and `serving.refusals`, so that a family's row is its
documentation.
"""

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill

from rap.checkpoint.gguf_header import ARCHITECTURES
from rap.model.families import FAMILIES, WRAPPERS
from rap.model.refusals import REASONS
from rap.model.specs import NORM_MODES, AttentionSpec
from rap.serving.plain_forms import STOCK_FAMILIES
from rap.serving.refusals import BESIDE, REFUSED, is_served

_ARGUMENTS = {"softcap": "soft cap of logits", "s_aux": "attention sinks"}
TESTED = "5.19.0, those of the first release in 5.16.1 too"
_HEADER = f"""# Models

Written by `python docs/models_page.py` from the table in
`src/rap/model/families.py`; a test keeps it up to date. Every family here is tested against its own
attention in transformers {TESTED}:
attention, logits, cached decoding, left-padded generation, saving, loading.

What a head keeps: where channels rotate, whole pairs; where they do not (partial rotation, layers
without rotation), single channels, the same fraction of each. Slow pairs can be folded and the
other channels kept as a subspace, unless a norm or a clamp works on single ones (`rap inspect` says
so). Values keep channels or a subspace; behind a gate or a clamp, channels. Layers without softmax
attention (linear attention, convolution) are left as they are and `rap inspect` names them.

With QK-norm a head's channels are divided by their root mean square before they are cut, so what
remains must still be divided by that of the whole head. `qk_norm` of a plan says how (measured in
docs/results/quality.md):

| mode | what it keeps | saves | error |
|---|---|---|---|
| `constant` (default) | kept rows, one constant per head | all | the kept energy varies |
| `rows` | 8 more rows a head (`norm_rows`), for the norm alone | all but these | what they miss |
| `exact` | all rows of W_q and W_k | cache and attention, not W_q and W_k | none beside the cut |

Where values are normalised too (gemma3n, gemma4), by a norm without weights, W_v keeps all its rows
in every mode, rotated so that what is kept comes first: their norm sees the whole head, and cache,
attention and W_o are cut with no error beside the cut. Where layers read the keys and values of an
earlier one, that layer and its readers keep the same pairs and values, chosen by the queries and
outputs of all of them; readers cache nothing, so nothing of them counts in a retain ratio. Such
models cannot be worked on layer by layer: no streamed calibration, no closed-form refit, no fit;
`rap apply --stream` and distillation work. A linear that is keys and values in one
(`attention_k_eq_v`) has rows of both after the cut, so that W_k itself becomes no smaller there.

Every family is cut in memory and from files (`rap apply --stream`); those that say `all` are also
calibrated and fitted from files, layer by layer (`--stream --recover fit`).

`vLLM`: pruned checkpoints of the family run in vLLM ([](serving.md)). All of these were compared
with transformers in vLLM on a CPU, whole and with their heads on two ranks
(`--tensor-parallel-size 2`), those with QK-norm in every mode there (`make test-families`);
`rap verify OUT --engine vllm` compares a checkpoint. `plain`: pruned for `--target plain`, or with
the stock profile, it is a checkpoint of the family named there, which engines run without `rap`.
Those written as llama or mistral have a GGUF file too (`rap export gguf`).

| model type | pairs | layers that rotate | QK-norm | other | from files | vLLM | plain |
|---|---|---|---|---|---|---|---|
"""
_FOOTER = """
Windows of text, to calibrate, recover or evaluate on, begin with BOS where the model's tokenizer
puts one before a text by itself, and for the families that need it; `--bos always` or `never`
decides otherwise, and every result says which it was.

Partial rotation, rope scaling (linear, dynamic, yarn, longrope, llama3, proportional), biases,
softmax scales, grouped queries and mixtures of experts need no row: they are read off the model.

## Multimodal

{wrappers}
The text model, of a family above, is compressed as its family says; what looks at images or video,
and the way it enters the text, pass through unchanged. The result loads with
`AutoModelForImageTextToText`, and as a causal LM. What sees in gemma3n comes from the timm package,
which transformers asks for; in the tests a small module stands in its place.

Where the pairs of a head take their positions from several axes (time, height and width of an
image), every kept pair keeps its own axis, and pairs are kept whole, not folded.

## Not served by vLLM

{unserved}

## GGUF files

{read}

Each is tested with a file laid out as llama.cpp's converter writes it: dequantized, it has the
logits of the model that it was written from. Values of the header that transformers replaces by
defaults (rope bases, rotating part, windows, soft caps, head and expert sizes, norm epsilon, BOS)
are read from the header. The windows of Mistral, Qwen2 and StarCoder2 are in no GGUF file: these
models have full attention when read from one, as in llama.cpp. Rejected:

{unread}
* Mixtral, which is stored as `llama`: transformers does not read its experts.
* Rope scaling by yarn or by two lists of factors, and files with tensors that transformers drops.
* Every other architecture.

## Refused

* Multimodal models other than those above.
* Models whose config has no `rope_parameters`: nothing in them rotates.
* MLA (deepseek_v2, deepseek_v3, glm4_moe_lite, ...): it caches one latent for all heads, so that
  cutting channels of heads would save nothing.
{refused}
* Encoder-decoders, and model types newer than this release.
* Checkpoints quantized already: compress first, then quantize.

Every family's checkpoint, experts stored one by one and older names included, is also cut without
the model in memory (`rap apply --stream`), to the same bytes.
"""


def models_page() -> str:
    """The text of docs/models.md."""
    rows = [_row(spec) for _, spec in sorted(FAMILIES.items())]
    footer = _FOOTER.format(
        wrappers=fill(f"Taken whole: {', '.join(WRAPPERS)}.", 100),
        refused=_reasons(REASONS),
        read=_read_files(),
        unread=_reasons({name: row.unread for name, row in ARCHITECTURES.items() if row.unread}),
        unserved=_reasons({**REFUSED, "gemma4_text with experts": BESIDE}),
    )
    return _HEADER + "\n".join(rows) + "\n" + footer


def _read_files() -> str:
    """The architectures of GGUF files that can be a source."""
    names = [f"`{name}`" for name, row in sorted(ARCHITECTURES.items()) if not row.unread]
    return fill(f"A .gguf file is a source of architecture {', '.join(names)}.", 100)


def _reasons(reasons: Mapping[str, str]) -> str:
    """A list of model types by the reason that they share."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    return "\n".join(
        fill(f"* {', '.join(sorted(names))}: {reason}.", 100, subsequent_indent="  ")
        for reason, names in sorted(by_reason.items(), key=lambda item: item[1])
    )


def _row(spec: AttentionSpec) -> str:
    rotates = "all" if spec.rotates is None else (spec.rotates.__doc__ or "").strip()
    cells = (
        f"`{spec.model_type}`",
        spec.pairing,
        rotates,
        _norm(spec),
        _features(spec),
        "cut" if spec.value_norm else "all",
        "yes" if is_served(spec.model_type) else "-",
        STOCK_FAMILIES.get(spec.model_type, "-"),
    )
    return f"| {' | '.join(cells)} |"


def _norm(spec: AttentionSpec) -> str:
    if spec.norm is None:
        return "-"
    kind = "LayerNorm" if spec.norm.centred else "RMS"
    over = "all heads" if spec.norm.over == "all" else "each head"
    when = "after rotation" if spec.norm.after_rotation else "before rotation"
    modes = NORM_MODES if not spec.norm.one_module_per_head else ("exact",)
    return f"{kind} over {over}, {when}; {', '.join(modes)}"


def _features(spec: AttentionSpec) -> str:
    features = [
        ("fused q, k, v", spec.fused),
        ("gated output", spec.gate),
        ("normalised values", spec.value_norm),
        ("layers that read others' keys and values", spec.value_norm),
        ("positions of several axes (M-RoPE)", spec.by_axis),
        ("clockwise rotation", spec.clockwise),
        ("rotation in float32", spec.rope_in_float32),
        (f"{spec.table} cos/sin", spec.table != "repeated"),
        ("sliding windows", spec.sliding_window_from),
        *((_ARGUMENTS[name], True) for name, _ in spec.arguments),
        ("query scale", spec.query_scale),
        ("needs BOS", spec.needs_bos),
    ]
    return ", ".join(name for name, there in features if there) or "-"


if __name__ == "__main__":
    (Path(__file__).parent / "models.md").write_text(models_page(), encoding="utf-8")
