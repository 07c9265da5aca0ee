"""A hook of mkdocs: the notebooks of examples/notebooks become pages of the site, with what their cells show.

A Jupyter kernel executes each notebook in an empty folder; a cell that fails ends the build. Code becomes a
block of Python and text a block of output, as on other pages. HTML goes into the finished page as it is.
"""

import os
import re
import tempfile
from functools import cache
from itertools import count
from pathlib import Path

import nbformat
from jupyter_client import KernelManager
from mkdocs.structure.files import File
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parent.parent / "examples" / "notebooks"
FOLDER = "tutorials"  # of the site

_places = count()
_html: dict[str, str] = {}  # by their places in pages


def on_files(files, config):
    """Add the pages."""
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        files.append(File.generated(config, f"{FOLDER}/{path.stem}.md", content=page_of(path.read_text())))
    return files


def on_page_content(html, **_):
    """Put what notebooks show as HTML into the page."""
    return re.sub(r'<div id="(output-\d+)"></div>', lambda place: _html[place[1]], html)


@cache  # `mkdocs serve` makes all pages again after each change
def page_of(notebook):
    """The Markdown of a notebook, which is executed first."""
    content = nbformat.reads(notebook, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        # Sockets in a private folder: on ports, other users could read them, and the kernel warns.
        kernel = KernelManager(kernel_name="python3", transport="ipc", ip=f"{folder}/socket")
        place = {"metadata": {"path": folder}}
        client = NotebookClient(content, km=kernel, timeout=120, coalesce_streams=True, resources=place)
        try:
            # Nets this small gain nothing by a second thread.
            client.execute(env={**os.environ, "OMP_NUM_THREADS": "1"})
        finally:
            kernel.shutdown_kernel(now=True)
    return "\n\n".join(part for cell in content.cells for part in _parts(cell))


def _parts(cell):
    if cell.cell_type == "markdown":
        text = re.sub(r"\]\((\w+)\.ipynb", r"](\1.md", cell.source)
        yield text.replace("](../../docs/", "](../")
        return
    yield _block("python", cell.source)
    for output in cell.outputs:
        if output.output_type == "stream":
            yield _block('text title="Output"', output.text)
        elif "text/html" in output.data:
            place = f"output-{next(_places)}"
            _html[place] = f'<div class="notebook-output">{_plain(output.data["text/html"])}</div>'
            yield f'<div id="{place}"></div>'
        else:
            yield _block('text title="Output"', output.data["text/plain"])


def _block(language, text):
    return f"```{language}\n{text.rstrip()}\n```"


def _plain(html):
    """Tables without the style of pandas, so that they look like all tables of the site."""
    html = re.sub(r"<style scoped>.*?</style>", "", html, flags=re.DOTALL)
    return html.replace(' border="1" class="dataframe"', "").replace(' style="text-align: right;"', "")
