"""A run that is interrupted and gone on with equals one that is not."""

import pytest
import torch


def checked(outcome):
    assert set(outcome.codes) == {0}, outcome.output
    return outcome


FULL = ("train.steps=6", "optim.lr=1e-2", "save.every=2", "eval.every=3", "eval.fraction=0.1")


@pytest.mark.parametrize(
    ("gear", "ranks"),
    [
        ("single", 1),
        ("ddp", 2),
        ("ddp", 3),
        ("fsdp", 2),
        ("fsdp", 3),
        ("zero1", 2),
        ("zero2", 2),
        ("zero3", 2),
        ("zero3", 3),
    ],
)
@pytest.mark.parametrize("method", ["full", "lora"])
def test_exact(train, gear, ranks, method):
    extra = () if method == "full" else ("adapter.method=lora", "adapter.dropout=0.2")
    whole = checked(train(gear, *FULL, *extra, "run.name=whole", ranks=ranks))
    first = checked(train(gear, *FULL, *extra, "run.name=cut", "train.steps=6", "run.resume=auto", ranks=ranks))
    assert whole.losses == first.losses
    import shutil

    # go back to step 2
    for at in ("step-6",):
        shutil.rmtree(first.folder / "checkpoints" / at)
    kept = sorted(p.name for p in (first.folder / "checkpoints").iterdir())
    print(kept)
    again = checked(train(gear, *FULL, *extra, "run.name=cut", "run.resume=latest", ranks=ranks))
    again.folder = first.folder
    assert "goes on from" in again.output
    assert again.losses == whole.losses
    for name, t in again.weights.items():
        assert torch.equal(t, whole.weights[name]), name
