"""Guards the trained tokens: for each row format and template, the assistant's text and its end of turn."""

import itertools
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from gearbox import ROOT
from gearbox.data import loss_mask, row_formats
from gearbox.data.loss_mask import ChatTokenizer
from gearbox.data.row_formats import FieldNames, InvalidRecord
from gearbox.errors import UserError

SMOLLM2 = ROOT / "models" / "smollm2-135m"
SPECIAL = [
    "<|im_start|>", "<|im_end|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|bos|>",
]  # fmt: skip
END = {"smollm2": "<|im_end|>", "llama_like": "<|eot_id|>", "qwen_like": "<|im_end|>", "chatml_tools": "<|im_end|>"}
NO_THOUGHT = "<think>\n\n</think>\n\n"  # Qwen's template writes it before the last answer


def template(name: str) -> str:
    if name == "smollm2":
        if not SMOLLM2.is_dir():
            pytest.skip("needs SmolLM2: make smollm2")
        return AutoTokenizer.from_pretrained(SMOLLM2).chat_template
    folder = ROOT / "recipes/chat_templates" if name == "chatml_tools" else ROOT / "tests/data/templates"
    return (folder / f"{name}.jinja").read_text()


@pytest.fixture(scope="module")
def make():
    """Return a function that pairs a template with a byte tokenizer that has the special tokens of all templates."""
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes" / "tiny")
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL, "bos_token": "<|bos|>"})

    def encoder(name: str, supervise: str = "assistant") -> ChatTokenizer:
        tokenizer.chat_template = template(name) if name in END else name
        return ChatTokenizer(tokenizer, supervise)

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
    import re

    unmarked = re.sub(r"{%- (end)?generation -%}\n", "", template("chatml_tools"))
    for record in ({"messages": SYSTEM + TWO}, {"messages": TOOLS, "tools": [WEATHER]}):
        ours, theirs = (encode(make(t), record) for t in (unmarked, template("chatml_tools")))
        assert (ours.tokens == theirs.tokens).all() and (ours.loss_mask == theirs.loss_mask).all()


def test_markers_that_do_not_match_the_turns_are_refused(make):
    twice = template("chatml_tools").replace(
        "{{- message.content -}}\n{%- for", "{{- message.content -}}{%- endgeneration -%}{%- generation -%}\n{%- for"
    )
    with pytest.raises(InvalidRecord, match="marks 4 generations, but the chat has 2 assistant turns"):
        trained(make(twice), {"messages": TWO})


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
        "USER: q\nASSISTANT: abc\n"
    )
    assert trained(encoder, {"messages": turns_of("user", "q", "assistant", "abc")}) == ["abc"]


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


def test_an_end_that_only_the_last_turn_lacks_is_trained_elsewhere(make):
    ask = "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    between = HEADLESS.replace("<|im_end|>\n", "{{ eos_token if not loop.last }}") + ask
    assert trained(make(between), {"messages": TWO}) == ["hé €<|end|>", "B c.\n\n- d"]
    broken = HEADLESS.replace("<|im_end|>", "{{ eos_token if not loop.last }}") + ask
    assert trained(make(broken), {"messages": TWO}) == ["hé €<|end|>", "B c.\n\n- d"]


def test_the_head_of_the_next_turn_is_not_an_end_of_turn(make):
    without = HEADLESS.replace("<|im_end|>\n", "") + "{{ '<|im_start|>assistant\n' if add_generation_prompt }}"
    assert trained(make(without), {"messages": TWO}) == ["hé €", "B c.\n\n- d"]


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


def test_the_common_prefix_is_the_longest():
    pairs = {("", "a"): 0, ("abc", "abd"): 2, ("ab", "abc"): 2, ("x", "y"): 0, ("é", "é"): 1}
    assert {pair: loss_mask._common_prefix(*pair) for pair in pairs} == pairs
