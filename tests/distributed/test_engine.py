"""Test an engine within a step: its gradients, their norm, and the isolation of packed documents."""

from copy import deepcopy

import pytest
import torch
import yaml

from gearbox import ROOT
from gearbox.config.gear import Gear
from gearbox.distributed import engine
from gearbox.kernels import attention
from gearbox.model import probes
from gearbox.sharding import unwrap
from support.faults import patch_step
from support.ranks import fork_ranks


def test_fsdp_holds_no_full_gradient_between_micro_batches(train, monkeypatch):
    """FSDP2's default accumulation would keep the full fp32 gradient on each rank."""

    def look(step):
        whole = []
        backward = step.accelerator.backward

        def then_look(share):
            backward(share)
            parameters = [p for m in step.model.modules() if (state := getattr(m, "_get_fsdp_state", None))
                          for group in state()._fsdp_param_groups for p in group.fsdp_params]  # fmt: skip
            kept = [p.unsharded_accumulated_grad is not None or _gradient(p) is not None for p in parameters]
            whole.append(sum(kept))
            assert parameters

        monkeypatch.setattr(step.accelerator, "backward", then_look)
        step.take()
        monkeypatch.setattr(step.accelerator, "backward", backward)
        assert whole == [0, 0, 0], whole

    patch_step(monkeypatch, look)
    assert train("fsdp", ranks=2).codes == [0, 0]


def _gradient(parameter):
    return getattr(getattr(parameter, "_unsharded_param", None), "grad", None)


def test_under_ulysses_packed_documents_are_isolated_by_the_positions(train, monkeypatch):
    """Documents leak into each other if the positions are not read. The probe detects it, in training mode."""
    usual = attention._given_bounds
    isolated = train("ulysses", ranks=2)
    assert "documents do not affect each other (largest loss change 0)\n" in isolated.output, isolated.output
    monkeypatch.setattr(attention, "_given_bounds", lambda query, positions: usual(query, None))
    monkeypatch.setattr(probes, "document_arguments", lambda *_: {"positions"})  # which would notice it first
    assert "packing is off, one document per row" in train("ulysses", ranks=2).output


def test_a_gradient_that_is_scaled_by_the_number_of_ranks_is_noticed_under_ulysses(train, monkeypatch):
    """DeepSpeed averages over all ranks in stage 3, over some in other stages. AdamW and the clip hide the factor."""
    given = ("optim.max_grad_norm=0", "train.steps=1", "schedule.warmup=0")

    def norm(gear, ranks):
        return train(gear, *given, ranks=ranks).lines("grad_norm")[0]["grad_norm"]

    whole = norm("single", 1)
    assert norm("ulysses", 2) == pytest.approx(whole, rel=1e-4)
    monkeypatch.setattr(Gear, "averaged_over", property(lambda gear: gear.data_parallel))
    assert norm("ulysses", 2) == pytest.approx(whole / 2, rel=1e-3)


def part_of(gradient):
    return gradient.to_local() if hasattr(gradient, "to_local") else gradient


@pytest.mark.parametrize("gear", ["tp", "fsdp_tp"])
def test_the_norm_over_shards_equals_the_full_norm(train, monkeypatch, gear):
    """A norm without communication is too small: it counts only one rank's shards."""
    ranks = 2 if gear == "tp" else 4
    whole = train("single").lines("grad_norm")[0]["grad_norm"]
    assert train(gear, ranks=ranks).lines("grad_norm")[0]["grad_norm"] == pytest.approx(whole, rel=1e-5)
    monkeypatch.setattr(
        engine, "norm_of_shards", lambda parts: float(sum(part_of(g).square().sum() for g in parts)) ** 0.5
    )
    broken = train(gear, ranks=ranks)
    assert broken.lines("grad_norm")[0]["grad_norm"] < 0.95 * whole


@pytest.mark.ranks
def test_a_step_on_local_shards_is_the_step_on_dtensors():
    def work() -> None:
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import DTensor

        torch.distributed.init_process_group("gloo")
        torch.manual_seed(0)
        plain = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.Tanh(), torch.nn.Linear(10, 3))
        sides = []
        for model in (deepcopy(plain), plain):
            for layer in (model[0], model[2], model):
                fully_shard(layer)
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)
            sides.append((model, optimizer))
        unwrap.step_on_local_shards(sides[1][1])
        stepped = [p for group in sides[1][1].param_groups for p in group["params"]]
        assert len(stepped) == 4 and not any(isinstance(p, DTensor) for p in stepped)
        before = [p.full_tensor().clone() for p in sides[0][0].parameters()]
        for step in range(3):
            torch.manual_seed(10 * step + torch.distributed.get_rank())
            inputs = torch.randn(5, 6)
            for model, optimizer in sides:
                model(inputs).square().mean().backward()
                optimizer.step()
                # Only the hooks drop the gradients of the DTensors, which the optimizer no longer has.
                if optimizer is sides[0][1]:
                    optimizer.zero_grad()
                assert all(p.grad is None for p in model.parameters())
        for start, left, right in zip(before, *(model.parameters() for model, _ in sides), strict=True):
            assert torch.equal(left.full_tensor(), right.full_tensor())
            assert (left.full_tensor() - start).abs().max() > 0.1
        torch.distributed.destroy_process_group()

    codes, output = fork_ranks(2, {}, work)
    assert codes == [0, 0], output


def test_a_layer_class_that_the_model_lacks_is_refused(train, tmp_path):
    path = tmp_path / "fsdp.yaml"
    settings = yaml.safe_load((ROOT / "accelerate_configs" / "fsdp.yaml").read_text())
    settings["fsdp_config"]["fsdp_transformer_layer_cls_to_wrap"] = "NoDecoderLayer"
    path.write_text(yaml.safe_dump(settings))
    outcome = train(str(path))
    assert outcome.codes == [2, 2]
    assert "Traceback" not in outcome.output
    assert "fsdp_transformer_layer_cls_to_wrap: Could not find the transformer layer class No" in outcome.output
