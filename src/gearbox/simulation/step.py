# mypy: disable-error-code="assignment, method-assign, attr-defined, no-untyped-call"
"""Build a model on a fake GPU under a gear's real engine, and take training steps as rank 0.

Run this module in a child process. It joins a process group without other ranks, and replaces functions that
would touch memory.
"""

from __future__ import annotations

import json
import os
import pickle
import sys
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

import accelerate.commands.launch as launcher
import numpy as np
import torch
import torch.distributed as dist
import yaml
from accelerate.state import PartialState
from accelerate.utils.launch import prepare_multi_gpu_env, prepare_simple_launcher_cmd_env
from torch import nn
from torch._subclasses import DynamicOutputShapeException, FakeTensor
from torch._subclasses.fake_tensor import DataDependentOutputException, UnsupportedOperatorException
from torch.distributed.fsdp._fully_shard import _fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import distributed as ddp
from torch.testing._internal.distributed import fake_pg
from transformers import BitsAndBytesConfig, PretrainedConfig, PreTrainedModel, initialization

from gearbox.checks.model import check_architecture
from gearbox.config.job import Job
from gearbox.config.recipe import Model
from gearbox.config.recipe_values import WITH_REFERENCE
from gearbox.distributed import engine as engines
from gearbox.distributed import pipeline_stages, process_group, sequence_parallel
from gearbox.distributed.engine import Engine
from gearbox.distributed.process_group import ProcessGroup
from gearbox.errors import UserError, one_line_with_type
from gearbox.kernels import attention, head, lora, pointwise
from gearbox.launch.environment import of_first_rank
from gearbox.metrics.clock import Phases, StepClock
from gearbox.model import adapters, loading, loss, probes
from gearbox.model.optimizer import make_optimizer
from gearbox.model.pretrained import Pretrained
from gearbox.model.router_loss import has_router_loss
from gearbox.rows.batches import Batch, StepBatch
from gearbox.rows.units import BAD, GOOD, ComparedAnswers
from gearbox.sharding import fsdp_loading
from gearbox.sharding.unwrap import text_class, unwrap_optimizer, without_adapter
from gearbox.simulation.fake_gpu import GPU, HOST, FakeGPU, Value
from gearbox.training import comparing, loop

UNKNOWN = (DynamicOutputShapeException, DataDependentOutputException, UnsupportedOperatorException, RuntimeError)
PORTION = 2  # micro-batches of a simulated step: with more of them, only the bytes sent grow
NUM_STEPS = 2  # the first one creates the optimizer's state
TERMS = ("weights", "gradients", "optimizer", "activations", "head", "gathered")


@dataclass(frozen=True)
class _Plan:
    """Hold what a run finds out about a model before it loads it."""

    config: PretrainedConfig
    attention: str
    takes_bounds: bool
    unreached: set[str]


def simulate_step(job: Job, config: Mapping[str, Value]) -> dict[str, Value]:
    """Return the peak of a training step by term, the peak while loading, and the bytes sent by kind of collective."""
    _join(job)
    batch = replace(job.batch, accumulation_steps=min(PORTION, job.batch.accumulation_steps))
    gpu = FakeGPU()
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(dict(config)))
        _pretend(gpu)
        plan = _plan(job, folder)
        with gpu:
            engine = _build(replace(job, batch=batch), folder, plan, gpu)
            loading_bytes = gpu.peak_bytes
            first, total = _take_steps(engine, plan.config, gpu)
    more = job.batch.accumulation_steps - batch.accumulation_steps
    return {
        "peak_bytes": gpu.peak_bytes,
        "terms": {term: gpu.peak[term] for term in TERMS},
        "loading_bytes": loading_bytes,
        "sent_bytes": {kind: total[kind] + more * first[kind] for kind in sorted(total)},
    }


def _join(job: Job) -> None:
    """Become rank 0 of the gear's ranks, with the variables of its launcher and a process group without other ranks."""
    gear, ranks = job.gear, job.gear.num_processes
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        yaml.safe_dump(dict(gear.settings) | {"num_processes": ranks, "num_machines": 1}, file)
        file.flush()
        parsed = launcher.launch_command_parser().parse_args(["--config_file", file.name, "src/train.py"])
        parsed, _, _ = launcher._validate_launch_command(parsed)
    is_multiple = parsed.use_fsdp or parsed.multi_gpu
    os.environ.update(prepare_multi_gpu_env(parsed) if is_multiple else prepare_simple_launcher_cmd_env(parsed)[1])
    if ranks > 1 or gear.engine == "fsdp":
        os.environ.update(of_first_rank(ranks))
        dist.init_process_group("fake", rank=0, world_size=ranks, store=fake_pg.FakeStore())
    process_group.quiet_libraries()
    process_group.unwrap_without_deepspeed()
    process_group._init_process_group(gear)
    PartialState._shared_state["device"] = GPU


def _pretend(gpu: FakeGPU) -> None:
    """Let the libraries and our own code run on the fake GPU as on a real one."""
    for module in (process_group, engines):
        module.runs_on_cpu = lambda: False
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    head.NUM_LOGITS["cpu"] = head.NUM_LOGITS["cuda"]
    attention.is_on_cpu = lambda tensor: tensor.device != GPU
    for module in (lora, pointwise, loss):
        vars(module)["type"] = _plain_type  # their fast paths are for plain tensors
    adapters._init_adapter = lambda *_: None
    usual = torch.UntypedStorage.resize_

    def resize(storage: torch.UntypedStorage, size: int) -> None:
        usual(storage, size)
        gpu.resized(storage)

    torch.UntypedStorage.resize_ = resize
    torch.utils.swap_tensors = _swap
    _fully_shard._get_device_from_mesh = lambda _: GPU
    # These compare and send the weights of rank 0 by reading memory.
    ddp._verify_param_shape_across_processes = ddp._sync_module_states = lambda *_, **__: None
    FakeTensor.data_ptr = lambda self: self.untyped_storage()._cdata + self.storage_offset() * self.itemsize
    FakeTensor.is_cuda = property(lambda self: self.device == GPU)
    for name in ("unshard", "wait_for_unshard", "post_backward"):
        setattr(FSDPParamGroup, name, gpu.as_term("gathered", getattr(FSDPParamGroup, name)))
    for owner, name in (
        (head._CrossEntropySum, "forward"),
        (head._CrossEntropySum, "backward"),
        (head._CrossEntropies, "forward"),
        (head._CrossEntropies, "backward"),
        (loss.ChunkedLoss, "_losses_of_chunk"),
    ):
        function = gpu.as_term("head", getattr(owner, name))
        setattr(owner, name, function if owner is loss.ChunkedLoss else staticmethod(function))


def _plain_type(value: object) -> type:
    """Return the type of an object, and for a tensor without memory the type that it stands for."""
    if not isinstance(value, FakeTensor):
        return type(value)
    return nn.Parameter if isinstance(value, nn.Parameter) else torch.Tensor


def _swap(one: torch.Tensor, other: torch.Tensor) -> None:
    """Swap two tensors, as torch does when it moves a module. Torch refuses tensors that a cache of it refers to."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = one.__dict__ | other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _plan(job: Job, folder: str) -> _Plan:
    """Return what a run would find out. The probes compute real narrow copies of the model on the CPU."""
    recipe, gear = job.recipe, job.gear
    config = Pretrained.of(recipe.model, folder).config()
    check_architecture(gear, config, recipe.model.router_loss if has_router_loss(config) else 0.0)
    tokenizer = Pretrained(str(loading.TINY)).tokenizer()
    arguments = probes.document_arguments(config, tokenizer)
    by_document = "positions" in arguments and engines.attends_by_document(gear)
    name = loading.attention_of(config, recipe.model.attention, by_document)
    sequence_parallel.check_attention(gear, config.model_type, name)
    return _Plan(config, name, "bounds" in arguments, probes.unreached_parameters(config, tokenizer))


def _build(job: Job, folder: str, plan: _Plan, gpu: FakeGPU) -> Engine:
    """Return the engine of a run, as `session.build_engine` builds it, with a model on the fake GPU."""
    recipe, gear = job.recipe, job.gear
    accelerator = engines.create_accelerator(job, bool(plan.unreached) or probes.may_skip_experts(plan.config))
    stage = engines.stage_of_rank(gear, 0)
    options = {**engines.loading_options(gear, accelerator, recipe), "attn_implementation": plan.attention}
    rows = None
    if gear.engine == "fsdp" and recipe.model.quantize is None and recipe.adapter.method != "dora":
        rows = fsdp_loading.row_range(accelerator, gear.degree("ep"))
    on_host = gear.engine == "fsdp" and recipe.model.quantize is None

    def load_weights(
        config: PretrainedConfig, model: Model, _: str, options: dict[str, Value], stage: pipeline_stages.Stage | None
    ) -> PreTrainedModel:
        return _fake_model(config, model, options, stage, (HOST if on_host else GPU, rows))

    loading.load_weights = load_weights
    with gpu.counting_as("weights"):
        perf = recipe.perf.model_copy(update={"compile": False})
        recipe = recipe.model_copy(update={"perf": perf})
        loaded = loading.load(folder, recipe, _Tokenizer(plan.config), engines.precision(gear), options, stage)
        without_adapter(loaded).takes_bounds = plan.takes_bounds
        optimizer = make_optimizer(loaded, recipe.optim, plan.unreached)
        model, optimizer = engines.prepare(gear, accelerator, loaded, optimizer, perf)
    unwrapped = engines.unwrap(accelerator, model)
    gpu.recount([*unwrapped.parameters(), *unwrapped.buffers()], "weights")
    job = replace(job, recipe=recipe)
    comparing.install(loaded, job, accelerator)
    return Engine(job, ProcessGroup(), accelerator, model, unwrapped, optimizer, folder, torch.bfloat16)


class _Tokenizer:
    """The tokens that a recipe adds come after all others."""

    def __init__(self, config: PretrainedConfig) -> None:
        self.size: int = config.get_text_config().vocab_size

    def convert_tokens_to_ids(self, tokens: list[str]) -> list[int]:
        return [*range(self.size, self.size + len(tokens))]


def _fake_model(
    config: PretrainedConfig,
    model: Model,
    options: dict[str, Value],
    stage: pipeline_stages.Stage | None,
    place: tuple[torch.device, fsdp_loading.RowRange | None],
) -> PreTrainedModel:
    """Return what from_pretrained returns, without files: weights without memory, on the GPU or on the host."""
    kind = text_class(config) if stage is None else pipeline_stages.stage_class(config, stage)
    if kind is None:
        raise UserError(f"plan: model.name: {config.model_type} is not a model that continues text; use another model")
    with torch.device("meta"), initialization.no_init_weights(), initialization.no_tie_weights():
        built = kind._from_config(config, dtype=options["dtype"], attn_implementation=options["attn_implementation"])
    if (distributed := options.get("distributed_config")) is not None:
        distributed, _, meshes = kind.prepare_distribute_model(distributed)
        built = kind.maybe_distribute_model(built, distributed, meshes)
    built.tie_weights()
    if model.quantize:
        _quantize(built, options["quantization_config"])
    made: dict[int, nn.Parameter] = {}
    for module_name, module in built.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    dtype = fsdp_loading._planned_dtype(built, f"{module_name}.{name}", parameter.dtype)
                    is_packed = type(module).__name__ == "Linear4bit" and name == "weight"
                    fake = _packed_parameter(module) if is_packed else _fake_parameter(parameter, dtype, place)
                    made[id(parameter)] = fake
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=GPU)
    return cast(PreTrainedModel, built)


def _fake_parameter(
    meta: nn.Parameter, dtype: torch.dtype, place: tuple[torch.device, fsdp_loading.RowRange | None]
) -> nn.Parameter:
    """Return a weight on a device, or a stand-in with this rank's rows of it."""
    device, rows = place
    local = meta.to_local() if isinstance(meta, DTensor) else meta
    part = None
    if rows is None or local.dim() < 2:
        made = torch.empty(local.shape, dtype=dtype, device=device)
    else:
        made = torch.full((1,), 0, dtype=dtype).expand(local.shape)
        mine = rows.of(len(local), of_experts=False)  # rank 0 has the first part of all
        part = torch.empty((mine.stop - mine.start, *local.shape[1:]), dtype=dtype, device=rows.device)
    if isinstance(meta, DTensor):
        mesh, placements = meta.device_mesh, meta.placements
        made = DTensor.from_local(made, mesh, placements, run_check=False, shape=meta.shape, stride=meta.stride())
    parameter = nn.Parameter(made, meta.requires_grad)
    if part is not None:
        setattr(parameter, fsdp_loading.OWN_ROWS, part)
    return parameter


def _packed_parameter(module: Value) -> nn.Parameter:
    """Return the weight of a layer in 4 bits, as bitsandbytes packs it on the GPU."""
    from bitsandbytes.functional import quantize_4bit

    meta = module.weight
    full = torch.empty(meta.shape, dtype=torch.bfloat16, device=GPU)
    options = {name: getattr(meta, name) for name in ("quant_type", "compress_statistics", "quant_storage")}
    packed, state = quantize_4bit(full, blocksize=meta.blocksize, **options)
    parameter = nn.Parameter(packed, requires_grad=False)
    module.quant_state = state
    vars(parameter).update(options, quant_state=state, blocksize=meta.blocksize, bnb_quantized=True)
    return parameter


def _quantize(model: PreTrainedModel, settings: BitsAndBytesConfig) -> None:
    """Replace a model's layers by ones in 4 bits, which are packed where the weights are placed."""
    import bitsandbytes
    from transformers.quantizers import AutoHfQuantizer

    def restore(module: bitsandbytes.nn.Linear4bit) -> None:
        module.weight.quant_state = module.quant_state

    bitsandbytes.nn.modules.fix_4bit_weight_quant_state_from_module = restore
    quantizer = AutoHfQuantizer.from_config(settings)
    quantizer.preprocess_model(model=model, device_map=None)
    quantizer.postprocess_model(model)


def _take_steps(engine: Engine, config: PretrainedConfig, gpu: FakeGPU) -> tuple[Counter[str], Counter[str]]:
    """Take steps. Return the bytes sent in the first micro-batch of the last step, and in all of it."""
    plan, tokens = engine.job.batch, engine.job.recipe.batch.row_tokens
    num_units = plan.rows if engine.job.recipe.compares else None
    optimizer = unwrap_optimizer(engine.optimizer)
    before: list[str] = []

    def begin(*_: object) -> None:
        before.append(gpu.term)
        gpu.term = "optimizer"

    def end(*_: object) -> None:
        gpu.term = before.pop()
        found = (value for state in optimizer.state.values() for value in state.values())
        gpu.recount((value for value in found if isinstance(value, torch.Tensor)), "optimizer")

    optimizer.register_step_pre_hook(begin)
    optimizer.register_step_post_hook(end)
    micro = _micro_batch(engine.job)
    num_tokens = plan.rows * tokens
    batch = StepBatch([dict(micro)] * plan.accumulation_steps, num_tokens, num_tokens, [], num_units, num_tokens // 2)
    first: Counter[str] = Counter()

    def look(phase: str) -> None:
        gpu.recount((parameter.grad for parameter in engine.unwrapped.parameters()), "gradients")
        if phase == "micro-batch 2":
            first.update(gpu.sent)

    if engine.job.gear.engine == "ddp":
        engine._try_rows({name: tensor[:1] for name, tensor in micro.items()})  # as `Engine.warm_up` does
    _watch_gradients(engine.unwrapped, gpu)
    for _ in range(NUM_STEPS):
        gpu.forget_peak()
        first.clear()
        loop.train_step(
            engine, batch, engine.job.recipe.optim.max_grad_norm, Phases(StepClock(torch.device("cpu")), look)
        )
    return first, Counter(gpu.sent)


def _micro_batch(job: Job) -> Batch:
    """Return rows full of targets: one document each, or the two answers of a pair."""
    recipe, tokens = job.recipe, job.recipe.batch.row_tokens
    parts = 2 if recipe.compares else 1
    lines = job.batch.micro_rows * (1 if recipe.data.packing else parts)
    in_line = parts * job.batch.micro_rows // lines
    micro = {name: torch.zeros(lines, tokens, dtype=torch.long) for name in ("input_ids", "labels")}
    micro["chunk_ids"] = (torch.arange(lines * tokens) * in_line // tokens).view(lines, tokens)
    if recipe.data.packing:
        micro["position_ids"] = torch.arange(tokens).repeat(lines, 1)
    if not recipe.compares:
        return micro
    num_answers = in_line * lines
    sides = np.tile(np.array([GOOD, BAD], np.int8), num_answers // 2)
    reference = np.zeros(num_answers, np.float32) if recipe.train.objective in WITH_REFERENCE else None
    return ComparedAnswers(sides, reference).mark(micro)


def _watch_gradients(model: nn.Module, gpu: FakeGPU) -> None:
    """Count each gradient as one from the moment that it exists. Under FSDP2 it is complete first."""
    for parameter in model.parameters():
        if parameter.requires_grad and not isinstance(parameter, DTensor):
            parameter.register_post_accumulate_grad_hook(lambda one: gpu.recount([one.grad], "gradients"))
    usual = FSDPParam.init_unsharded_param

    def init(self: FSDPParam) -> None:
        is_first = not hasattr(self, "_unsharded_param")
        usual(self)
        if is_first and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(lambda one: gpu.recount([one.grad], "gathered"))

    FSDPParam.init_unsharded_param = init


def main() -> None:
    """Read a job and a config from standard input, and write the result to the file that the argument names."""
    job, config = pickle.load(sys.stdin.buffer)
    try:
        found = simulate_step(job, config)
    except UserError as error:
        found = {"refused": str(error)}
    except UNKNOWN as error:
        family = config.get("model_type")
        reason = f"the family {family} needs values that only real tensors have ({one_line_with_type(error, 200)})"
        found = {"refused": f"plan: {job.gear.name}: {reason}"}
    Path(sys.argv[1]).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
