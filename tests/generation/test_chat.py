"""Test what a chat reads, what it answers, and what reaches the screen."""

import io
import os
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, decoders, models
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

import ask
import chat as chat_script
from gearbox.errors import UserError
from gearbox.generation.chat import NO_SYSTEM, Chat, Sampling, Speakers
from gearbox.generation.saved_model import base_of, find_model
from gearbox.generation.streaming import Pieces, TextStream
from gearbox.model.pretrained import Pretrained
from support.speaking import Terminal, save_random, save_speaker, tokenizer_of

TURN = "{{ '<|user|>' if m.role == 'user' else '<|assistant|>' }}{{ m.content }}<|end|>"
ASK = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
REFUSES_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    + TURN
    + "{% endfor %}"
    + ASK
)
DROPS_SYSTEM = "{% for m in messages if m.role != 'system' %}" + TURN + "{% endfor %}" + ASK
HOSTILE = "a\x1b[2J\x07é漢😀\x9bz"


def chat_with(folder, tokens: int = 12, **sampling) -> Chat:
    notes: list[str] = []
    chat = Chat(Speakers.load(str(folder), False, "x").tuned, Sampling(tokens, **sampling), notes.append)
    chat.notes = notes
    return chat


def generated(folder, turns, tokens=12, model=None) -> str:
    """Return what plain transformers answer."""
    tokenizer = tokenizer_of()
    ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    model = model or AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(**ids, max_new_tokens=tokens, do_sample=False, pad_token_id=3)
    return tokenizer.decode(made[0, ids["input_ids"].shape[1] :], skip_special_tokens=True).strip()


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_greedy_answers_are_those_of_generate(tmp_path, capsys, family):
    folder = save_random(tmp_path / "m", family)
    chat, turns = chat_with(folder), []
    for question in ("abc", "more", "é漢😀"):
        heard = []
        turns.append({"role": "user", "content": question})
        answer = chat.ask(question, lambda piece, heard=heard: heard.append(piece.text))
        assert answer.text == generated(folder, turns) == "".join(heard)
        turns.append({"role": "assistant", "content": answer.text})
    assert chat.turns == turns
    ask.main([str(folder), "abc", "max_new_tokens=12"])
    assert capsys.readouterr().out == chat_script.printable(turns[1]["content"]) + "\n"


def test_sampled_answers_repeat_with_their_seed(tmp_path):
    chat = chat_with(save_random(tmp_path / "m"), temperature=1.5, top_p=0.9)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append((chat.ask("abc").text, chat.retry().text))
        chat.reset()
    assert found[0] == found[1] != found[2]
    assert found[0][0] != found[0][1]


def test_an_adapter_answers_with_and_without_its_base(tmp_path):
    base = save_random(tmp_path / "base")
    model = get_peft_model(
        AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, target_modules="all-linear", lora_alpha=64)
    )
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "adapter")
    tokenizer_of().save_pretrained(tmp_path / "adapter")
    speakers = Speakers.load(str(tmp_path / "adapter"), False, "x")
    chat = Chat(speakers.tuned, Sampling(12), print)
    turns = [{"role": "user", "content": "abc"}]
    tuned, plain = generated(None, turns, model=model), generated(base, turns)
    assert tuned != plain
    assert chat.ask("abc").text == tuned
    chat.speaker = speakers.base()
    assert (chat.speaker.name, chat.retry().text) == (str(base), plain)
    chat.speaker = speakers.tuned
    assert chat.retry().text == tuned
    assert [turn["role"] for turn in chat.turns] == ["user", "assistant"]


def test_a_full_fine_tune_answers_with_its_base(tmp_path, monkeypatch, capsys):
    save_speaker(tmp_path / "start", "xyz", template=None)
    save_speaker(tmp_path / "run/model", "abc")
    (tmp_path / "run/resolved.yaml").write_text(f"model: {{name: {tmp_path / 'start'}}}\n")
    tuned = Speakers.load(str(tmp_path / "run/model"), False, "x").tuned
    lines = "q\n/base\n/tuned\n\n/reset\n/retry\n"
    with pytest.raises(UserError, match="nothing was asked yet"):
        piped(monkeypatch, str(tmp_path / "run"), lines=lines)
    assert capsys.readouterr().out == "abc\nxyz\nabc\n\n"
    (tmp_path / "run/resolved.yaml").write_text("model: {name: org/base, revision: v1}\n")
    with monkeypatch.context() as patch, pytest.raises(UserError, match="org/base at v1"):
        patch.setattr(Pretrained, "tokenizer", lambda self: refuse(f"{self.name} at {self.revision}"))
        Speakers(str(tmp_path / "run/model"), tuned, False, "x", False).base()
    (tmp_path / "run/resolved.yaml").unlink()
    with pytest.raises(UserError, match="does not say from which model its training started"):
        piped(monkeypatch, str(tmp_path / "run"), lines="/base\n")


def refuse(text: str) -> None:
    raise UserError(text)


def denied(path: Path) -> bool:
    raise PermissionError(13, "Permission denied", str(path))


def test_what_a_question_or_a_stream_cannot_do(tmp_path, monkeypatch, capfd):
    """A model in another user's folder, a question and a stream that are not UTF-8, and a closed input."""
    folder = save_speaker(tmp_path / "m", "é漢")
    with pytest.raises(UserError, match="the question is not UTF-8"):
        ask.main([str(folder), "\udce9t\udce9"])
    with os.fdopen(os.dup(1), "w", encoding="ascii") as stream, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        ask.main([str(folder), "q"])
    assert capfd.readouterr().out == "\\xe9\\u6f22\n"
    monkeypatch.setattr(sys, "stdin", None)
    assert chat_script.main([str(folder)]) == 0
    with monkeypatch.context() as patch, pytest.raises(UserError, match=r"m: cannot be read: Permission denied$"):
        patch.setattr(Path, "is_file", denied)  # root, which runs these tests in CI, is denied nothing
        find_model(str(folder))


def test_ctrl_c_ends_ask(tmp_path, monkeypatch, capsys):
    """Print what there is of the answer, but do not end like an answer."""
    folder = save_speaker(tmp_path / "m", "abc")
    put, given = TextStream.put, []

    def interrupted(stream, tokens):
        put(stream, tokens)
        given.append(tokens)
        if len(given) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(TextStream, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        ask.main([str(folder), "q"])
    assert capsys.readouterr().out == "ab\n"


def piped(monkeypatch, *arguments: str, lines: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    assert chat_script.main([*arguments]) == 0


def test_each_line_of_a_pipe_gets_one_line(tmp_path, monkeypatch, capsys):
    folder = save_speaker(tmp_path / "m", "a\n\tb\x1bc")
    piped(monkeypatch, str(folder), "--system", "be short", lines="one\n\n /etc is a folder\n/quit\nnever\n")
    assert capsys.readouterr() == ("a\\n\\tb\\x1bc\n\na\\n\\tb\\x1bc\n", "")
    with pytest.raises(UserError, match="/etc/passwd: unknown command; /help lists them"):
        piped(monkeypatch, str(folder), lines="/etc/passwd is a file\n")


def test_an_answer_does_not_command_the_terminal(tmp_path, capsys):
    ask.main([str(save_speaker(tmp_path / "m", HOSTILE)), "q"])
    assert capsys.readouterr().out == "a\\x1b[2J\\x07é漢😀\\x9bz\n"


def test_the_oldest_turns_are_left_out_at_the_models_last_position(tmp_path):
    chat = chat_with(save_random(tmp_path / "m", max_position_embeddings=60), tokens=15)
    chat.system = "S"
    read = []
    generate = chat.speaker.generate
    chat.speaker.generate = lambda ids, *rest: read.append(ids[0].tolist()) or generate(ids, *rest)
    for letter in "abcdefgh":
        chat.ask(letter * 10)
    texts = [chat.speaker.tokenizer.decode(ids) for ids in read]
    assert all(len(ids) <= 45 for ids in read), "no room for the answer"
    assert all(text.startswith("<|system|>S") or "S" in text[:12] for text in texts)
    assert "a" * 10 in texts[0] and "a" * 10 not in texts[-1] and "h" * 10 in texts[-1]
    assert chat.notes and "the model reads 60 tokens: it no longer reads the oldest 1 of" in chat.notes[0]
    assert len({*chat.notes}) == len(chat.notes) and len(chat.turns) == 16
    chat.ask("x" * 99)
    assert chat.notes[-2] == "the question is longer than the 60 tokens that the model was trained to read"


def test_a_table_of_positions_is_never_exceeded(tmp_path):
    chat = chat_with(save_random(tmp_path / "m", "gpt2", n_positions=40), tokens=99)
    answer = chat.ask("abc")
    assert answer.num_tokens <= 35 and (answer.end == "full" or answer.num_tokens < 35)
    with pytest.raises(UserError, match="the question has 53 tokens, but the model has 40 positions"):
        chat.ask("x" * 50)
    assert chat.ask("abc").text, "one refused question ends the chat"


@pytest.mark.parametrize("template", [REFUSES_SYSTEM, DROPS_SYSTEM])
def test_a_template_without_a_system_role(tmp_path, template):
    chat = chat_with(save_speaker(tmp_path / "m", "xyz", template=template))
    chat.system = "Be short."
    assert [chat.ask(question).text for question in ("one", "two")] == ["xyz", "xyz"]
    prompt, _ = chat.speaker.render(chat.system, [*chat.turns, {"role": "user", "content": "three"}])
    assert prompt.startswith("<|user|>Be short.\n\none<|end|><|assistant|>xyz<|end|><|user|>two<|end|>")
    assert chat.notes == [NO_SYSTEM]


@pytest.mark.parametrize(
    "template",
    ["{{ raise_exception('no') }}", "{{ messages[0].x.y }}", "{{ 'a' * 10**15 }}", "<|user|>{{ messages | length }}"],
)
def test_a_template_that_rejects_every_chat(tmp_path, template):
    chat = chat_with(save_speaker(tmp_path / "m", "xyz", template=template))
    for system in (None, "Be short."):
        chat.system = system
        with pytest.raises(UserError, match=r"^MODEL: .* cannot answer: (Template|Undefined|Memory|Value)Error"):
            chat.ask("one")
    chat.system, chat.speaker.tokenizer.chat_template = None, REFUSES_SYSTEM
    assert chat.ask("two").text == "xyz"
    assert len(chat.turns) == 2, "a question without an answer stays in the conversation"


def test_a_model_without_a_template_continues_each_text(tmp_path, monkeypatch):
    folder = save_random(tmp_path / "m", template=None)
    chat = chat_with(folder)
    first, _, again = chat.ask("abc"), chat.ask("other"), chat.ask("abc")
    ids = torch.tensor([tokenizer_of()("abc")["input_ids"]])
    model = AutoModelForCausalLM.from_pretrained(folder)
    made = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=3)[0, ids.shape[1] :]
    assert first == again and first.text == tokenizer_of().decode(made, skip_special_tokens=True).strip()
    with pytest.raises(UserError, match="a system prompt needs a chat template"):
        piped(monkeypatch, str(folder), "--system", "x", lines="a\n")


def test_ctrl_c_ends_the_answer_and_keeps_what_there_is(tmp_path):
    chat = chat_with(save_speaker(tmp_path / "m", "abcdefgh", loops=True), tokens=10_000)

    def hear(piece, heard):
        heard.append(piece.text)
        if len(heard) == 5:
            raise KeyboardInterrupt

    heard: list[str] = []
    answer = chat.ask("q", lambda piece: hear(piece, heard))
    assert (answer.text, answer.end) == ("abcde", "interrupted")
    assert chat.turns[-1] == {"role": "assistant", "content": "abcde"}
    chat.sampling = Sampling(3)
    answer = chat.ask("r")
    assert (answer.text, answer.end) == ("abc", "full")
    assert [turn["content"] for turn in chat.turns] == ["q", "abcde", "r", "abc"]


def byte_fallback_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer that decodes like those of Llama 2 and Gemma."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"▁": 256, "▁an": 257, "an": 258, "漢": 259}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    parts = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(parts)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def streamed(tokenizer, tokens: list[int]) -> tuple[str, str]:
    """Return what is heard, and the text of the stream."""
    heard: list[str] = []
    stream = TextStream(tokenizer, heard.append)
    stream.put(torch.tensor([[1, 2, 3]]))  # the prompt
    for token in tokens:
        stream.put(torch.tensor([token]))
    stream.end()
    return "".join(heard), stream.text


@pytest.mark.parametrize("make", [tokenizer_of, byte_fallback_tokenizer])
def test_what_is_streamed_is_the_text(make):
    tokenizer = make()
    tokens = tokenizer("é漢😀 an an漢👨\u200d👩", add_special_tokens=False)["input_ids"]
    assert len(tokens) > 14, "no character is divided"
    assert streamed(tokenizer, tokens) == ("é漢😀 an an漢👨\u200d👩",) * 2
    assert streamed(tokenizer, tokens[:2] + tokens[-2:-1])[0].startswith("é"), "a half character hides the others"


def test_bytes_that_are_no_characters_hide_no_others():
    tokenizer, generator = tokenizer_of(), torch.Generator().manual_seed(0)
    known = tokenizer("é漢😀 an", add_special_tokens=False)["input_ids"]
    for number in range(40):
        tokens = [*known, *torch.randint(0, 260, (number % 9,), generator=generator).tolist(), *known]
        heard, text = streamed(tokenizer, tokens)
        assert heard.replace("\ufffd", "") == text.replace("\ufffd", "")
        assert heard.startswith("é漢😀 an") and heard.endswith("é漢😀 an")


@pytest.mark.parametrize(
    ("prompt", "text", "said"),
    [
        ("", "  Hello <b> a < b [1]\n\n ", "Hello <b> a < b [1]"),
        ("", "<think>\nA cow.\n</think>\n\nMoo", "(<think>)(\nA cow.)(\n)(</think>)\n\nMoo"),
        ("", "<think>\n\n</think>\n\nMoo", "Moo"),
        ("", "Moo <think> </think> moo", "Moo  moo"),
        ("<think>\n", "A cow.\n</think>\n\nMoo", "(A cow.)(\n)(</think>)\n\nMoo"),
        ("", "[THINK]A[/THINK]B <think", "([THINK])(A)([/THINK])B <think"),
        ("", "<think>A", "(<think>)(A)"),
        ("", "<think>", "(<think>)"),
        ("", "A</think>B", "A(</think>)B"),
    ],
)
@pytest.mark.parametrize("size", [1, 3, 99])
def test_thoughts_are_told_apart(prompt, text, said, size):
    heard: list = []
    pieces = Pieces(heard.append, prompt)
    for first in range(0, len(text), size):
        pieces.add(text[first : first + size])
    pieces.end()
    assert "".join(piece.text for piece in heard) == said.replace("(", "").replace(")", "")
    thoughts = "".join(piece.text for piece in heard if piece.is_thought)
    assert thoughts == "".join(part.partition(")")[0] for part in said.split("(")[1:])


def test_find_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_random(tmp_path / "runs/first/model")
    (tmp_path / "runs/going/checkpoints/step-3").mkdir(parents=True)
    (tmp_path / "runs/going/checkpoints/step-3/manifest.json").write_text("{}")
    assert find_model("runs/first") == find_model("runs/first/model") == "runs/first/model"
    assert find_model("org/name-1.5B") == "org/name-1.5B"
    for name, said in (
        ("runs/first1", "contains no model; a run saves its model to runs/<name>/model; did you mean 'first'?"),
        ("runs/going", "the run has not saved its model yet; write that of a checkpoint to a folder with: python src/"),
        ("runs/going/checkpoints/step-3", "is a checkpoint; write its model to a folder with: python src/export.py"),
        ("runs", "contains no model"),
        ("/nowhere", "contains no model"),
        ("a" * 300, "contains no model"),
        ("../x", "contains no model"),
        ("", "contains no model"),
    ):
        with pytest.raises(UserError, match=r".") as error:
            find_model(name)
        assert str(error.value).startswith(f"{name}: ") and said in str(error.value)


def test_base_of(tmp_path, monkeypatch):
    run = tmp_path / "run"
    model = run / "model"
    model.mkdir(parents=True)
    assert base_of(str(model)) is None
    (model / "README.md").write_text("---\nbase_model:\n- org/base\n---\n\n# Card\n")
    assert base_of(str(model)) == ("org/base", None)
    (model / "gearbox_export.json").write_text('{"base": "org/base", "base_revision": "v1"}')
    (model / "README.md").write_bytes(b"---\r\nbase_model: org/base\r\n---\r\n\r\n# Card\r\n")
    assert base_of(str(model)) == ("org/base", "v1")
    (run / "resolved.yaml").write_text("model: {name: models/x, revision: v2}\n")
    assert base_of(str(model)) == ("models/x", "v2")
    (tmp_path / "latest").symlink_to(model)
    assert base_of(str(tmp_path / "latest")) == ("models/x", "v2")
    monkeypatch.chdir(model)
    assert base_of(".") == ("models/x", "v2")
    (run / "resolved.yaml").write_text("model: [&a *a]\n")
    assert base_of(str(model)) == ("org/base", "v1"), "a damaged file is left out"
    save_random(run / "base")
    assert base_of(str(model)) == (str(run / "base"), None)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "usage: "),
        (["m", "--temperature", "x"], "argument --temperature: invalid float value: 'x'"),
        (["m", "--temperature", "nan"], "--temperature: must be from 0 to 100, found nan"),
        (["m", "--top_p", "0.5"], "--top_p: needs --temperature"),
        (["m", "--seed", "1"], "--seed: needs --temperature"),
        (["m", "--max_new_tokens", "0"], "--max_new_tokens: must be from 1 to 100000, found 0"),
        (["m", "--quantize", "int8"], "argument --quantize: invalid choice: 'int8'"),
    ],
)
def test_what_chat_refuses(arguments, said):
    with pytest.raises(UserError) as error:
        chat_script.main(arguments)
    assert said in str(error.value)


@pytest.mark.cold
def test_a_chat_on_a_terminal(tmp_path):
    """Ask, stop an answer that never ends, compare with the base, and leave."""
    save_speaker(tmp_path / "run/base", "0123456789", loops=True)
    save_speaker(tmp_path / "run/model", HOSTILE)
    terminal = Terminal("chat.py", str(tmp_path / "run"), "--max_new_tokens", "100000", NO_COLOR="1")
    start = terminal.wait_for("\r\n> ")
    assert f"{tmp_path / 'run/model'}" in start and ", on " in start and start.count("\n") <= 5
    terminal.type("hellp\x1b[D\x7fo\r")  # edited: left, erase, o
    answer = terminal.wait_for("\r\n> ")
    assert "\r\na\\x1b[2J\\x07é漢😀\\x9bz\r\n" in answer and "\x1b[2J" not in answer and "\x07" not in answer
    terminal.type("/base\r")
    terminal.wait_for("0123456789" * 3)
    terminal.type("\x03")
    assert "stopped; Ctrl-C again or Ctrl-D leaves" in terminal.wait_for("base> ")
    terminal.type("/tuned\r")
    assert "é漢😀" in terminal.wait_for("\r\n> ")
    terminal.type("\x1b[A\x1b[A\r")  # the line before the last one
    assert "base model" in terminal.wait_for("base model")
    terminal.wait_for("0123456789" * 3)
    terminal.type("\x03")
    terminal.wait_for("base> ")
    terminal.type("\x03")
    assert terminal.end() == 0
