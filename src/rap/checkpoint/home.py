"""Where fetched and converted models are kept, and what searches measured.

The user's cache folder, or RAP_HOME.
"""

import os
from pathlib import Path

import platformdirs

VARIABLE = "RAP_HOME"


def home() -> Path:
    """The folder; it may not exist yet."""
    given = os.environ.get(VARIABLE)
    return Path(given).expanduser() if given else platformdirs.user_cache_path("rap-kv")
