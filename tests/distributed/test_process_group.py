"""Test that ranks which do not match the gear or the machine are refused, and ranks which do not join are named."""

import os
import re
import signal
import socket
import time
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import transformers

from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.distributed import process_group
from gearbox.errors import UserError
from gearbox.launch.outcome import RUN_FOLDER
from support import ranks
from support.gears import written
from support.ranks import fork_ranks

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


@pytest.fixture
def join_three(monkeypatch, tmp_path):
    """Return a function that lets three ranks join, after rank 1 has called `meddle`: codes, output = join_three(f)."""
    monkeypatch.setattr(process_group, "FIRST_SECONDS", 2.0)
    monkeypatch.setattr(ranks, "PATIENCE", 2)

    def call(meddle) -> tuple[list[int], str]:
        gear = load_gear(written(tmp_path, "ddp", num_processes=3))

        def work() -> None:
            if os.environ["RANK"] == "1":
                meddle()
            process_group.join_process_group(gear)
            print("joined")

        return fork_ranks(3, {}, work)

    return call


def stop(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.ranks
def test_ranks_that_connect_may_load(join_three):
    codes, output = join_three(lambda: time.sleep(1))
    assert codes == [0, 0, 0] and output.count("joined") == 3, output


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("owner", "name", "message"),
    [
        (process_group.ProcessGroup, "check_connections", "rank 1 (?) did not begin the first all-reduce"),
        (process_group, "_started", f"rank 1 ({socket.gethostname()}, cpu) did not begin the first all-reduce"),
        (torch.distributed, "all_reduce", f"all 3 ranks ({socket.gethostname()}) began the first all-reduce"),
    ],
)
def test_a_rank_that_hangs_before_loading_is_named(join_three, owner, name, message):
    codes, output = join_three(lambda: setattr(owner, name, stop))
    assert codes == [2, -signal.SIGKILL, 2], output
    advice = "run src/doctor.py, and set GLOO_SOCKET_IFNAME to the network interface that connects the machines"
    assert output.count(f"gearbox: {message}: it has not ended within 2 s; {advice}\n") == 2, output


@pytest.mark.ranks
def test_a_rank_that_fails_in_the_first_all_reduce_is_reported(join_three):
    codes, output = join_three(lambda: setattr(torch.distributed, "all_reduce", lambda *_, **__: os._exit(9)))
    assert codes == [2, 9, 2], output
    assert output.count("gearbox: all 3 ranks") == 2 and re.search("Connection (reset|closed)", output), output


@pytest.mark.ranks
def test_ranks_that_do_not_join_are_named(join_three, monkeypatch):
    monkeypatch.setattr(process_group, "WAITING_SECONDS", 1.0)
    monkeypatch.setattr(process_group, "LOADING_TIMEOUT", timedelta(seconds=3))
    codes, output = join_three(stop)
    assert codes == [2, -signal.SIGKILL, 2], output
    assert "gearbox: waiting for rank 1 of 3 to join; see the output of each machine\n" in output
    assert output.count("gearbox: rank 1 did not join (3 ranks): ") == 2, output


@pytest.mark.ranks
def test_a_restart_that_cannot_connect_may_be_tried_again(join_three, monkeypatch):
    """src/launch.py restarts after a crash, but not after a user error."""
    monkeypatch.setenv(RUN_FOLDER, "runs/x")
    codes, output = join_three(lambda: setattr(process_group, "_started", stop))
    assert codes == [1, -signal.SIGKILL, 1], output
    assert "RuntimeError: rank 1 (" in output
