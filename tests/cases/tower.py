"""A tower for the images of gemma3n, whose own comes from timm, which nothing here installs.

The whole model passes images through unchanged, whatever tower makes features of them, so a small
one in its place shows as much.
"""

from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from transformers.models.timm_wrapper import modeling_timm_wrapper

CHANNELS = 32


class Tower(nn.Module):
    """Features [B, C, 2, 2] of images [B, 3, 16, 16], by weights and buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, CHANNELS, kernel_size=8, stride=8)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward_features(self, pixels: Tensor) -> Tensor:
        """What timm's models call their output before any head."""
        return self.norm(self.conv(pixels))


def stand_in_for_timm() -> None:
    """Let transformers make a Tower of whatever it would ask timm for."""
    wrapper: Any = modeling_timm_wrapper
    wrapper.timm = SimpleNamespace(create_model=lambda name, **settings: Tower())
    wrapper.requires_backends = lambda *asked: None
