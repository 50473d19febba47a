"""What one attention layer caches of a token, and the entry of a layer in config.json.

Copied into checkpoints as remote code with `modeling`.

Shapes: G KV heads of the dense layer, D dense head dim, P dense pairs, M slots, N free channels,
C value channels.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

from .rope import AttentionShape


@dataclass(frozen=True)
class CacheLayout:
    """What the cache of one layer holds of a token: heads, and channels of K and of V in each.

    `num_heads` counts what is cached, which need not be the dense model's number of KV heads, and
    widths may exceed the dense head. A layer that reads the cache of another has no heads.
    """

    num_heads: int
    key_width: int
    value_width: int

    @property
    def elements(self) -> int:
        """Numbers that the cache grows by with every token."""
        return self.num_heads * (self.key_width + self.value_width)

    @property
    def width(self) -> int:
        """The channels that a cache with one head size for keys and values needs."""
        return max(self.key_width, self.value_width)


def dense_layout(shape: AttentionShape) -> CacheLayout:
    """What a dense layer of this shape caches."""
    return CacheLayout(shape.num_cached_heads, shape.head_dim, shape.head_dim)


@dataclass(frozen=True)
class Entry:
    """A layer's entry in the `rap` section of config.json: JSON-able fields, typed.

    `kind` is the name of the kind of attention that the layer has (rap.model.kinds).
    """

    kind: ClassVar[str]

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> Self:
        """The entry that `fields` of config.json are.

        TypeError if some are missing or unknown, ValueError for impossible ones.
        """
        return cls(**{name: value for name, value in fields.items() if name != "kind"})

    def fields(self) -> dict[str, Any]:
        """What config.json holds."""
        return {"kind": self.kind, **asdict(self)}

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """What a layer with this entry caches, whose dense layer has that shape."""
        raise NotImplementedError

    def fits(self, shape: AttentionShape) -> bool:
        """Whether a layer of this shape can have the entry."""
        return self.cache(shape).elements > 0 or shape.source is not None


@dataclass(frozen=True)
class PairEntry(Entry):
    """RoPE pairs (or mixed slots) M, free channels N and values C of every cached head.

    `norm_rows` are rows of a head that only its norm sees (rap.model.norms). `heads` are the cached
    heads, None for the dense number.
    """

    kind: ClassVar[str] = "pairs"

    pairs: int
    free: int
    values: int
    norm_rows: int = 0
    heads: int | None = None

    def __post_init__(self) -> None:
        if self.key_width < 1 or self.values < 1:
            raise ValueError("a head must keep at least one channel of K and of V")

    def fields(self) -> dict[str, Any]:
        """As of every entry, with neither the kind nor defaults, as checkpoints always had it."""
        unset = {"norm_rows": 0, "heads": None}
        return {name: x for name, x in asdict(self).items() if (name, x) not in unset.items()}

    @property
    def key_width(self) -> int:
        """Cached key channels of a head, 2M + N."""
        return 2 * self.pairs + self.free

    def num_heads(self, shape: AttentionShape) -> int:
        """Heads of keys and values, whether the layer caches them or reads another's."""
        return shape.num_kv_heads if self.heads is None else self.heads

    def cache(self, shape: AttentionShape) -> CacheLayout:
        """As of every entry."""
        heads = self.num_heads(shape) if shape.source is None else 0
        return CacheLayout(heads, self.key_width, self.values)

    def fits(self, shape: AttentionShape) -> bool:
        """Whether the widths are those of pruned dense heads, or of whole merged groups."""
        heads = self.num_heads(shape)
        if heads < 1 or shape.num_kv_heads % heads:
            return False
        merged, geometry = shape.num_kv_heads // heads, shape.geometry
        return (
            self.key_width > 0
            and 0 <= self.pairs <= merged * geometry.num_pairs
            and 0 <= self.free <= merged * geometry.num_free
            and 0 < self.values <= merged * shape.head_dim
        )


@dataclass(frozen=True)
class FactoredEntry(PairEntry):
    """As PairEntry, of a layer that keeps W_q, W_o or both dense and maps every head instead.

    With `queries` each query head gets its slots by a map behind its projection, or behind its norm
    where queries and keys are normalised; with `outputs` attention's output comes back to the dense
    D channels of every head by a map.
    """

    kind: ClassVar[str] = "factored"

    queries: bool = True
    outputs: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.norm_rows or not (self.queries or self.outputs):
            raise ValueError("a factored layer has maps of queries or outputs, and no norm rows")

    def fields(self) -> dict[str, Any]:
        """As of every entry."""
        return {"kind": self.kind, **super().fields()}
