"""The prose of the repository: comments, docstrings, messages, documents. `python tests/support/prose.py PATH...`

Without a path it reads every tracked file. It prints idioms, long sentences and docstrings that open with a fragment.
"""

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # pytest does this by its pythonpath

from gearbox import ROOT
from support.repository import tracked

MAX_WORDS = 25  # of a sentence

# What reads as translated, and what the field writes instead.
IDIOMS = {
    r"\b(hold|holds|held|holding)\b[^.;|]{0,60}?\bagainst\b": "compare with, verify against",
    r"\b(go|goes|going|gone|went) on\b": "resume, continue",
    r"\b(tells?|told|said|says)\b": "report, print, show, describe",
    r"\b(lies|lie|lay)\b": "is in, is saved to",
    r"\b(stands?|stood)\b(?! for\b)(?!-)": "is in, is listed in",
    r"\balone\b": "only",
    r"\bbeside\b": "next to, in addition to, and",
    r"\banew\b": "again, from scratch",
    r"\balike\b": "the same way, identically",
    r"\b(passed|passes|pass|passing) over (?!rows|the rows|the data|all rows)": "skip, ignore",
    r"\b(mend|mends|mended|mending)\b": "fix",
    r"\bin silence\b": "silently",
    r"\bof (its|their|our|one's) own\b|\bof (yours|ours)\b": "its own, your",
    r"\b(kept|keeps?|keeping) (\w+ )?apart\b|\b(see|sees|seeing) each other\b": "isolate, leak into each other",
    r"\bas (it|they) (must|should)\b|\b(come|comes|came) of\b|\b(become|becomes|became) of\b": "expected, result",
    r"\bto be had\b": "available",
    r"\blet loose\b|\bgets on\b|\bgetting on\b|\bthe books\b": "run against, make progress, step ledgers",
    r"\b(put together|handed (round|on|about|over))\b": "gather, pass, forward",
    r"\bso many\b": "N",
    r"(?<!here )\b(is|are) no (?!longer|more|less|such|need)[a-z]": "is not a",
    r"\b(is|are|was|were) none\b": "there is no X, no X exists",
    r"\b(is|are) whole\b|\bwhole (or not|checkpoint)": "complete, all or nothing",
    r"\bcut over\b": "sharded across",
    r"\bseen to\b": "verified, measured",
    r"\bmust come\b|\bthe same holds\b|\bas is\b[^ ]": "expected",
    r"\bmistakes? of (yours|the user)\b": "user error",
}
# A docstring that opens with one of these is a fragment; a function's opens with a verb, a class's may name its noun.
FRAGMENTS = set(
    "of as what one how why whether where which that those for from with in on if whatever each every "
    "not its their after before by without to under at than and or nor but so such there here".split()
)
NOUN_OPENERS = {"a", "an", "the", "all", "both", "no", "it", "this", "these", "they"}


@dataclass(frozen=True)
class Prose:
    """A run of prose and where it is."""

    path: str
    line: int
    kind: str  # comment | docstring | message | document | quoted
    text: str

    @property
    def words(self) -> list[str]:
        """Return the words; a span of code is one word."""
        return words_of(self.text)

    @property
    def sentences(self) -> list[str]:
        """Return the sentences, as full stops, question and exclamation marks end them."""
        return [one for one in re.split(r"(?<=[.!?])[)\"»]*\s+(?=[^a-z])", self.text) if one.strip()]


def words_of(text: str) -> list[str]:
    """Return the words of a text."""
    return re.findall(r"[A-Za-z][\w'-]*", text)


def plain(text: str) -> str:
    """Return Markdown without code, links and emphasis: a span of code becomes one word."""
    text = re.sub(r"``?[^`]+``?", "Code", text)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    return re.sub(r"\s+", " ", re.sub(r"\*\*|(?<!\w)\*(?=\w)|(?<=\w)\*(?!\w)|<[^>]+>", "", text)).strip()


def of_markdown(path: str, text: str) -> Iterator[Prose]:
    """Yield paragraphs, list items, table cells and headings; then what fenced blocks quote."""
    paragraph: list[str] = []
    start, fenced = 0, False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        opens = not line.strip() or re.match(r"\s*([-*|#>]|\d+\.|```)", line)
        if paragraph and (opens or fenced):
            yield Prose(path, start, "document", plain(" ".join(paragraph)))
            paragraph = []
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif fenced:
            yield Prose(path, number, "quoted", line)
        elif line.lstrip().startswith("|"):
            cells = [plain(cell) for cell in line.strip().strip("|").split("|")]
            yield from (Prose(path, number, "document", cell) for cell in cells if re.search("[a-z]", cell))
        elif line.strip():
            start = start if paragraph else number
            paragraph.append(re.sub(r"^\s*([-*>]|\d+\.|#+) ", "", line).strip())


def of_comments(path: str, comments: list[tuple[int, str, bool]]) -> Iterator[Prose]:
    """Yield comments, (line, text, whether it has the line for itself); lines that follow each other are one."""
    block: list[str] = []
    start = last = 0
    for line, text, own in [*comments, (0, "", False)]:
        if block and not (own and line == last + 1):
            yield Prose(path, start, "comment", plain(" ".join(block)))
            block = []
        if text and own:
            start = start if block else line
            block.append(text)
        elif text:
            yield Prose(path, line, "comment", plain(text))
        last = line


def of_python(path: str, text: str) -> Iterator[Prose]:
    """Yield comments, docstrings, and strings of three words or more."""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    found = [t for t in tokens if t.type == tokenize.COMMENT and not re.match(r"# (noqa|type:|fmt:)|#!", t.string)]
    lines = text.splitlines()
    comments = [(t.start[0], t.string.lstrip("#: "), not lines[t.start[0] - 1][: t.start[1]].strip()) for t in found]
    yield from of_comments(path, comments)
    tree = ast.parse(text)
    docstrings = set()
    for body in (node.body for node in ast.walk(tree) if hasattr(node, "body") and isinstance(node.body, list)):
        for node in body:
            string = node.value if isinstance(node, ast.Expr) else None
            if isinstance(string, ast.Constant) and isinstance(string.value, str):
                docstrings.add(id(string))
                rows = r"|\n {4}" if body is tree.body else ""  # a script's help: arguments and examples, one a line
                for part in re.split(r"\n\s*\n|\n(?=\s*[-*] )" + rows, string.value):
                    yield Prose(path, node.lineno, "docstring", plain(part))
    inside = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            message = "".join(v.value if isinstance(v, ast.Constant) else "X" for v in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings | inside:
            message = node.value
        else:
            continue
        if len(re.findall(r"\b[a-z]{2,}\b", message)) >= 3 and "\\b" not in message:
            is_script = "\n" in message or re.search(r"[=;]\s*\$?\(|^(\{|\.env|import|mount)", message)
            yield Prose(path, node.lineno, "quoted" if is_script else "message", plain(message))


@functools.cache
def prose_of(name: str) -> list[Prose]:
    """Return the prose of one file of the repository, read once; none of a file that has no comments."""
    path = ROOT / name
    if path.suffix == ".md":
        return list(of_markdown(name, path.read_text()))
    if path.suffix == ".py":
        return list(of_python(name, path.read_text()))
    if path.suffix in {".yaml", ".yml", ".sh", ".sbatch", ".toml"} or path.name in {"Makefile", "Dockerfile", "run"}:
        lines = enumerate(path.read_text().splitlines(), 1)
        found = [(n, re.search(r"(?:^|\s)##? ?([^#!].*)$", line), line) for n, line in lines]
        return list(of_comments(name, [(n, m[1], line.lstrip().startswith("#")) for n, m, line in found if m]))
    return []


def all_prose(*tops: str) -> list[Prose]:
    """Return the prose of all tracked files under these folders, or of these files; of every file without any."""
    names = [name for name in tracked() if not tops or name.startswith(tops)]
    skipped = ("tests/support/prose.py", "requirements/", "tests/data/templates/")
    return [one for name in names if not name.startswith(skipped) for one in prose_of(name)]


def idioms(prose: list[Prose]) -> list[tuple[Prose, str, str]]:
    """Return every idiom: where it is, its words, and what to write instead."""
    return [
        (one, found[0], instead)
        for one in prose
        for pattern, instead in IDIOMS.items()
        for found in re.finditer(pattern, one.text, re.I)
    ]


def long_sentences(prose: list[Prose]) -> list[tuple[Prose, str]]:
    """Return the sentences of more than MAX_WORDS words; output and scripts in strings are no sentences."""
    return [
        (one, sentence)
        for one in prose
        if one.kind != "quoted"
        for sentence in one.sentences
        if len(words_of(sentence)) > MAX_WORDS
    ]


def fragments(names: list[str]) -> list[str]:
    """Return the docstrings that open with a fragment, such as "Of ..." or "What ...", as path:line: first words."""
    found = []
    for name in names:
        for node in ast.walk(ast.parse((ROOT / name).read_text())):
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
                continue
            docstring = ast.get_docstring(node) or "x"
            first = re.sub(r"\W", "", docstring.split()[0]).lower()
            decorators = [ast.unparse(one) for one in getattr(node, "decorator_list", [])]
            noun = isinstance(node, ast.ClassDef | ast.Module) or any("property" in one for one in decorators)
            test = getattr(node, "name", "").startswith("test_")
            if first in FRAGMENTS or (first in NOUN_OPENERS and not noun and not test):
                found.append(f"{name}:{getattr(node, 'lineno', 1)}: {docstring.splitlines()[0][:80]}")
    return found


def main(tops: list[str]) -> None:
    """Print what the tests would find under these paths."""
    prose = all_prose(*tops)
    for one, words, instead in idioms(prose):
        print(f"{one.path}:{one.line}: {one.kind}: '{words}': {instead}: {one.text[:150]}")
    for one, sentence in long_sentences(prose):
        print(f"{one.path}:{one.line}: {one.kind}: more than {MAX_WORDS} words: {sentence[:300]}")
    names = sorted({one.path for one in prose if one.path.endswith(".py")})
    for line in fragments(names):
        print(f"{line}  <- opens with a fragment")
    num_words = sum(len(one.words) for one in prose)
    print(f"{num_words:,} words, {1000 * len(idioms(prose)) / max(num_words, 1):.1f} idioms per 1,000")


if __name__ == "__main__":
    main(sys.argv[1:])
