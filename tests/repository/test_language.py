"""The prose is plain English: no idioms, short sentences, docstrings that open with a verb, a short README."""

import statistics

import pytest

from gearbox import ROOT
from support.prose import (
    MAX_WORDS,
    all_prose,
    fragments,
    idioms,
    long_sentences,
    of_markdown,
    of_python,
    prose_of,
)
from support.repository import tracked

MAX_IDIOMS = 1  # per 1,000 words; other projects of the field have 0.0 to 0.3
MAX_WORDS_OF_README = 1400
MAX_MEAN_OF_README = 19  # words a sentence
PARTS = {  # and the least number of words that each has, so that a part cannot go missing
    "src": 15_000,
    "tests": 8_000,
    "docs": 10_000,
    "recipes": 500,
    "benchmarks": 500,
    "cluster": 300,
    "": 50_000,  # everything that Git tracks
}


def places(found: list[tuple]) -> list[str]:
    """Return where each finding is, and its words."""
    return [f"{one.path}:{one.line}: {words}" for one, words, *_ in found]


@pytest.mark.parametrize(("part", "least"), PARTS.items())
def test_idioms_are_rare(part, least):
    prose = all_prose(f"{part}/") if part else all_prose()
    num_words = sum(len(one.words) for one in prose)
    found = idioms(prose)
    assert num_words >= least
    assert 1000 * len(found) / num_words <= MAX_IDIOMS, places(found)


def test_sentences_are_short():
    assert places(long_sentences(all_prose())) == []


def test_docstrings_open_with_a_sentence():
    names = [name for name in tracked() if name.endswith(".py")]
    assert len(names) > 150
    assert fragments(names) == []


def test_the_readme_is_read_to_the_end():
    text = (ROOT / "README.md").read_text()
    assert len(text.split()) <= MAX_WORDS_OF_README
    sentences = [sentence for one in prose_of("README.md") if one.kind == "document" for sentence in one.sentences]
    lengths = [len(sentence.split()) for sentence in sentences if sentence.endswith((".", ":", "?"))]
    assert len(lengths) >= 30 and statistics.mean(lengths) <= MAX_MEAN_OF_README


PLANTED = [
    "each loss is held against the first",
    "the same command goes on from step 8",
    "the model lies in runs/x",
    "trained tokens alone",
    "what becomes of a job",
    "a folder of its own",
    "'bot' is no known role",
]


@pytest.mark.parametrize("sentence", PLANTED)
@pytest.mark.parametrize("reader", ["markdown", "docstring", "comment", "message", "table"])
def test_the_checker_finds_each_idiom_wherever_it_is(sentence, reader):
    if reader in ("markdown", "table"):
        text = f"# Title\n\n| a | {sentence} |\n" if reader == "table" else f"# Title\n\nText\n{sentence}.\n"
        prose = of_markdown("page.md", text)
    else:
        lines = {
            "docstring": f'def f():\n    """Return one.\n\n    Then {sentence}.\n    """\n',
            "comment": f"x = 1  # {sentence}\n",
            "message": f'x = f"{{y}}: {sentence}"\n',
        }
        prose = of_python("module.py", lines[reader])
    assert len(idioms(list(prose))) == 1


def test_the_checker_counts_words_by_sentence():
    long, short = " ".join(["word"] * (MAX_WORDS + 1)), " ".join(["word"] * MAX_WORDS)
    text = f"# Title\n\n{short}. {short.capitalize()}.\n\n- {long}.\n\n```text\n{long}\n```\n"
    assert [one.line for one, _ in long_sentences(list(of_markdown("page.md", text)))] == [5]
