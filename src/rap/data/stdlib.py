"""The source `python`: the standard library of the interpreter that runs, code on every machine.

Models are asked to write code far more often than novels are at hand to calibrate on. Modules are
parted by their first letter, so that what is evaluated is not calibrated on.
"""

import sysconfig
from pathlib import Path

from ..model.errors import CalibrationError

PYTHON, PYTHON_TEST = "python", "python-test"
_MODULES = {PYTHON: "[e-z]*.py", PYTHON_TEST: "[a-d]*.py"}


def stdlib_text(name: str) -> str:
    """The modules of one part, PYTHON or PYTHON_TEST, in the order of their names.

    Raises CalibrationError where the library is not there as files.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(folder.glob(_MODULES[name]))
    try:
        text = "".join(path.read_text(encoding="utf-8") for path in modules)
    except (OSError, UnicodeDecodeError) as error:
        raise CalibrationError(f"cannot read Python's standard library: {error}") from error
    if not text:
        raise CalibrationError(
            f"Python's standard library is not in {folder}, so there is no source 'python': give a "
            "file of code instead"
        )
    return text
