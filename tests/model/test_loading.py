"""Test that models and tokenizers load, and that anything that could run code is refused."""

import json
import os
from contextlib import suppress

import pytest
import torch
import transformers
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

import ask
from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.config.recipe import Model
from gearbox.errors import UserError
from gearbox.model import loading, random_init
from gearbox.model.pretrained import Pretrained

TOKENIZER = transformers.AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
TINY = Model(name=str(ROOT / "recipes/tiny"))


def caused_by(kind: type[Exception]) -> Exception:
    """Return the OSError that transformers raises, with an error of huggingface_hub as its cause."""
    error = OSError("transformers' page of advice")
    error.__cause__ = kind.__new__(kind)
    return error


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (caused_by(GatedRepoError), "is gated: accept its terms at https://huggingface.co/org/x, then export HF_TOKEN"),
        (caused_by(RepositoryNotFoundError), "'org/x' is not on the Hub"),
        (caused_by(LocalEntryNotFoundError), "is not on this machine and the Hub cannot be reached"),
        (OSError("We couldn't connect to the hub"), "is not on this machine and the Hub cannot be reached"),
        (ValueError("the file\nis broken"), "cannot be loaded: the file is broken"),
    ],
)
def test_load_errors_are_explained(error, said):
    text = str(Pretrained("org/x").explain(error))
    assert said in text
    assert "\n" not in text


class Payload:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (os.mkdir, (str(self.path),))


def a_model(folder):
    random_init.write_random(
        loading.load_config(TINY, rehearse=False), loading.load_tokenizer(TINY, None, False), 0, folder
    )
    return folder


def loaded(folder):
    recipe = load_recipe(ROOT / "recipes/tiny.yaml", [f"model.name={folder}"])
    return loading.load(str(folder), recipe, TOKENIZER, "no")


def test_pickled_weights_are_refused_and_do_not_run(tmp_path):
    folder, mark = a_model(tmp_path / "m"), tmp_path / "it-ran"
    (folder / "model.safetensors").unlink()
    torch.save({"w": Payload(mark)}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="has no safetensors weights, and pickled weights could run code"):
        loaded(folder)
    assert not mark.exists()


@pytest.mark.parametrize("part", ["config", "tokenizer"])
def test_a_models_code_runs_only_if_the_recipe_allows_it(tmp_path, part):
    folder, mark = a_model(tmp_path / "m"), tmp_path / "it-ran"
    code = f"import os\nos.mkdir({str(mark)!r})\nfrom transformers import LlamaConfig\nclass Odd(LlamaConfig):\n"
    (folder / "odd.py").write_text(code + "    model_type = 'odd'\n")
    settings = json.loads((folder / "config.json").read_text()) | {"model_type": "odd"}
    (folder / "config.json").write_text(json.dumps(settings | {"auto_map": {"AutoConfig": "odd.Odd"}}))
    if part == "config":
        with pytest.raises(UserError, match="comes with Python code; read it"):
            loading.load_config(Model(name=str(folder)), rehearse=False)
        assert not mark.exists()
        with pytest.raises(UserError, match="not a causal language model"):  # its code has run and registered a config
            loading.load_config(Model(name=str(folder), trust_remote_code=True), rehearse=False)
        assert mark.exists()
    else:
        with suppress(UserError):
            loading.load_tokenizer(Model(name=str(folder)), None, rehearse=False)
        assert not mark.exists()


@pytest.mark.parametrize(
    "escape",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.mkdir('MARK') }}",
        "{{ messages.append(1) }}",
        "{% for x in [].__class__.__base__.__subclasses__() %}{{ x }}{% endfor %}",
    ],
)
def test_a_chat_template_cannot_leave_its_sandbox(tmp_path, escape):
    mark = tmp_path / "it-ran"
    path = tmp_path / "escape.jinja"
    path.write_text(escape.replace("MARK", str(mark)))
    tokenizer = loading.load_tokenizer(TINY, str(path), rehearse=False)
    with pytest.raises(Exception, match=r"unsafe|is not safely callable|undefined|not safe"):
        tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], tokenize=False)
    assert not mark.exists()


def test_trusting_code_prints_a_warning(train):
    outcome = train("single", "model.trust_remote_code=true")
    assert outcome.codes == [0]
    assert "WARNING: model.trust_remote_code runs the code shipped with recipes/tiny" in outcome.output


def test_a_saved_model_answers(train, capsys):
    folder = train("fsdp", "adapter.method=lora").folder
    ask.main([f"{folder}/model", "sort dbca", "max_new_tokens=3"])
    said = capsys.readouterr()
    assert said.err == ""
    assert len(said.out.strip()) <= 3 * 4, "three byte tokens, shown as at most three characters"


def test_a_scaled_embedding_keeps_its_scale_in_4_bits_under_zero3(train, tmp_path):
    """Gemma multiplies its embeddings by a buffer that no file holds. Without its value a run trains nothing."""
    transformers.Gemma3TextConfig(num_hidden_layers=2, sliding_window=64).save_pretrained(tmp_path / "gemma")
    given = (f"model.name={tmp_path / 'gemma'}", "adapter.method=lora", "model.quantize=nf4", "optim.eps=1e-3")
    alone, sharded = train("single", *given, "run.name=alone"), train("zero3", *given, ranks=2)
    assert set(alone.codes + sharded.codes) == {0}, sharded.output
    assert sharded.losses == pytest.approx(alone.losses, rel=1e-5)
