"""The site: `python -m sphinx -E -W --keep-going docs build/docs`.

The pages are Markdown that GitHub shows as it is. Their links to files outside
of docs/ are relative, too; on the site they lead to a copy of the file.
"""

import pathlib
import re

import specdec

project = 'specdec'
author = 'the specdec authors'
version = release = specdec.__version__

extensions = ['myst_parser', 'sphinx.ext.autodoc', 'sphinx.ext.napoleon']
html_theme = 'furo'
html_title = f'specdec {release}'
html_show_copyright = False
html_copy_source = False

myst_heading_anchors = 3  # as GitHub has them: `page.md#a-heading`

# Single backticks in a docstring mark code, which is a link where the
# reference has something of that name.
default_role = 'py:obj'
autodoc_member_order = 'bysource'
autodoc_default_options = {
  'members': True,
  'exclude-members': 'replace',  # flax gives it to every record
}
python_use_unqualified_type_names = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes are described once, by their class
napoleon_use_rtype = False


def _copy_markdown_outside(app, name, source):
  """Has files outside of docs/ copied if they are Markdown, like all others.

  MyST takes a link to any Markdown file for one to a page of the site.
  """
  folder = pathlib.Path(app.srcdir, name).parent

  def mark(link):
    target = (folder / link[1]).resolve()
    inside = target.is_relative_to(pathlib.Path(app.srcdir).resolve())
    return link[0] if inside else f'](path:{link[1]})'

  source[0] = re.sub(r'\]\((\.\./[^)#]*\.md)\)', mark, source[0])


def setup(app):
  """Called by Sphinx."""
  app.connect('source-read', _copy_markdown_outside)
