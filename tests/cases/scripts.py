"""Scripts of the repository that are no package, as modules."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from unittest import mock

REPOSITORY = Path(__file__).parents[2]


def load_script(name: str) -> ModuleType:
    """The module of a script, by its path in the repository; it may import those beside it."""
    path = REPOSITORY / name
    spec = importlib.util.spec_from_file_location(f"{path.parent.name}_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up.
    sys.modules[spec.name] = module
    with mock.patch.object(sys, "path", [str(path.parent), *sys.path]):
        spec.loader.exec_module(module)
    return module
