"""Test the logic of `make gpu` on a machine without GPUs: what runs, limits, resuming, and its parts at small sizes."""

import json
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import psutil
import pytest
import torch

from gearbox import ROOT
from gearbox.config.gear import gear_names
from gearbox.config.loader import load_recipe
from gearbox.kernels import attention
from gearbox.launch import supervisor
from gearbox.pages import run_comparison
from gearbox.planning import cost, gpus
from gearbox.planning.architecture import Architecture
from support import gpu, gpu_kernels, gpu_parts, simulations
from support.ranks import skip_loading_back, supervise_warm

HARDWARE = {"GPUs": "1 x some GPU"}
TESTS = """
import subprocess, sys, time
from pathlib import Path
import pytest

pytestmark = pytest.mark.gpu
HERE = Path(__file__).parent

def test_passes(record_property):
    record_property("tokens/s", "12")
    with (HERE / "passed").open("a") as file:
        file.write("x")

def test_fails(record_property):
    record_property("peak", "9")
    assert 1 + 1 == 3, "the peak is too high"

def test_misses():
    pytest.skip("needs 80 GB")

def test_ends():
    import os
    os._exit(7)

def test_hangs():
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    (HERE / "child").write_text(str(child.pid))
    time.sleep(600)
"""


@pytest.mark.parametrize(
    ("num_gpus", "ranks"),
    [
        (0, {}),
        (1, {"ddp": 1, "fsdp": 1, "zero3": 1, "zero3_nvme": 1}),
        (2, {"ddp": 2, "fsdp": 2, "ep": 2, "zero3": 2, "zero3_nvme": 2, "tp": 2, "pp": 2, "ring": 2, "ulysses": 2}),
        (4, {"ddp": 4, "fsdp": 2, "tp": 2, "pp": 2, "ring": 2, "ulysses": 2, "hsdp": 4, "fsdp_tp": 4}),
        (8, {"ddp": 4, "fsdp": 2, "tp": 2, "pp": 2, "ring": 2, "ulysses": 2, "hsdp": 4, "fsdp_tp": 4}),
    ],
)
def test_the_gpus_select_gears_and_their_ranks(num_gpus, ranks):
    runnable = {part.name for part in gpu.all_parts() if part.gpus <= num_gpus}
    assert {name: gpu.ranks_of(name, num_gpus) for name in ranks} == ranks
    for name in gear_names():
        may = gpu.ranks_of(name, num_gpus) > 0 and name != "single"
        assert (f"parity-{name}-bf16" in runnable) == may, name
        assert (f"parity-{name}-fp32" in runnable) == (may and name not in ("ring", "ulysses")), name
    assert ("shapes-fsdp_2gpu" in runnable) == (num_gpus >= 2)
    assert ("shapes-qlora_1gpu" in runnable) == (num_gpus >= 1)


def test_every_gear_and_recipe_for_gpus_is_a_part():
    names = {part.name for part in gpu.all_parts()}
    assert names >= {f"parity-{name}-bf16" for name in gear_names() if name != "single"}
    with_sums = {path.stem for path in (ROOT / "recipes").glob("*.yaml") if "GB  in all" in path.read_text()}
    assert with_sums == set(gpu.RECIPES)
    assert len(names) == len(gpu.all_parts())


def test_a_part_that_needs_more_gpus_is_skipped_with_its_reason(tmp_path):
    result = gpu.run_part(gpu.Part("tp", "", gpus=2, test="no such test"), 1, tmp_path)
    assert result == gpu.Result("skipped", "needs 2 GPUs", {}, 0)


def test_without_gpus_nothing_runs(capsys, monkeypatch):
    monkeypatch.setattr(gpu, "accept", None)
    before = gpu.PAGE_FILE.read_text()
    assert gpu.main([]) == 2
    assert re.fullmatch(r"gpu: nothing was run: CUDA_VISIBLE_DEVICES hides all GPUs.*\n", capsys.readouterr().out)
    assert gpu.PAGE_FILE.read_text() == before
    assert gpu.main(["parity-nothing"]) == 2
    assert "parity-nothing: not a part" in capsys.readouterr().out


def test_the_page_is_that_of_a_run_or_reports_that_there_is_none():
    page = gpu.PAGE_FILE.read_text()
    if "Generated on" not in page:
        assert page == gpu.write_page(gpu.all_parts(), {}, {}, ""), "run write_page again"
        assert "No run on GPUs is recorded yet" in page and "passed" not in page.partition("## How")[0]


def test_the_page_shows_results_and_hardware():
    parts = [gpu.Part("a", "shows a"), gpu.Part("b", "shows b", 2), gpu.Part("c", "shows c")]
    results = {
        "a": gpu.Result("passed", "", {"tokens/s": "12", "MFU": "50.0%"}, 41.6),
        "b": gpu.Result("failed", "x | y", {"peak GB": "9.0"}, 3.2),
    }
    page = gpu.write_page(parts, HARDWARE | {"driver": "580"}, results, "2030-01-02")
    assert "Generated on 2030-01-02" in page and "| GPUs | 1 x some GPU |\n| driver | 580 |" in page
    rows = [line for line in page.splitlines() if line.startswith("| shows")]
    assert rows == [
        "| shows a | 1 | passed | tokens/s 12; MFU 50.0% | 42 |",
        "| shows b | 2 | failed | x \\| y; peak GB 9.0 | 3 |",
        "| shows c | 1 | not run | - | - |",
    ]


KERNELS = {  # names as in the sources of the libraries, by what ran
    "cudnn": ["cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_6_64x128x128_4x1x1_kernel0_0"],
    "flash of torch": ["void pytorch_flash::flash_fwd_kernel<pytorch_flash::Flash_fwd_kernel_traits<64, 128, 128, 4>>"],
    "flash of flash-attn": ["void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128, 64, 128, 4>>"],
    "efficient": ["fmha_cutlassF_bf16_aligned_64x64_rf_sm80(PyTorchMemEffAttention::AttentionKernel::Params)"],
    "math": ["void (anonymous namespace)::softmax_warp_forward<float, float, float, 8, false, false>"],
    "none": ["void cunn_SoftMaxForward<8, float, float, float, at::native::LogSoftMaxForwardEpilogue>"],
}


@pytest.mark.parametrize(("kernel", "names"), KERNELS.items())
def test_the_kernel_of_a_trace_is_named(kernel, names):
    products = ["nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNN", "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n"]
    assert gpu_kernels.kernel_of([*products, *names, "void at::native::vectorized_elementwise_kernel<4>"]) == kernel
    assert gpu_kernels.kernel_of(products) == "none"


def test_a_profile_on_the_cpu_names_its_kernels(tmp_path):
    figures = {}
    gpu_parts.run_profile(gpu_parts.Setting(tmp_path, 0), figures)
    assert figures == {"eager": "math", "sdpa": "flash for CPU", "documents": "flash for CPU"}
    assert json.loads((tmp_path / "traces" / "trace-documents.json").read_text())["traceEvents"]


def test_attentions_equal_eager_and_a_wrong_one_is_found(monkeypatch):
    monkeypatch.setattr(gpu_kernels, "FAMILIES", {"mistral": gpu_kernels.FAMILIES["mistral"]})
    figures = {}
    assert gpu_kernels.compare_attentions("cpu", figures) == []
    assert set(figures) == {f"mistral, {name}, {p}" for name in ("sdpa", "documents") for p in ("bf16", "fp32")}
    usual = attention._settings
    monkeypatch.setattr(attention, "_settings", lambda query, options: (0, *usual(query, options)[1:]))  # no window
    problems = gpu_kernels.compare_attentions("cpu", figures)
    assert [one.partition(":")[0] for one in problems] == ["mistral, documents, bf16", "mistral, documents, fp32"]


@pytest.mark.parametrize("name", gear_names())
def test_each_gear_has_a_variant_in_fp32(name, tmp_path):
    ranks = gpu.fewest_ranks(name)
    shipped, variant = (gpu_parts.gear_in(precision, name, ranks, tmp_path) for precision in gpu.PRECISIONS)
    assert (shipped.precision, variant.precision) == ("bf16", "no")
    assert (shipped.engine, shipped.zero_stage, shipped.offload) == (
        variant.engine,
        variant.zero_stage,
        variant.offload,
    )


@pytest.mark.parametrize("name", gpu.RECIPES)
def test_the_first_lines_of_a_recipe_give_gear_and_sum(name):
    gear, head = gpu_parts.head_figures(ROOT / "recipes" / f"{name}.yaml")
    gears = {
        "qlora_1gpu": "single",
        "ddp_4gpu": "ddp",
        "ddp_4gpu_full": "ddp",
        "dpo_1gpu": "single",
        "dpo_4gpu": "ddp",
        "fsdp_2gpu": "fsdp",
        "zero3_2gpu": "zero3",
    }
    assert gear == gears[name]
    text = (ROOT / "recipes" / f"{name}.yaml").read_text()
    parts = [float(part) for part in re.findall(r"^#\s+([\d.]+) GB  (?!in all)", text, re.M)]
    assert len(parts) > 2 and sum(parts) == pytest.approx(head, abs=0.11)
    assert gpu.fewest_ranks(gear) <= gpu.RECIPES[name]


def test_a_recipe_without_a_sum_is_a_failure():
    with pytest.raises(AssertionError, match="smollm2"):
        gpu_parts.head_figures(ROOT / "recipes" / "smollm2_135m.yaml")


def test_the_utilization_of_a_full_step_is_six_flops_per_weight():
    recipe = load_recipe(ROOT / "recipes" / "ddp_4gpu_full.yaml", [])
    config = {
        "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4,
        "num_key_value_heads": 4, "vocab_size": 1000,
    }  # fmt: skip
    weights = 3 * (4 * 64 * 64 + 3 * 64 * 128) + 64 * 1000
    attended = 3 * 4 * 64 * 3 * gpu_parts.DOCUMENT_CHARACTERS / 2  # scores and values, forward and backward
    assert gpu_parts.utilization(recipe, config, 100, 1e9) == pytest.approx((6 * weights + attended) * 100 / 1e9)


def made_parts(folder, *names, limit=120) -> list[gpu.Part]:
    path = folder / "test_made.py"
    path.write_text(TESTS)
    return [gpu.Part(name, f"shows {name}", limit=limit, test=f"{path}::test_{name}") for name in names]


@pytest.mark.cold
def test_a_part_that_fails_ends_or_hangs_does_not_hide_the_others(tmp_path):
    parts = [*made_parts(tmp_path, "fails", "misses", "ends", "passes"), *made_parts(tmp_path, "hangs", limit=12)]
    results = gpu.accept([parts[-1], *parts[:-1]], 1, HARDWARE, tmp_path / "kept")
    assert {name: one.status for name, one in results.items()} == {
        "hangs": "stopped", "fails": "failed", "misses": "skipped", "ends": "failed", "passes": "passed",
    }  # fmt: skip
    assert results["hangs"].why.startswith("took more than 12 s")
    assert not psutil.pid_exists(int((tmp_path / "child").read_text())), "a process of the part is left"
    assert results["fails"].why.startswith("the peak is too high") and results["fails"].figures == {"peak": "9"}
    assert results["misses"].why.endswith("needs 80 GB")
    assert results["ends"].why.startswith("pytest exited with code 7")
    assert results["passes"].figures == {"tokens/s": "12"}


@pytest.mark.cold
def test_a_killed_run_resumes_after_the_parts_that_passed(tmp_path):
    made_parts(tmp_path)
    code = (
        "import sys; from pathlib import Path; sys.path[:0] = ['src', 'tests', 'tests/support']; import gpu\n"
        f"test = {str(tmp_path / 'test_made.py')!r}\n"
        "parts = [gpu.Part(name, '', test=f'{test}::test_{name}') for name in ('passes', 'hangs')]\n"
        f"gpu.accept(parts, 1, {HARDWARE!r}, Path({str(tmp_path / 'kept')!r}))"
    )
    runner = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (tmp_path / "child").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    (hanging,) = psutil.Process(runner.pid).children()
    runner.send_signal(signal.SIGKILL)
    runner.wait()
    _, alive = psutil.wait_procs([hanging], timeout=60)
    gpu.kill_tree(int((tmp_path / "child").read_text()))
    assert not alive, "the part outlives the run"
    results = gpu.accept(made_parts(tmp_path, "passes", "misses"), 1, HARDWARE, tmp_path / "kept")
    assert (tmp_path / "passed").read_text() == "x", "a part that passed ran again"
    assert (results["passes"].status, results["misses"].status) == ("passed", "skipped")
    gpu.accept(made_parts(tmp_path, "passes"), 1, {"GPUs": "2 x another"}, tmp_path / "kept")
    assert (tmp_path / "passed").read_text() == "xx", "a result of other hardware counts"


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    changes = ("batch.rows=12", "batch.micro_rows=1", "batch.row_tokens=64", "optim.lr=5e-4")
    return gpu_parts.Setting(tmp_path_factory.mktemp("gpu"), 0, steps=6, weights_every=2, overrides=changes)


@pytest.fixture
def warm(setting, monkeypatch):
    """Train on forked ranks: the real launcher takes 10 s of imports a run, and the test of resuming uses it."""
    skip_loading_back(monkeypatch)
    monkeypatch.setattr(supervisor, "supervise", partial(supervise_warm, setting.folder))


@pytest.mark.ranks
def test_parity_on_the_cpu(setting, warm):
    figures = {}
    gpu_parts.run_part("parity-fsdp-bf16", setting, figures)
    assert figures["ranks"] == "2" and float(figures["loss"]) <= 1e-5 and "moments" in figures
    check_that_a_difference_is_found(setting, gpu_parts.reference(setting, "bf16"))


@pytest.mark.cold
def test_resuming_on_the_cpu(setting, monkeypatch):
    with monkeypatch.context() as patch:
        skip_loading_back(patch)
        patch.setattr(supervisor, "supervise", partial(supervise_warm, setting.folder))
        gpu_parts.reference(setting, "bf16")
    figures = {}
    gpu_parts.run_part("resume-single", setting, figures)
    assert 2 <= int(figures["killed after step"]) < 6 and float(figures["loss"]) == 0


def check_that_a_difference_is_found(setting, run) -> None:
    """Change one loss of a run by 2e-5."""
    other = run.with_name("changed")
    shutil.copytree(run, other)
    lines = [json.loads(line) for line in (other / "metrics.jsonl").read_text().splitlines()]
    third = next(line for line in lines if line["step"] == 3 and "loss" in line)
    third["loss"] *= 1 + 2e-5
    (other / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(AssertionError, match=r"step 3 differs in loss by 2\.0e-05"):
        gpu_parts.compare(setting, other, "bf16", run_comparison.Compared("single", run), {})


@pytest.mark.ranks
def test_an_optimizer_is_compared_with_adamw(setting, warm):
    figures = {}
    gpu_parts.run_part("optimizer-adamw_8bit", setting, figures)
    assert set(figures) == {"largest difference of a loss", "size of the checkpoint"}


@pytest.mark.cold
@pytest.mark.parametrize("recipe", ["qlora_1gpu", "dpo_1gpu"])
def test_a_peak_far_from_the_recipe_fails_with_its_figures(setting, warm, recipe):
    figures = {}
    small = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "vocab_size": 512}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    with pytest.raises(AssertionError, match=r"is not within 5 % of 8.0 GB"):  # the small model takes less
        gpu_parts.run_shapes(replace(setting, steps=3), figures, recipe, **small, **heads)
    assert set(figures) == {"GPUs", "tokens/s per GPU", "MFU", "peak GB", "GB in the recipe"}
    assert 0 < float(figures["peak GB"]) < 7 and torch.get_default_device().type == "cpu"


def test_the_plan_reads_the_measured_share_of_the_peak(tmp_path, monkeypatch):
    """A step that takes as long as the plan says at a share has that share."""
    monkeypatch.setattr(cost, "MEASURED", tmp_path / "mfu.json")
    job = simulations.job_of("ddp_4gpu_full", "ddp", 4)
    kind, config = gpus.gpu_named("H100"), simulations.config_of(job)
    assert cost.measured_mfu(kind) == cost.MFU
    for recipe, share in (("a", 0.3), ("b", 0.5)):
        seconds = cost.cost_of_step(Architecture.of(config), job, kind, mfu=share).seconds
        gpu_parts.record_mfu("NVIDIA H100 80GB HBM3", recipe, config, job, seconds)
    assert cost.measured_mfu(kind) == pytest.approx(0.4, abs=0.01)
    assert cost.measured_mfu(gpus.gpu_named("A100")) == cost.MFU
    gpu_parts.record_mfu("NVIDIA Unheard-of 1", "a", config, job, 1.0)
    assert [*json.loads(cost.MEASURED.read_text())] == ["H100"]
