"""Gradients and parameters that differ between ranks are found, under the doctor and in a loop of one's own."""

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
    codes, _, told = examine(changed_model(lambda model: model.head.weight.register_hook(torch.zeros_like)))
    assert of_colour(told, "red") == {"gradients": "head.weight: the gradient of rank 1 is 0, the others' is not"}
    assert codes == [1, 0]  # that of a machine's first rank counts


def test_a_rank_that_freezes_a_parameter(examine):
    _, _, told = examine(changed_model(lambda model: model.head.bias.requires_grad_(False)))
    assert of_colour(told, "red") == {"gradients": "head.bias: rank 1 has no gradient, the others have one"}


def test_a_parameter_that_differs(examine):
    def change(model: torch.nn.Module) -> None:
        with torch.no_grad():
            model.layer.bias[3] += 1e-6

    _, _, told = examine(changed_model(change))
    assert of_colour(told, "red") == {"parameters": "the same seed gave other values: layer.bias is another on rank 1"}


@pytest.mark.ranks
def test_the_documented_snippet(tmp_path):
    """As it stands in the document, on two ranks, healthy; and where rank 1 has another weight and drops a gradient."""
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

    said = run(faulty=False)
    assert said.splitlines() == ["in step", "[rank 0] 4 gradients", "[rank 1] 4 gradients"], said
    said = run(faulty=True)
    assert "module.1.bias is another on rank 1" in said
    assert "module.0.weight: the gradient of rank 1 is 0, the others' is not" in said


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
        told = [gradient.problem for gradient in replica_sync.check_gradients(model.named_parameters(), averaged=True)]
        assert told == ["after averaging rank 1 has another gradient than the others", ""], told
        checked = replica_sync.check_gradients(model.named_parameters())
        assert [gradient.problem for gradient in checked] == ["", ""]
        assert checked[0].before == pytest.approx([3**0.5, 2 * 3**0.5])
        assert checked[0].after == pytest.approx([1.5 * 3**0.5] * 2)
        if rank == 1:
            model.bias.grad.fill_(float("nan"))
        told = [gradient.problem for gradient in replica_sync.check_gradients(model.named_parameters())]
        assert told == ["", "the gradient of rank 1 is not finite"], told

    codes, output = fork_ranks(2, {}, work)
    assert codes == [0, 0], output


def test_shards_are_refused():
    model = torch.nn.Linear(2, 2)
    model.weight.device_mesh = "a mesh"
    with pytest.raises(UserError, match="weight: is cut over ranks"):
        replica_sync.check_parameters(model)
