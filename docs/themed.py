"""Drawings and figures as SVG whose colors follow the page, light or dark.

matplotlib draws with placeholder colors. Inside a page of the site they become its CSS variables;
a file of its own brings both palettes and follows the reader's setting. The site puts the drawing
of such a file into its pages, where it follows the theme that the reader chose there.
"""

import io
import re
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

LIGHT = {
    "ink": "#24292f",
    "soft": "#6e7781",
    "line": "#d0d7de",
    "fill": "#eef2f6",
    "one": "#0b5f8a",
    "two": "#b4480f",
    "three": "#3f7d20",
    "four": "#7a4fb5",
    "five": "#b83280",
    "six": "#0f7b6c",
    "seven": "#8a6d00",
    "cut": "#e4e8ec",
    "page": "#ffffff",
}
DARK = {
    "ink": "#e6edf3",
    "soft": "#9aa4ae",
    "line": "#3d444d",
    "fill": "#20262d",
    "one": "#6cb8e6",
    "two": "#f0955c",
    "three": "#86c765",
    "four": "#bda0f0",
    "five": "#f08ab4",
    "six": "#5fd0bd",
    "seven": "#dcc05a",
    "cut": "#2d333b",
    "page": "#131416",
}
# No black: that is what matplotlib leaves out.
COLORS = {name: f"#0000{number:02x}" for number, name in enumerate(LIGHT, start=1)}
SETTINGS: dict[str, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "rap",
    "font.size": 12,
    "axes.edgecolor": COLORS["line"],
    "axes.labelcolor": COLORS["ink"],
    "text.color": COLORS["ink"],
    "xtick.color": COLORS["soft"],
    "ytick.color": COLORS["soft"],
    "axes.spines.top": False,
    "axes.spines.right": False,
}


def inline(figure: Figure, name: str) -> str:
    """A figure as SVG to put into a page; ids begin with its name, fonts are the page's."""
    text = io.StringIO()
    figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    found = text.getvalue()
    found = found[found.index("<svg") :]
    for color, value in COLORS.items():
        found = found.replace(value, f"var(--{color})")
    # Fonts are the page's; ids would meet those of the other drawings of a page.
    found = re.sub(r" font-family: [^;\"]*;?", "", found)
    found = re.sub(r"(id=\"|#)(?=[\w.-]+[\")])", rf"\1{name}-", found)
    found = re.sub(r"<metadata>.*?</metadata>", "", found, flags=re.DOTALL)
    opening, rest = found.split(">", 1)
    return re.sub(r' (width|height)="[^"]*"', "", opening) + ">" + rest


def standalone(figure: Figure, name: str) -> str:
    """A figure as an SVG file with both palettes, on a ground of its own."""
    opening, rest = inline(figure, name).split(">", 1)
    return f'<?xml version="1.0" encoding="utf-8"?>\n{opening}>{_frame()}{rest}'


def embedded(file: str) -> str:
    """What a file of `standalone` draws, to put into a page; ValueError for any other SVG."""
    before, frame, rest = file.partition(_frame())
    if not frame:
        raise ValueError("the SVG has not the colors of today; write it again")
    return before[before.index("<svg") :] + rest


def save(figure: Figure, path: Path) -> None:
    """Write a figure to a file."""
    path.write_text(standalone(figure, path.stem), encoding="utf-8")


def _frame() -> str:
    """Both palettes, the font and the ground of a file of its own."""
    dark = f"@media (prefers-color-scheme: dark) {{ svg {{ {_variables(DARK)} }} }}"
    font = "text { font-family: system-ui, sans-serif; }"
    style = f"<style>svg {{ {_variables(LIGHT)} }} {dark} {font}</style>"
    return f'{style}<rect width="100%" height="100%" style="fill: var(--page)"/>'


def _variables(palette: dict[str, str]) -> str:
    return " ".join(f"--{name}: {value};" for name, value in palette.items())
