"""Train a small transformer language model, with schedule, validation and checkpoints.

poprun-py -n 2 --num-replicas 4 examples/language_model.py --checkpoints checkpoints
python examples/language_model.py --replicas 4

The text is the Python language reference, which comes with every Python. The global batch of a step
does not depend on the number of instances, so the losses do not either. A job that gets SIGTERM
saves a checkpoint and ends with code 75. The same command then resumes the training.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from common.arguments import (
    Parser,
    from_zero,
    positive,
    rate,
    readable_file,
    writable_file,
    writable_folder,
)
from torch import nn
from torch.nn import functional as F

import popdist_py
from popdist_py import poptorch
from popdist_py.poptorch.checkpoint import TrainingCheckpoints

BYTES = 256  # the size of the vocabulary, since a token is a byte
VALIDATION_SHARE = 0.1
VALIDATION_STEPS = 4


class Block(nn.Module):
    """Causal self-attention and a feed-forward network.

    Both parts have a norm before them and a residual connection around them.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.joined = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x):
        batch, length, width = x.shape
        projected = self.queries_keys_values(self.attention_norm(x))
        # [batch, length, 3 * width] -> 3 of [batch, heads, length, width / heads]
        q, k, v = projected.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.joined(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.feed_forward(x)


class LanguageModel(nn.Module):
    """A model that returns scores of the next byte [batch, length, 256], or the mean loss."""

    def __init__(self, width: int, layers: int, heads: int, context: int) -> None:
        super().__init__()
        self.tokens = nn.Embedding(BYTES, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.scores = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, BYTES))

    def forward(self, tokens, targets=None):
        x = self.tokens(tokens) + self.positions[: tokens.shape[1]]
        scores = self.scores(self.blocks(x))
        if targets is None:
            return scores
        return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


@dataclass(frozen=True)
class Batches:
    """Batches of random windows of a text. A batch depends only on its number and on the seed.

    The job has ``replicas`` replicas. This instance has ``local`` of them, and its first replica
    has the index ``first``.
    """

    text: torch.Tensor
    context: int
    micro_batch: int
    accumulation: int
    replicas: int
    first: int
    local: int
    seed: int

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this instance's part of a global batch: tokens, and the byte after each token."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + number)
        size = (self.accumulation, self.replicas, self.micro_batch)
        starts = torch.randint(len(self.text) - self.context, size, generator=generator)
        mine = starts[:, self.first : self.first + self.local].reshape(-1, 1)
        windows = self.text[mine + torch.arange(self.context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


def load_text(path: Path | None, context: int) -> torch.Tensor:
    """Return the bytes of a file, or of the Python language reference."""
    if path is None:
        from pydoc_data.topics import topics

        data = "\n\n".join(topics.values()).encode()
    else:
        data = path.read_bytes()
    needed = math.ceil((context + 1) / VALIDATION_SHARE)
    if len(data) < needed:
        Parser().error(f"{path} has {len(data)} bytes: --context {context} needs at least {needed}")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def learning_rate_factor(step: int, warm_up: int, steps: int) -> float:
    """Return the learning rate of a step as a fraction of the highest learning rate.

    The rate has a linear warm-up and a cosine decay.
    """
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.5 * (1 + math.cos(math.pi * min(1.0, (step - warm_up) / max(1, steps - warm_up))))


def say(text: str) -> None:
    """Print a text on instance 0 only."""
    if popdist_py.getInstanceIndex() == 0:
        print(text, flush=True)


def train(model: LanguageModel, text: torch.Tensor, args: argparse.Namespace) -> None:
    """Train ``model`` in place, beginning with the newest checkpoint."""
    options = poptorch.DistributedOptions()
    if not popdist_py.isPopdistEnvSet():
        options.replicationFactor(args.replicas)
    options.randomSeed(args.seed)
    options.outputMode(poptorch.OutputMode.All)
    inference_options = options.clone()
    options.Training.gradientAccumulation(args.gradient_accumulation)

    local = options.replication_factor
    share = {
        "context": args.context,
        "micro_batch": args.micro_batch,
        "replicas": local * popdist_py.getNumInstances(),
        "first": local * popdist_py.getInstanceIndex(),
        "local": local,
    }
    split = len(text) - math.ceil(len(text) * VALIDATION_SHARE)
    batches = Batches(
        text[:split], accumulation=args.gradient_accumulation, seed=args.seed, **share
    )
    validation = Batches(text[split:], accumulation=1, seed=args.seed + 1, **share)

    optimizer = poptorch.optim.AdamW(model.parameters(), lr=args.learning_rate, weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, args.warm_up, args.steps)
    )
    training_model = poptorch.trainingModel(model, options, optimizer=optimizer)
    inference_model = poptorch.inferenceModel(model, inference_options)

    # A row of metrics has the means over all instances and over the steps since the last row.
    sinks = [popdist_py.CsvSink(args.metrics)] if args.metrics else []
    metrics = popdist_py.Metrics(sinks, reductions={"learning rate": "last"})

    checkpoints = args.checkpoints and TrainingCheckpoints(args.checkpoints, training_model)
    step, extra = checkpoints.resume() if checkpoints else (0, {})
    if extra:
        schedule.load_state_dict(extra["schedule"])
        metrics.load_state_dict(extra["metrics"])
        say(f"resumed after step {step}")
    tokens_of_step = (
        args.context * args.micro_batch * args.gradient_accumulation * share["replicas"]
    )
    began, since = time.perf_counter(), step
    while step < args.steps:
        metrics.update(
            {"loss": training_model(*batches[step]), "learning rate": schedule.get_last_lr()[0]}
        )
        schedule.step()
        training_model.setOptimizer(optimizer)
        step += 1
        if step % args.validate_every == 0 or step == args.steps:
            for number in range(VALIDATION_STEPS):
                # The inference model automatically uses the newest weights of the training model.
                metrics.update(validation=inference_model(*validation[number]))
            values = metrics.log(step)
            speed = (step - since) * tokens_of_step / (time.perf_counter() - began)
            say(
                f"step {step:4}  loss {values['loss']:.3f}  "
                f"validation {values['validation']:.3f}  "
                f"learning rate {values['learning rate']:.1e}  {speed:,.0f} tokens/s"
            )
            began, since = time.perf_counter(), step
        if checkpoints:
            # After SIGTERM, this call returns True on all instances at the same step.
            stop = popdist_py.stopRequested()
            if stop or step % args.save_every == 0 or step == args.steps:
                state = {"schedule": schedule.state_dict(), "metrics": metrics.state_dict()}
                checkpoints.save(step, state)
            if stop and step < args.steps:
                say(f"stopped after step {step}")
                sys.exit(popdist_py.RESUME_EXIT_CODE)
    metrics.close()


@torch.no_grad()
def sample(model: LanguageModel, start: str, length: int, context: int, seed: int) -> str:
    """Return ``start`` with a continuation that the model generates byte by byte."""
    generator = torch.Generator().manual_seed(seed)
    written = list(start.encode())
    for _ in range(length):
        scores = model(torch.tensor([written[-context:]]))[0, -1]
        shares = torch.softmax(scores / 0.5, dim=0)
        written.append(int(torch.multinomial(shares, 1, generator=generator)))
    return bytes(written).decode(errors="replace")


def main(argv: list[str] | None = None) -> None:
    """Train the model, and print a text that the model generates."""
    parser = Parser(
        description=__doc__.splitlines()[0],
        epilog="Example: python examples/language_model.py --replicas 4",
    )
    parser.add_argument(
        "--text", type=readable_file, help="file to learn; the language reference if unset"
    )
    parser.add_argument("--steps", type=positive, default=400)
    parser.add_argument("--micro-batch", type=positive, default=4)
    parser.add_argument("--gradient-accumulation", type=positive, default=1)
    parser.add_argument("--learning-rate", type=rate, default=3e-3)
    parser.add_argument(
        "--warm-up", type=from_zero, default=20, help="steps of a rising learning rate"
    )
    parser.add_argument("--width", type=positive, default=96)
    parser.add_argument("--layers", type=positive, default=3)
    parser.add_argument("--heads", type=positive, default=4)
    parser.add_argument(
        "--context", type=positive, default=64, help="bytes that the model looks back"
    )
    parser.add_argument("--validate-every", type=positive, default=50)
    parser.add_argument(
        "--metrics", type=writable_file, help="CSV file for losses and learning rates"
    )
    parser.add_argument(
        "--checkpoints", type=writable_folder, help="folder to save in and to go on from"
    )
    parser.add_argument("--save-every", type=positive, default=100)
    parser.add_argument("--sample", type=from_zero, default=200, help="bytes to write at the end")
    parser.add_argument("--replicas", type=positive, default=4, help="without the launcher only")
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args(argv)
    if args.width % args.heads:
        parser.error(f"--width {args.width} cannot be divided among --heads {args.heads}")
    parser.say_idle(
        args,
        (popdist_py.isPopdistEnvSet(), "the launcher gives the replicas", "replicas"),
        (args.checkpoints is None, "no --checkpoints", "save_every"),
    )

    popdist_py.init()
    torch.manual_seed(args.seed)
    model = LanguageModel(args.width, args.layers, args.heads, args.context)
    train(model, load_text(args.text, args.context), args)
    if args.sample and popdist_py.getInstanceIndex() == 0:
        print(sample(model, "The ", args.sample, args.context, args.seed))


if __name__ == "__main__":
    main()
