"""Plant disagreements in copies of the shipped files. Each is found, in the right file and line, and nothing else."""

import json
import os
import shutil
from pathlib import Path
from typing import NamedTuple

import pytest

from gearbox import ROOT
from gearbox.checks import agreement
from gearbox.config.gear import read_gear
from gearbox.planning.gpus import gpu_named

MODEL_FILES = ("config.json", "chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
TEXT = '{"text": "one"}\n{"text": "two"}\n'
ALPACA = '{"question": "one", "answer": "two"}\n'
UNANSWERED = json.dumps({"messages": [{"role": "user", "content": "one"}]})
R, G, Z, C = "mine.yaml", "gear.yaml", "zero.json", "model/config.json"
TEMPLATE, TOKENS, SPECIAL = "model/chat_template.jinja", "model/tokenizer.json", "model/tokenizer_config.json"


class Planted(NamedTuple):
    """Changes of files, and the finding that they must lead to."""

    gear: str
    edits: str
    """Lines `file: old -> new`; new may have \\n. An old text of `*` is the whole file, and a new text of `-` removes
    it."""
    found: str
    """`file: a part of the line that the finding points to`. The place without a line is only `file`."""
    says: str
    more: str = ""
    """Overrides, flags and variables of the environment, and gpu=NAME."""
    severity: str = "problem"


def hint(*values: str) -> Planted:
    return Planted(*values, severity="hint")


PLANTED = [
    # The recipe
    Planted(
        "single", f"{R}: weight_decay: 0.0 -> weight_decya: 0.0", f"{R}: weight_decya", "did you mean 'weight_decay'"
    ),
    Planted("single", f"{R}: micro_rows: 8 -> micro_rows: eight", f"{R}: eight", "batch.micro_rows: "),
    Planted("single", f"{R}: warmup: 5% -> warmup: 900", f"{R}: warmup: 900", "must be below the 700 steps"),
    Planted("single", f"{R}: warmup: 5% -> warmup: 5.5", f"{R}: warmup: 5.5", "must be a number of steps"),
    Planted("single", f"{R}: warmup: 5% -> warmup_steps: 9\n  warmup: 9", f"{R}: warmup_steps", "old name of"),
    Planted("single", f"{R}: rows: 8  -> rows: 0  ", f"{R}: rows: 0", "greater than or equal to 1"),
    Planted("single", f"{R}: init: random -> init: random\n  init: random  # again", f"{R}: # again", "duplicate key"),
    Planted("single", f"{R}: adapter: -> adapter: [", f"{R}: path: null", "invalid YAML"),
    Planted("single", f"{R}: quantize: null -> quantize: nf4", f"{R}: quantize", "needs an adapter"),
    Planted("single", f"{R}: path: DATA -> path: none.jsonl", f"{R}: none.jsonl", "no such file 'none.jsonl'"),
    Planted("single", f"{R}: chat_template: null -> chat_template: a.jinja", f"{R}: a.jinja", "no such file 'a.jinja'"),
    Planted("single", f"{R}: add_tokens: [] -> add_tokens: [<|end|>]", f"{R}: <|end|>", "is already a token of"),
    Planted(
        "single",
        f"{R}: method: none -> method: lora && {R}: targets: all-linear -> targets: [q_proj, v_prj]",
        f"{R}: v_prj",
        "no module of the model is named 'v_prj'; did you mean 'v_proj'?",
    ),
    Planted(
        "single",
        f"{R}: path: null                    # a folder or -> path: SAVED  # && {R}: method: none -> method: lora",
        f"{R}: r: 16",
        "is 16, but 8 in",
    ),
    Planted("single", "", "command line", "batch.rows: input should be", "batch.rows=0"),
    Planted("single", "", "command line", "unknown key; did you mean 'lr'", "optim.lrr=1"),
    Planted("single", f"{R}: path: DATA -> path: ''", f"{R}: path: ''", "data.path: is empty; give a path"),
    hint("single", f"{R}: warmup: 5% -> warmup: 60%", f"{R}: 60%", "is 60% of the 700 steps"),
    hint(
        "single",
        f"{R}: every: 100                    # steps between eval -> every: 1000  #",
        f"{R}: 1000",
        "eval.every",
    ),
    hint(
        "single",
        f"{R}: every: 100                    # steps between check -> every: 800  #",
        f"{R}: 800",
        "save.every",
    ),
    hint("single", f"{R}: row_tokens: 128 -> row_tokens: 8192", f"{R}: 8192", "4,096 positions that llama was trained"),
    hint("single", f"{R}: prefetch: 1 -> prefetch: 3", f"{R}: prefetch", "how far FSDP2 gathers ahead"),
    hint(
        "single", f"{R}: steps: 700 -> steps: 700 && {R}: split: train -> split: test", f"{R}: split: test", "no splits"
    ),
    Planted(
        "single",
        f"{R}: method: none -> method: lora && {R}: targets: all-linear -> targets: q_proj",
        f"{R}: targets: q_proj",
        "use all-linear, or a list: [q_proj]",
    ),
    Planted(
        "single",
        f"{R}: method: none -> method: lora && {R}: targets: all-linear -> targets: all_linear",
        f"{R}: all_linear",
        "did you mean 'all-linear'?",
    ),
    # Rows and ranks
    hint("ddp", f"{R}: rows: 8  -> rows: 2  ", f"{R}: rows: 2", "ranks 2-3 get only empty rows; use 4 rows or more"),
    hint("ddp", f"{R}: rows: 8  -> rows: 9  ", f"{R}: rows: 9", "rank 3 gets only empty rows; use 8 or 12 rows"),
    hint(
        "ddp",
        f"{R}: rows: 8  -> rows: 10   && {R}: micro_rows: 8 -> micro_rows: 1",
        f"{R}: rows: 10",
        "17% of the rows",
    ),
    hint("fsdp_tp", f"{R}: rows: 8  -> rows: 3  ", f"{R}: rows: 3", "ranks 6-7 get only empty", "--num_processes=8"),
    # The data
    Planted("single", f"chats.jsonl: * -> {ALPACA}", "chats.jsonl: question", "match no known format"),
    Planted("single", f"chats.jsonl: * -> {TEXT}oops", "chats.jsonl: oops", "is not JSON"),
    Planted("single", "chats.jsonl: * -> ", "chats.jsonl: ", "the file is empty"),
    Planted("single", f"chats.jsonl: * -> {UNANSWERED}", "chats.jsonl: user", "contains no assistant turn"),
    Planted(
        "single", f"{R}: path: null                    # doc -> path: DATA  #", f"{R}: path: ", "is all of data.path"
    ),
    # Recipe and gear
    Planted("zero2", f"{R}: name: adamw -> name: adamw_8bit", f"{R}: adamw_8bit", "under ZeRO, 8-bit"),
    Planted("zero3", f"{R}: name: adamw -> name: muon", f"{R}: muon", "Muon needs complete matrices"),
    Planted("zero1", f"{R}: master_weights: fp32 -> master_weights: bf16", f"{R}: bf16 ", "ZeRO always keeps fp32"),
    Planted("zero3", f"{R}: checkpointing: none -> checkpointing: selective", f"{R}: selective", "use full"),
    Planted("ulysses", f"{R}: attention: auto -> attention: sdpa", f"{R}: sdpa", "cannot split the masks"),
    Planted("ring", f"{R}: attention: auto -> attention: eager", f"{R}: eager", "ring attention is attention by"),
    Planted("fsdp_tp", f"{R}: compile: false -> compile: true", f"{R}: compile", "its layers are not compiled"),
    # The gear
    Planted("fsdp", f"{G}: fsdp_version: 2 -> fsdp_version: 1", f"{G}: fsdp_version", "version 1 is not supported"),
    Planted(
        "fsdp",
        f"{G}: fsdp_version: 2 -> fsdp_version: 2\n  fsdp_sharding_strategy: FULL_SHARD",
        f"{G}: fsdp_sharding_strategy",
        "belongs to FSDP version 1",
    ),
    Planted(
        "fsdp",
        f"{G}: fsdp_version: 2 -> fsdp_version: 2\n  fsdp_use_orig_params: false",
        f"{G}: fsdp_use_orig_params",
        "belongs to FSDP version 1",
    ),
    Planted("fsdp", f"{G}: fsdp_reshard -> fsdp_rehsard", f"{G}: fsdp_rehsard", "did you mean 'fsdp_reshard_after"),
    Planted("ddp", f"{G}: num_machines: 1 -> dynamo_config:\n  dynamo_mode: max", f"{G}: dynamo_mode", "perf.compile"),
    Planted("ddp", f"{G}: num_machines: 1 -> fsdp_config:\n  fsdp_version: 2", f"{G}: fsdp_config", "only for FSDP"),
    Planted("ddp", f"{G}: bf16 -> fp16", f"{G}: fp16", "mixed_precision: must be bf16"),
    Planted("tp", f"{G}: num_processes: 2 -> num_processes: 3", f"{G}: num_processes", "not divisible by tp=2"),
    Planted("tp", f'{C}: "num_attention_heads": 8 -> "num_attention_heads": 9', f"{G}: tp_size", "9 attention heads"),
    Planted(
        "pp", f"{G}: pp_size: 2 -> pp_size: 4 && {G}: num_processes: 2 -> num_processes: 4", f"{G}: pp_size", "2 layers"
    ),
    Planted("zero2", f"{G}: num_machines: 1 -> mixed_precision: bf16", f"{G}: mixed_precision", "only one of the two"),
    Planted(
        "zero2", f"{G}: zero3_init -> gradient_clipping: 1.0\n  zero3_init", f"{G}: clipping", "optim.max_grad_norm"
    ),
    Planted("zero3", f"{G}: zero3_init_flag: true -> zero3_init_flag: false", f"{G}: zero3_init_flag", "must be true"),
    Planted("zero3", f"{G}: ZERO -> none.json", "none.json", "no such file"),
    Planted("single", f"{G}: num_machines: 1 -> \tnum_machines: 1", f"{G}: num_machines", "invalid YAML"),
    Planted("ddp", "", "command line", "--gradient_clipping=5: is set by the recipe", "--gradient_clipping=5"),
    hint("ddp", f"{G}: mixed_precision: bf16 -> debug: false", f"{G}", "is not set, so a GPU computes in fp32"),
    Planted(
        "fsdp",
        f"{G}: fsdp_config: -> fsdp_offload_params: true\nfsdp_config:",
        f"{G}: fsdp_offload_params",
        "did you mean 'fsdp_config.fsdp_offload_params'?",
    ),
    Planted(
        "tp",
        f"{G}: num_machines: 1 -> tp_size: 2",
        f"{G}: tp_size: 2",
        "did you mean 'parallelism_config.parallelism_config_tp_size'?",
    ),
    # The ZeRO JSON
    Planted("zero2", f'{Z}: clipping": "auto" -> clipping": 0.5', f"{Z}: clipping", "is 0.5, but optim.max_grad_norm"),
    Planted("zero2", f'{Z}: batch_size": "auto" -> batch_size": 32', f"{Z}: train_batch_size", "is 32, but batch.rows"),
    Planted("zero2", f'{Z}: steps": "auto" -> steps": 3', f"{Z}: accumulation", "is 3, but"),
    Planted("zero2", f'{Z}: per_gpu": "auto" -> per_gpu": 3', f"{Z}: per_gpu", "is 3, but batch.micro_rows"),
    Planted("zero2", f"{Z}: overlap_comm -> overlap_com", f"{Z}: overlap_com", "did you mean 'overlap_comm'"),
    Planted(
        "zero2",
        f'{Z}: "bf16" -> "offload_optimizer": {{"device": "cpu"}},\n  "bf16"',
        f"{Z}: offload_optimizer",
        "did you mean 'zero_optimization.offload_optimizer'?",
    ),
    Planted("zero2", f'{Z}: "bf16" -> "fp16": {{"enabled": true}},\n  "bf16"', f"{Z}: fp16", "use bf16"),
    Planted("zero2", f'{Z}: "bf16" -> "optimizer": {{"type": "AdamW"}},\n "bf16"', f"{Z}: optimizer", "(optim:)"),
    Planted("zero2", f'{Z}: "stage": 2 -> "stage": 2,\n    "stage":  2', f'{Z}: "stage":  2', "duplicate key"),
    Planted("zero2", f'{Z}: "bf16" -> // precision\n  "bf16"', f"{Z}: // precision", "invalid JSON"),
    Planted("zero2", f'{Z}: "communication_data_type": "fp32", -> ', f"{Z}", "otherwise DeepSpeed reduces"),
    Planted(
        "zero3_nvme", f'{Z}: "nvme_path": "/tmp/gearbox-nvme", -> ', f"{Z}: offload_optimizer", "is missing; set it"
    ),
    Planted("ulysses", f'{Z}: "stage": 3 -> "stage": 2', f"{Z}: zero_optimization", "is tested only with stage 3"),
    # The environment
    Planted("ddp", "", "environment", "ACCELERATE_MIXED_PRECISION=fp16 is set", "ACCELERATE_MIXED_PRECISION=fp16"),
    Planted("fsdp", "", "environment", "all modules are sharded; unset it", "FSDP_IGNORED_MODULES=head"),
    # The model and its tokenizer
    Planted("single", f"{TEMPLATE}: {{% endfor %}} -> \n{{% endif %}}", f"{TEMPLATE}: endif", "cannot be parsed"),
    Planted("single", f'{C}: "llama" -> "t5"', f"{R}: name: ", "(t5) is not a causal language model"),
    Planted("single", f'{C}: "llama" -> "llamax"', f"{R}: name: ", "(llamax) is not a causal language model"),
    Planted(
        "single", f"{R}: init: random -> init: pretrained", f"{R}: name: ", "has no weights; copy model.safetensors"
    ),
    Planted(
        "single",
        f"{R}: init: random -> init: pretrained && model/pytorch_model.bin: * -> x",
        f"{R}: name: ",
        "pickled weights could run code",
    ),
    Planted(
        "single",
        f"{R}: init: random -> init: pretrained && model/a.safetensors: * -> x && "
        'model/model.safetensors.index.json: * -> {"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}',
        f"{R}: name: ",
        "names b.safetensors, which is not in the folder",
    ),
    Planted(
        "single",
        f"{R}: init: random -> init: pretrained && model/model.safetensors: * -> x && "
        f'{C}: "llama", -> "llama", "quantization_config": {{"quant_method": "gptq"}},',
        f"{R}: name: ",
        "are quantized; set adapter.method=lora",
    ),
    Planted("single", f"{TEMPLATE}: * -> -", f"{R}: name: ", "the tokenizer has no chat template"),
    Planted("single", f"{C}: {{ -> \ufeff{{", f"{R}: name: ", "is not valid JSON: Unexpected UTF-8 BOM"),
    Planted(
        "single",
        f"{R}: init: random -> init: pretrained && model/consolidated.safetensors: * -> x",
        f"{R}: name: ",
        "neither model.safetensors nor model.safetensors.index.json",
    ),
    Planted("single", f"{TOKENS}: * -> [", f"{R}: name: ", "is not valid JSON"),
    Planted(
        "single", f'{C}: "llama" -> "gpt2" && {R}: row_tokens: 128 -> row_tokens: 5000', f"{R}: 5000", "1,024 positions"
    ),
    Planted(
        "single",
        f'{SPECIAL}: "eos_token": "<|end|>", ->  && chats.jsonl: * -> {TEXT}',
        f"{R}: name: ",
        "no end-of-text",
    ),
    hint(
        "single",
        f'{SPECIAL}: "eos_token": "<|end|>", ->  && '
        f"{TEMPLATE}: * -> {{% for one in messages %}}{{{{ one.content }}}}{{% endfor %}}",
        f"{TEMPLATE}",
        "neither the chat template nor the tokenizer ends an answer",
    ),
    hint("single", f"{TEMPLATE}: <|end|> -> <|stop|>", f"{TEMPLATE}", "which is no token of the tokenizer"),
    hint("single", f'{C}: "vocab_size": 260 -> "vocab_size": 256', f"{C}: vocab_size", "4 tokens have no embedding"),
    hint("single", f"{SPECIAL}: <|pad|> -> <|none|>", f"{SPECIAL}: pad_token", "no token of tokenizer.json"),
    hint(
        "single",
        'model/generation_config.json: * -> {"eos_token_id": [3, 999]}',
        "model/generation_config.json: 999",
        "999 is no token",
    ),
    # The GPU
    Planted("single", f'{C}: "hidden_size": 256 -> "hidden_size": 32768', f"{R}: name: ", "state take", "gpu=16GB"),
    hint("single", "", f"{R}: micro_rows: ", "GiB of 0.40 GiB memory", "gpu=0.4GB"),
    hint("ddp", "", f"{G}: mixed_precision", "bf16 is slow below 8.0", "gpu=T4"),
    hint("zero2", "", f"{Z}: bf16", "V100-32GB has compute capability 7.0", "gpu=V100-32GB"),
    hint(
        "single", f'{G}: mixed_precision: bf16 -> mixed_precision: "no"', f"{G}: mixed_precision", "in fp32", "gpu=H100"
    ),
]


def lay_out(folder: Path, gear: str) -> None:
    """Copy the tiny recipe with its model, chats, a gear and its ZeRO JSON."""
    (folder / "model").mkdir()
    for name in MODEL_FILES:
        shutil.copy(ROOT / "recipes/tiny" / name, folder / "model" / name)
    shutil.copy(ROOT / "recipes/chats.jsonl", folder / "chats.jsonl")
    (folder / "saved").mkdir()
    adapter = {"peft_type": "LORA", "r": 8, "lora_alpha": 32, "target_modules": ["q_proj"]}
    (folder / "saved/adapter_config.json").write_text(json.dumps(adapter))
    (folder / "saved/adapter_model.safetensors").write_bytes(b"")
    recipe = (ROOT / "recipes/tiny.yaml").read_text().replace("recipes/tiny ", f"{folder}/model ")
    (folder / R).write_text(recipe.replace("path: builtin:tasks", f"path: {folder}/chats.jsonl"))
    settings = (ROOT / f"accelerate_configs/{gear}.yaml").read_text()
    if (zero := ROOT / f"ds_configs/{gear}.json").is_file():
        shutil.copy(zero, folder / Z)
    (folder / G).write_text(settings.replace(f"ds_configs/{gear}.json", str(folder / Z)))


def plant(folder: Path, edits: str) -> None:
    """Make the changes."""
    edits = edits.replace("path: DATA", f"path: {folder}/chats.jsonl").replace("SAVED", f"{folder}/saved")
    for edit in filter(None, edits.replace("ZERO", str(folder / Z)).split(" && ")):
        name, _, change = edit.partition(": ")
        old, _, new = change.partition(" -> ")
        path = folder / name
        if new == "-":
            path.unlink()
            continue
        text = path.read_text() if path.exists() else ""
        assert old == "*" or old in text, (name, old)
        path.write_text(new if old == "*" else text.replace(old, new, 1))


@pytest.mark.parametrize("planted", PLANTED, ids=lambda one: f"{one.gear}: {one.found}: {one.says}"[:70])
def test_a_planted_disagreement_is_found(tmp_path, monkeypatch, planted):
    lay_out(tmp_path, planted.gear)
    plant(tmp_path, planted.edits)
    words = planted.more.split()
    for word in [word for word in words if word.isupper() or word.startswith(("ACCEL", "FSDP"))]:
        monkeypatch.setenv(*word.split("="))
    flags = dict(word[2:].split("=") for word in words if word.startswith("--"))
    gpu = next((gpu_named(word[4:]) for word in words if word.startswith("gpu=")), None)
    overrides = [word for word in words if "." in word and not word.startswith(("--", "gpu="))]
    found = agreement.examine(tmp_path / R, overrides, read_gear(tmp_path / G, flags), gpu).findings

    (one,) = [finding for finding in found if planted.says in finding.text]
    file, has_line, part = planted.found.partition(": ")
    assert Path(one.file).name == Path(file).name
    assert one.severity == planted.severity
    if has_line:
        assert part in [*Path(one.file).read_text().split("\n")][one.line - 1]
    else:
        assert one.line is None
    assert found == [one], "nothing else is wrong"


def test_the_files_agree_before(tmp_path):
    """Check that no finding above comes from the copies."""
    for gear in {one.gear for one in PLANTED}:
        folder = tmp_path / gear
        folder.mkdir()
        lay_out(folder, gear)
        assert agreement.examine(folder / R, [], read_gear(folder / G, {})).findings == []
    assert len(PLANTED) >= 90


def test_data_without_an_end_is_named_and_not_read(tmp_path):
    pipe = tmp_path / "chats.jsonl"
    os.mkfifo(pipe)
    gear = read_gear(ROOT / "accelerate_configs/single.yaml", {})
    examined = agreement.examine(ROOT / "recipes/tiny.yaml", [f"data.path={pipe}"], gear)
    assert any("is not a regular file" in finding.text for finding in examined.problems)
