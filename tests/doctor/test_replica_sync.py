"""The doctor and a user's own loop find gradients and parameters that differ between ranks."""

import re

import pytest
import torch
import torch.distributed as dist

from gearbox import ROOT
from gearbox.doctor import replica_sync
from gearbox.errors import UserError
from support.examination import of_colour, on_rank_1
from support.ranks import fork_ranks


def changed_model(change):
    def fault() -> None:
        usual = replica_sync.small_model

        def changed() -> torch.nn.Module:
            model = usual()
            change(model)
            return model

        replica_sync.small_model = changed

    return on_rank_1(fault)


def test_a_rank_that_drops_a_gradient(examine):
    codes, _, report = examine(changed_model(lambda model: model.head.weight.register_hook(torch.zeros_like)))
    assert of_colour(report, "red") == {"gradients": "head.weight: gradient is 0 on rank 1, unlike the others"}
    assert codes == [1, 0]  # the first rank of a machine sets the exit code


def test_a_rank_that_freezes_a_parameter(examine):
    _, _, report = examine(changed_model(lambda model: model.head.bias.requires_grad_(False)))
    assert of_colour(report, "red") == {"gradients": "head.bias: no gradient on rank 1, unlike the others"}


def test_a_parameter_that_differs(examine):
    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.layer.bias[3] += 1e-6

    _, _, report = examine(changed_model(change))
    assert of_colour(report, "red") == {"parameters": "values from the same seed differ: layer.bias differs on rank 1"}


@pytest.mark.ranks
def test_the_documented_snippet(tmp_path):
    """Run the documented snippet on two healthy ranks, then with a changed weight and a dropped gradient on rank 1."""
    (snippet,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "doctor.md").read_text(), re.S)

    def run(faulty: bool) -> str:
        def work() -> None:
            dist.init_process_group("gloo")
            torch.manual_seed(0)
            inner = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
            model = torch.nn.parallel.DistributedDataParallel(inner)
            if faulty and dist.get_rank() == 1:
                with torch.no_grad():
                    inner[1].bias += 1
                inner[0].weight.register_hook(torch.zeros_like)
            exec(snippet, {"model": model, "batch": torch.randn(3, 4)})

        codes, output = fork_ranks(2, {}, work)
        assert codes == [0, 0], output
        return output

    output = run(faulty=False)
    assert output.splitlines() == ["in step", "[rank 0] 4 gradients", "[rank 1] 4 gradients"], output
    output = run(faulty=True)
    assert "module.1.bias differs on rank 1" in output
    assert "module.0.weight: gradient is 0 on rank 1, unlike the others" in output


@pytest.mark.ranks
def test_gradients_that_are_not_finite_or_not_averaged():
    def work() -> None:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
        model = torch.nn.Linear(3, 1)
        with torch.no_grad():
            model.weight.fill_(1)
            model.bias.fill_(0)
        model(torch.full((1, 3), 1.0 + rank)).sum().backward()
        problems = [
            gradient.problem for gradient in replica_sync.check_gradients(model.named_parameters(), averaged=True)
        ]
        assert problems == ["gradient still differs after averaging on rank 1", ""], problems
        checked = replica_sync.check_gradients(model.named_parameters())
        assert [gradient.problem for gradient in checked] == ["", ""]
        assert checked[0].before == pytest.approx([3**0.5, 2 * 3**0.5])
        assert checked[0].after == pytest.approx([1.5 * 3**0.5] * 2)
        if rank == 1:
            model.bias.grad.fill_(float("nan"))
        problems = [gradient.problem for gradient in replica_sync.check_gradients(model.named_parameters())]
        assert problems == ["", "gradient is not finite on rank 1"], problems

    codes, output = fork_ranks(2, {}, work)
    assert codes == [0, 0], output


def test_shards_are_refused():
    model = torch.nn.Linear(2, 2)
    model.weight.device_mesh = "a mesh"
    with pytest.raises(UserError, match="weight: sharded by this gear; only full copies"):
        replica_sync.check_parameters(model)
