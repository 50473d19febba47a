"""The measurement protocol: how many samples every command calibrates and evaluates on by default.

Calibration is the paper's: 32 samples of 1,024 tokens. Evaluation reads 8 windows of 2,048 tokens,
or of the model's context length where that is less.
"""

import numpy as np

CALIBRATION_WINDOWS, CALIBRATION_WINDOW = 32, 1024
CALIBRATION_TOKENS = CALIBRATION_WINDOWS * CALIBRATION_WINDOW
EVALUATION_WINDOWS = 8  # of this length they resolve a ratio of perplexities to 3 or 4%
EVALUATION_WINDOW = 2048


def evaluation_rng(seed: int, *key: int) -> np.random.Generator:
    """Generator whose stream no training seed can reach (training uses `default_rng(int)`)."""
    return np.random.default_rng([0xE7A1, seed, *key])
