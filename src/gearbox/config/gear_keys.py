"""Classify each key of a gear's files, and each flag of Accelerate's launcher: honoured, refused or without effect.

A key is refused if its value asks for something that a run does not do. The tests compare these tables with
Accelerate's config classes and parser, and with DeepSpeed's models. The page docs/gear-keys.md is made from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from gearbox.errors import did_you_mean, nearest, shown

Effect = Literal["honoured", "refused", "without effect"]


class Values(NamedTuple):
    """A set of values, with its description."""

    text: str
    contains: Callable[[Any], bool]


INTEGER = Values("an integer >= 0", lambda value: type(value) is int and value >= 0)
POSITIVE = Values("an integer >= 1", lambda value: type(value) is int and value >= 1)
NUMBER = Values("a number >= 0", lambda value: type(value) in (int, float) and math.isfinite(value) and value >= 0)
SIZE = Values("an integer >= 1, such as 5e8", lambda value: NUMBER.contains(value) and value >= 1 and value % 1 == 0)
TRUTH = Values("true or false", lambda value: type(value) is bool)
SPELLED = Values("true or false", lambda value: type(value) in (bool, str) and str(value).lower() in ("true", "false"))
TEXT = Values(
    "text of 1 to 500 characters",
    lambda value: isinstance(value, str) and value.strip() != "" and value.isprintable() and len(value) <= 500,
)
TEXTS = Values("a list of text", lambda value: isinstance(value, list) and all(map(TEXT.contains, value)))
MAPPING = Values("a mapping", lambda value: isinstance(value, dict))
ANY = Values("any value", lambda value: True)


def choice(*values: object, text: str = "") -> Values:
    """Return the set of these values, which differ in type too: true is not 1."""
    named = [str(value) for value in values]
    text = text or (" or ".join([", ".join(named[:-1]), named[-1]]) if len(named) > 1 else named[0])
    return Values(text, lambda value: any(type(value) is type(one) and value == one for one in values))


def or_auto(values: Values) -> Values:
    """Return the values and "auto", which the recipe or Accelerate replaces."""
    return Values(f'{values.text}, or "auto"', lambda value: value == "auto" or values.contains(value))


class Key(NamedTuple):
    """The effect of a key, and the values that a gear may give it."""

    effect: Effect
    values: Values
    text: str = ""
    """The meaning of the key; for a refused key, the one who decides instead, and what to do."""

    def problem(self, value: object) -> str | None:
        """Return why a gear may not give the key this value, or None if it may."""
        if self.values.contains(value):
            return None
        return self.text if self.effect == "refused" else f"must be {self.values.text}, found {shown(value)}"


Table = Mapping[str, "Key | Table"]


def key_meant(name: str, table: Table) -> str:
    """Return `; did you mean 'group.key'?` for a key that the table has with a prefix or in a group, or nearly has."""
    groups = [(group, keys) for group, keys in table.items() if not isinstance(keys, Key)]
    inside = [f"{group}.{key}" for group, keys in groups for key in keys if f"_{key}".endswith(f"_{name}")]
    return did_you_mean([key for key in table if key.endswith(f"_{name}")] + inside) or nearest(name, list(table))


def honoured(values: Values, text: str = "") -> Key:
    """Return a key whose value decides how a run is launched or trains."""
    return Key("honoured", values, text)


def refused(text: str, *harmless: object) -> Key:
    """Return a key that may only have a value which asks for nothing: null, or one of `harmless` in any spelling."""
    spellings = dict.fromkeys(str(value).lower() for value in (*harmless, None))

    def contains(value: object) -> bool:
        if isinstance(value, dict):
            return not value or value.get("enabled") is False
        return value == [] or (isinstance(value, str | int | float | None) and str(value).lower() in spellings)

    return Key("refused", Values(" or ".join(list(spellings)[:-1]), contains), text)


def ignored(values: Values, text: str) -> Key:
    """Return a key that changes nothing, whatever its value."""
    return Key("without effect", values, text)


TPU = "TPUs are not supported; remove it"
SAGEMAKER = "SageMaker is not supported; use compute_environment: LOCAL_MACHINE, and start the launcher on each machine"
MEGATRON = "Megatron-LM is not supported; use accelerate_configs/tp.yaml or pp.yaml"
FP8 = "fp8 is decided by the recipe (perf.float8); use bf16"
COMPILE = "is decided by the recipe (perf.compile); remove it"
MPI = "MPI is not supported; start the launcher on each machine (docs/cluster.md)"
FSDP_1 = "belongs to FSDP version 1; remove it"
CHECKPOINTING = "is decided by the recipe (perf.checkpointing); remove it"
ACCUMULATION = "follows from the recipe (batch.rows, batch.micro_rows) and the number of ranks; remove it"
CLIPPING = "is set by the recipe (optim.max_grad_norm); remove it"
ONLY_FLAG = "Accelerate ignores it in a file; remove it here, and give the launcher the flag"
OTHER_LAUNCHERS = "is for launchers that reach other machines; start the launcher on each machine (docs/cluster.md)"
KINDS = choice(
    "NO", "MULTI_GPU", "FSDP", "DEEPSPEED",
    text='"NO" (quoted, because YAML reads NO as false), MULTI_GPU, FSDP or DEEPSPEED',
)  # fmt: skip


def zero_json(key: str) -> str:
    """Return why a ZeRO setting is refused outside the ZeRO JSON."""
    return f"is set by the ZeRO JSON ({key}); remove it, and set it there"


FSDP: Table = {
    "fsdp_version": honoured(choice(2, "2", text="2; version 1 is not supported")),
    "fsdp_offload_params": honoured(SPELLED, "parameters, gradients and optimizer state in host memory"),
    "fsdp_reshard_after_forward": honoured(SPELLED, "free the gathered parameters between forward and backward"),
    "fsdp_auto_wrap_policy": honoured(choice("TRANSFORMER_BASED_WRAP", "NO_WRAP"), "what is gathered at a time"),
    "fsdp_transformer_layer_cls_to_wrap": honoured(TEXT, "the layers that are gathered one at a time"),
    "fsdp_min_num_params": refused("is for SIZE_BASED_WRAP, which FSDP version 2 cannot apply to a model; remove it"),
    "fsdp_cpu_ram_efficient_loading": honoured(SPELLED, "each rank reads only its rows; `false`: all of them"),
    "fsdp_state_dict_type": ignored(
        choice("SHARDED_STATE_DICT", "FULL_STATE_DICT", "LOCAL_STATE_DICT"), "checkpoints do not depend on the engine"
    ),
    "fsdp_sync_module_states": refused(FSDP_1, True),
    "fsdp_use_orig_params": refused(FSDP_1, True),
    "fsdp_backward_prefetch": refused(FSDP_1, "BACKWARD_PRE"),
    "fsdp_forward_prefetch": refused(FSDP_1, False),
    "fsdp_sharding_strategy": refused(
        "belongs to FSDP version 1; remove it, and use fsdp_reshard_after_forward or parallelism_config"
    ),
    "fsdp_activation_checkpointing": refused(CHECKPOINTING, False),
    "fsdp_activation_checkpointing_offload": refused(CHECKPOINTING, False),
    "fsdp_ignored_modules": refused("all modules are sharded; remove it"),
}
# The settings of a gear without a ZeRO JSON, as `accelerate config` writes them.
INLINE_ZERO: dict[str, Key] = {
    "zero_stage": refused(zero_json("zero_optimization.stage")),
    "offload_optimizer_device": refused(zero_json("zero_optimization.offload_optimizer.device")),
    "offload_param_device": refused(zero_json("zero_optimization.offload_param.device")),
    "offload_optimizer_nvme_path": refused(zero_json("zero_optimization.offload_optimizer.nvme_path")),
    "offload_param_nvme_path": refused(zero_json("zero_optimization.offload_param.nvme_path")),
    "gradient_accumulation_steps": refused(ACCUMULATION),
    "gradient_clipping": refused(CLIPPING),
    "zero3_save_16bit_model": refused("models are saved in the dtype of their starting weights; remove it"),
}
DEEPSPEED: Table = {
    "deepspeed_config_file": honoured(TEXT, "the ZeRO JSON"),
    "zero3_init_flag": honoured(SPELLED, "must be true for stage 3, which shards weights while they load"),
    "deepspeed_multinode_launcher": honoured(choice("standard"), "start the launcher on each machine"),
    **{f"deepspeed_{what}": refused(OTHER_LAUNCHERS) for what in ("hostfile", "exclusion_filter", "inclusion_filter")},
    "deepspeed_moe_layer_cls_names": refused(zero_json("zero_optimization.leaf_module")),
    **INLINE_ZERO,
}
# Each degree of parallelism, with the values of distributed_type that allow it. A degree is the number of ranks that
# share one copy of something. The names are Accelerate's, except ep, pp and pp_schedule, which Accelerate ignores.
DEGREES = {
    "dp_replicate": ("FSDP",),
    "dp_shard": ("FSDP",),
    "tp": ("MULTI_GPU", "FSDP"),
    "sp": ("DEEPSPEED",),
    "cp": ("FSDP",),
    "pp": ("MULTI_GPU",),
    "ep": ("FSDP",),
}
SCHEDULES = ("1f1b", "gpipe")
PARALLELISM: Table = {
    **{f"parallelism_config_{name}_size": honoured(POSITIVE, "the degree of parallelism") for name in DEGREES},
    "parallelism_config_pp_schedule": honoured(choice(*SCHEDULES), "the order of a pipeline's stages"),
    "parallelism_config_cp_backend": refused("only torch is supported; remove it", "torch"),
    "parallelism_config_cp_comm_strategy": refused("only allgather is supported; remove it", "allgather"),
    "parallelism_config_sp_backend": refused("only deepspeed is supported; remove it", "deepspeed"),
    "parallelism_config_sp_seq_length": refused("is set by the recipe (batch.row_tokens); remove it"),
    "parallelism_config_sp_seq_length_is_variable": refused("rows are complete; remove it", True),
    "parallelism_config_sp_attn_implementation": refused("is set by the recipe (model.attention); remove it"),
}
DYNAMO: Table = {
    "dynamo_backend": refused(COMPILE, "no"),
    "dynamo_mode": refused(COMPILE, "default"),
    **{f"dynamo_use_{what}": refused(COMPILE, False) for what in ("fullgraph", "dynamic", "regional_compilation")},
}
SAGEMAKER_KEYS = """
    ec2_instance_type iam_role_name image_uri profile region base_job_name pytorch_version transformers_version
    py_version sagemaker_inputs_file sagemaker_metrics_file additional_args
""".split()
TPU_KEYS = "tpu_name tpu_zone tpu_use_cluster tpu_use_sudo command_file commands tpu_vm tpu_env".split()
GEAR: Table = {
    "compute_environment": refused(SAGEMAKER, "LOCAL_MACHINE"),
    "distributed_type": honoured(KINDS, "the engine"),
    "mixed_precision": honoured(
        choice("bf16", "no", text='bf16, or "no" (quoted) for fp32'), "the precision of forward and backward"
    ),
    "num_processes": honoured(POSITIVE, "the number of ranks on all machines"),
    "num_machines": honoured(POSITIVE, "the number of machines"),
    "machine_rank": honoured(INTEGER, "the number of this machine"),
    "main_process_ip": honoured(TEXT, "the address of machine 0"),
    "main_process_port": honoured(INTEGER, "0 takes any free port"),
    "gpu_ids": honoured(TEXT, 'quoted, such as "0,1", or all'),
    "use_cpu": honoured(TRUTH, "true is allowed for one process on a machine without a GPU"),
    "debug": honoured(TRUTH, "Accelerate compares the shapes of tensors between ranks"),
    "main_training_function": ignored(TEXT, "only TPUs and notebooks read it"),
    "same_network": ignored(TRUTH, "Accelerate reads only the flag"),
    "rdzv_backend": refused(ONLY_FLAG, "static"),
    "enable_cpu_affinity": refused(ONLY_FLAG, False),
    "downcast_bf16": refused(TPU, False, "no"),
    "fp16": refused("is an old key; use mixed_precision", False),
    "dynamo_backend": refused(COMPILE, "no"),
    "deepspeed_config": DEEPSPEED,
    "fsdp_config": FSDP,
    "parallelism_config": PARALLELISM,
    "dynamo_config": DYNAMO,
    "fp8_config": refused(FP8),
    "megatron_lm_config": refused(MEGATRON),
    "mpirun_config": refused(MPI),
    **dict.fromkeys(TPU_KEYS, refused(TPU, False)),
    **dict.fromkeys(SAGEMAKER_KEYS, refused(SAGEMAKER)),
}
GROUPS: dict[str, Table] = {name: table for name, table in GEAR.items() if not isinstance(table, Key)}

# Flags that choose the engine, with the only distributed_type that they may repeat.
ENGINE_FLAGS = {"cpu": "NO", "multi_gpu": "MULTI_GPU", "use_fsdp": "FSDP", "use_deepspeed": "DEEPSPEED"}
# Flags that are given without a value.
BARE_FLAGS = {
    *ENGINE_FLAGS, "quiet", "tpu", "tpu_cluster", "no_tpu_cluster", "tpu_use_sudo", "enable_cpu_affinity",
    "dynamo_use_fullgraph", "dynamo_use_dynamic", "dynamo_use_regional_compilation", "use_parallelism_config",
    "use_megatron_lm", "same_network", "module", "no_python", "downcast_bf16", "fp8_use_autocast_during_eval", "debug",
}  # fmt: skip
SHORT_FLAGS = {"q": "quiet", "t": "tee", "m": "module"}
KEYS_WITHOUT_FLAG = {
    "compute_environment", "distributed_type", "use_cpu", "fp16", "fsdp_ignored_modules", "tpu_use_cluster",
    "parallelism_config_pp_size", "parallelism_config_pp_schedule", "parallelism_config_ep_size",
    *(set(TPU_KEYS) - {"tpu_use_sudo"}), *SAGEMAKER_KEYS, *GROUPS, "fp8_config", "megatron_lm_config", "mpirun_config",
}  # fmt: skip
# All flags but those of FAMILIES.
FLAGS: dict[str, Key] = {
    **{name: key for table in (GEAR, *GROUPS.values()) for name, key in table.items()
       if isinstance(key, Key) and name not in KEYS_WITHOUT_FLAG},
    **{name: honoured(TRUTH, "must repeat the gear's distributed_type") for name in ENGINE_FLAGS},
    "use_parallelism_config": honoured(TRUTH, "must repeat the gear's parallelism_config"),
    "config_file": honoured(TEXT, "the gear"),
    "num_cpu_threads_per_process": honoured(POSITIVE, "OMP_NUM_THREADS of the ranks"),
    "same_network": honoured(TRUTH, "how machines meet"),
    "enable_cpu_affinity": honoured(TRUTH, "pin the ranks to cores"),
    **dict.fromkeys(("rdzv_backend", "rdzv_conf"), honoured(TEXT, "how machines meet")),
    "tee": honoured(TEXT, "copy the ranks' output to --log_dir"),
    **dict.fromkeys(("log_dir", "role"), honoured(TEXT)),
    "max_restarts": honoured(INTEGER, "restarts by torch's launcher"),
    "monitor_interval": honoured(NUMBER, "seconds between two checks of the ranks"),
    "module": honoured(TRUTH, "the script is a module"),
    "no_python": honoured(TRUTH, "the script is a program"),
    "quiet": ignored(TRUTH, "shortens the launcher's own traceback"),
    "tpu": refused(TPU),
    "tpu_cluster": refused(TPU),
    "no_tpu_cluster": ignored(TRUTH, "no TPU is used"),
    "vm": refused(TPU),
    "env": refused(TPU),
    "use_megatron_lm": refused(MEGATRON),
    "mpirun_hostfile": refused(MPI),
}  # fmt: skip
# Flags by their first letters.
FAMILIES = {"megatron_lm_": refused(MEGATRON), "fp8_": refused(FP8), "aws_": refused(SAGEMAKER)}

# The ZeRO JSON, as DeepSpeed 0.19 reads it.
REMOVED = "DeepSpeed has removed it; remove it"
NOT_USED = "is not supported; remove it"
MONITORS = "each run writes metrics.jsonl and report.html; remove it"
BF16_MASTERS = "is decided by the recipe (optim.master_weights), which ZeRO keeps in fp32; remove it"
AVERAGED = "gradients are averaged over the ranks; remove it"
QUANTIZED = "would quantize what ranks exchange; remove it"
OLD_OFFLOAD = "is an old key; use offload_param or offload_optimizer"
OFFLOAD: Table = {
    "device": honoured(choice("none", "cpu", "nvme")),
    "nvme_path": honoured(TEXT),
    "buffer_count": honoured(INTEGER),
    "pin_memory": honoured(TRUTH),
}
ZERO: Table = {
    "stage": honoured(choice(1, 2, 3)),
    "offload_param": {**OFFLOAD, "buffer_size": honoured(SIZE), "max_in_cpu": honoured(SIZE)},
    "offload_optimizer": {
        **OFFLOAD,
        **dict.fromkeys(("pipeline_read", "pipeline_write", "fast_init"), honoured(TRUTH)),
        "ratio": refused("all of the optimizer's state is offloaded; remove it", 1, 1.0),
        "super_offload": refused(NOT_USED, False),
        "cpuadam_cores_perc": refused("is only for super_offload, which is not supported; remove it"),
    },
    **dict.fromkeys(
        """contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce allgather_partitions overlap_comm
        stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential ignore_unused_parameters
        round_robin_gradients parameter_alignment memory_efficient_linear log_trace_cache_warnings
        enable_sanity_checks""".split(),
        honoured(TRUTH),
    ),
    **dict.fromkeys(
        """allgather_bucket_size sub_group_size stage3_model_persistence_threshold stage3_max_live_parameters
        stage3_max_reuse_distance""".split(),
        honoured(SIZE),
    ),
    **dict.fromkeys(
        ("stage3_prefetch_bucket_size", "stage3_param_persistence_threshold"),
        honoured(or_auto(INTEGER), "auto follows from the model's width"),
    ),
    **dict.fromkeys(
        """stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save load_from_fp32_weights
        pipeline_loading_checkpoint save_muon_momentum_buffer_in_memory""".split(),
        ignored(or_auto(TRUTH), "models and checkpoints are saved without DeepSpeed"),
    ),
    "reduce_bucket_size": honoured(or_auto(SIZE), "auto follows from the model's width"),
    "leaf_module": dict.fromkeys(("classes", "names", "name_suffixes"), honoured(TEXTS, "modules gathered together")),
    "stage3_module_granularity_threshold": honoured(INTEGER),
    "compute_grad_norm": refused("gradients are clipped by their norm; remove it", True),
    "override_module_apply": refused(NOT_USED, True),
    "zero_hpz_partition_size": refused("weights are sharded across all ranks; remove it", 1),
    **dict.fromkeys(("legacy_stage1", "elastic_checkpoint"), refused(REMOVED, False)),
    "zenflow": refused(NOT_USED),
    **dict.fromkeys(
        ("zero_quantized_weights", "zero_quantized_nontrainable_weights", "zero_quantized_gradients"),
        refused(QUANTIZED, False),
    ),
    **dict.fromkeys(("cpu_offload", "cpu_offload_param", "cpu_offload_use_pin_memory"), refused(OLD_OFFLOAD, False)),
    **dict.fromkeys(("mics_shard_size", "mics_hierarchical_params_gather", "zeropp_loco_param"), refused(REMOVED)),
}
ZERO_JSON: Table = {
    "train_batch_size": honoured(or_auto(POSITIVE), "must agree with the recipe (batch.rows)"),
    "train_micro_batch_size_per_gpu": honoured(or_auto(POSITIVE), "must agree with the recipe (batch.micro_rows)"),
    "gradient_accumulation_steps": honoured(or_auto(POSITIVE), "must agree with the recipe (batch.rows)"),
    "gradient_clipping": honoured(or_auto(NUMBER), "must agree with the recipe (optim.max_grad_norm)"),
    "zero_optimization": ZERO,
    "bf16": {
        "enabled": honoured(TRUTH, "the precision"),
        **dict.fromkeys(("immediate_grad_update", "check_grad_overflow"), honoured(TRUTH)),
        **dict.fromkeys(("bf16_master_weights_and_grads", "bf16_optimizer_states"), refused(BF16_MASTERS, False)),
    },
    "communication_data_type": honoured(choice("fp32", text="fp32"), "the dtype in which gradients are reduced"),
    "seq_parallel_communication_data_type": refused("gradients are reduced in fp32; remove it", "fp32"),
    "data_types": {
        "grad_accum_dtype": honoured(choice("fp32", text="fp32"), "the dtype in which gradients are accumulated"),
        "param_dtype": refused("is decided by bf16.enabled; remove it"),
        "buffer_dtype": refused("buffers keep their dtype; remove it"),
        "keep_in_fp32_modules": refused("is decided by the model; remove it", "auto"),
    },
    "zero_force_ds_cpu_optimizer": honoured(TRUTH, "DeepSpeed's own AdamW for host memory"),
    "zero_allow_untested_optimizer": ignored(TRUTH, "Accelerate decides it"),
    "aio": {
        **dict.fromkeys(("block_size", "queue_depth", "intra_op_parallelism"), honoured(POSITIVE)),
        **dict.fromkeys(("single_submit", "overlap_events", "use_gds"), honoured(TRUTH)),
    },
    **dict.fromkeys(("flops_profiler", "comms_logger", "timers"), honoured(MAPPING, "DeepSpeed prints it")),
    **dict.fromkeys("wall_clock_breakdown memory_breakdown dump_state disable_python_gc".split(), honoured(TRUTH)),
    "log_level": honoured(TEXT, "the log of DeepSpeed"),
    "steps_per_print": ignored(ANY, "Gearbox prints each step"),
    "checkpoint": ignored(MAPPING, "checkpoints do not depend on the engine"),
    "dataloader_drop_last": ignored(TRUTH, "DeepSpeed loads no data"),
    "optimizer": refused("is set by the recipe (optim:); remove it"),
    "scheduler": refused("is set by the recipe (schedule:); remove it"),
    "activation_checkpointing": refused(CHECKPOINTING),
    "fp16": {
        "enabled": refused("is not supported; use bf16", False),
        **dict.fromkeys(
            """auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis
            min_loss_scale fp16_master_weights_and_grads""".split(),
            ignored(ANY, "fp16 is off"),
        ),
    },
    "torch_autocast": refused(NOT_USED),
    "prescale_gradients": refused(AVERAGED, False),
    "gradient_predivide_factor": refused(AVERAGED, 1, 1.0),
    "gradient_allreduce_op": refused(AVERAGED, "mean"),
    "managed_gradient_accumulation": refused(NOT_USED, True),
    "disable_allgather": refused(NOT_USED, False),
    "compile": refused(COMPILE),
    "vocabulary_size": ignored(ANY, "DeepSpeed only compares it with a multiple of 8"),
    **dict.fromkeys(("tensorboard", "wandb", "csv_monitor", "comet"), refused(MONITORS)),
    "bfloat16": refused("is an old name; use bf16"),
    "sequence_parallel_size": refused("is set by the gear (parallelism_config_sp_size); remove it"),
    "tensor_parallel": refused("use accelerate_configs/tp.yaml or fsdp_tp.yaml; remove it"),
    "pipeline": refused("use accelerate_configs/pp.yaml; remove it"),
    **dict.fromkeys(
        """autotuning hybrid_engine data_efficiency datastates_ckpt weight_quantization expert_parallel
        use_data_before_expert_parallelism""".split(),
        refused(NOT_USED, False),
    ),
    **dict.fromkeys(
        """amp nebula compression_training curriculum_learning eigenvalue elasticity graph_harvesting
        progressive_layer_drop quantize_training sparse_attention sparse_gradients""".split(),
        refused(REMOVED, False),
    ),
}
