"""Test that every key and flag of Accelerate and DeepSpeed is honoured, refused by name, or known to change nothing."""

import dataclasses
import json
import os
import re
import typing
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config import cluster, default
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig
from accelerate.commands.launch import launch_command_parser
from pydantic import BaseModel

from gearbox import ROOT
from gearbox.config import gear
from gearbox.config.gear import load_gear
from gearbox.config.gear_keys import BARE_FLAGS, FAMILIES, FLAGS, GEAR, GROUPS, SHORT_FLAGS, ZERO, ZERO_JSON, Key
from gearbox.config.job import BatchPlan
from gearbox.config.loader import load_recipe
from gearbox.errors import UserError
from support.gears import check_against, written

OURS = {"parallelism_config_pp_size", "parallelism_config_pp_schedule"}  # Accelerate has no pipeline for training
OLD = {"fp16", "dynamo_backend"}  # Accelerate converts them
NOT_A_SCRIPT = {"help", "training_script", "training_script_args"}
RECIPE = ROOT / "recipes" / "tiny.yaml"


def refusal(path, flags=None) -> str:
    """Return the text of the refusal, which has one line per problem, or an empty string if the gear loads."""
    return refused(load_gear, path, flags)


def refused(load, *given) -> str:
    """Return the text with which a loader refuses, or an empty string if it does not."""
    try:
        load(*given)
    except UserError as error:
        assert all(len(line) < 600 for line in str(error).splitlines())
        return str(error)
    return ""


# What the packages know


def test_every_key_of_accelerates_config_files_is_classified():
    written_keys = {field.name for kind in (ClusterConfig, SageMakerConfig) for field in dataclasses.fields(kind)}
    assert set(GEAR) == written_keys | OLD
    source = Path(cluster.__file__).read_text(encoding="utf-8")
    for group, table in GROUPS.items():
        prefix = {"fsdp_config": "", "deepspeed_config": ""}.get(group, group.replace("dynamo_config", "dynamo") + "_")
        names = re.findall(rf'\b{group}\[(?:prefix \+ )?"(\w+)"\]', source)
        assert {prefix + name for name in names} <= set(table), group
        assert names, group


def test_every_flag_of_accelerates_launcher_is_classified():
    actions = [action for action in launch_command_parser()._actions if action.dest not in NOT_A_SCRIPT]
    names = {word.lstrip("-") for action in actions for word in action.option_strings if "-" not in word[2:]}
    in_families = {name for name in names if name.startswith(tuple(FAMILIES))}
    assert set(FLAGS) | set(SHORT_FLAGS) == names - in_families
    bare = {word for action in actions if action.nargs == 0 for word in action.option_strings if "-" not in word[2:]}
    assert BARE_FLAGS | {"q", "m"} == {word.lstrip("-") for word in bare}


def models_of(annotation) -> list[type[BaseModel]]:
    """Return the pydantic models in a type."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for part in typing.get_args(annotation) for model in models_of(part)]


def compare_with_model(model: type[BaseModel], table, group: str) -> None:
    """Check that a table has every field of a pydantic model, and every field of the models in it."""
    for field, info in model.model_fields.items():
        name = info.alias or field
        assert name in table, f"{group}.{name}"
        if not isinstance(table[name], Key):
            (nested,) = models_of(info.annotation)
            compare_with_model(nested, table[name], f"{group}.{name}")


def test_every_key_of_deepspeeds_models_is_classified():
    from deepspeed.runtime import config
    from deepspeed.runtime.precision_config import DeepSpeedBF16Config, DeepSpeedFP16Config
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    read = set()

    class Recorder(dict):
        def keys(self):
            return self

        def get(self, key, instead=None):
            read.add(key)
            return super().get(key, instead)

        def __contains__(self, key):
            read.add(key)
            return super().__contains__(key)

    config.DeepSpeedConfig(Recorder(train_batch_size=1))
    assert len(read) > 50
    assert read <= set(ZERO_JSON), sorted(read - set(ZERO_JSON))
    assert set(ZERO_JSON) - read == {"sequence_parallel_size"}  # read from the file, before the record
    assert set(config._REMOVED_ZERO_CONFIG_KEYS) <= set(ZERO)
    compare_with_model(DeepSpeedZeroConfig, ZERO, "zero_optimization")
    compare_with_model(DeepSpeedBF16Config, ZERO_JSON["bf16"], "bf16")
    compare_with_model(DeepSpeedFP16Config, ZERO_JSON["fp16"], "fp16")


# Files that `accelerate config` writes


def ask(monkeypatch, path, answers: dict[str, object]):
    """Run Accelerate's questionnaire, and write its file. The first words of a question give its answer."""
    asked = set()

    def answer(question):
        found = next((start for start in answers if question.startswith(start)), None)
        asked.add(found)
        return answers.get(found)

    def field(question, convert=None, default=None, error_message=None):
        said = answer(question)
        if said is None and default is not None:
            return default
        return convert(said or "") if convert is not None else said

    def options(question, choices=(), convert=None, default=0):
        said = answer(question)
        at = default if said is None else [str(choice) for choice in choices].index(said)
        return convert(at) if convert is not None else at

    monkeypatch.setattr(cluster, "_ask_field", field)
    monkeypatch.setattr(cluster, "_ask_options", options)
    cluster.get_cluster_input().to_yaml_file(path)
    assert asked - {None} == set(answers), "each answer must belong to a question"
    return yaml.safe_load(path.read_text())


GPUS = {"Which type of machine": "multi-GPU", "How many GPU(s)": "2", "Do you wish to use mixed": "bf16"}
BY_SIZE = GPUS | {"Do you want to use FullySharded": "yes", "What should be your FSDP version": "2"}
FSDP = BY_SIZE | {"Do you want to use the model's `_no_split_modules`": "yes"}
ZERO_ANSWERS = GPUS | {"Do you want to use DeepSpeed": "yes"}
ZERO_FILE = {"Do you want to specify a json": "yes", "Please enter the path to the json": "ds_configs/zero3.json"}
MACHINES = {
    "How many different": "2", "What is the rank": "1", "What is the IP": "10.0.0.1", "What is the port": "29500",
}  # fmt: skip


@pytest.mark.parametrize(
    ("answers", "engine"),
    [
        ({"Do you wish to use mixed": "bf16"}, "single"),
        ({"Do you want to run your training on CPU": "yes"}, "single"),
        (GPUS, "ddp"),
        (GPUS | {"Should distributed operations": "yes", "What GPU(s)": "0,1"}, "ddp"),
        (GPUS | MACHINES, "ddp"),
        (FSDP, "fsdp"),
        (FSDP | {"Do you want to offload": "yes"}, "fsdp"),
        (FSDP | {"Do you want to use the parallelism": "yes", "What is the tensor parallelism": "2"}, "fsdp"),
        (ZERO_ANSWERS | ZERO_FILE | {"Do you want to enable `deepspeed.zero.Init`": "yes"}, "zero"),
    ],
)
def test_a_file_of_accelerate_config_loads(monkeypatch, tmp_path, answers, engine):
    if ZERO_FILE.items() <= answers.items():
        answers = {name: said for name, said in answers.items() if name != "Do you wish to use mixed"}
    ask(monkeypatch, tmp_path / "gear.yaml", answers)
    assert load_gear(tmp_path / "gear.yaml").engine == engine


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ({"Which type of machine": "TPU"}, "distributed_type: must be \"NO\" (quoted, because YAML reads NO as"),
        ({"Which type of machine": "multi-CPU"}, "MULTI_GPU, FSDP or DEEPSPEED, found 'MULTI_CPU'"),
        (GPUS | {"Do you wish to use mixed": "fp16"}, "mixed_precision: must be bf16, or "),
        (GPUS | {"Would you like to enable numa": "yes"}, "enable_cpu_affinity: Accelerate ignores it in a file"),
        (GPUS | MACHINES | {"Are all the machines": "no", "What rendezvous": "c10d"}, "rdzv_backend: Accelerate ignor"),
        (GPUS | {"Do you wish to optimize": "yes"}, "dynamo_backend: is decided by the recipe (perf.compile)"),
        (FSDP | {"Do you want to enable FSDP activation": "yes"},
         "fsdp_activation_checkpointing: is decided by the recipe (perf.checkpointing); remove it"),
        (BY_SIZE | {"What should be your auto wrap": "SIZE_BASED_WRAP"},
         "fsdp_auto_wrap_policy: must be TRANSFORMER_BASED_WRAP or NO_WRAP, found 'SIZE_BASED_WRAP'"),
        (FSDP | {"What should be your FSDP version": "1"}, "fsdp_config.fsdp_version: must be 2; version 1"),
        (ZERO_ANSWERS, "deepspeed_config.deepspeed_config_file: must name a JSON file such as ds_configs/zero3.json"),
        (ZERO_ANSWERS, "deepspeed_config.zero_stage: is set by the ZeRO JSON (zero_optimization.stage); remove it"),
        (ZERO_ANSWERS, "deepspeed_config.gradient_accumulation_steps: follows from the recipe (batch.rows, batch."),
        (ZERO_ANSWERS | ZERO_FILE, "deepspeed_config.zero3_init_flag: must be true for stage 3"),
    ],
)  # fmt: skip
def test_what_a_file_of_accelerate_config_asks_beyond_a_run_is_refused_by_name(monkeypatch, tmp_path, answers, said):
    if ZERO_FILE.items() <= answers.items():
        answers = {name: said for name, said in answers.items() if name != "Do you wish to use mixed"}
    if answers["Which type of machine"] in ("TPU", "multi-CPU"):
        answers = {"Which type of machine": answers["Which type of machine"]}
    ask(monkeypatch, tmp_path / "gear.yaml", answers)
    (line,) = [line for line in refusal(tmp_path / "gear.yaml").splitlines() if said in line]
    assert line.startswith(f"{tmp_path}/gear.yaml: ")


def test_the_basic_file_of_accelerate_loads(tmp_path):
    assert default.write_basic_config("bf16", str(tmp_path / "default_config.yaml"))  # JSON, in spite of its name
    assert load_gear(tmp_path / "default_config.yaml").engine == "single"
    (tmp_path / "moved.yaml").write_text(
        yaml.safe_dump(ClusterConfig("LOCAL_MACHINE", "MULTI_GPU", "bf16", False, False, num_processes=2).to_dict())
    )
    assert load_gear(tmp_path / "moved.yaml").engine == "ddp"


# Values of any kind

ILL = [
    None,
    True,
    False,
    0,
    -1,
    2**70,
    1.5,
    float("nan"),
    "",
    "x",
    "2",
    "true",
    [],
    [2],
    {},
    {"a": 1},
    "a\0b",
    "y" * 9999,
]


def leaves(table, path=()):
    """Yield the path of every key of a table, and of every group."""
    for name, key in table.items():
        yield (*path, name)
        if not isinstance(key, Key):
            yield from leaves(key, (*path, name))


def changed(content: dict, path: tuple[str, ...], value) -> dict:
    """Return the content with another value at the path."""
    first, *rest = path
    below = content.get(first) if isinstance(content.get(first), dict) else {}
    return content | {first: changed(below, tuple(rest), value) if rest else value}


@pytest.mark.parametrize("name", ["single", "fsdp_tp", "zero3"])
def test_a_gear_with_any_value_loads_or_is_refused_in_short_lines(tmp_path, monkeypatch, name):
    monkeypatch.chdir(ROOT)
    shipped = yaml.safe_load((ROOT / "accelerate_configs" / f"{name}.yaml").read_text())
    groups = {"fsdp_tp": {"fsdp_config", "parallelism_config"}, "zero3": {"deepspeed_config"}}.get(name)
    path, loaded = tmp_path / "gear.yaml", 0
    for keys in leaves(GEAR):
        for value in ILL if groups is None or keys[0] in groups else []:
            path.write_text(json.dumps(changed(shipped, keys, value)).replace("NaN", ".nan"))
            loaded += not refusal(path)
    assert loaded >= 10


@pytest.mark.parametrize(
    "key", ["num_processes", "mixed_precision", "fsdp_config", "data", "data.path", "optim.lr", "schedule.warmup"]
)
def test_a_value_that_aliases_make_large_is_refused_in_short_lines(tmp_path, key):
    value: list = ["x"] * 9
    for _ in range(30):
        value = [value] * 9  # written with aliases
    load, file = (load_gear, gear_of(key)) if key in GEAR else (lambda path: load_recipe(path, []), RECIPE)
    path = tmp_path / file.name
    path.write_text(yaml.safe_dump(changed(yaml.safe_load(file.read_text()), tuple(key.split(".")), value)))
    assert f"{path}: {key}" in refused(load, path)


def test_a_wrong_engine_is_the_only_problem(tmp_path):
    """Nothing is said about other keys: which ones fit depends on the engine."""
    text = (ROOT / "accelerate_configs" / "fsdp.yaml").read_text()
    path = tmp_path / "gear.yaml"
    for engine, said in (("distributed_type: FSDPP", "must be"), ("", "is missing; set it to")):
        path.write_text(text.replace("distributed_type: FSDP", engine))
        (line,) = refusal(path).splitlines()
        assert line.startswith(f"{path}: distributed_type: {said}")


def zero_refusal(path, content: dict) -> str:
    path.write_text(json.dumps(content))
    _, problems = gear._read_zero_json(path)
    assert all(len(line) < 600 for line in problems)
    return "\n".join(problems)


def test_a_zero_json_with_any_value_loads_or_is_refused_in_short_lines(tmp_path):
    content = json.loads((ROOT / "ds_configs" / "zero3.json").read_text())
    for keys in [*leaves(ZERO_JSON), ("zero_optimization", "stage", "x"), ("none",)]:
        for value in ILL:
            zero_refusal(tmp_path / "zero.json", changed(content, keys, value))


def test_what_loads_is_what_deepspeeds_own_models_take(tmp_path):
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    taken = 0
    for keys in leaves(ZERO, ("zero_optimization",)):
        for value in ILL:
            content = changed({"zero_optimization": {"stage": 3}}, keys, value)
            if not zero_refusal(tmp_path / "zero.json", content):
                settings = gear._read_zero_json(tmp_path / "zero.json")[0]["zero_optimization"]
                DeepSpeedZeroConfig(**{name: given for name, given in settings.items() if given != "auto"})
                taken += 1
    assert taken > 50


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("a: &a [*a]\n", "gear.yaml: a: unknown key"),
        ("gpu_ids: &a [*a]\nnum_processes: *a\n", "num_processes: must be an integer >= 1, found [[[[[["),
        ("[" * 1500, "invalid YAML"),
        ("num_processes: 2020-13-45", "num_processes: must be an integer >= 1, found '2020-13-45'"),
        ("num_processes: !!timestamp 2020-13-45", "invalid YAML: month must be in 1..12"),
        ("num_processes: !!int ''", "invalid YAML"),
        ("? [a]\n: 1", "invalid YAML"),
        ("num_processes: 2020-12-05\ndistributed_type: [NO]", 'distributed_type: must be "NO" (quoted'),
        ("\0\1\2", "invalid YAML"),
        ("#" + " " * 2**20, "cannot be read: it has more than 1,048,576 bytes"),
        (
            "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9) if i else 1}]\n" for i in range(40)),
            "a39: unknown key",
        ),
    ],
)
def test_a_hostile_gear_is_refused(tmp_path, content, said):
    (tmp_path / "gear.yaml").write_text(content)
    assert said in refusal(tmp_path / "gear.yaml")


@pytest.mark.parametrize("which", ["gear.yaml", "zero.json"])
def test_a_gear_that_is_no_file_is_refused(tmp_path, which):
    path = written(tmp_path, "zero3", {})
    (tmp_path / which).unlink()
    os.mkfifo(tmp_path / which)
    assert refusal(path) == f"{tmp_path / which}: cannot be read: it is not a regular file"
    (tmp_path / which).unlink()
    (tmp_path / which).mkdir()
    assert refusal(path) == f"{tmp_path / which}: cannot be read: it is not a regular file"


def test_a_hostile_json_is_refused(tmp_path):
    path = written(tmp_path, "zero3", "[" * 100_000)
    assert "zero.json: invalid JSON: " in refusal(path)
    written(tmp_path, "zero3", '{"bf16": {"enabled": true, "enabled": false}}')
    assert refusal(path).splitlines()[0] == f"{tmp_path}/zero.json: duplicate key 'enabled'; keep one"


def test_harmless_values_are_not_passed_to_deepspeed(tmp_path):
    """DeepSpeed stops at the mere name of a key that it has removed."""
    harmless = {"amp": {"enabled": False}, "elasticity": {}, "sparse_gradients": False, "wandb": {"enabled": False}}
    loaded = load_gear(written(tmp_path, "zero3", harmless | {"gradient_allreduce_op": "mean"}))
    assert set(loaded.zero_json) & {*harmless, "gradient_allreduce_op"} == set()


# Flags

BASE = {"FSDP": "fsdp", "DEEPSPEED": "zero3", "NO": "single", "MULTI_GPU": "ddp"}
# A value of each honoured flag that differs from that of the gear that reads it.
OTHER = {
    "mixed_precision": "no", "num_processes": "3", "num_machines": "2", "machine_rank": "1", "main_process_ip": "a",
    "main_process_port": "29501", "gpu_ids": "0,1", "debug": "true", "fsdp_version": "2",
    "fsdp_offload_params": "true", "fsdp_reshard_after_forward": "false", "fsdp_auto_wrap_policy": "NO_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": "A", "fsdp_cpu_ram_efficient_loading": "false",
    "deepspeed_multinode_launcher": "standard",
    "deepspeed_config_file": str(ROOT / "ds_configs/zero2.json"), "zero3_init_flag": "true",
}  # fmt: skip


def gear_of(flag: str) -> Path:
    """Return the shipped gear that reads a flag."""
    name = "fsdp" if flag.startswith("fsdp") else "zero3" if flag in GROUPS["deepspeed_config"] else "ddp"
    return ROOT / "accelerate_configs" / f"{name}.yaml"


@pytest.mark.parametrize("flag", sorted(name for name, key in FLAGS.items() if key.effect == "refused"))
def test_a_refused_flag_is_named_with_what_to_do(flag):
    text = refusal(gear_of(flag), {flag: "3"})
    place = f"--{flag}" if flag in BARE_FLAGS else f"--{flag}=3"
    assert text.startswith(f"{place}: ") and "\n" not in text
    assert "remove it" in text or "; use " in text or "; start the launcher" in text, text


@pytest.mark.parametrize("flag", sorted(OTHER))
def test_an_honoured_flag_changes_the_gear(flag):
    before, after = load_gear(gear_of(flag)), load_gear(gear_of(flag), {flag: OTHER[flag]})
    group = next((name for name, table in GROUPS.items() if flag in table), None)
    settings = after.settings[group] if group else after.settings
    assert str(settings[flag]).lower() == OTHER[flag].lower()
    assert before != after or flag in ("fsdp_version", "zero3_init_flag", "deepspeed_multinode_launcher")
    wrong = refusal(gear_of(flag), {flag: "[]\0"})
    assert wrong.startswith(f"--{flag}") and "\n" not in wrong  # nothing else is wrong


@pytest.mark.parametrize(
    ("gear_name", "flag", "value"),
    [
        ("zero3", "num_machines", "0"),
        ("zero3", "num_machines", "x"),
        ("zero1", "parallelism_config_sp_size", "x"),
        ("zero3", "deepspeed_config_file", "\0"),
        ("single", "num_processes", "x"),
    ],
)
def test_a_wrong_flag_is_the_only_problem(gear_name, flag, value):
    (line,) = refusal(ROOT / "accelerate_configs" / f"{gear_name}.yaml", {flag: value}).splitlines()
    assert line.startswith(f"--{flag}={value}: must be ")


def test_every_honoured_flag_has_a_test():
    """The launcher itself honours the rest: they start no other engine."""
    launcher_only = set(FLAGS) - set(GEAR) - {name for table in GROUPS.values() for name in table}
    sizes = {name for name in FLAGS if name.startswith("parallelism_config_") and FLAGS[name].effect == "honoured"}
    honoured = {name for name, key in FLAGS.items() if key.effect == "honoured"}
    assert honoured - launcher_only - sizes - set(OTHER) == {"same_network", "enable_cpu_affinity", "rdzv_backend"}


@pytest.mark.parametrize(
    ("flag", "gear", "said"),
    [
        ("use_deepspeed", "fsdp", "--use_deepspeed: does not fit this gear, whose distributed_type is FSDP"),
        ("use_fsdp", "zero3", "--use_fsdp: does not fit this gear, whose distributed_type is DEEPSPEED"),
        ("multi_gpu", "single", "--multi_gpu: does not fit this gear"),
        ("cpu", "ddp", "--cpu: does not fit this gear"),
        ("use_parallelism_config", "fsdp", "--use_parallelism_config: this gear has no parallelism_config"),
        ("use_fsdp", "fsdp", ""), ("multi_gpu", "ddp", ""), ("use_deepspeed", "zero1", ""), ("cpu", "single", ""),
        ("use_parallelism_config", "hsdp", ""), ("quiet", "ddp", ""), ("same_network", "ddp", ""),
    ],
)  # fmt: skip
def test_a_flag_may_only_repeat_the_engine_of_the_gear(flag, gear, said):
    assert refusal(ROOT / f"accelerate_configs/{gear}.yaml", {flag: "true"})[: len(said) or 1] == said


@pytest.mark.parametrize(
    ("gear", "flags", "said"),
    [
        ("single", {"num_processes": "3"}, '--num_processes=3: 3 ranks, but distributed_type is "NO"; use 1 rank, or'),
        (
            "zero3",
            {"fsdp_offload_params": "true"},
            "--fsdp_offload_params=true: is only for FSDP, but dist",
        ),
        ("ddp", {"zero3_init_flag": "true"}, "--zero3_init_flag=true: is only for DEEPSPEED, but"),
        ("tp", {"num_processes": "3"}, "--num_processes=3: 3 ranks are not divisible by tp=2; use 2 or 4"),
        (
            "zero3",
            {"num_proceses": "3"},
            "--num_proceses=3: the launcher has no such flag; did you mean",
        ),
        ("pp", {"parallelism_config_pp_size": "4"}, "--parallelism_config_pp_size=4: the launcher has no such flag"),
    ],
)
def test_a_flag_that_does_not_fit_the_gear_is_named(gear, flags, said):
    text = refusal(ROOT / f"accelerate_configs/{gear}.yaml", flags)
    assert text.startswith(said) and "\n" not in text


def test_zero_on_several_machines_needs_the_standard_launcher(tmp_path):
    several = {"num_machines": 2, "zero_json": {"zero_optimization": {"stage": 2}}}
    assert "deepspeed_multinode_launcher: must be standard for several machines" in refusal(
        written(tmp_path, "zero2", **several)
    )


# The environment

VARIABLES = {
    "ACCELERATE_USE_FSDP": ("true", "ddp"), "ACCELERATE_USE_DEEPSPEED": ("true", "fsdp"),
    "ACCELERATE_USE_MEGATRON_LM": ("true", "ddp"), "ACCELERATE_DYNAMO_BACKEND": ("inductor", "single"),
    "ACCELERATE_MIXED_PRECISION": ("fp16", "ddp"), "ACCELERATE_GRADIENT_CLIPPING": ("5", "zero2"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": ("7", "zero2"), "ACCELERATE_DEEPSPEED_ZERO_STAGE": ("2", "zero3"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": ("A", "zero3"), "ACCELERATE_TORCH_DEVICE": ("meta", "single"),
    "ACCELERATE_FP8_BACKEND": ("MSAMP", "zero3"), "FSDP_IGNORED_MODULES": (".*", "fsdp"),
    "FSDP_ACTIVATION_CHECKPOINTING": ("true", "fsdp"), "FSDP_AUTO_WRAP_POLICY": ("NO_WRAP", "fsdp"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": ("A", "fsdp"), "PARALLELISM_CONFIG_CP_COMM_STRATEGY": ("alltoall", "ring"),
}  # fmt: skip


@pytest.mark.parametrize("variable", VARIABLES)
def test_a_variable_that_would_change_the_run_is_refused(monkeypatch, variable):
    value, name = VARIABLES[variable]
    gear, recipe, batch = (
        load_gear(ROOT / f"accelerate_configs/{name}.yaml"), load_recipe(RECIPE), BatchPlan.divide(16, 2, 2)
    )  # fmt: skip
    check_against(gear, recipe, RECIPE, batch)
    monkeypatch.setenv(variable, value)
    with pytest.raises(UserError, match=f"^{variable}={re.escape(value)} is set in the environment, but .*; unset it$"):
        check_against(gear, recipe, RECIPE, batch)


@pytest.mark.parametrize("name", ["single", "ddp", "fsdp", "hsdp", "ring", "zero1", "ulysses"])
def test_the_variables_of_the_launcher_are_accepted(monkeypatch, name):
    from support.ranks import launcher_environment

    path = ROOT / f"accelerate_configs/{name}.yaml"
    for variable, value in launcher_environment(path, None).items():
        monkeypatch.setenv(variable, value)
    check_against(load_gear(path), load_recipe(RECIPE), RECIPE, BatchPlan.divide(16, 2, 2))


def test_each_refused_or_ignored_key_has_a_reason():
    def walk(table):
        for key in table.values():
            yield from [key] if isinstance(key, Key) else walk(key)

    keys = [*walk(GEAR), *walk(ZERO_JSON), *FLAGS.values(), *FAMILIES.values()]
    assert all(key.text for key in keys if key.effect != "honoured")
