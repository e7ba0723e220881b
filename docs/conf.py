"""How the documentation is built: `python -m sphinx -W docs build/docs`."""

import inspect
import os
import re
import sys

# The notebooks run while the pages are built, on a CPU also where there is a GPU.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Most of their time is compilation.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jaxmp

for name in jaxmp.__all__:  # a class has its public module once it is loaded
    getattr(jaxmp, name)

project = "jaxmp"
author = "the jaxmp authors"
copyright = f"2026, {author}"
version = release = jaxmp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]

# Pages are plain Markdown, so that they read well in a repository browser too.
myst_enable_extensions = ["alert", "colon_fence"]
myst_heading_anchors = 3

# A notebook holds what it showed when `.ci/notebooks.py` ran it, for those who read it
# elsewhere. It runs again here, and an exception in it ends the build.
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_timeout = 120
nb_merge_streams = True
nb_output_stderr = "remove"  # what JAX logs about the machine

toc_object_entries_show_parents = "hide"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
maximum_signature_line_length = 70
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False

# A name of jaxmp in a docstring must lead somewhere. Those of other libraries lead to
# their pages in the documentation that a release puts online. Elsewhere they are names
# only, because a build needs no network.
nitpicky = True
if os.environ.get("DOCS_ONLINE"):
    extensions.append("sphinx.ext.intersphinx")
    intersphinx_mapping = {
        "python": ("https://docs.python.org/3", None),
        "jax": ("https://docs.jax.dev/en/latest", None),
        "flax": ("https://flax.readthedocs.io/en/latest", None),
        "optax": ("https://optax.readthedocs.io/en/latest", None),
        "chex": ("https://chex.readthedocs.io/en/latest", None),
    }
nitpick_ignore_regex = [
    ("py:.*", r"(?!jaxmp\.).*"),
    ("py:class", r"jaxmp\.[\w.]+\.(T|P|Module)"),  # in signatures
]

html_theme = "furo"
html_title = f"jaxmp {release}"
html_logo = html_favicon = "_static/logo.svg"
html_static_path = ["_static"]
html_css_files = ["jaxmp.css"]
html_js_files = ["sidebar.js", "breaks.js"]
html_theme_options = {
    "light_css_variables": {
        "color-brand-primary": "#2f5d8c",
        "color-brand-content": "#2f5d8c",
        "color-brand-visited": "#5d4a8c",
        "color-api-name": "#2f5d8c",
        "color-api-pre-name": "#6b7a8c",
        "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, "
        "'DejaVu Sans Mono', monospace",
    },
    "dark_css_variables": {
        "color-brand-primary": "#8ab4e0",
        "color-brand-content": "#8ab4e0",
        "color-brand-visited": "#b7a5e3",
        "color-api-name": "#8ab4e0",
        "color-api-pre-name": "#8494a6",
    },
}
pygments_style = "friendly"
pygments_dark_style = "github-dark"

copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True


def where_defined(app, module, name):
    """Returns the file of jaxmp that a public class is defined in, for its link."""
    name = name.partition(".")[0]
    for path, module in list(sys.modules.items()):
        ours = path.startswith("jaxmp._") and isinstance(vars(module).get(name), type)
        if ours and f"\nclass {name}" in inspect.getsource(module):
            return path
    return None


def link_files(app, docname, source):
    """Links to Markdown of the repository that is no page here, as to a file."""
    up = "../" * (1 + docname.count("/"))
    outside = rf"\]\(({re.escape(up)}(?!\.\.)[^)#\s]+\.md)(#[^)\s]*)?\)"
    source[0] = re.sub(outside, r"](path:\1)", source[0])


def describe_default(app, what, name, obj, options, lines):
    """Says what `DEFAULT_OPS` is, where autodoc says again what its class is."""
    if name == "jaxmp.DEFAULT_OPS":
        text = "The :class:`jaxmp.OpLists` that autocast has without ``ops=``."
        lines[:] = [text, "", "``print(jaxmp.DEFAULT_OPS)`` shows them.", ""]


def setup(app):
    """Connects them: public classes say that their module is `jaxmp`."""
    app.connect("viewcode-follow-imported", where_defined)
    app.connect("source-read", link_files)
    app.connect("autodoc-process-docstring", describe_default, priority=900)
