"""Old addresses of pages: each becomes a small page of the site that leads to the new one."""

import os
from pathlib import Path, PurePosixPath
from typing import Any

# Most are from before the site had tutorials, how-to guides, reference and explanation.
MOVED = {
    "composition": "how-to/combine",
    "contributing": "how-to/extend/index",
    "context": "how-to/evaluate",
    "findings": "explanation/paper-replication",
    "how/fitting": "explanation/layerwise-distillation",
    "how/folding": "explanation/folding",
    "how/index": "explanation/index",
    "how/loss": "explanation/budget",
    "how/pairs": "explanation/rope-pairs",
    "how/subspace": "explanation/value-latent",
    "measurements/beyond-perplexity": "measurements/data-and-tasks",
    "methods": "reference/methods",
    "real-model": "measurements/index",
    "reference-model": "reference/test-model",
    "reference/inside": "reference/internals",
    "speed": "how-to/speed",
    "tutorials/add-family": "how-to/extend/family",
    "tutorials/add-method": "how-to/extend/method",
    "tutorials/add-statistic": "how-to/extend/statistic",
    "tutorials/first": "tutorials/quickstart",
    "tutorials/llamacpp": "how-to/serve-llamacpp",
    "tutorials/recover": "how-to/recover",
    "tutorials/vllm": "how-to/serve-vllm",
}
PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>Moved</title>
<meta http-equiv="refresh" content="0; url={to}"><link rel="canonical" href="{to}"></head>
<body><p>This page moved to <a href="{to}">{to}</a>.</p></body></html>
"""


def write_redirects(app: Any, exception: Exception | None) -> None:
    """Write one page per old address; ValueError for one that still exists or leads nowhere."""
    if exception is None and app.builder.format == "html":
        write(Path(app.outdir), MOVED)


def write(site: Path, moved: dict[str, str]) -> None:
    """Write the pages of `moved` into a built site."""
    for old, new in moved.items():
        page, target = site / f"{old}.html", site / f"{new}.html"
        if not target.is_file():
            raise ValueError(f"{old} leads to {new}, which is no page")
        if page.is_file() and "<title>Moved" not in page.read_text("utf-8"):
            raise ValueError(f"{old} is still a page")
        page.parent.mkdir(parents=True, exist_ok=True)
        to = PurePosixPath(os.path.relpath(target, page.parent))
        page.write_text(PAGE.format(to=to), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    """Write the pages after a build."""
    app.connect("build-finished", write_redirects)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
