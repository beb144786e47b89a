"""The site's settings: Sphinx with the book theme, from book.yml. ``workbook site`` builds it."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import yaml  # noqa: E402

from lib.workbook.tools import pages, site  # noqa: E402
from lib.workbook.tools.tryit import assets  # noqa: E402

settings = yaml.safe_load((HERE / "book.yml").read_text(encoding="utf-8"))
book = settings["project"]
mathjax = Path(find_spec("sphinx-mathjax-offline").submodule_search_locations[0], "static/mathjax/tex-svg.js")

project = book["title"]
author = "The authors of the Scaling Workbook"
project_copyright = "code MIT, prose CC BY 4.0"
language = "en"

extensions = [
    "myst_nb",
    "sphinx_external_toc",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_togglebutton",
]
external_toc_path = site.write_toc(book)
external_toc_exclude_missing = True
exclude_patterns = ["_build", "notebooks", ".*"]

# Equations are numbered (2.4): the fourth of chapter 2.
numfig = True
numfig_secnum_depth = 1
math_numfig = True
math_eqref_format = "({number})"

myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath", "substitution", "tasklist"]
myst_heading_anchors = 3

# Every cell runs. The cache is named after the code: after a change in lib/ or solutions/ every cell runs again.
code = site.code_digest()
nb_execution_mode = "force" if os.environ.get("CI") else "cache"
nb_execution_excludepatterns = ["solutions/*.md"]  # which have no cells; each would start a kernel
nb_execution_cache_path = str(HERE / "_build" / ".jupyter_cache" / code)
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 300
nb_merge_streams = True
nb_render_markdown_format = "myst"  # otherwise a table that a cell writes stays raw text

# Nothing is fetched from another host, mathematics included.
mathjax_path = mathjax.name
mathjax3_config = {
    "tex": {"packages": {"[+]": ["boldsymbol"]}, "macros": {"R": r"\mathbb{R}"}},
    "options": {"enableMenu": False},
    "svg": {"mtextInheritFont": True},
}

html_theme = "sphinx_book_theme"
html_title = project
html_logo = "_static/logo.svg"
html_favicon = "_static/favicon.svg"
html_static_path = ["_static", str(mathjax), *assets.folders()]
html_css_files = ["workbook.css"]
html_js_files = [("workbook.js", {"defer": "defer"})]
html_baseurl = os.environ.get(
    "WORKBOOK_URL", ""
)  # where the site will be published; without it, previews have relative addresses
html_show_sourcelink = False
html_copy_source = True
html_sourcelink_suffix = ""
html_last_updated_fmt = None
html_context = {"default_mode": "auto"}  # light or dark as the reader's system says, until a reader chooses
html_theme_options = {
    "navbar_persistent": [],  # otherwise the search bar is there twice
    "use_download_button": True,
    "use_fullscreen_button": False,
    "home_page_in_toc": True,
    "show_navbar_depth": 1,
    "show_toc_level": 1,
    "logo": {"text": project},
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
togglebutton_hint = "Show"
togglebutton_hint_hide = "Hide"


def setup(app):
    app.add_config_value("workbook_code", code, "env")
    app.add_config_value("workbook_subtitle", book["subtitle"], "html")
    app.add_config_value("workbook_previews", settings["previews"], "html")
    pages.connect(app)
    site.read_definition_lists(app)
    site.share_pages(app)
    site.make_cache(nb_execution_cache_path)
    site.listen_on_files()
    app.extensions[
        "sphinx_multitoc_numbering"
    ].parallel_read_safe = True  # it numbers chapters after all have been read
