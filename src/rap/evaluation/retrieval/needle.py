"""Needle in a haystack: one fact at every depth of documents of every length, asked for at the end.

The facts and the question are those of documents.py: by default in the words that the bundled model
was trained on, or in the wording `natural`, which any pretrained model can continue.
"""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import PercentFormatter

from ...data.bos import Bos, bos_token
from ...data.protocol import evaluation_rng
from ...model.errors import RapError
from .documents import (
    ANSWER,
    Document,
    FactWriter,
    check_grid,
    draw_facts,
    grade,
    interleave,
    opened,
    stretch,
)


@dataclass(frozen=True)
class NeedleCell:
    """Share of `num_documents` needles found: `accuracy` of whole numbers, then of tokens.

    The document has `length` tokens, the last of them the answer's; the needle stands behind the
    fraction `depth` of its text, 0 at the beginning.
    """

    length: int
    depth: float
    num_documents: int
    accuracy: float
    token_accuracy: float


def needle_document(
    writer: FactWriter,
    text: np.ndarray,
    rng: np.random.Generator,
    length: int,
    depth: float,
    num_facts: int = 1,
) -> Document:
    """A document of exactly `length` tokens with a needle at `depth`, and its question at the end.

    `num_facts` - 1 other facts stand anywhere in the text. `text` gives `length` tokens or more.
    Raises RapError if the facts and the question leave no room for text, or the text is short.
    """
    needle, *others = draw_facts(writer, rng, num_facts)
    stated = [writer.fact(*fact) for fact in (needle, *others)]
    question, kinds = writer.question(*needle)
    asked = int(np.flatnonzero(np.array(kinds) == ANSWER)[-1]) + 1  # up to the answer, no full stop
    room = length - asked - sum(len(ids) for ids, _ in stated)
    if room < 1:
        raise RapError(
            f"a document of {length} tokens has no room for more than {num_facts} facts and a "
            f"question ({length - room} tokens); use longer documents or fewer facts"
        )
    if len(text) < room:
        raise RapError(f"the text has {len(text)} tokens, {room} are needed: give a longer text")
    places = [round(depth * room), *(int(rng.integers(0, room + 1)) for _ in others)]
    events = [(at, *statement) for at, statement in zip(places, stated, strict=True)]
    events.append((room, question[:asked], kinds[:asked]))
    return interleave(text[:room], events)


def needle_grid(
    model: Any,
    tokenizer: Any,
    text_ids: np.ndarray,
    *,
    lengths: Sequence[int] = (256, 512, 1024, 2048),
    depths: Sequence[float] = (0.0, 0.25, 0.5, 0.75, 1.0),
    num_facts: int = 1,
    num_documents: int = 16,
    batch_size: int = 4,
    seed: int = 0,
    bos: Bos = "auto",
    wording: str = "plain",
    progress: bool = False,
) -> list[NeedleCell]:
    """Needles found over length (tokens) x depth, in documents made of `text_ids` [N].

    A needle is found if every token of its number is the greedy choice given those before it. The
    same call gives the same digits. Documents begin with BOS as `bos.bos_token` decides, and it
    counts as one of their tokens. `wording` is one of documents.WORDINGS. Raises RapError for a
    depth outside [0, 1], or documents that cannot be made.
    """
    check_depths(depths)
    check_grid(num_documents, lengths, [num_facts])
    text, made = np.asarray(text_ids), dict[tuple[int, float], list[Document]]()
    writer = FactWriter(tokenizer, wording=wording)
    first = bos_token(bos, tokenizer, getattr(model, "config", None))
    # All are made before any is read, so that what cannot be made is known at once.
    for length, depth in itertools.product(lengths, depths):
        rng = evaluation_rng(seed, length, *_key(float(depth)))
        size = length if first is None else length - 1
        documents = [
            needle_document(writer, stretch(text, rng, size), rng, size, depth, num_facts)
            for _ in range(num_documents)
        ]
        made[length, float(depth)] = [opened(document, first) for document in documents]
    graded = grade(model, made, batch_size, "needles", progress)
    return [
        NeedleCell(*place, num_documents, float(np.mean(shares)), token)
        for place, (shares, token) in zip(made, graded, strict=True)
    ]


def _key(depth: float) -> tuple[int, ...]:
    """What the documents of a depth are drawn by, whatever other depths there are.

    Quarters, the default's depths, by their number: recorded results were.
    """
    quarters = 4 * depth
    return (int(quarters),) if quarters.is_integer() else depth.as_integer_ratio()


def check_depths(depths: Sequence[float]) -> None:
    """RapError for a depth that is in no document."""
    for depth in depths:
        if not 0 <= depth <= 1:
            raise RapError(f"depth {depth} is outside [0, 1]: 0 is the beginning of the document")


def needle_table(title: str, cells: Sequence[NeedleCell]) -> dict[str, Any]:
    """Title, header and rows: a row a depth, a column a length, the share that was found."""
    lengths, depths, found = _grid(cells)
    return {
        "title": title,
        "header": ["depth", *(f"{length:,} tokens" for length in lengths)],
        "rows": [[f"{d:.0%}", *(f"{found[d, n]:.0%}" for n in lengths)] for d in depths],
    }


def heat_map(cells: Sequence[NeedleCell], title: str) -> Figure:
    """Depth against length, as squares with the accuracy written into them."""
    return heat_maps({title: cells})


def heat_maps(found: Mapping[str, Sequence[NeedleCell]]) -> Figure:
    """One heat map per title, side by side, on one color scale."""
    lengths, depths, _ = _grid(next(iter(found.values())))
    columns = min(2, len(found))
    rows = math.ceil(len(found) / columns)
    # A Figure of its own, not pyplot: no global state, no display.
    size = (1.6 + columns * (0.5 + 0.62 * len(lengths)), 0.5 + rows * (0.7 + 0.36 * len(depths)))
    figure = Figure(figsize=size)
    figure.set_layout_engine("constrained")
    panels = figure.subplots(rows, columns, squeeze=False).flatten()
    for axes, (title, cells) in zip(panels, found.items(), strict=False):
        image = _draw(axes, cells, title)
    for axes in panels[len(found) :]:
        axes.set_axis_off()
    # Every square tells its share, so that the key may be small.
    whole = PercentFormatter(1.0)
    figure.colorbar(image, ax=panels, shrink=1 / rows, anchor=(0.0, 1.0), format=whole)
    figure.supxlabel("length of the document, tokens", fontsize=10)
    figure.supylabel("depth of the needle", fontsize=10)
    return figure


def _grid(
    cells: Sequence[NeedleCell],
) -> tuple[list[int], list[float], dict[tuple[float, int], float]]:
    """Lengths and depths from small to large, and what was found at (depth, length)."""
    lengths = sorted({cell.length for cell in cells})
    depths = sorted({cell.depth for cell in cells})
    return lengths, depths, {(cell.depth, cell.length): cell.accuracy for cell in cells}


def _draw(axes: Axes, cells: Sequence[NeedleCell], title: str) -> AxesImage:
    lengths, depths, found = _grid(cells)
    grid = [[found[depth, length] for length in lengths] for depth in depths]
    # Blue to yellow is told apart in grey and by colour-blind readers too.
    image = axes.imshow(grid, vmin=0, vmax=1, cmap="cividis", aspect="auto")
    for row, shares in enumerate(grid):
        for column, share in enumerate(shares):
            color = "black" if share > 0.5 else "white"
            axes.text(column, row, f"{share:.0%}", ha="center", va="center", color=color)
    axes.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths])
    axes.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths])
    axes.set_title(title, fontsize=11)
    return image
