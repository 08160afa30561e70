"""Test that stages which run together give the losses and gradients of the full model."""

from itertools import chain

import pytest
import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import init_device_mesh

from gearbox.distributed import pipeline_parallel, pipeline_stages
from gearbox.model import loss
from gearbox.rows.units import IGNORE_INDEX
from support.pipelines import FAMILIES, load_stage, write_model
from support.ranks import fork_ranks

pytestmark = pytest.mark.ranks


def micro_batches(num: int, seed: int = 0) -> list[dict[str, torch.Tensor]]:
    """Return micro-batches of packed rows with two documents each and few targets."""
    draw = torch.Generator().manual_seed(seed)
    made = []
    for _ in range(num):
        tokens = torch.randint(3, 97, (2, 24), generator=draw)
        labels = tokens.roll(-1, 1).masked_fill(torch.rand(2, 24, generator=draw) < 0.5, IGNORE_INDEX)
        positions = (torch.arange(24) % 13).expand(2, 24)
        made.append({"input_ids": tokens, "labels": labels, "position_ids": positions})
    return made


def whole_gradients(folder, batches, scale):
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    loss.install_loss(model)
    total = sum(model(**batch) for batch in batches) * scale
    total.backward()
    return total.item(), {name: p.grad for name, p in model.named_parameters()}, model


def start(num_stages, num_replicas=1):
    """Join the process group of a fork. Return the groups of this rank's pipeline and of its stage."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (num_stages, num_replicas), mesh_dim_names=("pp", "dp"))
    return mesh["pp"].get_group(), mesh["dp"].get_group()


def run(num_stages, work, num_replicas=1):
    """Call `work` with the two groups on num_stages x num_replicas ranks."""
    codes, output = fork_ranks(num_stages * num_replicas, {}, lambda: work(start(num_stages, num_replicas)))
    assert set(codes) == {0}, output
    return output


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_match_the_full_model(tmp_path, name, schedule):
    write_model(FAMILIES[name], tmp_path)
    batches = micro_batches(5)
    expected, gradients, whole = whole_gradients(tmp_path, batches, 0.01)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()
    whole.eval()
    with torch.no_grad():
        losses, hits = whole(**batches[0])
        logits = whole(input_ids=batches[0]["input_ids"][:, :7], use_cache=False, logits_to_keep=1).logits

    def work(groups):
        part = pipeline_stages.Stage(dist.get_rank(groups[0]), 2)
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups, schedule=schedule)
        with torch.no_grad():
            pipe.eval()
            ours, found = pipe(**batches[0])
            assert torch.equal(ours, losses) and torch.equal(found, hits)
            kept = pipe(input_ids=batches[0]["input_ids"][:, :7], use_cache=False, logits_to_keep=1).logits
            assert torch.equal(kept, logits)
            pipe.train()
        total = pipe.step(batches, 0.01)
        assert abs(total - expected) < 1e-6 * expected
        held = dict(pipe.module.named_parameters())
        assert 0 < len(held) < len(gradients)
        for each, parameter in held.items():
            assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each
        assert abs(pipe.clip_gradients(1e-3) - norm) < 1e-5 * norm
        clipped = gradients[each] * (1e-3 / norm)
        assert torch.allclose(parameter.grad, clipped, rtol=1e-3, atol=1e-8)
        assert 0 < pipe.idle < 1

    run(2, work)


@pytest.mark.parametrize(("num_stages", "num_replicas", "num_micro"), [(2, 2, 3), (3, 1, 2), (2, 1, 1)])
def test_two_pipelines_a_middle_stage_and_few_micro_batches(tmp_path, num_stages, num_replicas, num_micro):
    """The cases are two pipelines, a stage in the middle, and fewer micro-batches than stages."""
    write_model(FAMILIES["llama, tied"], tmp_path)
    batches = [micro_batches(num_micro, seed) for seed in range(num_replicas)]
    expected, gradients, _ = whole_gradients(tmp_path, chain(*batches), 0.01)
    norm = torch.nn.utils.get_total_norm(gradients.values()).item()

    def work(groups):
        part, replica = pipeline_stages.Stage(dist.get_rank(groups[0]), num_stages), dist.get_rank(groups[1])
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups)
        for _ in range(2):  # torch keeps the buffers of the first step
            pipe.zero_grad()
            assert abs(pipe.step(batches[replica], 0.01) - expected) < 1e-6 * expected
        assert (pipe.tied is not None) == (part.is_first or part.is_last)
        for each, parameter in pipe.module.named_parameters():
            assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each
        assert abs(pipe.clip_gradients(0.0) - norm) < 1e-5 * norm

    run(num_stages, work, num_replicas)


def test_half_precision_between_stages(tmp_path):
    """Only the hidden states sent between stages are rounded to bf16, once per boundary."""
    write_model(FAMILIES["qwen2"], tmp_path)
    expected, gradients, _ = whole_gradients(tmp_path, micro_batches(4), 0.01)

    def work(groups):
        part = pipeline_stages.Stage(dist.get_rank(groups[0]), 2)
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups, compute=torch.bfloat16)
        total = pipe.step(micro_batches(4), 0.01)
        assert 1e-7 * expected < abs(total - expected) < 1e-3 * expected
        for each, parameter in pipe.module.named_parameters():
            assert parameter.grad.dtype == torch.float32
            assert (parameter.grad - gradients[each]).norm() < 2e-2 * gradients[each].norm(), each

    run(2, work)


def test_rows_of_any_width(tmp_path):
    """Unpacked rows have different widths in each micro-batch, pipeline and step."""
    write_model(FAMILIES["qwen2"], tmp_path)

    def batches(step, replica):
        made = micro_batches(3, 10 * step + replica)
        widths = [8, 24, 16] if step + replica == 1 else [8, 8, 16]
        kept = zip(widths, made, strict=True)
        return [{name: micro[name][:, :width] for name in ("input_ids", "labels")} for width, micro in kept]

    expected = [whole_gradients(tmp_path, batches(step, 0) + batches(step, 1), 0.01) for step in range(2)]

    def work(groups):
        part, replica = pipeline_stages.Stage(dist.get_rank(groups[0]), 2), dist.get_rank(groups[1])
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups)
        for step, (total, gradients, _) in enumerate(expected):
            pipe.zero_grad()
            assert abs(pipe.step(batches(step, replica), 0.01) - total) < 1e-6 * total
            for each, parameter in pipe.module.named_parameters():
                assert torch.allclose(parameter.grad, gradients[each], rtol=1e-4, atol=1e-6), each

    run(2, work, 2)


def test_all_ranks_get_a_loss_that_is_not_finite(tmp_path):
    write_model(FAMILIES["qwen2"], tmp_path)

    def work(groups):
        part, replica = pipeline_stages.Stage(dist.get_rank(groups[0]), 2), dist.get_rank(groups[1])
        pipe = pipeline_parallel.Pipeline(load_stage(tmp_path, part), *groups)
        if part.is_last and replica == 1:
            pipe.module.model.norm.weight.data.fill_(float("nan"))
        assert not torch.isfinite(torch.tensor(pipe.step(micro_batches(2), 0.01)))

    run(2, work, 2)
