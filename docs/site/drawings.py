"""Figures inside the page, so that the page themes them.

The directive `drawing` draws one of figures.py. An image that is an SVG file, which GitHub shows
as it is, becomes part of the page too.
"""

from pathlib import Path
from typing import Any

import figures
import themed
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

BEFORE_IMAGES_ARE_COLLECTED = 400  # the priority of Sphinx's own collector is 500


class Drawing(SphinxDirective):
    """`{drawing} NAME` with the caption as content."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        """The drawing and its caption as a figure."""
        name = self.arguments[0]
        svg = figures.svg(name)
        caption = self.parse_content_to_nodes()
        title = nodes.Text(" ".join(node.astext() for node in caption)).astext()
        opened = f'<figure class="drawing">{figures.labelled(svg, title)}<figcaption>'
        return [
            nodes.raw("", opened, format="html"),
            *caption,
            nodes.raw("", "</figcaption></figure>", format="html"),
        ]


def put_inside(app: Sphinx, doctree: nodes.document) -> None:
    """Replace the images of a page that are SVG files of this repository by what they draw."""
    for image in list(doctree.findall(nodes.image)):
        if image["uri"].endswith(".svg") and "://" not in image["uri"]:
            name, path = app.env.relfn2path(image["uri"])
            app.env.note_dependency(name)
            svg = themed.embedded(Path(path).read_text("utf-8"))
            drawn = figures.labelled(svg, image.get("alt", ""))
            figure = f'<figure class="drawing">{drawn}</figure>'
            # An image alone is a paragraph, which cannot have a figure in it.
            place = image.parent if len(image.parent) == 1 else image
            place.replace_self(nodes.raw("", figure, format="html"))


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive, and have images of every page go through `put_inside`."""
    app.add_directive("drawing", Drawing)
    app.connect("doctree-read", put_inside, priority=BEFORE_IMAGES_ARE_COLLECTED)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
