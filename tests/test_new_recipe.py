"""Write recipes for models that no file names, and train each under two gears without an edit."""

import json
import re
import shutil
import subprocess
import sys

import jsonschema
import peft
import pytest
import ruamel.yaml
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoTokenizer

import new_recipe
from gearbox import ROOT
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from gearbox.model import random_init
from gearbox.planning.new_recipe import described
from support.composites import write_composite
from support.ranks import run_ranks, skip_loading_back

TOKENIZER = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
FAMILIES = "apertus cwm diffllama ernie4_5 gpt_neox helium jais2 minicpm3 persimmon phimoe".split()
SMALL = "batch.rows=4 batch.row_tokens=64 train.steps=2 eval.samples=0 save.every=0".split()


def write_model(folder, family="llama", tokenizer=TOKENIZER):
    """Write a small random model of a family; return its folder."""
    config = random_init.shrink_config(CONFIG_MAPPING[family](), tokenizer)
    random_init.write_random(config, tokenizer, 0, folder)
    return folder


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.fixture
def write(tmp_path, chats):
    """Return a function that writes the recipe of a model, and returns its path."""

    def call(model, *arguments: str):
        path = tmp_path / "mine.yaml"
        new_recipe.main([str(model), "--data", str(chats), "--output", str(path), "--force", *arguments])
        return path

    return call


@pytest.fixture
def base(tmp_path):
    """Return the folder of a model without a chat template."""
    folder = write_model(tmp_path / "base")
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    assert AutoTokenizer.from_pretrained(folder).chat_template is None
    return folder


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Return a function that trains two steps of a recipe under a gear, and returns the losses."""
    skip_loading_back(monkeypatch)

    def call(recipe, gear: str, num_ranks: int = 2):
        arguments = [str(recipe), f"run.dir={tmp_path}", f"run.name={gear}", *SMALL]
        outcome = run_ranks(gear, arguments, tmp_path, num_ranks)
        assert set(outcome.codes) == {0}, outcome.output
        return outcome

    return call


@pytest.mark.ranks
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_that_no_file_names_trains_without_an_edit(family, write, runs, tmp_path):
    recipe = write(write_model(tmp_path / family, family), "--gpus", "2x24GB")
    losses = [runs(recipe, gear).losses for gear in ("fsdp", "zero3")]
    assert len(losses[0]) == 2 and losses[1] == pytest.approx(losses[0], rel=1e-4)


def test_no_file_names_these_families():
    files = [
        path for name in ("src", "recipes", "accelerate_configs", "ds_configs") for path in (ROOT / name).rglob("*")
    ]
    texts = [path.read_text() for path in files if path.suffix in (".py", ".yaml", ".json", ".jinja")]
    assert len(texts) > 120
    assert [name for name in FAMILIES if any(re.search(rf"\b{name}\b", text) for text in texts)] == []


def test_a_recipe_is_short_and_an_editor_finds_its_schema(write, tmp_path, capsys):
    path = write(write_model(tmp_path / "llama"), "--gpus", "2x24GB")
    lines = path.read_text().splitlines()
    assert len(lines) <= 30 and max(map(len, lines)) <= 120
    schema = re.fullmatch(r"# yaml-language-server: \$schema=(\S+)", lines[0])[1]
    validator = jsonschema.Draft202012Validator(json.loads((path.parent / schema).read_text()))
    content = ruamel.yaml.YAML(typ="safe").load(path)
    assert [error.message for error in validator.iter_errors(content)] == []
    parts = [float(found[1]) for line in lines if (found := re.match(r"#\s+([\d.]+) [GM]B  (?!in all)", line))]
    (total,) = [float(found[1]) for line in lines if (found := re.match(r"#\s+([\d.]+) [GM]B  in all", line))]
    assert parts and total == pytest.approx(sum(parts), abs=0.05)
    head = " ".join(line.removeprefix("#").strip() for line in lines)  # without its line breaks
    assert "<|end|> ends a turn." in head and "two 24 GB GPUs" in head
    shown = capsys.readouterr().out
    assert re.search(r"model\.name +TinyLlama/\S+ -> \S+/llama +the model given\n", shown), "the difference"
    assert "«" in shown and "packed rows" in shown, "the preview"
    launch = "accelerate launch --config_file accelerate_configs/ddp.yaml --num_processes 2 src/train.py"
    assert f"  {launch} {path}\n" in shown and f"  {launch} {path} run.rehearse=true\n" in shown
    assert f"  make prove RECIPE={path}\n" in shown


@pytest.mark.parametrize(
    "name", ['a "b"\'s', "a\nb: c", "ünï 漢字 😀", "a: b #c", "x\x85y", "2024-01-01", "s/../b=1", "\x1b[1m"]
)
def test_any_name_of_a_folder_is_written_as_it_is(name, write, tmp_path, monkeypatch):
    (tmp_path / "s").mkdir()
    monkeypatch.chdir(tmp_path)
    path = write(write_model(tmp_path / name).relative_to(tmp_path))
    assert load_recipe(path).model.name == name
    assert all(line.isprintable() for line in path.read_text().splitlines() if line.startswith("#"))


def test_a_file_is_replaced_only_when_asked(tmp_path, chats, monkeypatch):
    model, path = write_model(tmp_path / "model"), tmp_path / "mine.yaml"
    path.write_text("mine")
    arguments = [str(model), "--data", str(chats), "--output", str(path)]
    with pytest.raises(UserError, match=r"mine\.yaml exists; add --force to replace it"):
        new_recipe.main(arguments)
    edit(model / "config.json", quantization_config={"quant_method": "gptq"})
    with pytest.raises(UserError, match="quantized"):
        new_recipe.main([*arguments, "--force"])
    assert path.read_text() == "mine"
    edit(model / "config.json", quantization_config=None)
    new_recipe.main([*arguments, "--force"])
    assert path.read_text().startswith("# yaml-language-server")
    path.unlink()
    render = new_recipe.recipe_text.render
    monkeypatch.setattr(new_recipe.recipe_text, "render", lambda *given: path.write_text("other") and render(*given))
    with pytest.raises(UserError, match="exists"):  # it appeared while the model was being read
        new_recipe.main(arguments)
    assert path.read_text() == "other"
    assert {one.name for one in tmp_path.iterdir()} == {"model", "mine.yaml"}


@pytest.mark.parametrize("output", ["mine.txt", "a=b.yaml", "nowhere/mine.yaml", "folder.yaml", f"{'x' * 300}.yaml"])
def test_an_output_that_no_run_could_read_is_refused(output, tmp_path):
    (tmp_path / "folder.yaml").mkdir()
    with pytest.raises(UserError, match=r"^--output: "):
        new_recipe.main(["recipes/tiny", "--output", str(tmp_path / output), "--force"])


def damage(folder, name):
    """Make a folder wrong in the way that a test names."""
    config = folder / "config.json"
    if name == "gguf":
        config.unlink()
        (folder / "model.gguf").write_bytes(b"GGUF")
    elif name == "no tokenizer":
        (folder / "tokenizer.json").unlink()
        (folder / "tokenizer_config.json").unlink()
    elif name == "pickles":
        (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    elif name == "not json":
        config.write_text("{")
    else:
        key, value = {
            "gptq": ("quantization_config", {"quant_method": "gptq", "bits": 4}),
            "fp8": ("quantization_config", {"quant_method": "fp8"}),
            "unknown": ("model_type", "nobody-knows"),
            "images": ("model_type", "vit"),
        }[name]
        edit(config, **{key: value})


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gguf", "has no config.json; convert GGUF"),
        ("no tokenizer", "has no tokenizer files"),
        ("pickles", "has no safetensors weights"),
        ("not json", "is not valid JSON"),
        ("gptq", r"quantized \(gptq\), and cannot be trained; give the model with bf16 weights"),
        ("fp8", r"quantized \(fp8\)"),
        ("unknown", "does not recognize this architecture"),
        ("images", "is not a causal language model"),
    ],
)
def test_a_model_that_cannot_be_trained_is_refused(name, problem, write, tmp_path):
    damage(folder := write_model(tmp_path / "model"), name)
    with pytest.raises(UserError, match=problem) as refused:
        write(folder)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("", "is empty"),
        ("models/nothing-here", "no such folder"),
        ("../nothing", "no such folder"),
        ("x" * 5000, "is not a path"),
        ("a\udcff", "is not a path"),
        ("recipes/tiny/config.json", "is a file; give its folder"),
        (
            "nobody/knows-this",
            "give a folder, save config.json as recipes/architectures/nobody--knows-this.json, or export HF_TOKEN",
        ),
    ],
)
def test_a_name_of_no_model_is_refused(name, problem, write):
    with pytest.raises(UserError, match=f"^MODEL: .*{problem}"):
        write(name)


def test_a_hub_model_needs_only_its_shipped_config(write, capsys):
    path = write("Qwen/Qwen2.5-7B-Instruct", "--gpus", "8x80GB")
    assert load_recipe(path).model.name == "Qwen/Qwen2.5-7B-Instruct" and "(7.62B weights)" in path.read_text()
    assert "its chat template was not read" in path.read_text() and "packed rows" not in capsys.readouterr().out


@pytest.mark.ranks
def test_a_model_without_a_template_gets_ours_and_its_tokens(base, write, runs):
    recipe = load_recipe(path := write(base, "--method", "lora"))
    assert recipe.model.add_tokens == ["<|im_start|>", "<|im_end|>"] and recipe.optim.lr == 2e-4
    assert "<|im_start|>assistant" in runs(path, "single", 1).output
    with pytest.raises(UserError, match="dora cannot add the tokens"):
        write(base, "--method", "dora")


def test_texts_need_no_template(base, write, tmp_path):
    (tmp_path / "texts.txt").write_text("one paragraph\n\n" + "another\n\n" * 30)
    path = write(base, "--data", str(tmp_path / "texts.txt"))
    assert load_recipe(path).data.chat_template is None and "<|end|> ends each" in path.read_text()
    edit(base / "tokenizer_config.json", eos_token=None)
    with pytest.raises(UserError, match="no end-of-text token"):
        write(base, "--data", str(tmp_path / "texts.txt"))
    assert "The tokenizer has no token that ends one" in path.read_text().replace("\n# ", " ")


def test_few_rows_are_planned_with_few_in_a_pass(write, tmp_path, capsys):
    path = write(write_model(tmp_path / "llama"), "--gpus", "2x24GB")
    recipe = load_recipe(path)
    assert recipe.batch.rows < 8 and recipe.batch.micro_rows <= -(-recipe.batch.rows // 2)
    assert "Activations of 8 x" not in path.read_text()


def test_a_recipe_that_is_made_like_itself_stays_the_same(write, tmp_path, capsys):
    model = write_model(tmp_path / "llama")
    first = write(model, "--gpus", "2x24GB").rename(tmp_path / "first.yaml")
    new_recipe.main([str(model), "--like", str(first), "--gpus", "2x24GB", "--output", str(tmp_path / "second.yaml")])
    assert "nothing differs from" in capsys.readouterr().out
    second = (tmp_path / "second.yaml").read_text()
    assert second.replace("first.yaml", "ddp_4gpu_full.yaml") == first.read_text()


@pytest.mark.parametrize(("family", "expected"), [("gpt2", 1024), ("llama", 2048), ("mamba", 2048)])
def test_rows_are_no_longer_than_the_positions(family, expected, write, tmp_path):
    assert load_recipe(write(write_model(tmp_path / family, family))).batch.row_tokens == expected


def test_the_towers_of_a_composite_are_not_counted(write, tmp_path):
    path = write(write_composite("Gemma3", tmp_path / "composite"))
    text = CONFIG_MAPPING["gemma3_text"].from_pretrained(tmp_path / "composite")
    count = sum(p.numel() for p in AutoModelForCausalLM.from_config(text).parameters())
    assert f"({count:,} weights)" in path.read_text()


def test_code_of_a_model_is_not_run(write, tmp_path):
    folder = write_model(tmp_path / "coded")
    edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "coding.Config"})
    (folder / "coding.py").write_text(f"open({str(tmp_path / 'was_run')!r}, 'w')\n")
    with pytest.raises(UserError, match="comes with Python code; read it, then set"):
        write(folder)
    text = (tmp_path / "mine.yaml").read_text()
    assert "coding.py. Read that, then add trust_remote_code: true" in text and not (tmp_path / "was_run").exists()
    assert not load_recipe(tmp_path / "mine.yaml").model.trust_remote_code


def test_weights_that_are_missing_become_random(write, tmp_path):
    shutil.copytree(ROOT / "recipes/tiny", tmp_path / "bare")
    path = write(tmp_path / "bare")
    assert load_recipe(path).model.init == "random" and "The folder has no weights" in path.read_text()


@pytest.mark.ranks
def test_a_saved_adapter_is_continued(write, runs, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(write_model(tmp_path / "model"))
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM")
    peft.get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    path = write(tmp_path / "adapter")
    recipe = load_recipe(path)
    assert (recipe.model.name, recipe.adapter.path) == (str(tmp_path / "model"), str(tmp_path / "adapter"))
    assert (recipe.adapter.r, recipe.method) == (4, "lora")
    assert len(runs(path, "single", 1).losses) == 2
    with pytest.raises(UserError, match=r"--method: is full, but .* is an adapter of lora"):
        write(tmp_path / "adapter", "--method", "full")
    edit(tmp_path / "adapter/adapter_config.json", base_model_name_or_path=None)
    with pytest.raises(UserError, match="base_model_name_or_path: is empty"):
        write(tmp_path / "adapter")


def test_a_named_recipe_keeps_its_data_and_its_length(tmp_path):
    model, path = write_model(tmp_path / "model"), tmp_path / "mine.yaml"
    new_recipe.main([str(model), "--like", "recipes/tiny.yaml", "--gpus", "2x24GB", "--output", str(path)])
    made, tiny = load_recipe(path), load_recipe(ROOT / "recipes/tiny.yaml")
    for group in ("data", "batch", "optim", "schedule", "train", "eval"):
        if group != "batch":
            assert getattr(made, group) == getattr(tiny, group), group
    assert made.batch.row_tokens == 128 and made.method == "full" and made.model.init == "pretrained"


def test_the_gpus_of_this_machine_are_taken(tmp_path, monkeypatch):
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nprintf '0, 81559\\n1, 81559\\n'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    gpus, note = new_recipe.find_gpus(None)
    assert (described(gpus), gpus.gpu.memory) == ("two 80 GB GPUs", 81559 * 2**20) and "of this machine" in note
    program.write_text("#!/bin/sh\nexit 9\n")
    with pytest.raises(UserError, match=r"^--gpus: nvidia-smi does not show the GPUs of this machine"):
        new_recipe.find_gpus(None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert described(new_recipe.find_gpus(None)[0]) == "one 24 GB GPU"


@pytest.mark.cold
def test_a_wrong_argument_is_one_line():
    command = [sys.executable, "src/new_recipe.py", "nobody/knows-this", "--gpus", "3x", "--output", "x.yaml"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "gearbox: --gpus: is '3x'; write a count and a kind, such as 2x80GB or 8xH100\n"


@pytest.mark.parametrize(
    ("data", "problem"), [("", "is empty; give a path"), ("none.jsonl", "no such file 'none.jsonl'")]
)
def test_data_that_are_not_there_are_refused_by_the_name_of_their_option(data, problem, tmp_path):
    with pytest.raises(UserError, match=f"^--data: {problem}"):
        new_recipe.main(["recipes/tiny", "--data", data, "--output", str(tmp_path / "mine.yaml")])
