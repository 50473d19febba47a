"""`python docs/models_page.py` writes docs/models.md: the table of families, for people.

Everything in it is read from `model.families` and `serving.families`, so that a family's rows are
its documentation.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path

from rap.checkpoint.gguf_header import ARCHITECTURES
from rap.model.families import FAMILIES, WRAPPERS
from rap.model.refusals import REASONS
from rap.model.specs import AttentionSpec
from rap.serving.families import SUPPORT, support
from rap.serving.plain_forms import plain_form
from rap.serving.refusals import BESIDE

_ARGUMENTS = {"softcap": "soft cap of logits", "s_aux": "attention sinks"}
TESTED = "5.19.0, and those of the first release in 5.16.1"
_HEADER = f"""# Models

This page lists the model families that `rap` supports, with the features and engines of each. The
table is generated from `model.families` by `python docs/models_page.py`, and a test keeps it up to
date. Every family is tested against its original attention in transformers
{TESTED}. The tests compare attention, logits, cached
decoding, left-padded generation, saving and loading.

## Columns

* **pairs**: the two channels of a RoPE pair are half a head apart, or adjacent (interleaved).
* **layers that rotate**: the layers with RoPE.
* **QK-norm**: its kind. It is of each head, before rotation, in every [mode](#what-a-head-keeps),
  unless the entry states otherwise.
* **from files**: `apply` means that `rap apply --stream` prunes the checkpoint without the model in
  memory. `all` adds calibration and layer-wise distillation from files (`--stream --recover fit`).
* **vLLM**: pruned checkpoints run in [vLLM](how-to/serve-vllm.md). All were compared with
  transformers on a CPU, also with two ranks (`--tensor-parallel-size 2`) and in every QK-norm mode
  (`make test-families`). `rap verify OUT --engine vllm` compares one checkpoint.
* **plain**: the family of the checkpoint that `--target plain` writes, or that `rap export stock`
  writes after `--profile stock`. Engines run it without `rap`. `phi3` with a sliding window becomes
  `mistral`. Families `llama` and `mistral` can also be
  [exported to GGUF](how-to/serve-llamacpp.md).

## What a head keeps

Channels that rotate are pruned as RoPE pairs. Channels that do not rotate are pruned singly, by the
same fraction. Slow pairs can be folded, and other channels kept as a low-rank latent, unless a norm
or a clamp acts on single channels. `rap inspect` reports this. Values keep a low-rank latent, or
single channels behind a gate or a clamp. Layers without softmax attention (linear attention,
convolution) do not change.

With QK-norm, the dense model divides a head's channels by their root mean square. The pruned head
must still be divided by the value of the whole head. The setting `qk_norm` of a plan controls how
([measurements](results/quality.md)):

| mode | keeps | saves | error |
|---|---|---|---|
| `constant` (default) | kept rows, one constant per head | all | the kept energy varies |
| `rows` | 8 more rows per head (`norm_rows`), for the norm alone | all but these | what they miss |
| `exact` | all rows of W_q and W_k | cache and attention, not W_q and W_k | none from the norm |

gemma3n and gemma4 also normalize values, by a norm without weights. There W_v keeps all rows in
every mode, rotated so that the kept part comes first. Cache, attention and W_o are pruned without
an error from this norm.

In some models, layers read the keys and values of an earlier layer. These layers share one
selection of pairs and values, chosen by all their queries and outputs. Readers cache nothing, and
do not count in a retain ratio. Such models do not support calibration from files, the closed-form
refit or layer-wise distillation. `rap apply --stream` and end-to-end distillation work.

One projection can compute both keys and values (`attention_k_eq_v`). After pruning it has rows of
both, so that W_k itself does not shrink.

## Families

| model type | pairs | layers that rotate | QK-norm | other | from files | vLLM | plain |
|---|---|---|---|---|---|---|---|
"""
_FOOTER = """
Samples and evaluation windows begin with BOS if the model's tokenizer adds it to a text, and for
families that need it. `--bos always` or `--bos never` overrides this. Every result records the
choice.

Partial rotation, rope scaling, biases, softmax scales, grouped queries and mixtures of experts need
no row. They are detected from the model.

## Multimodal models

{wrappers}

The text model is compressed like its family above. The image and video parts and their embeddings
pass through unchanged. The result loads with `AutoModelForImageTextToText`, and as a causal LM. The
vision tower of gemma3n is from the package timm, which transformers requires. In the tests a small
module replaces it.

With positions on several axes (time, height and width of an image), every kept pair keeps its axis.
These pairs are not folded.

## Not served by vLLM

{unserved}

## GGUF files

{read}

Each is tested with a file in the layout of llama.cpp's converter. The dequantized model has the
logits of the original model. Some header values are read because transformers replaces them by
defaults. Examples are rope bases, sliding windows, soft caps and the norm epsilon. GGUF files do
not contain the sliding windows of Mistral, Qwen2 and StarCoder2. As in llama.cpp, these models have
full attention when read from GGUF. Unsupported files:

{unread}
| Mixtral, stored as `llama` | transformers does not read its experts |
| any, with YaRN or two lists of rope factors | transformers does not read them |
| any, with tensors that transformers drops | the model would be incomplete |
| every other architecture | not implemented |

## Unsupported models

{refused}
| other multimodal models | not implemented |
| models whose config has no `rope_parameters` | nothing rotates |
| MLA (deepseek_v2, deepseek_v3, glm4_moe_lite, ...) | it caches one latent for all heads |
| encoder-decoders | cross-attention has no rotary positions |
| model types newer than this release | not implemented |
| quantized checkpoints | compress first, then quantize |

`rap apply --stream` prunes the checkpoint of every family without the model in memory. The output
is bit-identical. This includes experts that are stored one by one, and older tensor names.
"""


def models_page() -> str:
    """The text of docs/models.md."""
    rows = [_row(spec) for _, spec in sorted(FAMILIES.items())]
    unserved = {name: row.unserved for name, row in SUPPORT.items() if row.unserved}
    footer = _FOOTER.format(
        wrappers=_listed("supported", WRAPPERS),
        refused=_reasons(REASONS),
        read=_read_files(),
        unread=_reasons({name: row.unread for name, row in ARCHITECTURES.items() if row.unread}),
        unserved=_reasons({**unserved, "gemma4_text with experts": BESIDE}),
    )
    return _HEADER + "\n".join(rows) + "\n" + footer


def _read_files() -> str:
    """The architectures of GGUF files that can be a source."""
    names = [f"`{name}`" for name, row in sorted(ARCHITECTURES.items()) if not row.unread]
    return _listed("supported architectures", names)


def _listed(header: str, names: Iterable[str]) -> str:
    """Names as a table of one column: many of them hold numbers, which sentences may not."""
    return "\n".join([f"| {header} |", "| --- |", f"| {', '.join(names)} |"])


def _reasons(reasons: Mapping[str, str]) -> str:
    """A table of model types by the reason that they share."""
    by_reason: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        by_reason.setdefault(reason, []).append(name)
    rows = (
        f"| {', '.join(sorted(names))} | {reason} |" for reason, names in sorted(by_reason.items())
    )
    return "\n".join(["| families | reason |", "|---|---|", *rows])


def _row(spec: AttentionSpec) -> str:
    rotates = "all" if spec.rotates is None else (spec.rotates.__doc__ or "").strip()
    cells = (
        f"`{spec.model_type}`",
        spec.pairing,
        rotates,
        _norm(spec),
        _features(spec),
        "apply" if spec.value_norm else "all",
        "-" if support(spec.model_type).unserved else "yes",
        plain_form(spec.model_type) or "-",
    )
    return f"| {' | '.join(cells)} |"


def _norm(spec: AttentionSpec) -> str:
    if spec.norm is None:
        return "-"
    said = [
        ("LayerNorm" if spec.norm.centred else "RMS", True),
        ("over all heads", spec.norm.over == "all"),
        ("after rotation", spec.norm.after_rotation),
        ("`exact` alone", spec.norm.one_module_per_head),
    ]
    return ", ".join(name for name, there in said if there)


def _features(spec: AttentionSpec) -> str:
    features = [
        ("fused q, k, v", spec.fused),
        ("gated output", spec.gate),
        ("normalized values", spec.value_norm),
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
