"""A hook of mkdocs: pages made of other files, links that leave docs/, and drawings.

The pages are also read as files of the repository, so their links lead to files. A
drawing becomes part of its page, so that it follows the page's colours.
"""

import re
from os.path import relpath
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

_ROOT = Path(__file__).parents[1]
_DOCS = _ROOT / "docs"
_PAGES = {
    "results.md": _ROOT / "benchmarks" / "RESULTS.md",
    "contributing.md": _ROOT / "CONTRIBUTING.md",
}
_DRAWING = re.compile(r"^!\[[^]]*\]\(([^)]+\.svg)\)$", re.MULTILINE)
_LINK = re.compile(r"(?<!!)\[([^]\[]*)\]\((?!https?:)([^)#]+)(#[^)]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name, path in _PAGES.items():
        files.append(File.generated(config, name, content=path.read_text()))
    return files


def on_page_markdown(
    markdown: str,
    page: Page,
    config: MkDocsConfig,  # noqa: ARG001  mkdocs passes it by name
    files: Files,  # noqa: ARG001
) -> str:
    name = page.file.src_uri
    folder = _PAGES.get(name, _DOCS / name).parent

    def replace(link: re.Match[str]) -> str:
        text, target, anchor = link[1], link[2], link[3] or ""
        path = (folder / target).resolve()
        for other, source in _PAGES.items():
            if path == source:
                return f"[{text}]({'../' * name.count('/')}{other}{anchor})"
        if path.is_relative_to(_DOCS):
            return f"[{text}]({relpath(path, (_DOCS / name).parent)}{anchor})"
        if not path.exists():
            return link[0]  # mkdocs reports it
        return f"{text} (`{path.relative_to(_ROOT)}`)"

    def draw(image: re.Match[str]) -> str:
        svg = (folder / image[1]).read_text().strip()
        return f'<div class="drawing">\n{svg}\n</div>'

    return _DRAWING.sub(draw, _LINK.sub(replace, markdown))
