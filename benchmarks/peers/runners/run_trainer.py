"""Train with transformers' Trainer: chats padded to the longest of a batch."""

import probe

settings = probe.start()

import torch  # noqa: E402
from peft import LoraConfig, get_peft_model  # noqa: E402
from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForSeq2Seq,
    Trainer,
    TrainingArguments,
)


def encode(chat: list[dict[str, str]]) -> dict[str, list[int]]:
    """Return the tokens of a chat, and its labels."""
    ids = tokenizer.apply_chat_template(chat, return_dict=False)[: settings["row_tokens"]]
    prompt = tokenizer.apply_chat_template(chat[:-1], add_generation_prompt=True, return_dict=False)
    num_masked = len(prompt) if settings["supervise"] == "assistant" else 0
    return {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": [-100] * num_masked + ids[num_masked:]}


tokenizer = AutoTokenizer.from_pretrained(settings["model"])
dtype = torch.bfloat16 if settings["bf16"] else torch.float32
model = AutoModelForCausalLM.from_pretrained(settings["model"], dtype=dtype)
if settings["method"] == "lora":
    model = get_peft_model(model, LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM"))
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=settings["scratch"],
        per_device_train_batch_size=settings["rows"],
        max_steps=settings["steps"],
        learning_rate=settings["lr"],
        seed=settings["seed"],
        lr_scheduler_type="constant",
        bf16=settings["bf16"],
        use_cpu=not settings["bf16"],
        report_to="none",
        save_strategy="no",
    ),
    data_collator=DataCollatorForSeq2Seq(tokenizer),
    train_dataset=[encode(chat) for chat in probe.questions_and_answers(settings)],
)
trainer.train()
