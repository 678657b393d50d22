"""
Site hook: links that leave `docs/` work on the site as they do in the repository.

The README is the home page. Any other file of the repository that a page links to is added to the site under
`repository/`: Markdown as a page (its links are followed in turn), images and notebooks unchanged, text as a listing.
"""

import os
import re
from pathlib import Path, PurePosixPath

from mkdocs.structure.files import File, Files


ROOT = Path(__file__).resolve().parents[2]
HOME = "README.md"
ELSEWHERE = "repository/"
COPIED = {".png", ".svg", ".ipynb"}

# The target of a link or image, without its anchor. Excludes targets with a scheme, and bare anchors.
_TARGET = re.compile(r"(?<=\]\()(?![a-z]+:|#)(?P<path>[^)#\s]+)")


def on_files(files: Files, config) -> Files:
    """Add the README and the files that the pages link to."""
    pages = [ROOT / HOME, *(ROOT / "docs" / file.src_uri for file in files.documentation_pages())]
    seen = set(pages)
    files.append(_file(ROOT / HOME, config))
    for page in pages:  # grows while iterating
        for match in _TARGET.finditer(page.read_text(encoding="utf-8")):
            found = _resolve(page, match["path"])
            if found in seen or not found.is_file() or _uri(found).startswith("docs/"):
                continue
            seen.add(found)
            if ROOT / "docs" not in found.parents:
                files.append(_file(found, config))
            if found.suffix == ".md":
                pages.append(found)
    return files


def on_page_markdown(markdown: str, page, config, files: Files) -> str:
    """Map links between files of the repository to links between their pages on the site."""
    source = _source(page.file.src_uri)

    def moved(match: re.Match) -> str:
        found = _resolve(source, match["path"])
        if not found.exists():
            return match["path"]  # left for the link check to report
        return os.path.relpath(_uri(found), PurePosixPath(page.file.src_uri).parent)

    return _TARGET.sub(moved, markdown)


def _resolve(page: Path, target: str) -> Path:
    return Path(os.path.normpath(page.parent / target))


def _uri(path: Path) -> str:
    """The site's source path of a repository file."""
    if ROOT / "docs" in path.parents:
        return path.relative_to(ROOT / "docs").as_posix()
    if path == ROOT / HOME:
        return HOME
    listing = "" if path.suffix in COPIED | {".md"} else ".md"
    return f"{ELSEWHERE}{path.relative_to(ROOT).as_posix()}{listing}"


def _source(uri: str) -> Path:
    if uri == HOME:
        return ROOT / HOME
    return ROOT / uri.removeprefix(ELSEWHERE) if uri.startswith(ELSEWHERE) else ROOT / "docs" / uri


def _file(path: Path, config) -> File:
    if path.suffix in COPIED | {".md"}:
        return File.generated(config, _uri(path), abs_src_path=str(path))
    name = path.relative_to(ROOT).as_posix()
    text = path.read_text(encoding="utf-8")
    listing = f"# {path.name}\n\n`{name}`\n\n````{path.suffix[1:]}\n{text}\n````\n"
    listing = f"---\nsearch: {{exclude: true}}\n---\n{listing}"
    return File.generated(config, _uri(path), content=listing)
