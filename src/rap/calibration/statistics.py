"""What calibration leaves behind: reduced sums per layer, saved and loaded without pickle.

Shapes: N windows, T tokens, H query heads, G KV heads, D head dim, P pairs, F channels that never
rotate. "Canonical" is the channel order of rope.HeadGeometry: first of every pair, second of every
pair, the rest.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..checkpoint.tensor_file import TensorFile
from ..model.errors import CalibrationError

FILE = TensorFile("statistics", 2, "calibration statistics", CalibrationError, "calibrate again")
# Version 1 held what o_proj reads, and its gradient, summed over the query heads of a KV head.
_SUMMED = {"values", "gradients"}


@dataclass(frozen=True, eq=False)
class Statistics:
    """Float32 CPU tensors per layer (None: a layer without attention to prune), by name.

    need      names
    fisher    root_fisher_k [G, D] canonical, root_fisher_v [G, D]: sum over inputs of sqrt(F);
              weighted_fisher_k, weighted_fisher_v: the same shapes, sum over inputs of F W^2
    gate      gate_fisher_k [G, P + F]: one gate per pair, then one per free channel;
              gate_fisher_v [G, D]
    values    value_moment [H, D, D]: second moment of o_proj's input
    pairs     query_moment, key_moment [G, P, P, 2]: complex second moments E[x x^H] of pairs as
              (real, imaginary), queries summed over the group; query_free_moment, key_free_moment
              [G, F, F]: those of the channels that never rotate
    gradients key_gradient [G, P, P, 2], free_gradient [G, F, F], value_gradient [H, D, D]: second
              moments of the loss gradient by keys (pairs, other channels) and o_proj's input
    joint     joint_key_moment [G P, G P, 2], joint_free_moment [G F, G F], joint_value_moment
              [G D, G D]: second moments of all KV heads side by side, head by head, of keys as in
              `pairs` and of values as they are projected
    normed    normed_query_moment, normed_key_moment, normed_query_free_moment,
              normed_key_free_moment, normed_joint_key_moment, normed_joint_free_moment: as in
              `pairs` and `joint`, of what norms of queries and keys give, where a map may follow
    normed_gradients  normed_key_gradient, normed_free_gradient: as in `gradients`, by the same
    averages  averaged_moment [H, V, V]: second moment of the values of a group of KV heads (V
              channels side by side, `forward.averaged_group`) as each query head averages them
    energy    energy_q [H, D], energy_k [G, D] canonical, energy_v [G, D]: mean square over tokens;
              where q and k are normalised also raw_energy_q, raw_energy_k: of what the norm divides
    norms     norm_moment_q [H, D, D], norm_moment_k [G, D, D]: second moments of the same
    inputs    input_moment [E, E]: second moment of what q, k and v read
    rotated   rotated_key_moment, value_moment_about_mean [G, D, D], value_mean [G, D]: covariances
              of rotated keys (canonical) and of values, before attention mixes them
    logits    logit_products [H, N, P, 2]: q conj(k) of every pair, not rotated, for N sampled
              queries and keys before them; logit_distances [N]: how far apart

    windows   `windows`, LongTensor [N, T]: the first of the windows themselves, for methods that
              try a cut before they plan it

    Values are in the dense channel order. `fingerprint` is that of the calibrated
    weights.
    """

    layers: tuple[Mapping[str, Tensor] | None, ...]
    num_windows: int
    window: int
    needs: frozenset[str]
    fingerprint: str = ""
    windows: Tensor | None = None

    def require(self, needs: Collection[str], what: str) -> None:
        """Raise CalibrationError, naming `what` asks, unless all of `needs` were collected."""
        missing = sorted(set(needs) - self.needs)
        if missing:
            raise CalibrationError(
                f"{what} needs the statistics {', '.join(missing)}, but only "
                f"{', '.join(sorted(self.needs)) or 'none'} were collected: calibrate again with "
                f"{', '.join(missing)}"
            )

    def save(self, path: str | Path) -> None:
        """Write one file: tensors in safetensors format, everything else as JSON in its header."""
        about = {
            "layers": [sorted(layer) if layer is not None else None for layer in self.layers],
            "num_windows": self.num_windows,
            "window": self.window,
            "needs": sorted(self.needs),
            "fingerprint": self.fingerprint,
            "windows": None if self.windows is None else self.windows.tolist(),
        }
        FILE.save(path, self.layers, about)

    @classmethod
    def load(cls, path: str | Path) -> "Statistics":
        """Read what `save` wrote; CalibrationError for any other file or a newer version."""
        return FILE.load(path, cls._of)

    @classmethod
    def _of(
        cls, about: dict[str, Any], tensors: Callable[[int], dict[str, Tensor]]
    ) -> "Statistics":
        summed = _SUMMED & set(about["needs"]) if about["version"] == 1 else set()
        if summed:
            raise CalibrationError(
                f"statistics version 1 of {', '.join(sorted(summed))} are sums over query heads, "
                "with too large loss estimates; calibrate again"
            )
        windows = about.get("windows")
        return cls(
            layers=tuple(
                None if names is None else {name: loaded[name] for name in names}
                for names, loaded in ((n, tensors(i)) for i, n in enumerate(about["layers"]))
            ),
            num_windows=about["num_windows"],
            window=about["window"],
            needs=frozenset(about["needs"]),
            fingerprint=about["fingerprint"],
            windows=None if windows is None else torch.tensor(windows),
        )
