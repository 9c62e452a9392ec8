"""Pages of the site that do not lie in docs/, and links between all of them.

The documents link to each other, to examples and to source files, by paths that also work in a checkout, except to
the pages that generated.py names, which exist on the site only. On the site the README is the home page, other markdown
files keep their path, and every other text file that a page links to becomes a page with its source, and a directory
without a README a page with the names of its files. A link that leads nowhere stays as it is, and the strict build
refuses it.
`make docs` builds the site into build/site.
"""

from __future__ import annotations

import os
import re
from pathlib import Path, PurePosixPath

from generated import PAGES, generated
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = ["README.md", "CHANGELOG.md", "SECURITY.md", "benchmarks/README.md"]
BEHIND = {
    "benchmarks/README.md",
    "CHANGELOG.md",
    "vime-flags.md",
    "add_a_model.md",
    "contributing.md",
    "architecture.md",
}
"""Pages for other readers, which have every word: the search shows them after those that explain it."""
LINK = re.compile(r"(\]\()([^)#\s]+)(#[^)]*)?(\))")
PICTURES = {".png", ".jpg", ".svg"}
LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "sh", ".yml": "yaml"}
FENCE = "`" * 8


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """List every example under "Examples"."""
    for section in config.nav:
        for entry in next(iter(section.values())) if isinstance(next(iter(section.values())), list) else []:
            if "Examples" in entry:
                entry["Examples"] = ["examples/README.md", *_examples()]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the generated pages, the markdown files outside of docs/, and what all pages link to."""
    for name, text in generated():
        if (left := files.get_file_from_path(name)) is not None:  # somebody wrote it there to read it
            files.remove(left)
        files.append(File.generated(config, name, content=text))
    pages = [*OUTSIDE, "examples/README.md", *_examples()]
    linked: set[str] = set()
    for path in pages:
        linked |= _targets(path, (ROOT / path).read_text())
    for file in files.documentation_pages():
        linked |= _targets(f"docs/{file.src_uri}", file.content_string)
    for path in sorted(linked | set(pages)):
        if files.get_file_from_path(_uri(path)) is None:
            files.append(_file(path, config))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Turn links by path into links by page; lower some pages in the search."""
    if page.file.src_uri in BEHIND:
        page.meta["search"] = {"boost": 0.3}
    source = _path(page.file.src_uri)
    if source is None:
        return markdown
    here = PurePosixPath(page.file.src_uri).parent

    def rewritten(match: re.Match[str]) -> str:
        target = _target(source, match[2])
        if target is None:
            return match[0]
        return f"{match[1]}{os.path.relpath(_uri(target), here)}{match[3] or ''}{match[4]}"

    return LINK.sub(rewritten, markdown)


def _examples() -> list[str]:
    return [str(path.relative_to(ROOT)) for path in sorted(ROOT.glob("examples/*/README.md"))]


def _targets(path: str, text: str) -> set[str]:
    found = (_target(path, link) for _, link, _, _ in LINK.findall(text))
    return {target for target in found if target is not None}


def _target(path: str, link: str) -> str | None:
    """The file that a link of `path` leads to, or the directory, with a slash; None if there is neither."""
    if "://" in link or link.startswith("mailto:"):
        return None
    target = os.path.relpath((ROOT / path).parent / link, ROOT)
    if target.removeprefix("docs/") in PAGES:
        return target
    if (ROOT / target).is_dir():
        readme = os.path.join(target, "README.md")
        target = readme if (ROOT / readme).is_file() else target + "/"
    if target.endswith("/"):
        return None if target.startswith("..") else target
    return target if not target.startswith("..") and (ROOT / target).is_file() else None


def _uri(path: str) -> str:
    """Where a file of the repository is on the site."""
    if path == "README.md":
        return "index.md"
    if Path(path).suffix in {".md", *PICTURES}:
        return path.removeprefix("docs/")
    return f"source/{path}files.md" if path.endswith("/") else f"source/{path}.md"


def _path(uri: str) -> str | None:
    """The document that a page shows; None for pages with source."""
    if uri == "index.md":
        return "README.md"
    if uri.startswith("source/"):
        return None
    return uri if uri in OUTSIDE or uri.startswith("examples/") else f"docs/{uri}"


def _file(path: str, config: MkDocsConfig) -> File:
    if not _uri(path).startswith("source/"):
        return File.generated(config, _uri(path), abs_src_path=str(ROOT / path))
    if path.endswith("/"):
        names = sorted(str(each.relative_to(ROOT / path)) for each in (ROOT / path).rglob("*") if each.is_file())
        listed = "\n".join(f"- `{name}`" for name in names if "__pycache__" not in name)
        head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n# {path}\n\n"
        return File.generated(config, _uri(path), content=f"{head}{listed}\n")
    language = LANGUAGES.get(Path(path).suffix, "text")
    head = f"---\ntitle: {path}\nsearch:\n  exclude: true\n---\n# {path}\n\n"
    text = f"{head}{FENCE}{language}\n{(ROOT / path).read_text()}\n{FENCE}\n"
    return File.generated(config, _uri(path), content=text)


_SPLIT = r"split(/\s+/g).reduce("
_UNSAID = "a|an|and|are|can|do|for|from|how|i|in|is|it|my|of|on|or|the|to|what|which|with"
"""Words of a question that name nothing. The theme's search takes each word as the beginning of others: `a` finds every
page with a word that begins so, and before all others the pages that have one in their title."""


def on_post_build(config: MkDocsConfig) -> None:
    """Leave such words out of what is searched for, unless there are no others."""
    unsaid = f"/^({_UNSAID})$/i"
    asked = _SPLIT.replace("reduce(", f"filter((x,i,w)=>!{unsaid}.test(x)||w.every(y=>{unsaid}.test(y))).reduce(")
    for path in Path(config.site_dir, "assets/javascripts/workers").glob("search.*.js"):
        text = path.read_text(encoding="utf-8")
        if _SPLIT not in text:
            raise PluginError(f"{path.name} of the theme has no {_SPLIT!r}: look how it reads a question now")
        path.write_text(text.replace(_SPLIT, asked, 1), encoding="utf-8")
