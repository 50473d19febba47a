"""The documentation site: Sphinx reads docs/, `make docs` builds it offline and strictly."""

import sys
from pathlib import Path

import rap

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE / "site"), str(HERE)]

project = "rap"
author = "the rap authors"
project_copyright = "2026, the rap authors; Apache-2.0"
version = release = rap.__version__

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx_copybutton",
    "sphinx_design",
    "mathml",
    "drawings",
    "commands",
    "docstrings",
    "redirects",
]
exclude_patterns = ["findings/*", "reliability/*", "site/*"]
# Records, generated or grown: pages of the site, but not of its navigation.
RECORDS = (
    *("log", "reliability", "results/README", "results/real", "results/archive"),
    "results/reliability",
)
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 4

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autodoc_mock_imports = ["vllm", "xllamacpp"]
python_maximum_signature_line_length = 88
python_use_unqualified_type_names = True
# Docstrings write code between single backticks.
default_role = "literal"
# Two dashes are two dashes: they begin options.
smartquotes = False
add_module_names = False

html_theme = "furo"
# The default underlines the names of modules, as if they were links.
pygments_dark_style = "github-dark"
html_title = f"rap {version}"
html_math_renderer = "mathml"
html_static_path = ["site/static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_theme_options = {
    "navigation_with_keys": True,
    "light_css_variables": {"color-brand-primary": "#0b5f8a", "color-brand-content": "#0b5f8a"},
    "dark_css_variables": {"color-brand-primary": "#6cb8e6", "color-brand-content": "#6cb8e6"},
}
copybutton_prompt_text = "$ "


def outside_navigation(app, docname, source):
    """Have Sphinx take the records for pages that no table of contents names."""
    if docname in RECORDS:
        source[0] = f"---\norphan: true\n---\n\n{source[0]}"


def setup(app):
    """Connect what is above."""
    app.connect("source-read", outside_navigation)
