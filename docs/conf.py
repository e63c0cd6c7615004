"""Settings of the site, which `make docs` builds from the repository's root with Sphinx."""

project = "orchestrate"
extensions = ["myst_parser"]
root_doc = "docs/index"
include_patterns = ["docs/*.md", "ARCHITECTURE.md", "SECURITY.md", "C*.md"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = "orchestrate"
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
