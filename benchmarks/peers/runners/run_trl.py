"""Train with TRL's SFTTrainer: packed, or with its defaults."""

from typing import Any

import probe


def add_losses(steps: list[dict[str, float]]) -> None:
    """Take the losses from the trainer's log, as TRL computes the loss itself. It logs the last step later."""
    for step, line in zip(steps, trainer.state.log_history, strict=False):
        step["loss"] = line["loss"]


def count_targets(model: Any, args: Any, inputs: dict[str, Any]) -> None:
    """Count the labels of a micro-batch."""
    if "labels" in inputs:
        probe.now["targets"] += int((inputs["labels"][:, 1:] != -100).sum())


settings = probe.start(add_losses)

from datasets import Dataset  # noqa: E402
from peft import LoraConfig  # noqa: E402
from transformers import AutoTokenizer  # noqa: E402
from trl import SFTConfig, SFTTrainer  # noqa: E402

chats = probe.questions_and_answers(settings)
if settings["supervise"] == "all":
    rows = [{"messages": chat} for chat in chats]
else:
    rows = [{"prompt": chat[:-1], "completion": chat[-1:]} for chat in chats]
size = {"per_device_train_batch_size": settings["rows"]}
if settings["packs"]:
    size = {"packing": True, "per_device_train_batch_size": 1, "gradient_accumulation_steps": settings["rows"]}
trainer = SFTTrainer(
    settings["model"],
    args=SFTConfig(
        output_dir=settings["scratch"],
        max_length=settings["row_tokens"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        seed=settings["seed"],
        lr_scheduler_type="constant",
        bf16=settings["bf16"],
        gradient_checkpointing=False,
        use_cpu=not settings["bf16"],
        report_to="none",
        save_strategy="no",
        logging_steps=1,
        **size,
    ),
    processing_class=AutoTokenizer.from_pretrained(settings["model"]),
    train_dataset=Dataset.from_list(rows),
    peft_config=LoraConfig(r=16, lora_alpha=32, target_modules="all-linear") if settings["method"] == "lora" else None,
)
trainer.model.register_forward_pre_hook(count_targets, with_kwargs=True)
trainer.train()
