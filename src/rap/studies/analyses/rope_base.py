"""Another base frequency on the same weights: does the base decide the cost of pruning?"""

import copy
from typing import Any

from matplotlib.axes import Axes
from transformers import AutoModelForCausalLM, PreTrainedModel

from ...methods import Method
from ...methods.kvpruner import KvPruner
from ...model.errors import UnsupportedModelError
from .study import Analysis, Data, Study, paper_cut

BASES = (1e4, 1e5, 5e5, 1e6)
RETAIN = 0.5


def with_base(model: PreTrainedModel, base: float) -> Any:
    """A copy of a model whose rotation has another base frequency, and the same weights.

    Raises UnsupportedModelError where the config has no one base, or the model is multimodal.
    """
    config = copy.deepcopy(model.config)
    rope = getattr(config, "rope_parameters", None) or {}
    if "rope_theta" not in rope or hasattr(config, "text_config"):
        raise UnsupportedModelError(
            f"a {config.model_type} model has no single rope_theta in its config: there is no one "
            "base to override"
        )
    config.rope_parameters = {**rope, "rope_theta": base}
    other = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    other.load_state_dict(model.state_dict())
    return other.to(model.device).eval()


def measure(study: Study) -> Data:
    """Perplexity of the dense model, and pruned in pairs or in channels, at every base.

    Every model is calibrated and scored at its own base.
    """
    # Uniform widths: a plain channel pruner's heads are all alike, so that only the unit differs.
    methods: dict[str, Method] = {
        "pairs": paper_cut(RETAIN, budget="uniform"),
        "channels": KvPruner(retain=RETAIN, budget="uniform", align=2, layers="all"),
    }
    rows = []
    for base in BASES:
        moved = study.on(with_base(study.model, base))
        perplexities = {name: moved.after(method) for name, method in methods.items()}
        rows.append({"base": base, "dense": moved.perplexity(moved.model), **perplexities})
    trained = float(study.model.config.rope_parameters["rope_theta"])
    return {"rows": rows, "trained": trained, "retain": RETAIN, "how": study.note}


def table(data: Data) -> Data:
    """One row a rope base.

    `data` is what `measure` gave. Cells are perplexities, and the ratio of the last two.
    """
    return {
        "title": f"Another rope base on fixed weights, retain {data['retain']:g}",
        "note": (
            f"{data['how']} The model was trained at {data['trained']:,.0f}. Uniform widths. The "
            "paper (Llama-3-8B): channels stay near 51,000 at every base, pairs at 330 to 380, and "
            "at 1,120 for a base of 10,000."
        ),
        "header": ["base", "dense", "pairs (RAP)", "channels (KVPruner)", "channels / pairs"],
        "rows": [
            [
                f"{row['base']:,.0f}",
                *(f"{row[name]:,.2f}" for name in ("dense", "pairs", "channels")),
                f"{row['channels'] / row['pairs']:.2f}",
            ]
            for row in data["rows"]
        ],
    }


def draw(data: Data, axes: Axes) -> None:
    """Perplexity against the base, both logarithmic."""
    bases = [row["base"] for row in data["rows"]]
    for name, label in (
        ("channels", "channels (KVPruner)"),
        ("pairs", "pairs (RAP)"),
        ("dense", "dense"),
    ):
        axes.plot(bases, [row[name] for row in data["rows"]], "o-", label=label)
    axes.axvline(data["trained"], color="0.6", linestyle=":", linewidth=1)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("rope base (dotted: as trained)")
    axes.set_ylabel("perplexity")


ANALYSIS = Analysis("rope-base", "Is it the base frequency?", measure, table, draw)
