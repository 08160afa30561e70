"""Guards the masks of public chat templates with an oracle, and the oracle with planted faults."""

import hashlib
import json
import re

import pytest

from gearbox import ROOT
from support import template_files, templates
from support.template_chats import KINDS, mark
from support.template_files import FOLDER, TemplateFile, listed, present
from support.templates import DOCUMENT, EXACT, REFUSED, REFUSED_WRONGLY, WRONG, Subject

CHATML = (ROOT / "recipes/chat_templates/chatml_tools.jinja").read_text()
HEAD, END = "<|im_start|>assistant\n", "<|im_end|>"
# Templates that were wrong before or that differ most from others, and a share of the rest.
HARD = (
    r"gemma4|gemma-4|r7b|V3\.2|deepseek.?v3|gpt-?oss|MiniMax|Mistral-|GLM-4|Apertus|Apriel|Seed|Reka|Nano-v2|Qwen3\.5"
)
SAMPLE = [file for number, file in enumerate(listed()) if number % 16 == 0 or templates.re.search(HARD, file.name)]


@pytest.fixture(scope="module")
def chatml() -> Subject:
    return Subject(CHATML.replace("{%- generation -%}", "").replace("{%- endgeneration -%}", ""), None, END)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["recipes/chat_templates/chatml_tools", "tests/data/templates/qwen_like"])
def test_own_templates_are_exact(name, kind):
    subject = Subject((ROOT / f"{name}.jinja").read_text(), None, END)
    verdict = subject.verdict(KINDS[kind])
    assert verdict.result == EXACT or (verdict.result == REFUSED and "reasoning" in verdict.why), verdict


def supervise(flags: list[bool], first: int, end: int, value: bool = True) -> list[bool]:
    return [*flags[:first], *[value] * (end - first), *flags[end:]]


def around(text: str, word: str) -> tuple[int, int]:
    first = text.index(word)
    return first, first + len(word)


# How to spoil a right mask of the kind "call with system": (text, flags) -> flags
FAULTS = {
    "a head": lambda text, flags: supervise(flags, *around(text, HEAD)),
    "the last letter of a head": lambda text, flags: supervise(flags, (at := around(text, HEAD)[1]) - 1, at),
    "a question": lambda text, flags: supervise(flags, *around(text, "Is it")),
    "the system turn": lambda text, flags: supervise(flags, *around(text, "Answer in one line.")),
    "a tool": lambda text, flags: supervise(flags, *around(text, "Look up weather")),
    "a result": lambda text, flags: supervise(flags, *around(text, "grey and wet")),
    "the mark of a result": lambda text, flags: supervise(flags, *around(text, "<tool_response>")),
    "text between turns": lambda text, flags: supervise(flags, (at := text.rindex(END)) + len(END), at + len(END) + 1),
    "no call": lambda text, flags: supervise(flags, *around(text, "Bern"), False),
    "no start of a call": lambda text, flags: supervise(flags, (at := around(text, HEAD)[1]), at + 1, False),
    "no answer": lambda text, flags: supervise(flags, *around(text, "Then nothing."), False),
    "no end": lambda text, flags: supervise(flags, (at := text.rindex(END)), at + len(END), False),
    "half of an end": lambda text, flags: supervise(flags, (at := text.rindex(END)) + 3, at + len(END), False),
    "nothing": lambda text, flags: [False] * len(flags),
    "everything": lambda text, flags: [True] * len(flags),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_the_oracle_notices_a_planted_fault(chatml, fault):
    marked = mark(KINDS["call with system"])
    text, flags = chatml.encode(marked)
    assert chatml.judge(marked, (text, flags)).result == EXACT
    spoilt = FAULTS[fault](text, flags)
    assert spoilt != flags
    assert chatml.judge(marked, (text, spoilt)).result == WRONG


@pytest.mark.parametrize(("kind", "word"), [("weight 0", "No: it's"), ("last only", "Bern")])
def test_the_oracle_notices_context_that_is_trained(chatml, kind, word):
    marked = mark(KINDS[kind])
    text, flags = chatml.encode(marked)
    assert chatml.judge(marked, (text, flags)).result == EXACT
    assert chatml.judge(marked, (text, supervise(flags, *around(text, word)))).result == WRONG


@pytest.mark.parametrize("change", [("grey", "gray"), ("mk0a", ""), (END, END + END)])
def test_the_oracle_notices_another_text(chatml, change):
    marked = mark(KINDS["call"])
    text = chatml.encode(marked)[0].replace(*change)
    verdict = chatml.judge(marked, (text, [False] * len(text)))
    assert verdict.result == WRONG and ("another text" in verdict.why or "encoded without" in verdict.why)


def test_a_refusal_is_right_only_for_a_chat_that_is_not_complete(chatml):
    marked = mark(KINDS["call"])
    assert chatml.judge(marked, "it is Monday").result == REFUSED_WRONGLY
    no_tools = Subject(CHATML.replace("{%- if tools -%}", "{%- if false -%}"), None, END)
    verdict = no_tools.judge(marked, "it is Monday")
    assert verdict.result == REFUSED and verdict.why == "the template omits the tools"
    no_end = Subject("{% for m in messages %}{{ m.role ~ ': ' ~ m.content ~ '\n' }}{% endfor %}", None, END)
    assert no_end.judge(mark(KINDS["one turn"]), "it is Monday").why.endswith("no mark at which generation stops")
    fails = Subject("{{ raise_exception('no') }}", None, END)
    assert fails.judge(marked, "it is Monday").why == "the template fails: no"


@pytest.mark.parametrize("file", SAMPLE, ids=lambda file: file.name)
def test_public_templates(file):
    if not file.copy.is_file():
        pytest.skip(f"{file.name} is not in {FOLDER}: run tests/support/template_files.py")
    found = templates.verdicts([file], templates.all_kinds(num_real=2))
    bad = {kind: one.why for (_, kind), one in found.items() if one.result in (WRONG, REFUSED_WRONGLY)}
    assert bad == {}


def test_the_document_shows_the_whole_list():
    files = listed()
    names, hashes = {file.name for file in files}, {file.sha256 for file in files}
    assert len(names) == len(hashes) == len(files) >= 400
    text = DOCUMENT.read_text().partition(templates.BEGIN)[2].partition(templates.FINISH)[0]
    assert text.startswith(f"\n\n{len(files)} public templates") and "and 0 are wrong" in " ".join(text.split())
    cells = [line.split(" | ") for line in text.splitlines() if re.match(r"\| .* \| \d+ \| ", line)]
    families = [file.family for file in files]
    assert {row[0][2:]: int(row[1]) for row in cells} == {name: families.count(name) for name in families}


def test_a_file_is_fetched_only_if_it_is_the_listed_one(tmp_path, monkeypatch):
    monkeypatch.setattr(template_files, "FOLDER", tmp_path)
    texts = {
        "a.jinja": "one", "b.json": json.dumps([{"model_name": "m"}, {"model_name": "n", "chat_template": "two"}]),
        "c.py": "def f():\n    return {'m': {'chat_template': {'x': 'three'}}}",
    }  # fmt: skip
    urls = []

    def read(url: str) -> str:
        urls.append(url)
        return texts[url.rpartition("/")[2]]

    for path, text in [("a.jinja", "one"), ("b.json#n", "two"), ("c.py#m#x", "three")]:
        file = TemplateFile(f"of/{text}", "", "me/it@0a1b", path, hashlib.sha256(text.encode()).hexdigest(), "", "")
        template_files.fetch(file, read)
        assert file.read() == text
        (tmp_path / f"of/{text}.jinja").write_text("changed")
        with pytest.raises(ValueError, match="differs from the file"):
            file.read()
        with pytest.raises(ValueError, match="is not the file that"):
            template_files.fetch(file._replace(sha256="0"), read)
    assert urls[0] == "https://raw.githubusercontent.com/me/it/0a1b/a.jinja" and present() == []


CHAT = "{% for m in messages %}MARK{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}ASK{% endif %}"
HEADS = {
    "other spaces": ("<|im_start|>{{ m.role }}\n", "   <|im_start|>assistant\n\n"),
    "other letters": ("### {{ m.role }}: ", "### Assistant: "),
}


@pytest.mark.parametrize("name", HEADS)
def test_a_prompt_that_the_text_does_not_repeat(name):
    mark_of, ask = HEADS[name]
    subject = Subject(CHAT.replace("MARK", mark_of).replace("ASK", ask), None, END)
    for kind in ("one turn", "several turns", "consecutive users"):
        assert subject.verdict(KINDS[kind]).result == EXACT, kind


CALLS = """{% for m in messages %}{{ '<|im_start|>' ~ m.role ~ '\n' ~ m.content }}
{% for c in m.tool_calls or [] %}<call>{{ c.function | tojson }}</call>{% endfor %}
{% if not m.tool_calls %}<|im_end|>{% endif %}{% endfor %}{% for tool in tools %}{{ tool | tojson }}{% endfor %}
{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"""


def test_the_mark_that_opens_a_result_does_not_end_a_call():
    subject = Subject(CALLS, None, END)
    verdict = subject.verdict(KINDS["call"])
    assert (verdict.result, verdict.why) == (REFUSED, "the template writes no mark at which generation stops")
