"""The attention "rap" of one token on a CPU: right, from a cache with room, and without copies."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from cases.kernel_cases import assert_close
from rap.model.kernels import grouped
from rap.model.kernels.decode_attention.reference import attend
from rap.model.kernels.interface import RapAttentionInterface

SCALE = 0.2
# Query heads of a cached head, cached heads, key and value width: merged SmolLM2 and Llama-3-8B,
# then odd ones, with keys narrower and wider than values.
SHAPES = [(9, 1, 96, 96), (8, 4, 128, 128), (5, 2, 74, 37), (9, 1, 96, 128), (3, 3, 1, 2)]


class Copies(TorchDispatchMode):
    """The most numbers that one operation made anew; views make none."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for made in result if isinstance(result, tuple) else (result,):
            if isinstance(made, Tensor) and _store(made) not in {_store(x) for x in args}:
                self.most = max(self.most, made.numel())
        return result


def _store(x: Any) -> int | None:
    return x.untyped_storage().data_ptr() if isinstance(x, Tensor) else None


def states(shape: Any, slots: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Queries of one token, and views of a cache that holds NaN behind its last slot."""
    per_group, groups, width, value_width = shape
    generator = torch.Generator().manual_seed(slots)
    stores = []
    for size in (width, value_width):
        store = torch.full((2, groups, slots + 9, size), float("nan"), dtype=dtype)
        held = torch.randn(2, groups, slots, size, generator=generator)
        store[:, :, :slots] = held.to(dtype)
        stores.append(store[:, :, :slots])
    query = torch.randn(2, groups * per_group, 1, width, generator=generator)
    return query.to(dtype), *stores


def masked_left(slots: int) -> Tensor:
    """A mask of two sequences, the second of which is padded on the left."""
    keep = torch.ones(2, 1, 1, slots, dtype=torch.bool)
    keep[1, ..., : slots // 2] = False
    return keep


def attended(query: Tensor, key: Tensor, value: Tensor, keep: Tensor | None) -> Tensor:
    found, _ = RapAttentionInterface()(nn.Module(), query, key, value, keep, scaling=SCALE)
    return found.transpose(1, 2)


def assert_exact(shape: Any, slots: int, dtype: torch.dtype, masked: bool) -> None:
    """As near to attention in float64 as plain attention is."""
    query, key, value = states(shape, slots, dtype)
    keep = masked_left(slots) if masked else None
    how: dict[str, Any] = {"scale": SCALE, "keep_B1TS": keep}
    plain = attend(query, key, value, **how)
    exact = attend(query.double(), key.double(), value.double(), **how)
    assert_close(attended(query, key, value, keep), plain, exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("slots", [1, 63, 100, 1000])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_as_exact_as_plain_attention(
    shape: Any, slots: int, dtype: torch.dtype, masked: bool
) -> None:
    assert_exact(shape, slots, dtype, masked)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Pretend to have that many threads."""
    return lambda count: monkeypatch.setattr(torch, "get_num_threads", lambda: count)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("slots", "count"), [(1024, 3), (1037, 5), (8191, 7), (8193, 40)])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[2]], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_a_context_in_parts_gives_the_same(
    shape: Any, slots: int, count: int, dtype: torch.dtype, masked: bool, threads: Any
) -> None:
    """Parts of equal size and what is left over, with and without a mask, head by head."""
    threads(count)
    assert_exact(shape, slots, dtype, masked)


def test_one_mask_serves_all_sequences(threads: Any) -> None:
    threads(8)
    query, key, value = states(SHAPES[0], 1200, torch.float32)
    keep = masked_left(1200)[1:]
    found = attended(query, key, value, keep)
    assert torch.equal(found, attended(query, key, value, keep.expand(2, -1, -1, -1)))


@pytest.mark.parametrize(
    ("batch", "heads", "slots", "dtype", "count", "parts"),
    [
        (1, 1, 1024, torch.float32, 2, 4),
        (1, 1, 1023, torch.float32, 2, 1),
        (1, 2, 4096, torch.float32, 2, 1),
        (1, 2, 4096, torch.float32, 3, 6),
        (2, 2, 4096, torch.float32, 4, 1),
        (1, 1, 8191, torch.bfloat16, 2, 1),
        (1, 1, 8192, torch.bfloat16, 2, 4),
        (1, 1, 1024, torch.float64, 2, 4),
        (1, 1, 1024, torch.float32, 64, 4),
        (1, 1, 8192, torch.float32, 1, 1),
    ],
)
def test_the_context_is_cut_where_heads_are_fewer_than_threads(
    batch: int, heads: int, slots: int, dtype: torch.dtype, count: int, parts: int
) -> None:
    key = torch.empty(batch, heads, slots, 2, dtype=dtype)
    assert grouped.num_parts(key, count) == parts


def test_parts_of_a_cache_are_not_copied(threads: Any) -> None:
    threads(8)
    query, key, value = states(SHAPES[0], 2049, torch.float32)
    assert grouped.num_parts(key, 8) == 8
    with Copies() as copies:
        attended(query, key, value, masked_left(2049))
    assert copies.most <= query.shape[1] * 2049


def test_a_compiled_step_is_not_cut_in_parts() -> None:
    """One graph serves all lengths, whatever the number of threads."""
    query, key, value = states(SHAPES[0], 1100, torch.float32)
    about = (query.squeeze(2).unflatten(1, (1, -1)), key, value, None, SCALE)
    step = torch.compile(grouped.grouped_attention, backend="eager", fullgraph=True)
    torch.testing.assert_close(step(*about), grouped.grouped_attention(*about))


@pytest.mark.parametrize("slots", [7, 1025])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_query_that_sees_nothing_gets_zeros(shape: Any, slots: int, threads: Any) -> None:
    query, key, value = states(shape, slots, torch.float32)
    keep = torch.zeros(2, 1, 1, slots, dtype=torch.bool)
    keep[0] = True
    threads(8)
    found = attended(query, key, value, keep)
    assert found[0].isfinite().all()
    assert torch.equal(found[1], torch.zeros_like(found[1]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES[:4], ids=str)
def test_the_cache_is_not_copied(shape: Any, dtype: torch.dtype) -> None:
    query, key, value = states(shape, 1000, dtype)
    with Copies() as copies:
        attended(query, key, value, None)
    # Scores are the largest thing made.
    assert copies.most <= query.shape[0] * query.shape[1] * 1000
    assert copies.most < min(key.numel(), value.numel())
    with Copies() as copies:
        torch.nn.functional.scaled_dot_product_attention(
            query, *(x.repeat_interleave(shape[0], 1) for x in (key, value))
        )
    assert copies.most >= key.numel()  # so that a copy is noticed
