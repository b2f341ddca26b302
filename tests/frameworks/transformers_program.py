"""Trains with Transformers' Trainer as its users write it: ``transformers_program.py BACKEND``.

Its ``ddp_backend`` takes no other name than gloo for the CPU, but it uses a group that is there.
"""

import sys
import tempfile

import torch
import torch.distributed as dist
from trained_digest import print_digest
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Sentences(torch.utils.data.Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        generator = torch.Generator().manual_seed(index)
        words = torch.randint(0, 50, (9,), generator=generator)
        return {"input_ids": words, "labels": index % 2}


def main():
    (backend,) = sys.argv[1:]
    if backend != "auto":
        dist.init_process_group(backend)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            use_cpu=True,
            ddp_backend="gloo",
            per_device_train_batch_size=4,
            num_train_epochs=2,
            eval_strategy="epoch",
            save_strategy="epoch",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        torch.manual_seed(3)
        model = BertForSequenceClassification(
            BertConfig(
                vocab_size=50,
                hidden_size=16,
                num_hidden_layers=2,
                num_attention_heads=2,
                intermediate_size=24,
                max_position_embeddings=16,
            )
        )
        trainer = Trainer(model, arguments, train_dataset=Sentences(), eval_dataset=Sentences())
        trainer.train()
        dist.barrier()
    print_digest(model)
    dist.destroy_process_group()


main()
