"""Test exports: from every kind of source, merged or not, verified, refused where they are wrong, and then absent."""

import json
import resource
import shutil
from pathlib import Path

import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file, save_file

from gearbox import filesystem
from gearbox.checkpoint.manifest import MANIFEST
from gearbox.errors import UserError
from gearbox.exporting import comparing, exporter, merging
from gearbox.model import export as writer
from support import experts
from support.exports import export, logits_of, verify_here, write_adapter, write_model
from support.methods import METHODS


@pytest.fixture(autouse=True)
def here(monkeypatch):
    verify_here(monkeypatch)


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    return write_model("llama", tmp_path_factory.mktemp("models") / "base")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory):
    return write_adapter(base, tmp_path_factory.mktemp("adapters") / "adapter")


def far(first, second):
    return comparing.difference(first[0], second[0]).distance


def refused(text, *arguments):
    """Return after an export was refused with this text, and has left nothing at its output."""
    before = {*arguments[1].parent.iterdir()}
    with pytest.raises(UserError, match=text) as error:
        export(*arguments)
    assert "\n" not in str(error.value)
    assert {*arguments[1].parent.iterdir()} == before, "something is left"


@pytest.mark.parametrize(
    ("gear", "ranks", "method", "more"),
    [
        ("zero3", 2, "full", ()),
        ("fsdp", 2, "lora", ("model.add_tokens=[ab, sort]",)),
        ("pp", 2, "dora", ()),
        ("single", 1, "qlora", ("adapter.rslora=true",)),
    ],
)
def test_a_checkpoint_is_exported_as_it_was_trained(train, tmp_path, gear, ranks, method, more):
    outcome = train(gear, "save.every=2", "train.steps=2", "optim.lr=3e-3", *METHODS[method], *more, ranks=ranks)
    assert set(outcome.codes) == {0}, outcome.output
    checkpoint, saved = outcome.folder / "checkpoints/step-2", outcome.folder / "model"
    folder = export(checkpoint, tmp_path / "a b")
    weights = "model.safetensors" if method == "full" else "adapter_model.safetensors"
    ours, theirs = load_file(folder / weights), load_file(saved / weights)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    ends = [json.loads((one / "generation_config.json").read_text())["eos_token_id"] for one in (folder, saved)]
    assert ends[0] == ends[1]
    record = json.loads((folder / "gearbox_export.json").read_text())
    assert (
        record["step"] == 2
        and record["gear"] == gear
        and {*record["files"]} == {path.name for path in folder.iterdir() if path.name != "gearbox_export.json"}
    )
    card = (folder / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front["pipeline_tag"] == "text-generation" and method in front["tags"] and "train:" in card
    if method == "full":
        return
    rounded = export(checkpoint, tmp_path / "rounded", "--dtype", "bf16")
    assert {one.dtype for one in load_file(rounded / weights).values()} == {torch.bfloat16}
    merged = export(outcome.folder, tmp_path / "merged", "--merge")
    assert not (merged / "adapter_config.json").exists()
    if method != "qlora":  # its base is the dequantized one, with which the export has compared it
        assert far(logits_of(saved), logits_of(merged)) < 1e-4
    record = json.loads((merged / "gearbox_export.json").read_text())
    assert record["verified"]["exact"]["distance"] < 1e-4 < record["verified"]["effect"]["distance"]
    assert record["merged_into"] == ("dequantized nf4" if method == "qlora" else "base")


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"use_dora": True, "use_rslora": True}),
        ("gemma3_text", {"target_modules": ["q_proj", "embed_tokens"]}),
        ("qwen3", {"target_modules": ["embed_tokens", "lm_head", "o_proj"]}),
    ],
)
def test_a_merge_computes_what_its_adapter_does(tmp_path, family, settings):
    """Gemma and Qwen tie the head to the embedding, of which one or both have an adapter here."""
    tied = {"tie_word_embeddings": True} if family == "qwen3" else {}
    base = write_model(family, tmp_path / "base", **tied)
    adapter = write_adapter(base, tmp_path / "adapter", **settings)
    merged = export(adapter, tmp_path / "merged", "--merge")
    assert far(logits_of(adapter), logits_of(merged)) < 1e-4 < 1e-2 < far(logits_of(base), logits_of(merged))
    untied = "embed_tokens" in settings.get("target_modules", ())
    is_tied = json.loads((merged / "config.json").read_text()).get("tie_word_embeddings", True)
    assert is_tied != untied or family == "llama"


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe"])
def test_adapters_of_experts_are_merged(tmp_path, family):
    base = tmp_path / "base"
    transformers.set_seed(0)
    transformers.AutoModelForCausalLM.from_config(experts.config_of(family)).save_pretrained(base)
    experts.TOKENIZER.save_pretrained(base)
    weights = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["q_proj"], target_parameters=weights)
    merged = export(adapter, tmp_path / "merged", "--merge")
    assert far(logits_of(adapter), logits_of(merged)) < 1e-4 < 1e-2 < far(logits_of(base), logits_of(merged))
    names = {*load_file(base / "model.safetensors")}
    assert names == {*load_file(merged / "model.safetensors")}


def test_several_files_and_another_dtype(base, adapter, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "SHARD_BYTES", 60_000)
    folder = export(adapter, tmp_path / "x", "--merge", "--dtype", "bf16")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert len({*index["weight_map"].values()}) > 2
    loaded = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.bfloat16}


MIXTURE = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
DEEP = MIXTURE | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1}


@pytest.mark.parametrize(
    ("family", "sizes", "in_fp32"),
    [
        ("glm4_moe", DEEP | {"n_shared_experts": 1}, {"model.layers.1.mlp.gate.e_score_correction_bias"}),
        ("ernie4_5_moe", MIXTURE | {"moe_num_experts": 8}, {"model.layers.1.mlp.gate.weight"}),
        ("hunyuan_v1_moe", {"num_experts": 4, "moe_topk": 2}, set()),
        ("mamba", {"state_size": 8}, set()),
    ],
)
def test_a_model_in_bf16_keeps_in_fp32_what_its_family_does(tmp_path, family, sizes, in_fp32):
    """Route tokens by biases as large as published ones, which bf16 would change."""
    base = write_model(family, tmp_path / "base", torch.bfloat16, **sizes)
    weights = load_file(base / "model.safetensors")
    for name in [name for name in weights if "correction_bias" in name]:
        weights[name] = 14 + 0.02 * torch.randn(weights[name].shape)
    save_file(weights, base / "model.safetensors", {"format": "pt"})
    found = load_file(export(base, tmp_path / "x", "--dtype", "bf16") / "model.safetensors")
    kept = {name for name, tensor in found.items() if tensor.dtype == torch.float32}
    assert in_fp32 <= kept and {*found} - kept, kept
    assert all(torch.equal(found[name].float(), weights[name].float()) for name in weights)


def test_the_head_is_not_rounded_by_the_comparison(tmp_path):
    """Mamba casts what enters the head to the head's dtype, which differs between a base and its merge."""
    base = write_model("mamba", tmp_path / "base", torch.bfloat16, state_size=8)
    adapter = write_adapter(base, tmp_path / "adapter", target_modules=["in_proj", "lm_head"])
    export(adapter, tmp_path / "x", "--merge", "--dtype", "fp32")


@pytest.mark.parametrize("fault", ["scale", "nothing", "rounded away"])
def test_a_wrong_merge_is_refused(base, tmp_path, monkeypatch, fault):
    with_delta = merging._with_delta
    adapter = write_adapter(base, tmp_path / "adapter", size=1e-3 if fault == "rounded away" else 0.1)
    if fault == "scale":
        monkeypatch.setattr(merging, "_with_delta", lambda weight, *a: 1.5 * with_delta(weight, *a) - 0.5 * weight)
    elif fault == "nothing":
        monkeypatch.setattr(merging, "_with_delta", lambda weight, *_: weight)
    flags = ("--dtype", "bf16") if fault == "rounded away" else ()
    refused("--merge: refused: .*export the adapter without --merge", adapter, tmp_path / "x", "--merge", *flags)


@pytest.mark.parametrize("fault", ["tensor", "head", "missing"])
def test_a_folder_that_loads_as_another_model_is_refused(base, tmp_path, monkeypatch, fault):
    """Damage what was written before it is verified."""
    save_full = writer.save_full

    def damaged(model, tensors, source, dtype, folder):
        save_full(model, tensors, source, dtype, folder)
        weights = load_file(folder / "model.safetensors")
        name = "model.layers.1.self_attn.k_proj.weight"
        if fault == "tensor":
            weights[name] = weights[name].flip(0)
        elif fault == "head":
            weights["lm_head.weight"] = weights.pop("model.embed_tokens.weight")
        else:
            del weights[name]
        save_file(weights, folder / "model.safetensors", {"format": "pt"})

    monkeypatch.setattr(writer, "save_full", damaged)
    refused("answers otherwise than its source|missing_keys|unexpected", base, tmp_path / "x")


@pytest.fixture(scope="module")
def runs():
    """Return the folders of the runs made so far, by their overrides, each with an untouched copy."""
    return {}


@pytest.fixture
def undamaged(train, runs, tmp_path_factory):
    """Return a function that trains on one device once per set of overrides, and returns the folder as it was left."""

    def call(*overrides: str) -> Path:
        if overrides not in runs:
            folder = train("single", *overrides).folder
            runs[overrides] = folder, shutil.copytree(folder, tmp_path_factory.mktemp("kept") / "run")
        folder, kept = runs[overrides]
        shutil.rmtree(folder)
        return Path(shutil.copytree(kept, folder))

    return call


@pytest.mark.parametrize("fault", ["shard", "manifest", "base", "no base"])
def test_a_damaged_checkpoint_or_base_is_refused(undamaged, tmp_path, fault):
    run = undamaged("save.every=1", "train.steps=1", "adapter.method=lora")
    checkpoint, base = run / "checkpoints/step-1", run / "base"
    if fault == "shard":
        (shard,) = checkpoint.glob("*.safetensors")
        content = bytearray(shard.read_bytes())
        content[-1] ^= 1
        shard.write_bytes(content)
    elif fault == "manifest":
        (checkpoint / MANIFEST).write_bytes((checkpoint / MANIFEST).read_bytes()[:-20])
    elif fault == "base":
        weights = load_file(base / "model.safetensors")
        save_file({name: tensor + 1 for name, tensor in weights.items()}, base / "model.safetensors", {"format": "pt"})
    else:
        base.rename(tmp_path / "moved")
    refused("corrupt|has changed since|is not a folder here", checkpoint, tmp_path / "x")
    if fault == "no base":
        export(checkpoint, tmp_path / "x", "--base", str(tmp_path / "moved"))


@pytest.mark.parametrize("fault", ["lacks a tensor", "empty", "other base"])
def test_an_adapter_that_does_not_fit_is_refused_in_one_line(base, adapter, tmp_path, fault):
    damaged, flags = shutil.copytree(adapter, tmp_path / "damaged"), ()
    weights = damaged / "adapter_model.safetensors"
    if fault == "lacks a tensor":
        tensors = load_file(weights)
        tensors.pop(min(tensors))
        save_file(tensors, weights, {"format": "pt"})
    elif fault == "empty":
        weights.write_bytes(b"")
    else:
        flags = ("--base", str(write_model("llama", tmp_path / "narrow", hidden_size=32)))
    refused("SOURCE with the base '.*damaged", damaged, tmp_path / "x", *flags)


def test_a_disk_without_room_for_an_adapter_is_one_line(adapter, tmp_path, monkeypatch):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8000, limit[1]))  # the adapter is larger
    try:
        refused("--output: .* cannot be written", adapter, tmp_path / "x")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    monkeypatch.setattr(exporter, "free_bytes", lambda _: exporter.RESERVE + 8000)
    refused("needs .* MiB, but its disk has", adapter, tmp_path / "x")


def test_the_current_folder_can_be_the_output(adapter, tmp_path, monkeypatch):
    (tmp_path / "x").mkdir()
    monkeypatch.chdir(tmp_path / "x")
    export(adapter, ".", "--force")
    assert (tmp_path / "x/adapter_model.safetensors").is_file()


def test_a_template_that_wants_a_system_message_is_exported(base, tmp_path):
    source = shutil.copytree(base, tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ raise_exception('the first message must be of the system') }}")
    assert "raise_exception" in (export(source, tmp_path / "x") / "chat_template.jinja").read_text()


def test_a_quantized_base_is_kept_or_named(adapter, tmp_path):
    """Export an adapter as one. Refuse a plain model: the files of the base do not have one."""
    plain = write_model("llama", tmp_path / "plain", torch.bfloat16)
    settings = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4")
    packed = transformers.AutoModelForCausalLM.from_pretrained(plain, quantization_config=settings)
    packed.save_pretrained(tmp_path / "packed")
    experts.TOKENIZER.save_pretrained(tmp_path / "packed")
    flags = ("--base", str(tmp_path / "packed"))
    assert (export(adapter, tmp_path / "x", *flags) / "adapter_model.safetensors").is_file()
    refused("--merge: .* are quantized; give by --base", adapter, tmp_path / "y", "--merge", *flags)
    refused("SOURCE: .* has quantized weights", tmp_path / "packed", tmp_path / "y", "--dtype", "bf16")


def test_an_output_is_never_overwritten_by_mistake(base, tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("mine")
    refused("exists and is not an earlier export", base, tmp_path / "full", "--force")
    (tmp_path / "link").symlink_to(tmp_path / "full")
    refused("is a link or a file", base, tmp_path / "link")
    refused("is a link or a file", base, tmp_path / "full/mine.txt")
    folder = export(base, tmp_path / "x")
    refused("add --force to replace it", base, folder)
    before = (folder / "gearbox_export.json").stat().st_ino
    export(base, folder, "--force")
    assert (folder / "gearbox_export.json").stat().st_ino != before
    copy = shutil.copytree(folder, tmp_path / "own")
    refused("contains what is exported", copy, copy, "--force")
    moved = write_adapter(folder, tmp_path / "adapter")
    refused("contains what is exported, or its base", moved, folder, "--force")
    monkeypatch.setattr(exporter, "free_bytes", lambda _: 1000)
    refused("needs .* MiB, but its disk has", base, tmp_path / "y")


@pytest.mark.parametrize("function", ["sync_tree", "rename"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, OSError])
def test_an_earlier_export_survives_an_interrupted_one(base, tmp_path, monkeypatch, function, error):
    folder = export(base, tmp_path / "x")
    before, real = (folder / "gearbox_export.json").stat().st_ino, getattr(filesystem, function)

    def interrupted(*paths):
        if function == "rename" and paths[1] != folder:
            return real(*paths)
        monkeypatch.setattr(filesystem, function, real)
        raise error

    monkeypatch.setattr(filesystem, function, interrupted)
    with pytest.raises(UserError if error is OSError else error):
        export(base, folder, "--force")
    assert [*tmp_path.iterdir()] == [folder]
    assert (folder / "gearbox_export.json").stat().st_ino == before


@pytest.mark.parametrize("fault", ["manifest", "shard"])
def test_the_last_checkpoint_of_an_unfinished_run_is_taken(undamaged, tmp_path, fault):
    run = undamaged("save.every=1", "train.steps=3")
    status = run / "status.json"
    status.write_text(json.dumps(json.loads(status.read_text()) | {"outcome": "saved"}))
    newest = max((run / "checkpoints").iterdir(), key=lambda path: int(path.name.split("-")[1]))
    if fault == "manifest":
        (newest / MANIFEST).write_text("{}")
    else:
        (shard,) = newest.glob("*.safetensors")
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    folder = export(run, tmp_path / "x")
    assert json.loads((folder / "gearbox_export.json").read_text())["step"] == 2


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--merge",), "has no adapter to merge"),
        (("--public",), "is about the repository of --push"),
        (("--dtype", "int8"), "invalid choice"),
        (("--push", "name"), "is not an id"),
        (("--push", "me/name"), "no token is set"),
    ],
)
def test_options_that_contradict_are_refused(base, tmp_path, monkeypatch, arguments, text):
    monkeypatch.delenv("HF_TOKEN", raising=False)
    refused(text, base, tmp_path / "x", *arguments)
    refused("is not a folder", Path("nowhere"), tmp_path / "x")
    refused("neither a saved model nor a checkpoint", tmp_path, tmp_path / "x")
    refused("add --merge", write_adapter(base, tmp_path / "adapter"), tmp_path / "x", "--gguf")


def test_a_hostile_name_stays_text_in_the_card(base, tmp_path):
    run = tmp_path / "a`b|<script>"
    shutil.copytree(base, run)
    card = (export(run, tmp_path / "x") / "README.md").read_text()
    assert "<script>" not in card.split("````text")[0] and "&lt;script>" in card
