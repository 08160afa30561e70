"""Guards the trained tokens: for each row format and template, the assistant's text and its end of turn."""

import itertools
import json
import random
import re

import numpy as np
import pytest
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.data import chat_rendering, row_formats
from gearbox.data.loss_mask import ChatTokenizer
from gearbox.data.row_formats import FieldNames, InvalidRecord
from gearbox.errors import UserError

SMOLLM2 = ROOT / "models" / "smollm2-135m"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>", "<|system|>",
    "<|observation|>", "<|start|>", "<|message|>", "<|channel|>", "<|end_call|>", "<|call|>", "<|return|>", "<turn|>",
    "<|turn>", "<|tool_response>", "<|start_text|>", "<|end_text|>", "<|start_call|>", "[TOOL_CALLS]",
]  # fmt: skip
END = {"smollm2": "<|im_end|>", "llama_like": "<|eot_id|>", "qwen_like": "<|im_end|>", "chatml_tools": "<|im_end|>"}
TEMPLATES = ROOT / "tests/data/templates"
NO_THOUGHT = "<think>\n\n</think>\n\n"  # Qwen's template writes it before the last answer


def template(name: str) -> str:
    if name == "smollm2":
        if not SMOLLM2.is_dir():
            pytest.skip("needs SmolLM2: make smollm2")
        return AutoTokenizer.from_pretrained(SMOLLM2).chat_template
    folder = ROOT / "recipes/chat_templates" if name == "chatml_tools" else TEMPLATES
    return (folder / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def make():
    """Return a function that pairs a template with a byte tokenizer that has the special tokens of all templates."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<|bos|>"})

    def encoder(name: str, supervise: str = "assistant", supplied: bool = False) -> ChatTokenizer:
        tokenizer.chat_template = name if "{" in name else template(name)
        return ChatTokenizer(tokenizer, supervise, supplied)

    return encoder


def encode(encoder: ChatTokenizer, record: dict, form: str = "messages", **fields):
    (outcome,) = encoder.encode([row_formats.read(record, FieldNames(form, fields, {}))])
    if isinstance(outcome, InvalidRecord):
        raise outcome
    return outcome


def trained(encoder: ChatTokenizer, record: dict, form: str = "messages") -> list[str]:
    """Return the text of each supervised run of tokens."""
    outcome = encode(encoder, record, form)
    runs = itertools.groupby(zip(outcome.loss_mask, outcome.tokens, strict=True), key=lambda pair: pair[0])
    return [encoder.tokenizer.decode([token for _, token in run]) for is_supervised, run in runs if is_supervised]


def turns_of(*pairs: str) -> list[dict]:
    return [{"role": role, "content": content} for role, content in zip(pairs[::2], pairs[1::2], strict=True)]


SYSTEM = turns_of("system", "Be short. système")
TWO = turns_of("user", "hi €", "assistant", "hé €", "user", "and\n\nthen?", "assistant", "B c.\n\n- d")
WEATHER = {"name": "weather", "description": "of a city", "parameters": {"type": "object", "properties": {}}}
CALL = {"name": "weather", "arguments": {"city": "Zürich", "days": 2}}
TOOLS = [
    *turns_of("user", "weather?"),
    {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": CALL}]},
    *turns_of("tool", '{"sky": "grey"}', "assistant", "Grey.", "user", "thanks", "assistant", "Welcome."),
]
SHAREGPT = {"messages": "conversations", "user": "human", "assistant": "gpt", "system": "system"}
FORMS = {
    "messages": ({"messages": TWO}, ["hé €", "B c.\n\n- d"]),
    "system": ({"messages": SYSTEM + TWO}, ["hé €", "B c.\n\n- d"]),
    "conversations": (
        {"conversations": [{"from": SHAREGPT[t["role"]], "value": t["content"]} for t in SYSTEM + TWO]},
        ["hé €", "B c.\n\n- d"],
    ),
    "instruction": ({"instruction": "q", "input": "i", "output": "o p"}, ["o p"]),
    "prompt": ({"prompt": "q", "completion": "o p"}, ["o p"]),
    "prompt of turns": ({"prompt": TWO[:3], "completion": TWO[3:]}, ["B c.\n\n- d"]),
    "untrained turn": ({"messages": [TWO[0], TWO[1] | {"weight": 0}, *TWO[2:]]}, ["B c.\n\n- d"]),
}


def form_of(record: dict) -> str:
    found = row_formats.recognise(record, "auto", {})
    assert found is not None
    return found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", END)
def test_assistant_texts_and_their_ends_are_trained(make, name, form):
    record, answers = FORMS[form]
    thought = NO_THOUGHT if name == "qwen_like" else ""
    expected = [answer + END[name] for answer in answers[:-1]] + [thought + answers[-1] + END[name]]
    assert trained(make(name), record, form_of(record)) == expected


@pytest.mark.parametrize("name", END)
def test_only_the_last_turn(make, name):
    assert trained(make(name, "last"), {"messages": TWO}) == [
        (NO_THOUGHT if name == "qwen_like" else "") + "B c.\n\n- d" + END[name]
    ]


@pytest.mark.parametrize("name", ["llama_like", "qwen_like", "chatml_tools"])
@pytest.mark.parametrize("form", ["messages", "conversations"])
def test_calls_are_trained_and_results_never(make, name, form):
    if form == "messages":
        record = {"messages": TOOLS, "tools": [{"type": "function", "function": WEATHER}]}
    else:
        roles = {"user": "human", "assistant": "gpt", "tool": "observation"}
        turns = [{"from": roles[t["role"]], "value": t["content"]} for t in TOOLS]
        turns[1] = {"from": "function_call", "value": json.dumps(CALL)}
        record = {"conversations": turns, "tools": json.dumps([WEATHER])}
    arguments = '{"city": "Zürich", "days": 2}'
    call = {
        "llama_like": f'{{"name": "weather", "parameters": {arguments}}}',
        "qwen_like": f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>',
        "chatml_tools": f'<tool_call>\n{{"name": "weather", "arguments": {arguments}}}\n</tool_call>',
    }[name]
    last = (NO_THOUGHT if name == "qwen_like" else "") + "Welcome."
    assert trained(make(name), record, form) == [text + END[name] for text in (call, "Grey.", last)]
    everything = "".join(trained(make(name, "all"), record, form))
    assert "grey" not in everything and "weather?" in everything and call in everything
    rest = encode(make(name, "all"), record, form)
    result = json.dumps('{"sky": "grey"}') if name == "llama_like" else '{"sky": "grey"}'
    assert make(name).tokenizer.decode(rest.tokens[rest.loss_mask == 0]).strip('"') == result.strip('"')


def test_several_results_in_one_turn_of_the_template(make):
    """Qwen's template joins them, so no prefix of the chat is rendered as in the complete chat."""
    turns = [*TOOLS[:2], *turns_of("tool", "one", "tool", "two", "assistant", "Both.")]
    record = {"messages": turns, "tools": [{"type": "function", "function": WEATHER}]}
    assert trained(make("qwen_like"), record)[-1] == NO_THOUGHT + "Both.<|im_end|>"
    assert "one" not in "".join(trained(make("qwen_like", "all"), record))


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_reasoning_that_the_template_drops_is_not_trained_and_not_an_error(make, field):
    def thinking(thought, words):
        if field == "content":
            return {"role": "assistant", "content": f"<think>\n{thought}\n</think>\n\n{words}"}
        return {"role": "assistant", "content": words, "reasoning_content": thought}

    turns = [*turns_of("user", "a"), thinking("old", "first"), *turns_of("user", "b"), thinking("new", "second")]
    assert trained(make("qwen_like"), {"messages": turns}) == [
        "first<|im_end|>", "<think>\nnew\n</think>\n\nsecond<|im_end|>"
    ]  # fmt: skip


def test_marked_spans_get_their_end_of_turn(make):
    """Many templates close the generation block before the end of turn. A model trained like that never stops."""
    short = template("chatml_tools").replace(
        "{{- '<|im_end|>' -}}\n{%- endgeneration -%}\n{{- '\\n' -}}", "{%- endgeneration -%}\n{{- '<|im_end|>\\n' -}}"
    )
    assert short != template("chatml_tools")
    assert trained(make(short), {"messages": TWO}) == ["hé €<|im_end|>", "B c.\n\n- d<|im_end|>"]


def test_markers_and_prefixes_agree(make):
    unmarked = re.sub(r"{%- (end)?generation -%}\n", "", template("chatml_tools"))
    for record in ({"messages": SYSTEM + TWO}, {"messages": TOOLS, "tools": [WEATHER]}):
        ours, theirs = (encode(make(t), record) for t in (unmarked, template("chatml_tools")))
        assert (ours.tokens == theirs.tokens).all() and (ours.loss_mask == theirs.loss_mask).all()


def test_several_markers_of_a_turn_are_one(make):
    """TRL's template for Phi 3 marks the end-of-text after the last answer as well."""
    twice = template("chatml_tools").replace(
        "{{- message.content -}}\n{%- for", "{{- message.content -}}{%- endgeneration -%}{%- generation -%}\n{%- for"
    )
    assert twice != template("chatml_tools")
    for record in ({"messages": SYSTEM + TWO}, {"messages": TOOLS, "tools": [WEATHER]}):
        assert trained(make(twice), record) == trained(make("chatml_tools"), record)


def test_markers_that_do_not_match_the_turns_are_refused(make):
    first = template("chatml_tools").replace("{%- generation -%}", "{%- if loop.index < 3 -%}{%- generation -%}")
    first = first.replace("{%- endgeneration -%}", "{%- endgeneration -%}{%- endif -%}")
    with pytest.raises(InvalidRecord, match="marks 1 generations, but the chat has 2 assistant turns"):
        trained(make(first), {"messages": TWO})


@pytest.mark.parametrize(
    ("change", "record", "message"),
    [
        (("message['role']", "'user'"), {"messages": TWO}, None),  # a template may rename roles
        (("'system'", "'nobody'"), {"messages": SYSTEM + TWO}, "turn 1 (system): the chat template omits"),
        (("'user'", "'human'"), {"messages": TWO}, "turn 1 (user): the chat template omits its content"),
        (("{{- content -}}", ""), {"messages": TWO}, "turn 2 (assistant): the chat template omits"),
        (("{{- content -}}", "{{- content[:1] -}}"), {"messages": TWO}, "turn 2 (assistant): the chat template omits"),
    ],
)  # fmt: skip
def test_a_template_that_drops_content_is_refused(make, change, record, message):
    changed = make(template("qwen_like").replace(*change))
    if message is None:
        assert trained(changed, record)
    else:
        with pytest.raises(InvalidRecord) as caught:
            trained(changed, record)
        assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            {"messages": TOOLS, "tools": [WEATHER]},
            "tools: the chat template omits the tools; set data.chat_template to one that renders them",
        ),
        ({"messages": TOOLS}, "turn 2 (assistant): the chat template omits its call of 'weather'; set data.chat"),
    ],
)
def test_a_template_without_tools_is_refused_for_calls(make, record, message):
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    with pytest.raises(InvalidRecord) as caught:
        trained(make(plain + "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"), record)
    assert str(caught.value).startswith(message)


def test_reasoning_that_the_template_does_not_know_is_not_lost_silently(make):
    turns = [*turns_of("user", "a"), {"role": "assistant", "content": "b", "reasoning_content": "because"}]
    with pytest.raises(InvalidRecord, match=r"turn 2 .assistant.: the chat template omits its reasoning_content"):
        trained(make("llama_like"), {"messages": turns})


@pytest.mark.parametrize(
    ("turns", "message"),
    [
        (turns_of("user", "a", "assistant", "b", "assistant", "c"), "Turns of user and assistant must alternate"),
        (turns_of("user", "a", "system", "b", "assistant", "c"), "A system turn must come first"),
    ],
)
def test_chats_that_the_template_rejects(make, turns, message):
    with pytest.raises(InvalidRecord, match=f"the chat template rejects this chat: {message}"):
        trained(make("llama_like"), {"messages": turns})


def test_a_missing_template_is_a_user_error(make):
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    tokenizer.chat_template = None
    with pytest.raises(UserError, match="the tokenizer has no chat template; use an instruction-tuned model, or set"):
        ChatTokenizer(tokenizer, "assistant").encode([row_formats.Chat(TWO)])


def test_the_date_of_a_template_is_fixed(make):
    outcome = encode(make("llama_like"), {"messages": TWO})
    assert "Today: 26 Jul 2024" in make("llama_like").tokenizer.decode(outcome.tokens)


def test_all_tokens_of_a_text_and_its_end_are_trained(make):
    outcome = encode(make("qwen_like"), {"text": "plain é"}, "text")
    assert make("qwen_like").tokenizer.decode(outcome.tokens) == "plain é<|end|>" and outcome.loss_mask.all()


@pytest.mark.parametrize("content", ["\n\nled by lines", "ends with lines  \n\n", " a"])
def test_no_token_crosses_the_edge_of_a_turn(content):
    """A tokenizer with merges may join the line breaks of template and answer. No prompt contains such a token."""
    if not SMOLLM2.is_dir():
        pytest.skip("needs a tokenizer with merges: make smollm2")
    tokenizer = AutoTokenizer.from_pretrained(SMOLLM2)
    turns = turns_of("user", "q", "assistant", content)
    encoder = ChatTokenizer(tokenizer, "assistant")
    assert trained(encoder, {"messages": turns}) == [content + "<|im_end|>"]
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, return_dict=False)
    assert encode(encoder, {"messages": turns}).tokens[: len(prompt)].tolist() == prompt, "as at generation"


def test_a_token_that_crosses_an_edge_is_divided(make):
    """The answer follows a space in the template, and the tokenizer joins that space to the next word."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    tokenizer.add_tokens(["ANT: ab", "c\n"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n{% endfor %}" + (
        "{{ 'ASSISTANT: ' if add_generation_prompt }}"
    )
    encoder = ChatTokenizer(tokenizer, "assistant")
    assert tokenizer.decode(encode(encoder, {"messages": turns_of("user", "q", "assistant", "abc")}).tokens) == (
        "USER: q\nASSISTANT: abc\n<|end|>"
    )
    assert trained(encoder, {"messages": turns_of("user", "q", "assistant", "abc")}) == ["abc\n<|end|>"]


HEADLESS = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"


def test_a_template_without_a_generation_prompt_trains_no_heads(make):
    assert trained(make(HEADLESS), {"messages": TWO}) == ["hé €<|im_end|>", "B c.\n\n- d<|im_end|>"]


def test_an_answer_without_a_head_begins_after_the_question(make):
    """Mistral's templates write only a space between the question's end and the answer."""
    mistral = (
        "{% for m in messages %}{{ '[INST] ' + m.content + ' [/INST]' if m.role == 'user' else ' ' + m.content }}"
        + ("{{ eos_token if m.role == 'assistant' }}{% endfor %}")
    )
    assert trained(make(mistral), {"messages": TWO}) == [" hé €<|end|>", " B c.\n\n- d<|end|>"]


@pytest.mark.parametrize(
    "ending",
    ["{{ m.content }}\n{{ eos_token }}", "{{ m.content }} {{ eos_token }}", "{{ m.content }}{{ eos_token }}\n"],
)
def test_the_end_of_text_is_trained_after_spaces_too(make, ending):
    answer = f"{{% generation %}}{ending.replace('{{ eos_token }}', '{% endgeneration %}{{ eos_token }}', 1)}"
    marked = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}" + (
        answer + "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for found, text in zip(trained(make(marked), {"messages": TWO}), ("hé €", "B c.\n\n- d"), strict=True):
        assert found.startswith(text) and found.endswith("<|end|>") and found.count("<|") == 1


ASK = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"


def test_an_end_that_the_last_turn_lacks_is_added(make):
    between = HEADLESS.replace("<|im_end|>\n", "{{ eos_token if not loop.last }}") + ASK
    assert trained(make(between), {"messages": TWO}) == ["hé €<|end|>", "B c.\n\n- d<|end|>"]
    spaced = HEADLESS.replace("<|im_end|>\n", "{{ ' <|im_end|>\n' if not loop.last }}") + ASK
    assert trained(make(spaced), {"messages": TWO}) == ["hé € <|im_end|>", "B c.\n\n- d <|im_end|>"]


def test_generation_stops_at_the_next_head_if_no_turn_has_an_end(make):
    without = HEADLESS.replace("<|im_end|>\n", "") + ASK
    assert trained(make(without), {"messages": TWO}) == ["hé €<|im_start|>", "B c.\n\n- d<|im_start|>"]


@pytest.mark.parametrize("ending", ["", "<|stop|>"])
def test_an_end_that_is_not_a_token(make, ending):
    """The template of Phi 3 with another tokenizer: generation would never stop after an earlier answer."""
    plain = f"{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}{ending}\n{{% endfor %}}"
    plain += "{{ 'assistant: ' if add_generation_prompt }}"
    with pytest.raises(
        InvalidRecord, match=rf"turn 2 .assistant.: the chat template ends it with '{re.escape(ending)}'"
    ):
        trained(make(plain), {"messages": TWO})
    assert trained(make(plain, "last"), {"messages": TWO}) == [f"B c.\n\n- d{ending}\n<|end|>"]
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    if ending:
        tokenizer.add_tokens([ending])
        tokenizer.chat_template = plain
        assert trained(ChatTokenizer(tokenizer, "assistant"), {"messages": TWO}) == [
            "hé €<|stop|>", "B c.\n\n- d<|stop|>"
        ]  # fmt: skip


def test_the_end_may_come_from_the_generation_config(tmp_path):
    AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny").save_pretrained(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [1, 3]}')
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    record = {"messages": turns_of("user", "q", "assistant", "a")}
    assert trained(ChatTokenizer(tokenizer, "assistant"), record) == ["a\n<|user|>"]


@pytest.mark.parametrize(
    ("change", "answer"),
    [
        ("m.content.split('\n')[0]", "one\ntwo"),
        ("m.content.split('</think>')[-1]", "<think>\nwhy\n</think>\n\nyes"),
    ],
)
def test_a_part_of_the_last_answer_is_not_omitted_silently(make, change, answer):
    """Templates like that of DeepSeek R1 remove the reasoning from every turn, including the trained one."""
    changed = make(HEADLESS.replace("{{ m.content }}", f"{{{{ {change} }}}}"))
    reason = r"turn 2 .assistant.: the chat template omits its content or a part of it"
    with pytest.raises(InvalidRecord, match=reason):
        trained(changed, {"messages": turns_of("user", "q", "assistant", answer)})


def test_a_date_that_cannot_be_fixed_is_refused(make):
    with pytest.raises(UserError, match="the template computes the format of its date"):
        trained(make("{% set f = '%d' %}{{ strftime_now(f) }}" + HEADLESS), {"messages": TWO})


@pytest.mark.parametrize("scheme", ["first", "always", "never"])
def test_a_tokenizer_that_joins_a_space_to_the_next_word(scheme):
    """Llama 2's tokenizer does this, and its template writes a space before the answer."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE(unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    core.decoder = decoders.Metaspace(prepend_scheme=scheme)
    special = ["<unk>", "<s>", "</s>"]
    words = ["USER: what is the colour ASSISTANT: the sky is blue and the sea too"] * 50
    core.train_from_iterator(words, trainers.BpeTrainer(special_tokens=special, vocab_size=90))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}{{ eos_token if m.role == 'assistant' }} "
        "{% endfor %}{{ 'ASSISTANT: ' if add_generation_prompt }}"
    )
    record = {
        "messages": turns_of("user", "what is", "assistant", "the sky", "user", "the colour", "assistant", "blue")
    }
    outcome = encode(ChatTokenizer(tokenizer, "assistant"), record)
    whole = tokenizer.apply_chat_template(record["messages"], tokenize=False)
    if scheme == "never":
        assert tokenizer.decode(outcome.tokens) == tokenizer.decode(tokenizer(whole)["input_ids"])
    else:
        assert outcome.tokens.tolist() == tokenizer(whole)["input_ids"], "no space is added to the text"
    found = [run.strip() for run in trained(ChatTokenizer(tokenizer, "assistant"), record)]
    assert found == ["the sky</s>", "blue</s>"]


def test_a_token_with_text_of_the_next_turn_is_refused():
    """Other tokens are divided there, but this tokenizer prepends a space to each part."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = [*"▁abUq:", "ab", "bU"]  # codespell:ignore
    core = Tokenizer(models.BPE({token: i for i, token in enumerate(letters)}, [("b", "U")]))
    core.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    core.decoder = decoders.Metaspace(prepend_scheme="always")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ 'U:' if m.role == 'user' else 'a:' }}{{ m.content }}"
        "{{ eos_token if m.role == 'assistant' and loop.last }}{% endfor %}{{ 'a:' if add_generation_prompt }}"
    )
    turns = turns_of("user", "q", "assistant", "ab", "user", "q", "assistant", "ab")
    with pytest.raises(InvalidRecord, match=r"turn 2 .assistant.: the chat template ends it with ''"):
        trained(ChatTokenizer(tokenizer, "assistant"), {"messages": turns})
    encoder = ChatTokenizer(tokenizer, "all")
    encoder.render = lambda chat: ("ab" + "U:q", [(0, 2)])  # as if the turn had no end
    (outcome,) = encoder.encode([row_formats.Chat(turns)])
    assert isinstance(outcome, InvalidRecord) and str(outcome).startswith("a token joins 'U' and a trained answer")


@pytest.mark.parametrize("file", ["glaive_toolcall_en_demo.json", "alpaca_en_demo.json"])
@pytest.mark.parametrize("name", ["llama_like", "qwen_like", "chatml_tools"])
def test_real_files(make, name, file):
    path = ROOT.parent / "shared" / "data" / file
    if not path.is_file():
        pytest.skip(f"the sample {file} is not on this machine")
    records = json.loads(path.read_text())[:60]
    form = form_of(records[0])
    encoder = make(name)
    documents = [row_formats.read(record, FieldNames(form, {}, {})) for record in records]
    for document, outcome in zip(documents, encoder.encode(documents), strict=True):
        assert not isinstance(outcome, InvalidRecord), outcome
        text = encoder.tokenizer.decode(outcome.tokens[outcome.loss_mask == 1])
        answers = [turn for turn in document.turns if turn["role"] == "assistant"]
        assert text.count(END[name]) == len(answers) and text.endswith(END[name])
        for turn, part in zip(answers, text.split(END[name]), strict=False):
            if turn["content"]:
                assert part.removeprefix(NO_THOUGHT).strip() == turn["content"].strip()
            else:
                assert turn["tool_calls"][0]["function"]["name"] in part
        assert np.isin(outcome.loss_mask, [0, 1]).all()


def call(name: str, number: int, **arguments) -> dict:
    return {"id": f"call0000{number}", "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: str, number: int) -> dict:
    return {"role": "tool", "content": content, "tool_call_id": f"call0000{number}", "name": "weather"}


CITY = {"properties": {"city": {"type": "string", "description": "größer"}}, "type": "object"}
USED = {
    "messages": [
        *turns_of("user", "weather?"),
        {"role": "assistant", "content": "", "tool_calls": [call("weather", 1, city="Zürich", days=2)]},
        result('{"sky": "grey"}', 1),
        *turns_of("assistant", "Grey.", "user", "and now?"),
        {"role": "assistant", "content": "", "tool_calls": [call("now", 2)]},
        result("12:30", 2),
        *turns_of("assistant", "Noon"),
    ],
    "tools": [
        {"type": "function", "function": {"name": "weather", "description": 'of a "city" in °C', "parameters": CITY}},
        {"type": "function", "function": {"name": "now", "description": "the time"}},
    ],
}
NO_ANSWER = "<think>\n\n</think>\n\n"
EXPECTED = {
    "next_head_ends": [
        "\n<think></think>\n<tool_call>weather\n<arg>city=Zürich</arg>\n<arg>days=2</arg>\n</tool_call><|observation|>",
        "\n<think></think>\nGrey.<|user|>",
        "\n<think></think>\n<tool_call>now\n</tool_call><|observation|>",
        "\n<think></think>\nNoon<|user|>",
    ],
    "named_results": [
        ' to=functions.weather<|channel|>commentary<|message|>{"city": "Zürich", "days": 2}<|call|>',
        "<|channel|>final<|message|>Grey.<|end|>",
        " to=functions.now<|channel|>commentary<|message|>{}<|call|>",
        "<|channel|>final<|message|>Noon<|return|>",
    ],
    "strict_turns": [
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Zürich", "days": 2}, "id": "call00001"}]<|end|>',
        " Grey.<|end|>",
        '[TOOL_CALLS][{"name": "now", "arguments": {}, "id": "call00002"}]<|end|>',
        " Noon<|end|>",
    ],
    "results_inside": [
        '<|tool_call>call:weather{city:<|"|>Zürich<|"|>,days:2}<tool_call|><|tool_response>',
        "Grey.<turn|>",
        "<|tool_call>call:now{}<tool_call|><|tool_response>",
        "Noon<turn|>",
    ],
    "always_a_head": [
        '<|start_call|>{\n  "name": "weather",\n  "arguments": {\n    "city": "Zürich",\n    "days": 2\n  }\n}'
        "<|end_call|><|eot_id|>",
        "<|start_text|>Grey.<|end_text|><|eot_id|>",
        '<|start_call|>{\n  "name": "now",\n  "arguments": {}\n}<|end_call|><|eot_id|>',
        "<|start_text|>Noon<|end_text|><|eot_id|>",
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_calls_and_results_of_every_kind_of_template(make, name):
    assert trained(make(name), USED) == EXPECTED[name]
    rest = encode(make(name, "all"), USED)
    untrained = make(name).tokenizer.decode(rest.tokens[rest.loss_mask == 0])
    quoted = json.dumps('{"sky": "grey"}')[1:-1] if name == "named_results" else '{"sky": "grey"}'
    assert untrained == quoted + "12:30", "the results, and nothing else"


def test_a_template_that_wants_arguments_as_text(make):
    """The template of DeepSeek V3 joins them to a string."""
    text = template("named_results").replace("call.function.arguments | tojson ~", "call.function.arguments +")
    assert text != template("named_results")
    text = text.replace("'<|channel|>commentary<|message|>' ~ ", "'<|channel|>commentary<|message|>' + ")
    assert trained(make(text), USED) == EXPECTED["named_results"]


@pytest.mark.parametrize("name", EXPECTED)
def test_a_chat_that_ends_with_a_call(make, name):
    for count in (2, 6):
        record = USED | {"messages": USED["messages"][:count]}
        assert trained(make(name), record) == EXPECTED[name][: count // 2]


@pytest.mark.parametrize("name", [*EXPECTED, "qwen_like", "opened_thought"])
def test_tools_that_the_template_omits_are_refused(make, name):
    """Apriel prints tools as Python does, Reka as JSON in ASCII. Both print their descriptions."""
    assert trained(make(name), USED)
    tools = [USED["tools"][0]]
    text = (
        template(name).replace("tool | ", "tool.function.name | ").replace("tools | string", "tools[0].function.name")
    )
    text = text.replace("tool.function.description", "''")
    if name == "opened_thought":
        text = text.replace("{%- set ns", "{%- set tools = [] -%}{%- set ns")
    with pytest.raises(InvalidRecord, match="tools: the chat template omits the tools"):
        trained(make(text), USED | {"tools": tools})


THINKING = [
    *turns_of("user", "a"),
    {"role": "assistant", "content": "first", "reasoning_content": "old"},
    *turns_of("user", "b"),
    {"role": "assistant", "content": "second", "reasoning_content": "new"},
]
IN_CONTENT = turns_of("user", "a", "assistant", "<think>\nold\n</think>\n\nfirst") + turns_of(
    "user", "b", "assistant", "<think>\nnew\n</think>\n\nsecond"
)


@pytest.mark.parametrize("turns", [THINKING, IN_CONTENT], ids=["field", "content"])
def test_reasoning_in_the_content_is_trained_where_the_template_shows_it(make, turns):
    record = {"messages": turns}
    assert trained(make("next_head_ends"), record) == [
        "\n<think></think>\nfirst<|user|>", "\n<think>new</think>\nsecond<|user|>"
    ]  # fmt: skip
    assert trained(make("opened_thought"), record) == ["first<|im_end|>", "new\n</think>\n\nsecond<|im_end|>"]


AFTER = "\n</think>\n\nsecond"


@pytest.mark.parametrize(
    ("name", "turns", "unprompted", "everything"),
    [
        ("opened_thought", TWO, ["hé €", "\n</think>\n\nB c.\n\n- d"], ["hé €", NO_ANSWER + "B c.\n\n- d"]),
        (
            "opened_thought",
            THINKING,
            ["first", "new\n</think>\n\nsecond"],
            ["first", "<think>\nnew\n</think>\n\nsecond"],
        ),
        ("closed_thought", TWO, ["hé €", "B c.\n\n- d"], ["hé €", NO_ANSWER + "B c.\n\n- d"]),
        ("qwen_like", TWO, ["hé €", NO_ANSWER + "B c.\n\n- d"], ["hé €", NO_ANSWER + "B c.\n\n- d"]),
    ],
)
@pytest.mark.parametrize("supplied", [False, True])
def test_text_that_the_template_supplies_is_trained_on_request(make, name, turns, unprompted, everything, supplied):
    """Only what the prompt contains is supplied. Qwen 3 thinks by default, so its prompt has no empty thought."""
    expected = [text + "<|im_end|>" for text in (everything if supplied else unprompted)]
    assert trained(make(name, supplied=supplied), {"messages": turns}) == expected


def test_a_supplied_thought_follows_the_markers_of_the_template(make):
    text = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}" + (
        "<think>\n\n</think>\n\n{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>"
        "{% endif %}\n{% endfor %}{{ '<|im_start|>assistant\n<think>\n' if add_generation_prompt }}"
    )
    answers = ["hé €<|im_end|>", "B c.\n\n- d<|im_end|>"]
    assert trained(make(text), {"messages": TWO}) == ["\n</think>\n\n" + answer for answer in answers]
    assert trained(make(text, supplied=True), {"messages": TWO}) == [NO_ANSWER + answer for answer in answers]


def test_a_template_that_moves_the_system_prompt(make):
    moved = template("strict_turns").replace("if loop.last and", "if message == users[-1] and")
    assert trained(make(moved), {"messages": SYSTEM + TWO}) == [" hé €<|end|>", " B c.\n\n- d<|end|>"]
    with pytest.raises(InvalidRecord, match=r"turn 1 .system.: the chat template omits its content"):
        trained(make("strict_turns"), {"messages": SYSTEM + TWO})


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("{{ m.content | unique | join }}", "changes the text of the turns"),
        ("{{ m.content | upper }}", None),
        ("{{ m.content | replace('e', 'ee') }}", None),
        (
            "{{ m.content[:1] ~ messages[0].content ~ m.content[1:] }}",
            "turn 2 .assistant.: .* renders turn 1 inside it",
        ),
        ("{{ messages[0].content ~ m.content }}", "turn 2 .assistant.: "),
        ("{{ m.content ~ messages[0].content }}", "turn 2 .assistant.: .* a part of it elsewhere"),
    ],
)
def test_a_span_with_text_of_another_turn_is_refused(make, change, reason):
    changed = make(HEADLESS.replace("{{ m.content }}", change) + ASK)
    turns = turns_of("user", "hid", "assistant", "help", "user", "and then", "assistant", "done")
    if reason is None:
        assert len(trained(changed, {"messages": turns})) == 2
    else:
        with pytest.raises(InvalidRecord, match=reason):
            trained(changed, {"messages": turns})


WORDS = [
    "Zürich",
    "a b",
    "x_1",
    '"quoted"',
    "<b>bold</b>",
    "{}",
    "[1]",
    "user",
    "\\n",
    "l1\nl2",
    "</tool_call>",
    "…",
    "𠀀",
    "42",
    "&c",
]


def random_chat(draw: random.Random) -> dict:
    """Return a chat whose turns consist of words that name their turn, between other texts."""
    turns: list[dict] = []

    def text() -> str:
        return " ".join([f"t{len(turns)}w", *draw.choices(WORDS, k=draw.randint(0, 3)), f"t{len(turns)}z"])

    for _ in range(draw.randint(1, 3)):
        turns.append({"role": "user", "content": text()})
        if draw.random() < 0.5:
            number = len(turns)
            arguments = {"city": text(), "days": draw.randint(0, 9)} if draw.random() < 0.7 else {}
            turns.append({"role": "assistant", "content": "", "tool_calls": [call("weather", number, **arguments)]})
            turns.append(result(text(), number))
        turns.append({"role": "assistant", "content": text()})
    return {"messages": turns, "tools": USED["tools"]}


ALL = ["chatml_tools", "qwen_like", "opened_thought", *EXPECTED]


@pytest.mark.parametrize("name", ALL)
def test_the_trained_text_of_random_chats(make, name):
    draw = random.Random(name)
    encoder, everything = make(name), make(name, "all")
    for _ in range(25):
        record = random_chat(draw)
        answers = [i for i, turn in enumerate(record["messages"]) if turn["role"] == "assistant"]
        runs = trained(encoder, record)
        assert len(runs) == len(answers)
        for i, run in zip(answers, runs, strict=True):
            turn = record["messages"][i]
            calls = turn.get("tool_calls", [])
            own = [turn["content"], *(value for c in calls for value in c["function"]["arguments"].values())]
            shown = [str(text) if "tool_calls" not in turn else json.dumps(text, ensure_ascii=False) for text in own]
            assert all(a in run or b in run for a, b in zip(map(str, own), shown, strict=True))
            assert {*re.findall(r"t\d+[wz]", run)} <= {f"t{i}w", f"t{i}z"}, "text of another turn"
            assert "weather" in run if calls else run.count(turn["content"]) == 1
            assert run.endswith(("|>", "<|tool_response>")) and not re.search(r"assistant|model\n|\[INST\]", run)
        outcome = encode(everything, record)
        untrained = everything.tokenizer.decode(outcome.tokens[outcome.loss_mask == 0])
        results = [turn["content"] for turn in record["messages"] if turn["role"] == "tool"]
        forms = {"".join(results), "".join(json.dumps(text, ensure_ascii=False)[1:-1] for text in results)}
        assert untrained in forms


def test_the_common_prefix_is_the_longest():
    pairs = {("", "a"): 0, ("abc", "abd"): 2, ("ab", "abc"): 2, ("x", "y"): 0, ("é", "é"): 1}
    assert {pair: chat_rendering.common_prefix(*pair) for pair in pairs} == pairs
