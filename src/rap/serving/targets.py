"""Requirements of an engine's target on a model, before it is pruned."""

from typing import Any

from ..planning.shared import STOCK_TARGETS
from .gguf.plain import check_plain
from .plain_forms import check_stock, check_widely_read


def check_target(config: Any, target: str) -> None:
    """Raise UnsupportedModelError for a dense config whose pruned form `target` cannot load.

    Read from the config alone, so that nobody pays for a profile that leads nowhere.
    """
    if target in STOCK_TARGETS:
        check_stock(config)
    if target == "mlx":
        check_widely_read(config, "mlx-lm")
    if target == "llamacpp":
        check_plain(config)
