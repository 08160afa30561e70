"""Test that ranks which share rows compute what one device computes, and that others are refused."""

import pytest
import torch

from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.distributed import process_group, sequence_parallel
from gearbox.errors import UserError
from support.gears import written
from support.ranks import fork_ranks

RING = load_gear(ROOT / "accelerate_configs/ring.yaml")


def ring_of_4(tmp_path, **degrees: int) -> str:
    settings = {f"parallelism_config_{name}_size": size for name, size in degrees.items()}
    return str(written(tmp_path, "ring", parallelism_config=settings, num_processes=4))


@pytest.mark.parametrize(
    ("degrees", "more"),
    [
        ({"cp": 4}, ("batch.row_tokens=101", "perf.checkpointing=full")),  # padded to 104, in 8 parts
        ({"cp": 2}, ("data.packing=false",)),
    ],
)
def test_other_degrees_train_the_same(train, tmp_path, degrees, more):
    given = ("optim.lr=5e-3", "optim.eps=1e-3", "batch.micro_rows=2", "batch.rows=8", *more)
    one, outcome = train("single", *given), train(ring_of_4(tmp_path, **degrees), *given)
    assert set(outcome.codes) == {0}, outcome.output
    assert outcome.losses == pytest.approx(one.losses, rel=1e-5)
    norms = [[line["grad_norm"] for line in run.lines("grad_norm")] for run in (outcome, one)]
    assert norms[0] == pytest.approx(norms[1], rel=1e-4)


@pytest.mark.ranks
def test_rows_are_gathered_in_order_and_gradients_are_added_up():
    """Rank r has parts r and 5 - r of six."""

    def work() -> None:
        torch.distributed.init_process_group("gloo")
        rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
        whole = torch.arange(2 * 3 * 12 * 2.0).view(2, 3, 12, 2)
        parts = whole.chunk(6, 2)
        local = torch.cat([parts[rank], parts[5 - rank]], 2).requires_grad_()
        gathered = sequence_parallel._GatherTokens.apply(local, group)
        assert torch.equal(gathered, whole)
        gathered.backward((rank + 1) * whole)
        assert torch.equal(local.grad, 6 * local.detach())
        torch.distributed.destroy_process_group()

    codes, output = fork_ranks(3, {}, work)
    assert codes == [0, 0, 0], output


def test_documents_are_isolated_with_ring_attention(train):
    outcome = train("ring", ranks=2)
    assert "documents do not affect each other (largest loss change 0)\n" in outcome.output, outcome.output


@pytest.mark.parametrize(
    ("changes", "capability", "message"),
    [
        ({"mixed_precision": "no"}, (9, 0), r"gear.yaml: the attention of GPUs that share rows needs bf16, found fp32"),
        ({}, (7, 5), r"gear.yaml: the attention of GPUs that share rows needs compute capability 8.0 .*, found 7.5"),
    ],
)
def test_gpus_without_the_kernel_are_refused(monkeypatch, tmp_path, changes, capability, message):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
    with pytest.raises(UserError, match=message):
        process_group.check_ranks(load_gear(written(tmp_path, "ring", **changes)))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    process_group.check_ranks(RING)


@pytest.mark.parametrize(
    ("gear", "attention", "refused"),
    [
        ("ring", "documents", False),
        ("ring", "flash_attention_2", True),
        ("ulysses", "flash_attention_2", False),
        ("ulysses", "sdpa", True),
        ("fsdp", "eager", False),
    ],
)
def test_masks_cannot_be_shared(gear, attention, refused):
    loaded = load_gear(ROOT / f"accelerate_configs/{gear}.yaml")
    if not refused:
        sequence_parallel.check_attention(loaded, "llama", attention)
        return
    with pytest.raises(UserError, match=rf"model.name: llama computes attention with a mask \({attention}\) here"):
        sequence_parallel.check_attention(loaded, "llama", attention)
