"""Hooks of the documentation site: boxes of pseudo-code, equations as MathML, files outside of docs/."""

from __future__ import annotations

import html
import posixpath
import re
from pathlib import Path
from typing import Any

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[2]
RENAMED = {"CONTRIBUTING.md": "contributing.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md"}
"""Pages at the root of the checkout by name on the site, whose start page stands for the README."""

LINK = re.compile(r"(!?\[(?:[^\]\[]|\[[^\]]*\])*\])\((?!\w+:|#|/)([^)\s#]+)(#[^)\s]*)?\)")
FENCED = re.compile(r"^( *)(`{3,}|~{3,}).*?^\1\2\s*$", re.MULTILINE | re.DOTALL)
MATH = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.DOTALL)

# ------------------------------------------------------------------ pseudo-code

SYMBOLS = [
    (r"<-", "←"),
    (r"<=", "≤"),
    (r">=", "≥"),
    (r" \* ", " · "),
    (r"\|\|", "‖"),
    (r"\bsqrt\(", "√("),
    (r"\b(beta)(\d)\b", r"β<sub>\2</sub>"),
    (r"\blambda\b", "λ"),
    (r"\brho\b", "ρ"),
    (r"\^T\b", "<sup>⊤</sup>"),
    (r"\^(\w+|-\d+|\([^()]*\))", r"<sup>\1</sup>"),
    (r"\b([A-Za-z]{1,2}|mean|sum|‖)_(\w{1,3})\b", r"\1<sub>\2</sub>"),
]
KEYWORD = re.compile(r"^(input|state|for|if|else|return)\b(.*)$")


def typeset(code: str) -> str:
    """A line of plain pseudo-code with the symbols that it stands for, as HTML."""
    code = html.escape(code, quote=False).replace("&lt;-", "<-").replace("&lt;=", "<=").replace("&gt;=", ">=")
    for plain, symbol in SYMBOLS:
        code = re.sub(plain, symbol, code)
    return code


def algorithm(source: str, *_: Any, **__: Any) -> str:
    """A fenced block ``algorithm``: indentation is structure, ``#`` starts a remark, keywords stand first."""
    rows = []
    for line in source.rstrip().splitlines():
        code, _, remark = line.partition("#")
        depth = (len(code) - len(code.lstrip())) // 4
        text = typeset(code.strip())
        if keyword := KEYWORD.match(text):
            text = f"<b>{keyword[1]}</b>{keyword[2]}"
        note = f'<span class="remark">{typeset(remark.strip())}</span>' if remark else ""
        rows.append(f'<div class="row" style="--depth: {depth}"><code>{text}</code>{note}</div>')
    return f'<div class="algorithm" role="figure" aria-label="Algorithm">{"".join(rows)}</div>'


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Registers the blocks, and adds pages of optimizers that the navigation does not name to its end."""
    named = re.findall(r"optimizers/\w+\.md", str(config.nav))
    pages = [f"optimizers/{page.name}" for page in sorted((ROOT / "docs" / "optimizers").glob("*.md"))]
    (section,) = (entry["Optimizers"] for entry in config.nav or [] if "Optimizers" in entry)
    section += [page for page in pages if page not in named]
    fences = config.mdx_configs.setdefault("pymdownx.superfences", {}).setdefault("custom_fences", [])
    fences.append({"name": "algorithm", "class": "algorithm", "format": algorithm})
    return config


# -------------------------------------------------------------------- equations


def _mathml(match: re.Match[str]) -> str:
    display = "block" if match[2] == "[" else "inline"
    made = convert(html.unescape(match[3]).strip(), display=display)
    return f'<div class="equation">{made}</div>' if display == "block" else made


def on_page_content(content: str, **_: Any) -> str:
    """Equations become MathML, which browsers draw themselves: no script, no font, nothing to download."""
    return MATH.sub(_mathml, content)


# ------------------------------------------------------- files outside of docs/


def _site_path(path: str) -> str:
    """Where a file of the checkout, named from its root, lies on the site."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return RENAMED.get(path, f"source/{path}")


def _repository_path(uri: str) -> str:
    """The file of the checkout that a page of the site is made of."""
    own = {site: path for path, site in RENAMED.items() if site != "index.md"}
    return own.get(uri) or (uri.removeprefix("source/") if uri.startswith("source/") else f"docs/{uri}")


def _is_text_only(target: str) -> bool:
    """Whether the site has no page for a file of the checkout: folders, and what a dot hides from servers."""
    return (ROOT / target).is_dir() or target.startswith(".")


def _targets(path: str) -> set[str]:
    """Files that the links of a page lead to, named from the root of the checkout."""
    text = FENCED.sub("", (ROOT / path).read_text())
    return {
        posixpath.normpath(posixpath.join(posixpath.dirname(path), link[2])) for link in LINK.finditer(text)
    }


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages of the root and every file outside of docs/ that a page links to."""
    waiting = [f"docs/{file.src_uri}" for file in files.documentation_pages()]
    waiting += [path for path in RENAMED if path != "README.md"]
    seen = {*waiting, "README.md"}
    while waiting:
        path = waiting.pop()
        if not path.startswith("docs/"):
            files.append(File.generated(config, _site_path(path), abs_src_path=str(ROOT / path)))
        if not path.endswith(".md"):
            continue
        for target in sorted(_targets(path) - seen):
            if target.startswith("docs/") or _is_text_only(target):
                continue
            if not (ROOT / target).is_file():
                raise PluginError(f"{path} links to {target}, which is not there")
            seen.add(target)
            waiting.append(target)
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Links that leave docs/ lead to the copies; links to folders and hidden files become text."""
    own = page.file.src_uri
    if own.startswith("source/"):
        page.meta["search"] = {"exclude": True}  # tables of measurements
    here = posixpath.dirname(_repository_path(own))

    def relink(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(here, match[2]))
        if _is_text_only(target):
            return match[1].strip("[]")
        site = posixpath.relpath(_site_path(target), posixpath.dirname(own) or ".")
        return f"{match[1]}({site}{match[3] or ''})"

    parts, end = [], 0
    for fence in FENCED.finditer(markdown):
        parts += [LINK.sub(relink, markdown[end : fence.start()]), fence.group()]
        end = fence.end()
    return "".join([*parts, LINK.sub(relink, markdown[end:])])
