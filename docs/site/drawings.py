"""The directive `drawing`: a figure of figures.py inside the page, so that the page themes it."""

from typing import Any

import figures
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective


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


def setup(app: Sphinx) -> dict[str, Any]:
    """Register the directive."""
    app.add_directive("drawing", Drawing)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
