"""Translate what other trainers call a key or a value: TRL, PEFT, axolotl, LLaMA-Factory, NeMo, torchtune and others.

These are facts only: the schema is in recipe.py, and a test checks that every key named here exists there.
"""

from __future__ import annotations

KEYS = {
    "model.name": """
        model_name_or_path model_name base_model base_model_config model_id model_path pretrained_model_name_or_path
        hf_model hf_model_id checkpoint_dir restore_from_path model_dir""",
    "model.revision": "model_revision revision_of_model",
    "model.trust_remote_code": "trust_remote_code_model",
    "model.attention": "attn_implementation flash_attn flash_attention use_flash_attention_2 flash_attn_2 attn_impl",
    "model.add_tokens": "special_tokens additional_special_tokens new_special_tokens add_special_tokens tokens",
    "model.router_loss": "router_aux_loss_coef aux_loss_coef moe_aux_loss_coeff",
    "adapter": "peft lora lora_config peft_config peft_scheme",
    "adapter.method": "finetuning_type peft_method tuner_type peft_type",
    "adapter.path": "lora_model_dir adapter_name_or_path peft_model_id lora_path adapter_path",
    "adapter.r": "lora_r lora_rank adapter_dim lora_dim rank",
    "adapter.alpha": "lora_alpha",
    "adapter.rslora": "use_rslora peft_use_rslora",
    "adapter.dropout": "lora_dropout adapter_dropout",
    "adapter.targets": "lora_target_modules target_modules lora_target lora_attn_modules",
    "data.path": """
        dataset datasets dataset_path dataset_name dataset_dir train_file train_files data_files train_data
        train_dataset file_names data_path data_prefix dataset_mixer dataset_mixture pretraining_dataset train_ds""",
    "data.split": "dataset_split train_split dataset_train_split",
    "data.form": "dataset_type ds_type formatting template_type",
    "data.fields": "dataset_text_field text_column field columns column_map prompt_template",
    "data.roles": "tags role_mapping",
    "data.chat_template": "template chat_template_path chat_template_jinja",
    "data.supervise": "roles_to_train",
    "data.long": "truncation truncation_method excess_length_strategy",
    "data.packing": "sample_packing packed packed_sequence neat_packing pack_sequences eval_sample_packing",
    "batch.rows": """
        batch_size global_batch_size train_batch_size total_batch_size effective_batch_size""",
    "batch.row_tokens": """
        max_seq_length max_seq_len max_length sequence_len sequence_length seq_length seq_len cutoff_len
        model_max_length block_size context_length max_tokens encoder_seq_length max_packed_sequence_len""",
    "batch.micro_rows": """
        per_device_train_batch_size per_device_batch_size micro_batch_size train_micro_batch_size_per_gpu
        per_gpu_train_batch_size""",
    "optim": "optimizer",
    "optim.name": "optimizer_name optimizer_type optim_type",
    "optim.lr": "learning_rate learningrate max_lr peak_lr base_lr init_lr",
    "optim.betas": "adam_betas adam_beta1 adam_beta2 beta1 beta2 betas1",
    "optim.eps": "adam_epsilon epsilon adam_eps",
    "optim.weight_decay": "wd",
    "optim.max_grad_norm": "gradient_clip_val gradient_clipping grad_clip clip_grad_norm clip_grad max_norm",
    "schedule": "lr_scheduler scheduler lr_schedule sched",
    "schedule.name": "lr_scheduler_type scheduler_type lr_scheduler_name lr_decay_style lr_schedule_type",
    "schedule.warmup": "warmup_steps num_warmup_steps lr_warmup_steps warmup_iters lr_warmup_iters",
    "schedule.decay": "num_decay_steps decay_steps lr_wsd_decay_iters wsd_decay_steps cooldown_steps",
    "train": "trainer training training_args training_arguments",
    "train.objective": "rl rlhf trainer_type pref_loss loss_type alignment_method preference_loss",
    "train.teacher": "teacher_model_name_or_path teacher_model kd_teacher",
    "train.steps": "max_steps max_train_steps num_train_steps num_steps train_steps train_iters",
    "train.epochs": "num_train_epochs num_epochs max_epochs n_epochs",
    "train.seed": "data_seed random_seed manual_seed",
    "preference": "dpo dpo_config",
    "preference.beta": """
        pref_beta dpo_beta kto_beta orpo_beta simpo_beta orpo_alpha ref_policy_kl_penalty
        reference_policy_kl_penalty""",
    "preference.label_smoothing": "dpo_label_smoothing",
    "preference.margin": "simpo_gamma",
    "preference.sft_weight": "rpo_alpha pref_ftx cpo_alpha sft_loss_weight",
    "preference.desirable_weight": "kto_desirable_weight kto_chosen_weight",
    "preference.undesirable_weight": "kto_undesirable_weight kto_rejected_weight",
    "eval": "validation evaluation",
    "eval.every": """
        eval_steps evals_per_epoch val_check_interval eval_interval evaluation_interval eval_freq
        run_val_every_n_steps eval_every""",
    "eval.fraction": """
        val_set_size test_size val_size validation_split eval_fraction validation_split_percentage test_split_size""",
    "eval.path": """
        eval_dataset test_datasets dataset_test_split validation_file eval_file validation_ds val_dataset
        dataset_validation dataset_val eval_path eval_data""",
    "eval.patience": "early_stopping_patience early_stopping",
    "eval.metric": "metric_for_best_model compute_metrics",
    "save": "checkpointer",
    "save.every": "save_steps saves_per_epoch checkpoint_every save_interval checkpoint_interval save_every",
    "save.best": "load_best_model_at_end save_best_model",
    "save.keep": "save_total_limit save_top_k keep_last_n_checkpoints max_checkpoints",
    "perf": "performance speed",
    "perf.kernels": """
        use_liger_kernel use_liger liger_kernel enable_liger_kernel liger_plugin liger_rms_norm liger_glu_activation
        liger_layer_norm liger_rope liger_fused_linear_cross_entropy lora_mlp_kernel lora_qkv_kernel lora_o_kernel
        use_kernels use_unsloth""",
    "perf.compile": "torch_compile torchcompile compile_model use_torch_compile",
    "perf.checkpointing": """
        gradient_checkpointing use_gradient_checkpointing enable_activation_checkpointing activation_checkpointing
        gradient_checkpoint activations_checkpoint_method activations_checkpoint_granularity""",
    "perf.float8": "fp8 float8_training enable_fp8 fp8_recipe",
    "perf.ddp_compression": "ddp_comm_hook comm_hook gradient_compression",
    "run.dir": "output_dir logging_dir checkpoint_save_dir out_dir save_dir exp_dir",
    "run.name": "run_name experiment_name wandb_name wandb_run_id exp_name",
    "run.resume": "resume_from_checkpoint auto_resume_from_checkpoints resume_if_exists resume_checkpoint",
    "run.hang_timeout": "ddp_timeout timeout",
    "run.max_bad_steps": "loss_watchdog_patience",
    "run.log_every": "logging_steps log_every_n_steps log_interval log_freq",
    "run.profile": "profiler use_profiler profile_steps",
    "run.trackers": "report_to log_with metric_logger logger_type use_tensorboard",
}
"""For each key or group of a recipe, the names that mean the same elsewhere."""

GEAR = "remove it, and set mixed_precision in the gear (accelerate_configs/*.yaml)"
ENGINE = "remove it: the gear chooses the engine, as in accelerate launch --config_file accelerate_configs/zero3.yaml"
LOGGED = "remove it: every step is written to metrics.jsonl, and to the trackers of run.trackers"
PROJECT = "use run.trackers, and the tracker's own variable for its project (docs/trackers.md)"
ADVICE = {
    "remove it: accumulation is computed from batch.rows, batch.micro_rows and the number of ranks": """
        gradient_accumulation_steps accumulate_grad_batches grad_accum_steps gradient_accumulation""",
    GEAR: "bf16 fp16 tf32 dtype torch_dtype precision mixed_precision half_precision_backend bf16_full_eval float16",
    ENGINE: "deepspeed fsdp fsdp_config deepspeed_config strategy fsdp_transformer_layer_cls_to_wrap",
    "remove it: the gear sets the number of processes (num_processes)": "devices num_gpus n_gpu world_size num_nodes",
    LOGGED: "logging_strategy log_level wandb_watch plot_loss logging_first_step",
    PROJECT: "wandb_project wandb_entity wandb use_wandb comet_project_name mlflow_experiment_name swanlab_project",
    "use schedule.warmup, with a share such as 3%": "warmup_ratio lr_warmup_fraction warmup_fraction lr_warmup_ratio",
    "use schedule.decay, with a share such as 20%": "decay_ratio lr_decay_ratio decay_fraction cooldown_fraction",
    "use model.quantize: nf4": """
        load_in_4bit quantization_bit quantization bnb_4bit_quant_type quantize_base use_4bit quantization_config
        bnb_4bit_compute_dtype bnb_4bit_use_double_quant double_quantization""",
    "use model.quantize: nf4, as 8-bit weights are not trained": "load_in_8bit use_8bit",
    "use data.supervise: assistant": "assistant_only_loss completion_only_loss answer_only_loss",
    "use data.supervise: last": "mask_history",
    "use data.supervise: all": "train_on_inputs train_on_input train_on_prompt",
    "use adapter.method: lora": "use_peft use_lora",
    "use adapter.method: dora": "use_dora peft_use_dora",
    "use adapter.targets, with gate_proj, up_proj and down_proj": "apply_lora_to_mlp",
    "use adapter.targets, with lm_head": "apply_lora_to_output",
    "remove it: adapter.targets is all-linear by default": "lora_target_linear",
    "use optim.master_weights: bf16": "pure_bf16",
    "use perf.checkpointing: none": "disable_gradient_checkpointing",
    "use perf.checkpointing: offload": "activation_offloading enable_activation_offloading",
    "use train.steps, the number in all epochs together": "max_steps_per_epoch",
    "remove it: model.router_loss is the weight of that loss": "output_router_logits",
    "use eval.every, a number of steps": "eval_strategy evaluation_strategy do_eval",
    "use save.every, a number of steps": "save_strategy",
    "remove it: a model without weights has model.init: random": "from_scratch",
    "use preference.margin, which is beta times this ratio": "simpo_gamma_ratio gamma_beta_ratio",
    "remove it: the reference is the model before its first step, computed once and kept": """
        ref_model ref_model_name_or_path ref_adapters ref_model_adapters model_adapter_name ref_adapter_name
        precompute_ref_log_probs precompute_ref_batch_size precompute_ref_eval_batch_size precompute_reference_log_probs
        ref_model_init_kwargs ref_model_revision ref_model_quantization_bit sync_ref_model""",
    "use train.objective: simpo, or orpo, which have no reference": "reference_free",
    "remove it: an answer that does not fit next to its pair is cut at its end": """
        max_prompt_length max_completion_length max_target_length max_prompt_len truncation_mode""",
    "remove it: prompts and answers are not trained apart, and dropout is off": "disable_dropout f_divergence_type",
    "remove it: rewards are given by pairs or labels, and no reward model is trained": """
        reward_model reward_model_path reward_funcs reward_weights reward_model_type""",
    "remove it: data are tokenized on all cores, once": """
        dataset_num_proc preprocessing_num_workers dataloader_num_workers num_workers num_proc dataset_prepared_path
        overwrite_cache dataloader_pin_memory""",
    "remove it, and use run.resume: never": "overwrite_output_dir",
    "remove it: models are safetensors, and only src/export.py RUN --push ID uploads one": """
        push_to_hub hub_model_id hub_token save_safetensors hub_strategy""",
    "remove it: documents in a row never see each other, and are shuffled by train.seed": """
        group_by_length shuffle shuffle_seed pad_to_sequence_len pad_to_multiple_of""",
    "remove it: it is not needed": """
        do_train dataloader_drop_last remove_unused_columns use_cache strict skip_prepare_dataset dataset_kwargs
        lora_task_type lora_fan_in_fan_out resize_vocab resize_token_embeddings_to_32x low_cpu_ram low_cpu_mem_usage""",
    "remove it: accelerate_configs/*.yaml sets how ranks divide the work": """
        fsdp_version ddp_find_unused_parameters dp_shard_size dp_replicate_size context_parallel_size cp_size
        tensor_parallel_size sequence_parallel_degree fsdp_cpu_offload custom_sharded_layers tensor_parallel_dim
        tensor_parallel_plan tensor_model_parallel_size pipeline_model_parallel_size expert_model_parallel_size
        sequence_parallel device device_map local_rank""",
    "remove it: the files of model.name choose the classes of model and tokenizer": """
        component model_type tokenizer tokenizer_type processor_type tokenizer_use_fast use_fast_tokenizer
        tokenizer_name_or_path tokenizer_config""",
    "remove it: the tokenizer and data.chat_template decide the tokens that end turns and documents": """
        eos_token pad_token eot_tokens train_on_eos train_on_eot""",
    "remove it: the loss is cross-entropy, averaged over all trained tokens of a step": """
        average_tokens_across_devices loss""",
    "remove it: the head computes its loss in chunks, and perf.kernels chooses kernels": "plugins cut_cross_entropy",
    "remove it: this version has nothing like it": """
        neftune_noise_alpha label_smoothing_factor optimizer_in_bwd unfrozen_parameters freeze_trainable_layers
        lora_target_parameters loss_watchdog_threshold quantize_moe_experts""",
    "remove it: metrics.jsonl and the report of a run show it": """
        wandb_log_model log_peak_memory_stats include_tokens_per_second include_num_input_tokens_seen""",
    "remove it: an evaluation uses batch.micro_rows": "per_device_eval_batch_size eval_batch_size batch_size_val",
    "use perf.checkpointing": "gradient_checkpointing_kwargs use_reentrant use_reentrant_gc selective_checkpointing",
    "remove it: rows of packed documents are cut where documents end": """
        packing_strategy padding_free eval_packing batch_flattening multipack_real_batches sample_packing_group_size
        sample_packing_bin_size""",
    "remove it: a checkpoint has all that a resumed run needs, and model/ the weights": """
        save_only_model save_adapter_weights_only""",
    "remove it: with model.add_tokens, the embedding and the head are adapted too": """
        lora_modules_to_save modules_to_save additional_target""",
    "use data.split, with a slice such as train[:1000]": "max_samples max_train_samples num_samples",
    "use data.path, with a list of {path, weight}": "interleave_probs mix_strategy",
    "remove it: src/prepare.py writes shards that a run streams": "streaming dataset_streaming",
    "remove it: all weights have the rate optim.lr, and schedule.name decides its end": """
        lr_scheduler_kwargs cosine_min_lr_ratio min_lr lr_min loraplus_lr_ratio embedding_lr""",
    "remove it, and set HF_TOKEN in the environment": "hf_use_auth_token hf_hub_token use_auth_token",
}
"""What to do, for the names elsewhere that no key of a recipe equals. A name with `use` may be switched on."""

SWITCHED_OFF = {
    "use data.supervise: assistant": "use data.supervise: all",
    "use data.supervise: all": "use data.supervise: assistant",
    "use perf.checkpointing: none": "use perf.checkpointing: full",
}
"""What to do instead if such a name is false. For all others it is nothing."""

LORA_4_BITS = "adapter.method: lora, with model.quantize: nf4"
DORA_4_BITS = "adapter.method: dora, with model.quantize: nf4"
ONLY_ADAMW = "optim.name: adamw, or optim.name: muon; other optimizers are not supported"
ONLY_NF4 = "model.quantize: nf4; 8-bit weights are not trained"
REWARD = "none of them: no reward model is trained, and no answers are drawn while training"
OTHER_LOSS = "train.objective: dpo, or ipo, simpo, orpo, kto; other losses are not supported"
VALUES = {
    "train.objective": {
        "train.objective: dpo": "sigmoid pref dpo_sigmoid dpo_trainer dpotrainer",
        "train.objective: kto": "kto_pair kto_trainer ktotrainer",
        "train.objective: orpo": "orpo_trainer orpotrainer odds_ratio",
        "train.objective: simpo": "simpo_trainer",
        "train.objective: sft": "pt pretrain supervised causal_lm cross_entropy nll none null",
        "train.objective: distil, with train.teacher": "kd distill distillation gkd knowledge_distillation",
        OTHER_LOSS: "hinge slic cpo bco robust exo_pair nca_pair sppo_hard aot aot_pair apo_zero apo_down discopop",
        REWARD: "rm reward rm_trainer ppo grpo rloo online_dpo gspo dapo prm",
    },
    "adapter.method": {
        LORA_4_BITS: "qlora q_lora lora_4bit",
        DORA_4_BITS: "qdora",
        "adapter.method: none": "full sft null full_finetune fft all freeze",
        "adapter.method: lora": "peft adapter rslora lora+ loraplus adalora loha lokr pissa olora",
    },
    "data.form": {
        "data.form: instruction": "alpaca instruct alpaca_chat instructions",
        "data.form: conversations": "sharegpt vicuna conversation",
        "data.form: messages": "chatml openai chat chat_template chat_dataset oasst messages_format conversational",
        "data.form: prompt": "completion prompt_completion prompt-completion input_output",
        "data.form: text": "pretrain pretraining pt raw plain corpus language_modeling",
    },
    "model.quantize": {
        "model.quantize: nf4": "4 4bit int4 fp4 bnb bnb_4bit bitsandbytes true q4 nf4_double",
        ONLY_NF4: "8 8bit int8 bnb_8bit fp8",
        "model.quantize: null": "false none no",
    },
    "model.attention": {
        "model.attention: flash_attention_2": """
            flash_attention flash_attn flash_attn_2 flash fa2 flash_attention_3 fa3 flash_attn_3
            kernels-community/flash-attn2 true""",
        "model.attention: sdpa": "xformers flex_attention flex torch memory_efficient false",
    },
    "model.init": {"model.init: random": "scratch from_scratch none false", "model.init: pretrained": "auto true"},
    "optim.name": {
        "optim.name: adamw": """
            adam adamw_torch adamw_torch_fused adamw_hf adamw_fused adamw_apex_fused fused_adam torch.optim.adamw
            distributed_fused_adam anyprecision adamw_anyprecision adamw_torch_xla""",
        "optim.name: adamw_8bit": "adamw_bnb_8bit adam8bit adamw8bit bitsandbytes.optim.adamw8bit adam_8bit",
        "optim.name: paged_adamw": "paged_adamw_32bit pagedadamw paged_adamw32bit",
        "optim.name: paged_adamw_8bit": "pagedadamw8bit paged_adamw8bit bitsandbytes.optim.pagedadamw8bit",
        "optim.name: muon": "torch.optim.muon dist_muon muon_adamw muonwithauxadam single_device_muon normuon",
        ONLY_ADAMW: "sgd adafactor lion lion_32bit lion_8bit adagrad rmsprop galore_adamw lomo sophia shampoo",
    },
    "optim.master_weights": {
        "optim.master_weights: fp32": "float32 float 32 full auto torch.float32 fp16 float16 half",
        "optim.master_weights: bf16": "bfloat16 16 bf16-mixed bf16_pure torch.bfloat16",
    },
    "schedule.name": {
        "schedule.name: cosine": """
            cosineannealing cosine_with_restarts cosine_with_min_lr cosine_annealing get_cosine_schedule_with_warmup
            cosine_with_warmup warmupcosinelr one_cycle rex""",
        "schedule.name: linear, with schedule.warmup": "linear_with_warmup warmup_linear warmupdecaylr polynomial",
        "schedule.name: wsd": "warmup_stable_decay get_wsd_schedule wsd_schedule trapezoidal constant_with_cooldown",
        "schedule.name: constant": "const none fixed null",
        "schedule.name: constant, with schedule.warmup": "constant_with_warmup warmuplr warmup",
    },
    "perf.checkpointing": {
        "perf.checkpointing: full": "true yes on uniform block unsloth",
        "perf.checkpointing: none": "false no off null",
        "perf.checkpointing: offload": "cpu disk offloaded",
    },
    "perf.kernels": {"perf.kernels: liger": "true liger_kernel", "perf.kernels: none": "false off null"},
    "perf.ddp_compression": {
        "perf.ddp_compression: bf16, which keeps no state that a resumed run would lack": "powersgd power_sgd fp16",
        "perf.ddp_compression: none": "false no null",
    },
    "data.supervise": {
        "data.supervise: assistant": "assistants completion completions completion_only answer answers",
        "data.supervise: last": "last_turn final last_assistant",
        "data.supervise: all": "everything full prompt inputs",
    },
    "data.long": {
        "data.long: truncate": "truncation cut right left true",
        "data.long: split": "wrap wrapped chunk chunks",
        "data.long: drop": "skip raise filter error false",
    },
    "run.resume": {"run.resume: auto": "true yes", "run.resume: never": "false no null"},
}
"""For each key, what to write instead of a value from elsewhere. Values are in lower case."""

# The key that a single value means, where it is given for a whole group.
FIRST_KEYS = {
    "model": "name", "adapter": "method", "data": "path", "batch": "rows", "optim": "name", "schedule": "name",
    "train": "steps", "preference": "beta", "eval": "fraction", "save": "every", "perf": "kernels", "run": "name",
}  # fmt: skip

_key_by_name = {name: key for key, names in KEYS.items() for name in names.split()}
_advice_by_name = {name: advice for advice, names in ADVICE.items() for name in names.split()}


def key_of(name: str) -> str | None:
    """Return the recipe's key or group for a name from elsewhere, or None."""
    return _key_by_name.get(_plain(name))


def advice_on_key(name: str, value: object = True) -> str:
    """Return `; ` and what to do about a name from elsewhere that no key equals, or an empty string."""
    advice = _advice_by_name.get(_plain(name))
    if advice and advice.startswith("use ") and (value is False or value is None):
        advice = SWITCHED_OFF.get(advice, "remove it") if value is False else "remove it"
    return f"; {advice}" if advice else ""


def advice_on_value(key: str, value: object) -> str:
    """Return `; use ` and what to write instead of this value, or an empty string."""
    if isinstance(value, list | dict):
        return ""
    word = "null" if value is None else str(value).strip().lower()
    found = [advice for advice, values in VALUES.get(key, {}).items() if word in values.split()]
    return f"; use {found[0]}" if found else ""


def _plain(name: str) -> str:
    return name.lower().replace("-", "_").strip("_ \n\t")
