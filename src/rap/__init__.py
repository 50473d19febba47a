"""RAP: a smaller KV cache for RoPE language models, by pruning RoPE pairs of the weights.

Importing the package registers the rap_<family> model types with transformers' Auto classes, so
that a pruned checkpoint loads with `AutoModelForCausalLM.from_pretrained`, and the opt-in attention
implementation "rap". Nothing is patched. In the process of the command `rap` this waits for a
subcommand, so that help and version do not wait for torch.
"""

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .checkpoint.version import __version__ as __version__


def _is_command() -> bool:
    """Whether this is the process of `rap ...` or `python -m rap ...`, and no child of one."""
    words = sys.orig_argv
    as_module = sys.argv[:1] == ["-m"] and "rap" in words and words[words.index("rap") - 1] == "-m"
    as_script = Path(sys.argv[0]).stem == "rap" if sys.argv else False
    return (as_module or as_script) and "multiprocessing.spawn" not in sys.modules


if TYPE_CHECKING or not _is_command():
    from .api import *  # noqa: F403
    from .api import __all__ as __all__
else:

    def __getattr__(name: str) -> Any:
        """A public name, for whoever asks in the process of the command."""
        if name.startswith("_"):
            raise AttributeError(name)
        api = importlib.import_module(".api", __name__)
        globals().update({each: getattr(api, each) for each in api.__all__})
        try:
            return globals()[name]
        except KeyError:
            raise AttributeError(name) from None
