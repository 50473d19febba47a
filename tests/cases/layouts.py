"""A stock Llama made to pair its channels another way, rotated by complex numbers.

Families with interleaved pairs or with channels that never rotate get rows later; until then this
gives the package a dense model of each such layout to be compared with.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from unittest import mock

import torch
from torch import Tensor
from transformers.models.llama import modeling_llama

from rap.model import layers as families


@contextlib.contextmanager
def llama_layout(
    pairing: str, table: str = "repeated", rotary_pairs: int | None = None
) -> Iterator[None]:
    """Within it, Llama models rotate in that pairing and hand out cos/sin tables of that kind.

    With `rotary_pairs` only the channels of that many pairs at the front of a head rotate.
    """
    spec = dataclasses.replace(families.FAMILIES["llama"], pairing=pairing, table=table)
    rotary = modeling_llama.LlamaRotaryEmbedding
    stock_frequencies, stock_tables = rotary.compute_default_rope_parameters, rotary.forward

    def frequencies(*args, **kwargs):
        inv_freq, scaling = stock_frequencies(*args, **kwargs)
        return inv_freq[:rotary_pairs], scaling

    def tables(self, *args, **kwargs):
        repeated = stock_tables(self, *args, **kwargs)
        return tuple(_relaid(part[..., : part.shape[-1] // 2], table) for part in repeated)

    def rotate(q, k, cos, sin):
        angle_BTP = torch.complex(*(_columns(part, table) for part in (cos, sin)))[:, None]
        return _rotate(q, angle_BTP, pairing), _rotate(k, angle_BTP, pairing)

    with (
        mock.patch.dict(families.FAMILIES, llama=spec),
        mock.patch.object(rotary, "compute_default_rope_parameters", staticmethod(frequencies)),
        mock.patch.object(rotary, "forward", tables),
        mock.patch.object(modeling_llama, "apply_rotary_pos_emb", rotate),
    ):
        yield


def _relaid(part: Tensor, table: str) -> Tensor:
    if table == "half":
        return part
    return part.repeat_interleave(2, -1) if table == "interleaved" else torch.cat([part, part], -1)


def _columns(part: Tensor, table: str) -> Tensor:
    if table == "half":
        return part
    return part[..., ::2] if table == "interleaved" else part.chunk(2, -1)[0]


def _rotate(x: Tensor, angle: Tensor, pairing: str) -> Tensor:
    turning, still = x[..., : 2 * angle.shape[-1]], x[..., 2 * angle.shape[-1] :]
    if pairing == "interleaved":
        plane = torch.view_as_complex(turning.unflatten(-1, (-1, 2)).contiguous())
        turned = torch.view_as_real(plane * angle).flatten(-2)
    else:
        plane = torch.complex(*turning.chunk(2, -1)) * angle
        turned = torch.cat([plane.real, plane.imag], -1)
    return torch.cat([turned, still], -1)
