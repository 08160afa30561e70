"""Pipelines: a cut model computes what the whole one does, holds its own part of it, and trains the same weights."""

import copy
import json
import shutil
from itertools import chain
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh

from gearbox import ROOT
from gearbox.config.compatibility import check_architecture
from gearbox.config.gear import load_gear
from gearbox.data.batches import IGNORE_INDEX
from gearbox.distributed import pipeline_parallel, pipeline_stages
from gearbox.errors import UserError
from gearbox.model import loss
from ranks import fork_ranks

NARROW = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 8, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip
FAMILIES = {
    "llama, tied": transformers.LlamaConfig(**NARROW, num_hidden_layers=3, tie_word_embeddings=True),
    "llama, untied": transformers.LlamaConfig(**NARROW, num_hidden_layers=3, tie_word_embeddings=False),
    "qwen2": transformers.Qwen2Config(**NARROW, num_hidden_layers=4, tie_word_embeddings=True),
    "gemma2": transformers.Gemma2Config(**NARROW, num_hidden_layers=4, query_pre_attn_scalar=8, sliding_window=8),
    "granite": transformers.GraniteConfig(**NARROW, num_hidden_layers=3, embedding_multiplier=12.0),
}


def write_model(config, folder, dtype=torch.float32):
    torch.manual_seed(0)
    transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](copy.deepcopy(config)).to(dtype).save_pretrained(folder)


def micro_batches(num: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Packed rows, two documents each, and few targets."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        tokens = torch.randint(3, 97, (2, 24), generator=draw)
        labels = tokens.roll(-1, 1).masked_fill(torch.rand(2, 24, generator=draw) < 0.5, IGNORE_INDEX)
        positions = (torch.arange(24) % 13).expand(2, 24)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return made


def whole_gradients(folder, batches, scale):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss.install_loss(model)
    total = sum(model(**batch) for batch in batches) * scale
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, model


def start(num_stages, num_replicas=1):
    """Join the group of a fork; the groups of this rank's pipeline and of its stage."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (num_stages, num_replicas), mesh_dim_names=("pp", "dp"))
    return mesh["pp"].get_group(), mesh["dp"].get_group()


def load_stage(folder, part):
    config = transformers.AutoConfig.from_pretrained(folder)
    model = pipeline_stages.stage_class(config, part).from_pretrained(folder, dtype=torch.float32)
    loss.install_loss(model)
    return model


def run(num_stages, work, num_replicas=1):
    """Call work(the groups) on so many ranks."""
    codes, output = fork_ranks(num_stages * num_replicas, {}, lambda: work(start(num_stages, num_replicas)))
    assert set(codes) == {0}, output
    return output


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_the_whole(tmp_path, name, schedule):
    write_model(FAMILIES[name], tmp_path)
    batches = micro_batches(5)
    expected, gradients, whole = whole_gradients(tmp_path, batches, 0.01)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    whole.eval()
    with torch.no_grad():
        losses, hits = whole(**batches[0])
        logits = whole(input_ids=batches[0]["input_ids"][:, :7], use_cache=False, logits_to_keep=1).logits

    def work(groups):
        part = pipeline_stages.Stage(dist.get_rank(groups[0]), 2)
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups, schedule=schedule)
        with torch.no_grad():
            pipe.eval()
            ours, found = pipe(**batches[0])
            assert torch.equal(ours, losses) and torch.equal(found, hits)
            kept = pipe(input_ids=batches[0]["input_ids"][:, :7], use_cache=False, logits_to_keep=1).logits
            assert torch.equal(kept, logits)
            pipe.train()
        total = pipe.step(batches, 0.01)
        assert abs(total - expected) < 1e-6 * expected
        held = dict(pipe.module.named_parameters())
        assert 0 < len(held) < len(gradients)
        for each, parameter in held.items():
            assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each
        assert abs(pipe.clip_gradients(1e-3) - norm) < 1e-5 * norm
        clipped = gradients[each] * (1e-3 / norm)
        assert torch.allclose(parameter.grad, clipped, rtol=1e-3, atol=1e-8)
        assert 0 < pipe.idle < 1

    run(2, work)


@pytest.mark.parametrize(("num_stages", "num_replicas", "num_micro"), [(2, 2, 3), (3, 1, 2), (2, 1, 1)])
def test_other_places_and_few_micro_batches(tmp_path, num_stages, num_replicas, num_micro):
    """Two pipelines side by side; a stage in the middle; fewer micro batches than stages."""
    write_model(FAMILIES["llama, tied"], tmp_path)
    batches = [micro_batches(num_micro, seed) for seed in range(num_replicas)]
    expected, gradients, _ = whole_gradients(tmp_path, chain(*batches), 0.01)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()

    def work(groups):
        part, replica = pipeline_stages.Stage(dist.get_rank(groups[0]), num_stages), dist.get_rank(groups[1])
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups)
        for _ in range(2):  # torch keeps the buffers of the first step
            pipe.zero_grad()
            assert abs(pipe.step(batches[replica], 0.01) - expected) < 1e-6 * expected
        assert (pipe.tied is not None) == (part.is_first or part.is_last)
        for each, parameter in pipe.module.named_parameters():
            assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each
        assert abs(pipe.clip_gradients(0.0) - norm) < 1e-5 * norm

    run(num_stages, work, num_replicas)


def test_half_precision_between_stages(tmp_path):
    """In bf16 what is sent is rounded, once a border, and nothing else."""
    write_model(FAMILIES["qwen2"], tmp_path)
    expected, gradients, _ = whole_gradients(tmp_path, micro_batches(4), 0.01)

    def work(groups):
        part = pipeline_stages.Stage(dist.get_rank(groups[0]), 2)
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups, compute=torch.bfloat16)
        total = pipe.step(micro_batches(4), 0.01)
        assert 1e-7 * expected < abs(total - expected) < 1e-3 * expected
        for each, parameter in pipe.module.named_parameters():
            assert parameter.grad.dtype == torch.float32
            assert (parameter.grad - gradients[each]).norm() < 2e-2 * gradients[each].norm(), each

    run(2, work)


def test_rows_of_any_width(tmp_path):
    """Unpacked rows: the widths of micro batches, of pipelines and of steps differ."""
    write_model(FAMILIES["qwen2"], tmp_path)

    def batches(step, replica):
        made = micro_batches(3, 10 * step + replica)
        widths = [8, 24, 16] if step + replica == 1 else [8, 8, 16]
        kept = zip(widths, made, strict=True)
        return [{name: micro[name][:, :width] for name in ("input_ids", "labels")} for width, micro in kept]

    expected = [whole_gradients(tmp_path, batches(step, 0) + batches(step, 1), 0.01) for step in range(2)]

    def work(groups):
        part, replica = pipeline_stages.Stage(dist.get_rank(groups[0]), 2), dist.get_rank(groups[1])
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups)
        for step, (total, gradients, _) in enumerate(expected):
            pipe.zero_grad()
            assert abs(pipe.step(batches(step, replica), 0.01) - total) < 1e-6 * total
            for each, parameter in pipe.module.named_parameters():
                assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each

    run(2, work, 2)


def test_a_loss_that_is_not_finite_is_seen_by_all(tmp_path):
    write_model(FAMILIES["qwen2"], tmp_path)

    def work(groups):
        part, replica = pipeline_stages.Stage(dist.get_rank(groups[0]), 2), dist.get_rank(groups[1])
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups)
        if part.is_last and replica == 1:
            pipe.module.model.norm.weight.data.fill_(float("nan"))
        assert not torch.isfinite(torch.tensor(pipe.step(micro_batches(2), 0.01)))

    run(2, work, 2)


def test_a_stage_is_loaded_alone(tmp_path):
    """Bytes held and the peak while loading, of 4 stages of a model of 135 MiB."""
    wide = NARROW | {"hidden_size": 512, "intermediate_size": 2048, "head_dim": 128}
    # In bf16: fp32 weights would be mapped from the file, and not count as memory until they are used.
    write_model(transformers.LlamaConfig(**wide, num_hidden_layers=9), tmp_path, torch.bfloat16)
    whole = 2 * sum(tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values())

    def work():
        stages = [load_stage(tmp_path, pipeline_stages.Stage(8, 9))]  # what the libraries need once
        for index in range(4):
            Path("/proc/self/clear_refs").write_text("5")  # the peak counts anew from here
            before = resident("VmRSS")
            stages.append(load_stage(tmp_path, pipeline_stages.Stage(index, 4)))
            assert resident("VmHWM") - before < 0.6 * whole, "3 layers of 9 at most, and them in bf16 before"
        shares = [sum(parameter.nbytes for parameter in stage.parameters()) / whole for stage in stages[1:]]
        assert abs(sum(shares) - 1) < 1e-6 and max(shares) < 3.1 / 9

    codes, output = fork_ranks(1, {}, work)
    assert codes == [0], output


def resident(field: str) -> int:
    """Bytes of this process's memory: VmRSS now, VmHWM at most."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(lines[field].split()[0]) * 1024


def test_balance():
    assert pipeline_stages.balance([10] * 4, 2, before=0, after=0) == [0, 2, 4]
    assert pipeline_stages.balance([10] * 3, 2, before=0, after=0) == [0, 2, 3], (
        "the last stage computes the logits too"
    )
    assert pipeline_stages.balance([10] * 8, 2, before=40, after=40) == [0, 4, 8]
    assert pipeline_stages.balance([10] * 8, 2, before=5, after=45) == [0, 6, 8]
    assert pipeline_stages.balance([1, 1, 1, 50], 2, before=0, after=0) == [0, 3, 4]
    assert pipeline_stages.balance([10] * 3, 3, before=100, after=0) == [0, 1, 2, 3], "each has a layer"
    assert pipeline_stages.balance([10] * 80, 8, before=30, after=30)[1] == 8, "two layers less on the first"


def test_what_cannot_be_cut_is_refused():
    gear = load_gear(ROOT / "accelerate_configs/pp.yaml", {"num_processes": "4", "parallelism_config_pp_size": "4"})
    with pytest.raises(UserError, match="4 stages, but this model has 3 layers; 3 or fewer would do"):
        check_architecture(gear, FAMILIES["llama, tied"])
    with pytest.raises(UserError, match=r"a pipeline: gpt2 has no plan for it in transformers; use .*fsdp\.yaml"):
        check_architecture(gear, transformers.GPT2Config())
    for config in FAMILIES.values():
        pipeline_stages.check_stages_equal_whole(config)


def test_a_cut_that_changes_the_model_is_refused(monkeypatch):
    granite = FAMILIES["granite"]
    # As if a stage took what was received for an embedding: Granite multiplies it once more.
    monkeypatch.setattr(
        pipeline_stages.ReceivedHidden, "forward", lambda self, given, **_: self.hidden if given.dim() == 2 else given
    )
    with pytest.raises(UserError, match="family granite cannot be cut into stages: its logits then differ by"):
        pipeline_stages.check_stages_equal_whole(granite)
    monkeypatch.undo()
    plan = {name: entry for name, entry in granite.base_model_pp_plan.items() if name != "norm"}
    monkeypatch.setattr(type(granite), "base_model_pp_plan", plan)
    with pytest.raises(UserError, match=r"model\.norm\.weight lies outside its pipeline plan"):
        pipeline_stages.check_stages_equal_whole(granite)


# --------------------------------------------------------------------------- the gear

STEPS = 20
# As in test_parity: a clip that bites and an eps of the gradients' size, else AdamW would not see a constant factor.
FULL = (
    "optim.lr=5e-3", "optim.eps=1e-3", "optim.max_grad_norm=0.5", f"train.steps={STEPS}", "schedule.warmup=3",
    "batch.rows=4", "batch.row_tokens=96",
)  # fmt: skip
MODELS = {
    "three layers": {"num_hidden_layers": 3},
    "untied": {"tie_word_embeddings": False},
    "qwen2": {"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]},
    "gemma2": {
        "model_type": "gemma2", "architectures": ["Gemma2ForCausalLM"], "head_dim": 32, "query_pre_attn_scalar": 32,
        "sliding_window": 32,
    },
}  # fmt: skip


def folder_of(name: str, folder: Path) -> str:
    """The model of recipes/tiny with these changes, to be drawn at random, but not narrowed."""
    made = folder / "model"
    shutil.copytree(ROOT / "recipes/tiny", made)
    config = json.loads((made / "config.json").read_text()) | {"hidden_size": 64} | MODELS[name]
    (made / "config.json").write_text(json.dumps(config))
    return str(made)


def assert_same(outcome, reference, weight_tolerance=1e-4, loss_tolerance=1e-5):
    assert set(outcome.codes + reference.codes) == {0}, outcome.output + reference.output
    assert outcome.losses == pytest.approx(reference.losses, rel=loss_tolerance)
    norms = [[line["grad_norm"] for line in each.lines("grad_norm")] for each in (outcome, reference)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-3)
    assert outcome.weights.keys() == reference.weights.keys()
    for name, tensor in outcome.weights.items():
        assert torch.allclose(tensor, reference.weights[name], rtol=0, atol=weight_tolerance), name


@pytest.mark.parametrize("name", MODELS)
def test_pipelines_train_the_same(train, tmp_path, name):
    given = (*FULL, f"model.name={folder_of(name, tmp_path)}", "run.rehearse=false", "model.init=random")
    ranks = 4 if name == "three layers" else 2
    assert_same(train("pp", *given, ranks=ranks), train("single", *given))


def test_gpipe_evaluates_and_says_how_long_it_idles(train, tmp_path):
    gear = tmp_path / "pp.yaml"
    gear.write_text((ROOT / "accelerate_configs/pp.yaml").read_text().replace("1f1b", "gpipe"))
    outcome = train(str(gear), *FULL, "eval.every=10", "eval.samples=1", "model.gradient_checkpointing=true")
    single = train("single", *FULL, "eval.every=10", "eval.samples=1")
    assert_same(outcome, single)
    assert "pipeline, gpipe, pp 2" in outcome.output and "layers 0-0, 1-1" in outcome.output
    assert "4 rows = 1 copies x 4 rounds x 1 rows" in outcome.output
    assert "(p-1)/(m+p-1) = 20% of a step idle" in outcome.output, "4 micro batches on 2 stages"
    assert all(0 < line["idle"] < 1 for line in outcome.lines("idle"))
    evaluated = [[line["eval_loss"] for line in each.lines("eval_loss")] for each in (outcome, single)]
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)


@pytest.mark.parametrize("given", [(), ("model.quantize=nf4",)], ids=["lora", "qlora"])
def test_adapters(train, given):
    given = (*FULL, "adapter.method=lora", "optim.lr=1e-2", "train.steps=8", *given)
    outcome, single = train("pp", *given), train("single", *given)
    assert_same(outcome, single, loss_tolerance=1e-4)
    assert len([name for name in outcome.weights if "lora_B" in name]) == 14
    settings = [json.loads((each.folder / "model/adapter_config.json").read_text()) for each in (outcome, single)]
    assert sorted(settings[0].pop("target_modules")) == sorted(settings[1].pop("target_modules"))
    assert settings[0].pop("base_model_name_or_path") != settings[1].pop("base_model_name_or_path")
    assert settings[0] == settings[1]


def test_an_adapter_goes_on(train):
    """DoRA on a pipeline, and the same adapter trained on from its folder."""
    given = ("adapter.method=dora", "optim.lr=1e-2", "run.rehearse=false", "model.init=random")
    first = train("single", *given, "run.name=first")
    path = f"adapter.path={first.folder / 'model'}"
    assert_same(train("pp", *given, path), train("single", *given, path), loss_tolerance=1e-4)


def test_unpacked_rows(train):
    given = (*FULL, "data.packing=false", "train.steps=5")
    assert_same(train("pp", *given, ranks=4), train("single", *given))


@pytest.mark.parametrize(("before", "after", "ranks"), [("pp", "single", None), ("single", "pp", 4)])
def test_a_run_goes_on_under_another_gear(train, before, after, ranks):
    whole = train("single", "train.steps=6", "run.name=whole")
    saving = ("train.steps=6", "save.every=3", "save.keep=3", "run.name=cut")
    first = train(before, *saving)
    shutil.rmtree(first.folder / "checkpoints/step-6")
    outcome = train(after, *saving, "run.resume=latest", ranks=ranks)
    assert "goes on" in outcome.output and "step 3 of 6" in outcome.output
    assert_same(outcome, whole)


def test_few_layers_are_refused(train, tmp_path):
    gear = tmp_path / "pp.yaml"
    gear.write_text((ROOT / "accelerate_configs/pp.yaml").read_text().replace("_size: 2", "_size: 3"))
    given = (f"model.name={folder_of('untied', tmp_path)}", "run.rehearse=false", "model.init=random")
    outcome = train(str(gear), *given, ranks=3)
    assert set(outcome.codes) == {2} and "3 stages, but this model has 2 layers; 2 or fewer would do" in outcome.output
