"""Train a tiny Qwen3-MoE with transformers' Trainer: an ordinary script that knows no plugin.

    deepspeed --num_accelerators 2 --module ds_moe_lb run launch/finetune_with_trainer.py \
        --deepspeed ds_configs/hf_zero2.json

The text is Python's own documentation of its language, as bytes; nothing is downloaded.
"""

import argparse
from pydoc_data.topics import topics

import torch
from accelerate import PartialState
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM, Trainer, TrainingArguments

LENGTH = 128
PADDING, IGNORED = 256, -100


class TopicDataset(torch.utils.data.Dataset):
    """Paragraphs, cut or padded to one length."""

    def __init__(self) -> None:
        paragraphs = [part for _, text in sorted(topics.items()) for part in text.split("\n\n")]
        self.texts = [part.encode()[:LENGTH] for part in paragraphs if len(part) > 32]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        text = list(self.texts[index])
        padding = LENGTH - len(text)
        return {
            "input_ids": torch.tensor(text + [PADDING] * padding),
            "attention_mask": torch.tensor([1] * len(text) + [0] * padding),
            "labels": torch.tensor(text + [IGNORED] * padding),
        }


def main() -> None:
    """Train and print the log's last line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--deepspeed", required=True, help="DeepSpeed JSON")
    parser.add_argument("--output-dir", default="runs/finetune")
    parser.add_argument("--max-steps", type=int, default=20)
    parser.add_argument("--local_rank", type=int, help="from the launcher; the environment says it")
    options = parser.parse_args()

    if not torch.cuda.is_available():
        PartialState(cpu=True, backend="gloo")  # else accelerate gives every rank the same data
    arguments = TrainingArguments(
        output_dir=options.output_dir,
        deepspeed=options.deepspeed,
        per_device_train_batch_size=2,
        gradient_accumulation_steps=4,
        max_steps=options.max_steps,
        learning_rate=1e-3,
        logging_steps=5,
        save_strategy="no",
        report_to="none",
        use_cpu=not torch.cuda.is_available(),
        seed=1,
    )
    torch.manual_seed(1)
    config = Qwen3MoeConfig(
        vocab_size=PADDING + 1,
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=LENGTH,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    )
    trainer = Trainer(Qwen3MoeForCausalLM(config), arguments, train_dataset=TopicDataset())
    trainer.train()
    if trainer.is_world_process_zero():
        for line in trainer.state.log_history:
            print(line)


if __name__ == "__main__":
    main()
