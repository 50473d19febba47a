"""A row of the table of families: how one family implements its attention."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from .rope import Pairing, TableKind

PROJECTIONS = ("q", "k", "v", "o")
# How QK-norm is computed after the cut; explained in `norms`.
NORM_MODES = ("exact", "constant", "rows")
# The further arguments of an attention module's forward.
Kwargs = Mapping[str, Any]


@dataclass(frozen=True)
class QKNorm:
    """How a family normalizes queries and keys, if its attention module has modules of that name.

    `over` is what one mean runs over: each head's channels (`head`), or all heads' (`all`).
    `layout` is how the states lie when they are normalised. `centred` is LayerNorm, which subtracts
    the mean first. The weight is `weight_offset` plus what is stored.
    """

    names: tuple[str, str] = ("q_norm", "k_norm")
    over: Literal["head", "all"] = "head"
    layout: Literal["BTHD", "BHTD"] = "BTHD"
    after_rotation: bool = False
    centred: bool = False
    weight_offset: float = 0.0
    one_module_per_head: bool = False


@dataclass(frozen=True)
class AttentionSpec:
    """How one family writes its attention.

    `pairing` and `table` are the layouts of rotated channels and of cos/sin; `clockwise` rotates by
    the negative angle. `rope_in_float32` says that the family casts queries and keys to float32 for
    the rotation. `rotates` tells from the attention module whether the layer rotates (None: every
    layer does). `by_axis` says that the pairs of a head take their positions from several axes
    (time, height and width of an image). `sliding_window_from` tells where the window handed to the
    attention function lives: an attribute of the module (`module`), the config read at call time
    (`config`), or nowhere. `arguments` are further arguments of the attention function, each with
    the module's attribute that holds it. `query_scale` multiplies rotated queries.

    `fused` is one linear for q, k and v: all of q, then k, then v (`blocks`), or a head's q, k and
    v after each other (`heads`). `gate` multiplies the attention output by the sigmoid of a
    projection: its own linear, or the second half of every head of q_proj (`query`). `needs_bos`
    says that the family goes wrong on a text that does not begin with BOS.

    `value_norm` names a norm of values over each head, without weights, before they are cached.
    What `of` tells of one layer: it `reads` the keys and values of an earlier one and has q and o
    alone, or it `ties_values`, whose projection is that of the keys (module `kv_sharing`).
    """

    model_type: str
    pairing: Pairing = "half"
    table: TableKind = "repeated"
    clockwise: bool = False
    rope_in_float32: bool = False
    rotates: Callable[[nn.Module], bool] | None = None
    by_axis: bool = False
    sliding_window_from: Literal["module", "config"] | None = None
    arguments: tuple[tuple[str, str], ...] = ()
    query_scale: Callable[[Any, Tensor, int, Kwargs], Tensor] | None = None
    norm: QKNorm | None = None
    fused: Literal["blocks", "heads"] | None = None
    gate: str | None = None
    needs_bos: bool = False
    value_norm: str | None = None
    reads: bool = False
    ties_values: bool = False
    attention: str = "self_attn"
    projections: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "o_proj")

    def projection_names(self) -> dict[str, str]:
        """Role (q, k, v, o) to the name of its linear layer."""
        return dict(zip(PROJECTIONS, self.projections, strict=True))

    def of(self, attention: nn.Module | None) -> "AttentionSpec":
        """The row of one layer, dense or pruned, of a family whose layers differ in projections."""
        if self.value_norm is None:
            return self
        q, k, v, o = self.projections
        reads = bool(getattr(attention, "is_kv_shared_layer", False))
        ties = not reads and getattr(attention, v, None) is None
        names = (q, k, k if ties else v, o)
        return replace(self, reads=reads, ties_values=ties, projections=names)

    def linears(self) -> dict[str, tuple[str, ...]]:
        """Every linear layer of the attention by name, and the projections of its rows."""
        linears: dict[str, tuple[str, ...]] = {}
        for projection, name in self.projection_names().items():
            if self.reads and projection in "kv":
                continue
            linears[name] = (*linears.get(name, ()), projection)
        if self.gate == "query":
            linears[self.projections[0]] += ("gate",)
        elif self.gate is not None:
            linears[self.gate] = ("gate",)
        return linears

    @property
    def per_head(self) -> bool:
        """Whether a linear of several projections lists them head by head in the dense model."""
        return self.fused == "heads" or self.gate == "query"
