"""Words, lengths and numbers of pages, comments and names that a reader has to take in."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

from .sources import ROOT, names_of_tests, numbered, relative, rust_code, rust_texts

PAGES = sorted((ROOT / "docs").rglob("*.md"))
MOST_WORDS = 1000
"""Of a page, its code and tables among them."""
MOST_WORDS_OF_A_CLASS = 350
"""Of a class's page: its prose, without code, tables and references."""
MOST_WORDS_IN_ALL = 32_000
MOST_WORDS_OF_CHANGES = 450
"""Of the changelog: one screen."""
WIDEST_CODE = 76
"""Characters of a line of code that a page shows whole."""
LONGEST_NAME = 60
DIALECT = re.compile(
    r"\b(beside|anew|told|tells|so many|whoever|nobody|everybody|somebody|in the place of|in its place"
    r"|goes along|go along|from now on|way out|that which|for a while|no number|what is no|lies with|lie with"
    r"|settles?|apart|stay|heard|of which|at hand|by hand|is dear|dear|takes no|as ever|is due|made anew"
    r"|travels?|held norms?|codes|coded)\b",
    re.IGNORECASE,
)
"""Words that a reader of torch, CUDA and the papers does not expect, or of several meanings."""
PLAIN_IN_NAMES = {"stay", "by hand", "is due"}
"""Words of the list that mean one thing in the name of a test or a function."""
GENERATED = {"oxidion_torch.cpp"}
"""Files that a build writes."""
PYTHON = (".py", ".pyi")
COMPILED = (".rs", ".cu", ".cuh", ".cpp", ".h", ".c")
SUFFIXES = (*PYTHON, *COMPILED, ".md", ".toml", ".yml", ".yaml", ".css", ".sh", ".ipynb")
#: The list itself.
ALLOWED = {"tests/meta/test_words.py"}


def words(text: str) -> int:
    """Words as ``wc -w`` counts them."""
    return len(text.split())


def in_words(name: str) -> str:
    """Words of a name in snake case or camel case."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", " ", name).replace("_", " ").strip().lower()


def code_lines(text: str) -> Iterator[str]:
    """Lines of Python and shell that a page shows."""
    for block in re.findall(r"^```(?:python|sh)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        yield from block.splitlines()


def comments(text: str) -> Iterator[tuple[int, str]]:
    """Comments of Python, those of adjoining lines as one, with the numbers of their last lines."""
    parts: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            parts.append(token.string.lstrip("#: "))
        elif token.type != tokenize.NL and parts:
            yield token.start[0] - 1, " ".join(parts)
            parts = []


def prose(path: str, text: str) -> Iterator[tuple[int, str]]:
    """Lines of a page; comments and strings of a source, docstrings among them."""
    if path.endswith(PYTHON):
        yield from comments(text)
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.lineno, " ".join(node.value.split())
    elif path.endswith(COMPILED):
        yield from rust_texts(text)
    else:
        yield from numbered(text)


def names(path: str, text: str) -> set[str]:
    """The name of a source, and all names that it has."""
    found = {Path(path).stem}
    if path.endswith(PYTHON):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        found.update(token.string for token in tokens if token.type == tokenize.NAME)
    elif path.endswith(COMPILED):
        found.update(re.findall(r"[A-Za-z_]\w*", rust_code(text)))
    return found


def sources() -> list[str]:
    """Files with prose, by their paths from the root of the checkout."""
    folders = ("src", "python", "tests", "benchmarks", "examples", "docs", ".ci")
    found = [path for folder in folders for path in (ROOT / folder).rglob("*")]
    found += [*ROOT.glob("*.md"), *ROOT.glob("*.toml")]
    own = [path for path in found if path.suffix in SUFFIXES and path.name not in GENERATED]
    own += [ROOT / "Makefile", ROOT / ".ci" / "run"]
    return sorted(relative(path) for path in own if path.is_file())


@pytest.mark.parametrize(
    ("path", "text", "lines", "defined"),
    [
        (
            "a.py",
            'def f(a):\n    """Told."""\n    told = 1  # anew\n    return f"{told} apart"\n',
            3,
            {"told"},
        ),
        ("a.py", "a = 1\n#: Columns of\n#: which one is sharded.\nb = 2\n", 1, set()),
        (
            "a.rs",
            'let told = 1; // beside\n/// Apart.\nlet a = "told";\nlet b = beside;\n',
            2,
            {"told", "beside"},
        ),
        ("a.rs", "// Columns of\n// which one is sharded.\nlet (a, mut anew) = b;\n", 1, {"anew"}),
        ("a.cu", 'fail("what is \\\n    no number");\nint told;\n', 1, {"told"}),
        ("a.toml", "x = 1\n# Apart.\n", 1, set()),
    ],
    ids=["Python", "Python, two lines", "Rust", "Rust, two lines", "CUDA", "TOML"],
)
def test_words_are_found(path: str, text: str, lines: int, defined: set[str]) -> None:
    assert sum(bool(DIALECT.search(line)) for _, line in prose(path, text)) == lines
    assert {name for name in names(path, text) if DIALECT.search(in_words(name))} == defined


def test_sources_have_no_word_of_the_dialect() -> None:
    paths = sources()
    assert len(paths) > 800
    found = [
        f"{path}:{number}: {match[0]}"
        for path in paths
        if path not in ALLOWED
        for number, line in prose(path, (ROOT / path).read_text())
        if (match := DIALECT.search(line))
    ]
    assert found == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT / "docs").as_posix())
def test_page_can_be_finished(page: Path) -> None:
    text = page.read_text()
    assert words(text) <= MOST_WORDS
    assert [line for line in code_lines(text) if len(line) > WIDEST_CODE] == []


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name == "optimizers"], ids=lambda page: str(page.stem)
)
def test_prose_on_a_class_is_short(page: Path) -> None:
    text = re.sub(r"```.*?```|^:::.*?(?=\n\S)|^## References.*", "", page.read_text(), flags=re.DOTALL | re.M)
    prose = [line for line in text.splitlines() if not line.startswith("|")]
    assert words(re.sub(r"\]\([^)]*\)", "]", "\n".join(prose))) <= MOST_WORDS_OF_A_CLASS


def test_pages_together_can_be_finished() -> None:
    assert sum(words(page.read_text()) for page in PAGES) <= MOST_WORDS_IN_ALL
    assert words((ROOT / "CHANGELOG.md").read_text()) <= MOST_WORDS_OF_CHANGES


def test_no_sentence_of_the_readme_has_two_semicolons() -> None:
    text = (ROOT / "README.md").read_text()
    sentences = re.split(r"[.!?]\s|\n\n|\|", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    assert [sentence for sentence in sentences if sentence.count(";") > 1] == []
    assert [line for line in code_lines(text) if len(line) > WIDEST_CODE] == []


def test_names_of_tests_fit_a_line() -> None:
    assert [f"{file}: {name}" for file, name in names_of_tests() if len(name) > LONGEST_NAME] == []


def test_names_are_split_into_words() -> None:
    assert [in_words(name) for name in ("is_told", "ToldApart")] == [
        "is told",
        "told apart",
    ]


def test_no_name_is_of_the_dialect() -> None:
    found = {
        f"{path}: {name}"
        for path in sources()
        if path not in ALLOWED
        for name in names(path, (ROOT / path).read_text())
    }
    assert len(found) > 40000
    refused = {name: set(DIALECT.findall(in_words(name.split(": ")[1]))) - PLAIN_IN_NAMES for name in found}
    assert sorted(name for name, words in refused.items() if words) == []
