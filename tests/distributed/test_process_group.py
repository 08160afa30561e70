"""Test that a number of ranks which does not match the gear or the machine's GPUs is refused."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.distributed import process_group
from gearbox.errors import UserError

DDP = load_gear(ROOT / "accelerate_configs/ddp.yaml")  # 4 ranks


def test_ranks_that_do_not_match_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="needs 4 ranks, found 2; pass --num_processes 2"):
        process_group.check_ranks(DDP)


@pytest.mark.parametrize(
    ("gpus", "message"),
    [
        (2, "4 ranks on this machine, but 2 GPUs; pass --num_processes 2"),
        (1, r"4 ranks on this machine, but 1 GPU; use accelerate_configs/single\.yaml"),
    ],
)
def test_more_ranks_than_gpus_are_refused(monkeypatch, gpus, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(UserError, match=message):
        process_group.check_ranks(DDP)


def test_a_gpu_that_torch_does_not_see_is_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(process_group, "NVIDIA_DRIVER", tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(UserError, match=r"has an NVIDIA driver, but torch .* sees no GPU"):
        process_group.check_ranks(DDP)


def test_a_run_on_the_cpu_needs_a_machine_without_gpus(monkeypatch):
    """The launcher sets this variable for use_cpu and --cpu, and Accelerate would then use no GPU."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "True")
    process_group.check_ranks(load_gear(ROOT / "accelerate_configs/single.yaml"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(UserError, match=r"single\.yaml: use_cpu: this machine has GPUs; set CUDA_VISIBLE_DEVICES="):
        process_group.check_ranks(load_gear(ROOT / "accelerate_configs/single.yaml"))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "False")
    process_group.check_ranks(load_gear(ROOT / "accelerate_configs/single.yaml"))


@pytest.mark.parametrize(
    ("gear", "omp", "ranks", "threads"),
    [
        ("fsdp_offload", "1", 2, [8]),
        ("zero3_offload", "1", 3, [5]),
        ("zero3_nvme", "1", 64, [1]),
        ("fsdp_offload", "4", 2, []),  # the user's own number
        ("fsdp_offload", None, 1, []),  # torch takes all cores
        ("fsdp_offload", "2,1", 1, []),
        ("fsdp", "1", 2, []),
    ],
)
def test_an_optimizer_in_host_memory_uses_the_cores(monkeypatch, gear, omp, ranks, threads):
    given = []
    monkeypatch.setattr(torch, "set_num_threads", given.append)
    monkeypatch.setattr(process_group.os, "sched_getaffinity", lambda pid: {*range(16)})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if omp is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", omp)
    process_group.use_host_cores(load_gear(ROOT / f"accelerate_configs/{gear}.yaml"))
    assert given == threads


@pytest.mark.parametrize("is_composite", [False, True])
def test_sizes_follow_from_the_width_of_the_text(is_composite):
    """Accelerate fills them too, but fails on a model whose width is in the config of its text."""
    text = transformers.LlamaConfig(hidden_size=64)
    config = transformers.LlavaConfig(text_config=text) if is_composite else text
    sizes = {"stage": 3, "reduce_bucket_size": "auto", "stage3_prefetch_bucket_size": 7}
    sizes["stage3_param_persistence_threshold"] = "auto"
    plugin = SimpleNamespace(hf_ds_config=SimpleNamespace(config={"zero_optimization": sizes}))
    process_group.fill_sizes_by_width(SimpleNamespace(deepspeed_plugin=plugin), SimpleNamespace(config=config))
    assert sizes == {
        "stage": 3, "reduce_bucket_size": 4096, "stage3_prefetch_bucket_size": 7,
        "stage3_param_persistence_threshold": 640,
    }  # fmt: skip
