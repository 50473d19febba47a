"""Cases of the kernels, run in Triton's interpreter on a CPU and compiled on a GPU.

A case is checked against float64; the bound is twice the error that plain PyTorch makes in the same
dtype. Errors are root mean squares, because the largest of a few hundred is a matter of luck.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from rap.model.kernels.decode_attention import reference as decode_reference
from rap.model.kernels.decode_attention.triton import launch
from rap.model.kernels.rope_pairs import reference as rope_reference
from rap.model.rope import gather_pairs, rotate_pairs

ROOM = 2.0
# A result that plain PyTorch has exactly may still be off by the last place of its dtype.
FLOOR = {torch.float32: 1e-7, torch.float16: 1e-4, torch.bfloat16: 1e-3}
# Compiled, a float32 product adds its 256 terms one by one, and exp is the hardware's: 8.5e-7 was
# seen on an H200.
COMPILED_FLOOR = FLOOR | {torch.float32: 1e-6}


def assert_close(found: Tensor, plain: Tensor, exact: Tensor) -> None:
    """`found` is at most twice as far from `exact` as `plain` is, and holds no NaN."""
    assert found.dtype == plain.dtype
    assert found.shape == exact.shape
    size = exact.square().mean().sqrt().item()
    # Else both may be far off: 0.01 is the most that rounding does here, a wrong sign is near 1.
    assert _error(plain, exact) < 0.05 * size
    floor = COMPILED_FLOOR if found.is_cuda else FLOOR
    allowed = ROOM * _error(plain, exact) + floor[found.dtype] * size
    assert _error(found, exact) <= allowed, f"{_error(found, exact):.3g} of {allowed:.3g}"


def _error(found: Tensor, exact: Tensor) -> float:
    return (found.double() - exact).square().mean().sqrt().item()


def doubled(value: Any) -> Any:
    """Tensors of floats, alone or in tuples, as float64."""
    if isinstance(value, tuple):
        return tuple(doubled(item) for item in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


@dataclass(frozen=True)
class Shape:
    """Sizes of a layer and its input; names as in the kernels."""

    batch: int = 2
    groups: int = 2
    per_group: int = 3
    slots: int = 37
    free: int = 0
    pairs: int = 64
    tokens: int = 13
    cached: int = 63
    value_width: int = 74

    @property
    def width(self) -> int:
        """W: channels of a key."""
        return 2 * self.slots + self.free


@dataclass
class Layer:
    """Random states, tables and cache. `strided` gives every tensor strides of its own."""

    shape: Shape
    dtype: torch.dtype
    device: str = "cpu"
    strided: bool = False
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))

    def random(self, *sizes: int) -> Tensor:
        """Normal values; with `strided`, heads after tokens and every other channel of a store."""
        if not self.strided:
            made = torch.randn(sizes, generator=self.generator).to(self.device, self.dtype)
            return made
        a, b, c, d = sizes
        made = torch.randn((a, c, b, 2 * d), generator=self.generator)
        return made.to(self.device, self.dtype).transpose(1, 2)[..., ::2]

    def states(self) -> tuple[Tensor, Tensor, Tensor]:
        """q [B, H, T, W], k [B, G, T, W], v [B, G, T, C]."""
        s = self.shape
        heads = s.groups * s.per_group
        return (
            self.random(s.batch, heads, s.tokens, s.width),
            self.random(s.batch, s.groups, s.tokens, s.width),
            self.random(s.batch, s.groups, s.tokens, s.value_width),
        )

    def cache(self) -> tuple[Tensor, Tensor]:
        """Keys [B, G, S, W] and values [B, G, S, C]."""
        s = self.shape
        return (
            self.random(s.batch, s.groups, s.cached, s.width),
            self.random(s.batch, s.groups, s.cached, s.value_width),
        )

    def tables(self, batch: int = 1) -> tuple[Tensor, Tensor]:
        """cos and sin [batch, T, P], every other column of a wider table where strided."""
        angle = 3 * torch.randn(
            batch, self.shape.tokens, self.shape.pairs, generator=self.generator
        )
        tables = [angle.cos().to(self.device, self.dtype), angle.sin().to(self.device, self.dtype)]
        if self.strided:
            tables = [table.repeat_interleave(2, -1)[..., ::2] for table in tables]
        return tables[0], tables[1]

    def index(self) -> Tensor:
        """Pairs of every head, int32 [G, M]; the first is there twice, as folding may have it."""
        rows = [
            torch.randperm(self.shape.pairs, generator=self.generator)[: self.shape.slots].sort()
            for _ in range(self.shape.groups)
        ]
        index = torch.stack([row.values for row in rows])
        index[:, 1:2] = index[:, :1]
        return index.to(self.device, torch.int32)


ROPE_SHAPES = [
    Shape(),
    Shape(batch=1, groups=2, per_group=5, slots=5, free=3, pairs=8, tokens=63, value_width=10),
    Shape(per_group=1, slots=44, tokens=1, value_width=88),
    Shape(groups=1, slots=1, pairs=4, tokens=100, value_width=2),
]


def plain_rotation(
    x: Tensor, tables: tuple[Tensor, Tensor], index: Tensor, clockwise: bool
) -> Tensor:
    """The rotation as models compute it: every product in the dtype of the states."""
    cos, sin = (gather_pairs(table, index) for table in tables)
    return rotate_pairs(x, cos, -sin if clockwise else sin)


def check_rotation(kernel: Any, layer: Layer, *, clockwise: bool, batch: int = 1) -> None:
    """Queries and keys of one layer; `kernel` is the Triton launcher or the operation."""
    q, k, _ = layer.states()
    tables, index = layer.tables(batch), layer.index()
    found = kernel(q, k, *tables, index, clockwise=clockwise)
    exact = rope_reference.rotate(q.double(), k.double(), *doubled(tables), index, clockwise)
    for one, states, truth in zip(found, (q, k), exact, strict=True):
        assert_close(one, plain_rotation(states, tables, index, clockwise), truth)


@dataclass(frozen=True)
class Decode:
    """One query per sequence over a cache. `lengths` of each sequence, or None for the whole cache;
    `hidden` is the share of slots that a mask hides. With `page` the cache is in pages of so many
    slots; with `quantized` it is in float8 with a scale each for keys and values."""

    name: str
    shape: Shape = Shape()
    lengths: tuple[int, ...] | None = None
    hidden: float = 0.0
    softcap: float | None = None
    sinks: bool = False
    splits: int = 2
    page: int = 0
    quantized: bool = False

    def settings(self, layer: Layer) -> dict[str, Any]:
        """Keyword arguments of the kernel and its reference."""
        s, device = self.shape, layer.device
        given: dict[str, Any] = {"scale": 0.3, "softcap": self.softcap}
        if self.lengths is not None:
            given["lengths_B"] = torch.tensor(self.lengths, device=device)
        if self.hidden:
            keep = torch.rand(s.batch, s.cached, generator=layer.generator) >= self.hidden
            keep[:, -1] = True
            given["keep_BS"] = keep.to(device)
        if self.sinks:
            heads = s.groups * s.per_group
            sinks = 2 * torch.randn(heads, generator=layer.generator)
            given["sinks_H"] = sinks.to(device, layer.dtype)
        if self.quantized:
            given["cache_scales"] = (0.37, 1.9)
        return given


DECODE_CASES = [
    Decode("whole cache"),
    Decode("one split", lengths=(63, 1), splits=1),
    Decode("odd widths", Shape(groups=1, per_group=5, slots=5, value_width=6, cached=100)),
    Decode("lengths", Shape(per_group=1, cached=130), lengths=(123, 5), splits=3),
    Decode("many splits", Shape(cached=1000), lengths=(1000, 70), splits=5),
    Decode("mask", hidden=0.4),
    Decode("mask and lengths", lengths=(50, 20), hidden=0.4),
    Decode("everything hidden but one", Shape(cached=200), hidden=1.0),
    Decode("soft cap and sinks", softcap=2.0, sinks=True),
    Decode("all", Shape(per_group=7), (61, 40), 0.3, 3.0, True, 3),
    # Merged heads: all of SmolLM2 and of Llama-3-8B at 0.7 and 0.5, and more than a tile's queries.
    Decode("one head of 9", Shape(groups=1, per_group=9, slots=67, value_width=134)),
    Decode("wider keys", Shape(groups=1, per_group=9, slots=67, value_width=98), (63, 7)),
    Decode("wider values", Shape(per_group=16, slots=49, value_width=134), (63, 7)),
    Decode("256 wide", Shape(per_group=16, slots=128, value_width=256), (63, 31)),
    Decode("32 queries", Shape(groups=1, per_group=32, slots=3, value_width=5), (60, 3)),
    Decode("tiles", Shape(per_group=33, slots=3, value_width=5), (60, 3), 0.3, 3.0, True),
    Decode("three tiles", Shape(groups=1, per_group=71, slots=3, value_width=5), splits=1),
    Decode("pages", Shape(cached=100), (99, 30), splits=3, page=16),
    Decode("odd pages", Shape(cached=63), (63, 8), 0.3, 3.0, True, 2, page=7),
    Decode("one page", Shape(groups=1, per_group=9, slots=67, value_width=98), page=63),
    Decode("float8", lengths=(62, 9), quantized=True),
    Decode("float8, capped", Shape(per_group=9, value_width=30), softcap=2.0, quantized=True),
    Decode("float8 pages", Shape(cached=96), (95, 33), 0.3, splits=2, page=16, quantized=True),
]


def check_decode(case: Decode, layer: Layer, kernel: Any = launch) -> None:
    """Attention output; what lies past a sequence's length is NaN and must not be read."""
    q, cache = layer.states()[0][:, :, 0], layer.cache()
    settings = case.settings(layer)
    scales = settings.get("cache_scales", (1.0, 1.0))
    if case.quantized:
        cache = tuple(tensor.to(torch.float8_e4m3fn) for tensor in cache)
    wide = [tensor.double() * scale for tensor, scale in zip(cache, scales, strict=True)]
    exact_settings = doubled_settings(settings) | {"cache_scales": (1.0, 1.0)}
    exact = decode_reference.decode(q.double(), *wide, **exact_settings)
    plain = decode_reference.decode(q, *cache, **settings)
    if case.lengths is not None:
        for row, length in enumerate(case.lengths):
            for tensor in cache:
                tensor[row, :, length:] = torch.nan
    if case.page:
        cache, settings["pages_BL"] = in_pages(cache, case.page, case.lengths, layer.generator)
    assert_close(kernel(q, cache, splits=case.splits, **settings), plain, exact)


def in_pages(
    cache: tuple[Tensor, ...],
    page: int,
    lengths: tuple[int, ...] | None,
    generator: torch.Generator,
) -> tuple[tuple[Tensor, ...], Tensor]:
    """The same cache in shuffled pages, as views [N, G, S, X] of a store [N, S, G, X].

    Pages in no use are NaN, and a sequence lists pages that do not exist past its length.
    """
    batch, slots = cache[0].shape[0], cache[0].shape[2]
    assert slots % page == 0 or lengths is not None, "a cache without lengths fills its pages"
    count = -(-slots // page)
    table = torch.randperm(batch * count + 3, generator=generator)[: batch * count]
    table = table.view(batch, count)
    pages = []
    for held in cache:
        store = torch.full((batch * count + 3, page, held.shape[1], held.shape[3]), torch.nan)
        store = store.to(held.device, held.dtype)
        for row, place in ((row, place) for row in range(batch) for place in range(count)):
            part = held[row, :, page * place : page * (place + 1)].transpose(0, 1)
            store[table[row, place], : len(part)] = part
        pages.append(store.transpose(1, 2))
    for row, length in enumerate(lengths or ()):
        table[row, -(-length // page) :] = 2**30
    return tuple(pages), table.to(held.device, torch.int32)


def doubled_settings(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings with float64 tensors."""
    return {name: doubled(value) for name, value in settings.items()}


def check_step(layer: Layer, case: Decode, positions: list[int], *, clockwise: bool) -> None:
    """The fused step: output, the slot that is written, and nothing else in the cache."""
    states = tuple(state[:, :, 0] for state in layer.states())
    tables, index, cache = layer.tables(), layer.index(), layer.cache()
    position = torch.tensor(positions, device=layer.device)
    settings = case.settings(layer)
    for row in range(layer.shape.batch):
        for tensor in cache:
            tensor[row, :, positions[row % len(positions)] :] = torch.nan
    before = tuple(tensor.clone() for tensor in cache)
    # The mask may not hide the token itself.
    keep = settings.pop("keep_BS", None)
    if keep is not None:
        keep[torch.arange(layer.shape.batch), position.expand(layer.shape.batch)] = True
    settings |= {"keep_BS": keep, "clockwise": clockwise}

    new = (states[1], states[2], tables[0][:, 0], tables[1][:, 0], index)
    found = launch(states[0], cache, new=new, lengths_B=position, splits=case.splits, **settings)

    def reference(change: Any) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        # What a mask hides has weight zero, but zero times NaN is NaN.
        held = tuple(change(tensor).nan_to_num(0.0) for tensor in before)  # new tensors
        output = decode_reference.decode_step(
            tuple(change(state) for state in states),
            tuple(change(table) for table in tables),
            index,
            held,
            position,
            **{name: change(value) for name, value in settings.items()},
        )
        return output, held

    exact, exact_cache = reference(doubled)
    plain, plain_cache = reference(
        lambda value: value.clone() if isinstance(value, Tensor) else value
    )
    assert_close(found, plain, exact)
    rows = torch.arange(layer.shape.batch, device=layer.device)
    for now, was, one, truth in zip(cache, before, plain_cache, exact_cache, strict=True):
        slot = position.expand(len(rows))
        assert_close(now[rows, :, slot], one[rows, :, slot], truth[rows, :, slot])
        now[rows, :, slot] = was[rows, :, slot]
        assert torch.equal(now.nan_to_num(7.0), was.nan_to_num(7.0)), "another slot was written"


STEP_CASES = [
    (Decode("one position for all"), [40], False),
    (Decode("one split", splits=1), [17, 0], False),
    (Decode("each its own", hidden=0.3, splits=3), [62, 0], False),
    (Decode("other way round", softcap=2.0, sinks=True), [30, 5], True),
    (
        Decode("one head of 9", Shape(groups=1, per_group=9, slots=48, value_width=98)),
        [62, 3],
        False,
    ),
    (Decode("tiles", Shape(groups=1, per_group=70, slots=20, value_width=30)), [40, 6], False),
    (Decode("pass-through", Shape(slots=5, free=3, pairs=8, value_width=10)), [17], False),
]
