"""Write what TRL's trainers compute from given log-probabilities to tests/hot_path/trl_losses.json.

Usage: python benchmarks/trl_losses.py

The trainers get a model that returns the log-probabilities of tokens. Their own code computes the loss, and autograd
its gradient for each answer's sum. The first run installs TRL into .peers/, as `make bench` does.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parents[1]
GOLDEN = ROOT / "tests/hot_path/trl_losses.json"
LENGTHS = [[3, 5], [1, 2], [7, 4], [6, 6]]
KTO_ANSWERS = [(0, 0), (1, 1), (2, 0), (3, 1), (1, 0)]  # pair and side
KTO_MOVED = [0.5, 1.0, -0.2, 1.5, 0.9]  # gains of the answers to other prompts


def main() -> None:
    """Run this file in the environment of TRL."""
    from peers import environments

    if failure := environments.install("trl"):
        sys.exit(failure)
    subprocess.run([str(environments.python_of("trl")), __file__, "--trl"], check=True)


def write_golden() -> None:
    """Write the losses of all trainers."""
    import torch
    import trl

    torch.manual_seed(1)
    tokens = [[-2.5 * torch.rand(length) for length in pair] for pair in LENGTHS]
    sums = torch.stack([torch.stack([answer.sum() for answer in pair]) for pair in tokens])
    reference = sums + 2 * torch.randn(len(LENGTHS), 2)
    with tempfile.TemporaryDirectory() as scratch:
        arguments = {
            "output_dir": scratch, "report_to": "none", "use_cpu": True, "bf16": False,
            "per_device_train_batch_size": len(LENGTHS),
        }  # fmt: skip
        cases = [*dpo_cases(arguments, tokens, reference), *kto_cases(arguments, tokens, reference)]
        cases += free_cases(arguments, sums)
    content = {"made by": "benchmarks/trl_losses.py", "trl": trl.__version__, "cases": cases}
    GOLDEN.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    print(f"{GOLDEN}: {len(cases)} cases of TRL {trl.__version__}")


def trainer_of(kind: type, arguments: Any, with_labels: bool = False) -> Any:
    """Return a trainer of recipes/tiny for data that it never reads."""
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    sides = {name: [{"role": "assistant", "content": name}] for name in ("chosen", "rejected")}
    answers = {"completion": sides["chosen"], "label": True} if with_labels else sides
    data = Dataset.from_list([{"prompt": [{"role": "user", "content": "copy a"}], **answers}] * 4)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(ROOT / "recipes/tiny"))
    tokenizer = AutoTokenizer.from_pretrained(ROOT / "recipes/tiny")
    return kind(model, args=arguments, train_dataset=data, processing_class=tokenizer)


def inputs_of(tokens: list[list[torch.Tensor]], order: list[tuple[int, int]]) -> tuple[torch.Tensor, dict[str, Any]]:
    """Return the log-probabilities of these answers as rows, and a trainer's inputs that say where they are."""
    import torch

    width = max(map(max, LENGTHS)) + 2
    log_probs, mask = torch.zeros(len(order), width), torch.zeros(len(order), width + 1, dtype=torch.long)
    for row, (pair, side) in enumerate(order):
        length = LENGTHS[pair][side]
        log_probs[row, 1 : 1 + length] = tokens[pair][side]
        mask[row, 2 : 2 + length] = 1  # inputs have a token more, since the first one has no log-probability
    same = torch.ones_like(mask)
    return log_probs.requires_grad_(), {"input_ids": same, "attention_mask": same, "completion_mask": mask}


class Given:
    """A model that returns given log-probabilities of tokens, and zeros for what trainers only log."""

    def __init__(self, log_probs: torch.Tensor) -> None:
        self.log_probs, self.training = log_probs, True

    def __call__(self, **_: object) -> SimpleNamespace:
        """Return the outputs of TRL's fused head."""
        zeros = self.log_probs.detach() * 0
        logged = dict.fromkeys(("entropy", "mean_logits", "log_sum_sq_probs"), zeros)
        return SimpleNamespace(log_probs=self.log_probs, is_top1=zeros.bool(), **logged)


def dpo_cases(
    arguments: dict[str, Any], tokens: list[list[torch.Tensor]], reference: torch.Tensor
) -> list[dict[str, Any]]:
    """Return the cases of DPOTrainer, whose answers are all chosen ones, then all rejected ones."""
    import torch
    from trl import DPOConfig, DPOTrainer

    order, cases = [(pair, side) for side in (0, 1) for pair in range(len(LENGTHS))], []
    for objective, kind, beta in (("dpo", "sigmoid", 0.1), ("dpo", "sigmoid", 0.5), ("ipo", "ipo", 0.1)):
        options = DPOConfig(loss_type=[kind], beta=beta, precompute_ref_log_probs=True, **arguments)
        log_probs, inputs = inputs_of(tokens, order)
        inputs |= {"ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1]}
        loss = trainer_of(DPOTrainer, options)._compute_loss(Given(log_probs), inputs, return_outputs=False)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        sums, slopes = log_probs.sum(1).view(2, -1).T, gradient[:, 1].view(2, -1).T
        numbers = (sums, reference, torch.tensor(LENGTHS), slopes)
        cases.append(case(f"DPOTrainer {kind} {beta}", objective, {"beta": beta}, numbers, loss))
    return cases


def kto_cases(
    arguments: dict[str, Any], tokens: list[list[torch.Tensor]], reference: torch.Tensor
) -> list[dict[str, Any]]:
    """Return the cases of KTOTrainer. Each unit has one answer; the reference includes z0."""
    import torch
    from trl import KTOConfig, KTOTrainer

    cases, moved = [], torch.tensor(KTO_MOVED)
    for desirable, undesirable in ((1.0, 1.0), (1.5, 0.6)):
        settings = {"beta": 0.2, "desirable_weight": desirable, "undesirable_weight": undesirable}
        options = KTOConfig(precompute_ref_log_probs=True, **settings, **arguments)
        log_probs, inputs = inputs_of(tokens, KTO_ANSWERS)
        sums = log_probs.detach().sum(1)
        inputs |= {f"KL_{name}": tensor for name, tensor in inputs.items()} | {"ref_KL_logps": sums - moved}
        inputs["label"] = torch.tensor([side == 0 for _, side in KTO_ANSWERS])
        inputs["ref_logps"] = torch.stack([reference[place] for place in KTO_ANSWERS])
        trainer = trainer_of(KTOTrainer, options, with_labels=True)
        loss = trainer._compute_loss(Given(log_probs), inputs, return_outputs=False)
        (gradient,) = torch.autograd.grad(loss, log_probs)
        numbers = tuple(torch.zeros(len(KTO_ANSWERS), 2) for _ in range(4))
        for unit, (pair, side) in enumerate(KTO_ANSWERS):
            gained = reference[pair, side] + moved.mean().clamp(min=0)
            values = (sums[unit], gained, LENGTHS[pair][side], gradient[unit, 1])
            for number, value in zip(numbers, values, strict=True):
                number[unit, side] = value
        cases.append(case(f"KTOTrainer {desirable} {undesirable}", "kto", settings, numbers, loss))
    return cases


def free_cases(arguments: dict[str, Any], sums: torch.Tensor) -> list[dict[str, Any]]:
    """Return the cases of CPOTrainer with SimPO's loss, and of ORPOTrainer without its usual loss."""
    import torch
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer

    cases, lengths, none = [], torch.tensor(LENGTHS), torch.zeros_like(sums)
    for smoothing in (0.0, 0.1):
        options = CPOConfig(
            loss_type="simpo", cpo_alpha=0.0, beta=2.0, simpo_gamma=1.0, label_smoothing=smoothing, **arguments
        )
        leaf = sums.clone().requires_grad_()
        loss = trainer_of(CPOTrainer, options).cpo_loss(*(leaf / lengths).unbind(1))[0].mean()
        settings = {"beta": 2.0, "margin": 1.0, "label_smoothing": smoothing}
        numbers = (sums, none, lengths, torch.autograd.grad(loss, leaf)[0])
        cases.append(case(f"CPOTrainer simpo {smoothing}", "simpo", settings, numbers, loss))
    leaf = sums.clone().requires_grad_()
    trainer = trainer_of(ORPOTrainer, ORPOConfig(beta=0.1, **arguments))
    loss = -trainer.odds_ratio_loss(*(leaf / lengths).unbind(1))[0].mean()
    numbers = (sums, none, lengths, torch.autograd.grad(loss, leaf)[0])
    return [*cases, case("ORPOTrainer", "orpo", {"beta": 0.1}, numbers, loss)]


def case(
    name: str, objective: str, settings: dict[str, float], numbers: tuple[torch.Tensor, ...], loss: torch.Tensor
) -> dict[str, Any]:
    """Return a case: the answers, and TRL's mean loss with its gradient for each answer's log-probability."""
    names = ("log_probs", "reference", "lengths", "gradient")
    tensors = {key: tensor.float().tolist() for key, tensor in zip(names, numbers, strict=True)}
    facts = {"name": name, "objective": objective, "settings": settings, "num_units": len(tensors["lengths"])}
    return {**facts, "loss": float(loss), **tensors}


if __name__ == "__main__":
    if sys.argv[1:] == ["--trl"]:
        write_golden()
    else:
        main()
