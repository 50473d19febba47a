"""Figures inside the page, so that the page themes them.

An image that is an SVG file, which GitHub shows as it is, becomes part of the page.
"""

from html import escape
from pathlib import Path
from typing import Any

import themed
from docutils import nodes
from sphinx.application import Sphinx

BEFORE_IMAGES_ARE_COLLECTED = 400  # the priority of Sphinx's own collector is 500


def labelled(drawing: str, text: str) -> str:
    """A drawing with its text for those who do not see it."""
    return drawing.replace("<svg", f'<svg role="img" aria-label="{escape(text, quote=True)}"', 1)


def put_inside(app: Sphinx, doctree: nodes.document) -> None:
    """Replace the images of a page that are SVG files of this repository by what they draw."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith(".svg") and "://" not in image["uri"]:
            name, path = app.env.relfn2path(image["uri"])
            app.env.note_dependency(name)
            svg = themed.embedded(Path(path).read_text("utf-8"))
            drawn = labelled(svg, image.get("alt", ""))
            figure = f'<figure class="drawing">{drawn}</figure>'
            # An image alone is a paragraph, which cannot have a figure in it.
            place = image.parent if len(image.parent) == 1 else image
            place.replace_self(nodes.raw("", figure, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Have images of every page go through `put_inside`."""
    app.connect("doctree-read", put_inside, priority=BEFORE_IMAGES_ARE_COLLECTED)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
