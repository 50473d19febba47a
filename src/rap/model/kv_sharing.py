"""Attention that reads the keys and values of an earlier layer, and normalizes values.

Copied into checkpoints as remote code with `modeling`.

In gemma3n and gemma4 the last layers (readers) have no keys and values of their own: they attend to
those of the last layer of their type that has (their source), and cache nothing. What a source
keeps, its readers' queries and output projections must keep too, so that there is one choice for
all of them. Each layer is a RapAttention of its own widths and index, and a reader's repeat its
source's. A plan has an entry for every layer (`planning.kv_sharing` makes them of one choice and
`Plan` refuses readers that keep anything else), and `AttentionShape.source` says what a layer
reads. A source hands on what it caches under the key of the dense family, so that readers which
stay dense work beside sources that do, and the other way round nothing is planned.

Values are divided by the root mean square of their head, by a norm without weights. That commutes
with any rotation R of a head's channels, norm(R v) = R norm(v), but with no cut: what remains must
be divided by the size of all of v. So W_v is not cut but rotated, R W_v, with an R whose first C
rows span what is kept (for kept channels a permutation). The norm sees all D rows, exactly as in
the dense model and whatever mode QK-norm has; the first C are cached and attended to. That costs
nothing beside the dense model, for W_v is small where heads are grouped, and leaves no error.

Where values are taken from the key projection (`attention_k_eq_v`), one linear gives the rows of
keys as they are cut, and after them the D rotated rows of values.

Shapes: B batch, T tokens, H query heads, G KV heads, D dense head dim, W key width, C value width.
"""

from typing import Any

from torch import Tensor, nn

from .attention import RapAttention, StateCache
from .norms import normalise_dense, select_channels
from .rope import Tables
from .specs import AttentionSpec


class SharingAttention(RapAttention):
    """RapAttention of a layer that may read another's keys and values, or be read by others."""

    fusable = False

    def __init__(self, dense: nn.Module, spec: AttentionSpec, *args: Any, **kwargs: Any):
        super().__init__(dense, spec, *args, **kwargs)
        assert self.norm is not None
        assert spec.value_norm is not None
        self.value_norm = None if self.spec.reads else getattr(dense, spec.value_norm)

    def project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """As of every layer, values normalized; of a reader queries, and nothing of the others."""
        if self.value_norm is not None:
            q, k, v, gate = super().project(hidden_states)
            return q, k, self.value_norm(v)[..., : self.value_width], gate
        name = self.spec.projections[0]
        heads = (*hidden_states.shape[:-1], -1, self.projection_widths["q"])
        q = getattr(self, name)(hidden_states).view(heads).transpose(1, 2)
        nothing = q.new_empty(0)
        return q, nothing, nothing, None

    def position(self, q: Tensor, k: Tensor, tables: Tables | None) -> tuple[Tensor, Tensor]:
        """As of every layer; of a reader the queries alone."""
        if not self.spec.reads:
            return super().position(q, k, tables)
        assert self.norm is not None
        norm = getattr(self, self.norm.names[0])
        if self.exact_norm:
            q = select_channels(normalise_dense(self.norm, norm, q), self.kept_channels)
        else:
            q = norm(q)
        if self.num_slots:
            q = self.turned(q, *self.slot_tables(tables, self.frequency_index))
        return q, k

    def cached(
        self, k: Tensor, v: Tensor, cache: StateCache | None, kwargs: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        """The layer's own keys and values, handed on where others read them, or its source's."""
        shared = kwargs.pop("shared_kv_states", None)
        # By layer where the family names the source's, else by type.
        by_layer = hasattr(self, "kv_shared_layer_index")
        if self.spec.reads:
            k, v = shared[self.kv_shared_layer_index if by_layer else self.layer_type]
            here = self.frequency_index.device  # the source may be on another
            return k.to(here), v.to(here)
        k, v = super().cached(k, v, cache, kwargs)
        if self.store_full_length_kv:
            shared[self.layer_idx if by_layer else self.layer_type] = k, v
        return k, v


def plain_attention(spec: AttentionSpec) -> Any:
    """The class of attention that pair pruning gives a family's layers."""
    return RapAttention if spec.value_norm is None else SharingAttention
