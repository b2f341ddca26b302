"""The training loop: it calls the device, logs, validates and saves checkpoints."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import batch_sizes
import checkpoints
import datasets
import idle_options
import instances
import ipu_options
import log
import lr_schedules
import models
import optimizers
import torch
import validation
import weight_avg
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm

import popdist_py
from popdist_py import poptorch

__all__ = ["NotFinite", "Result", "Training"]


class NotFinite(Exception):
    """The loss is not a finite number any more."""


@dataclass(frozen=True)
class Result:
    """The result of a training.

    Attributes:
        folder: The folder of the log and the checkpoints.
        steps: The number of weight updates.
        accuracy: The accuracy on all validation images in per cent; None without validation.
        images_per_second: The images per second of all instances, while they trained.
        stopped: Whether a stop request ended the training early.
    """

    folder: Path
    steps: int
    accuracy: float | None
    images_per_second: float
    stopped: bool


@dataclass
class _Meter:
    """Sums of this instance since the last log line. A training that stops saves these sums.

    Attributes:
        loss: The sum of the losses of the micro-batches.
        right: The number of right answers.
        micro_batches: The number of micro-batches.
        images: The number of images.
    """

    loss: float = 0.0
    right: float = 0.0
    micro_batches: int = 0
    images: int = 0

    def add(self, loss: torch.Tensor, right: torch.Tensor, micro_batches: int, images: int) -> None:
        self.loss += loss.double().sum().item()
        self.right += right.double().sum().item()
        self.micro_batches += micro_batches
        self.images += images


@dataclass
class _Clock:
    """A measurement of the training's speed, without the time for validations and checkpoints.

    A lap is a time of uninterrupted training, which ends with a log line.

    Attributes:
        seconds: The duration of all completed laps.
        images: The number of images that all instances trained on in the completed laps.
        counted: The number of images in the current lap.
        began: The start time of the current lap.
    """

    seconds: float = 0.0
    images: int = 0
    counted: int = 0
    began: float = 0.0

    def lap(self) -> float:
        """End the current lap, and return its images per second."""
        seconds = time.perf_counter() - self.began
        images, self.counted = self.counted, 0
        self.seconds += seconds
        self.images += images
        return images / seconds

    def go_on(self) -> None:
        self.began = time.perf_counter()

    @property
    def images_per_second(self) -> float:
        return self.images / self.seconds if self.seconds else 0.0


class Training:
    """One training: data, model, optimiser, schedule and progress.

    Args:
        args: All options.
        seed: The seed of the order of the images; it is the same on all instances.
        done: The updates that the training has already made.

    Raises:
        ValueError: The options do not fit together, or the data is missing.
    """

    def __init__(
        self, args: argparse.Namespace, seed: int, done: batch_sizes.Progress = batch_sizes.START
    ) -> None:
        self.args, self.sizes = args, batch_sizes.sizes(args)
        ipu_options.check_devices(args)
        self.images = images = datasets.load(args, training=True)
        self.network = models.create(args, images.num_classes)
        models.place(self.network, args)
        self.validation: validation.Validation | None = None
        if args.validation:
            others = datasets.load(args, training=False)
            self.validation = validation.Validation(self.network, args, others)
        options = ipu_options.training_options(args, len(images.data), done)
        self.at_once = options.device_iterations
        self.loader = datasets.loader(args, options, images, training=True, seed=seed)
        updates = batch_sizes.updates(args, len(images.data))
        self.steps_per_epoch, self.steps = updates.of_epoch, updates.total
        self.schedule = lr_schedules.make(
            args,
            epochs=self.steps / self.steps_per_epoch,
            global_batch=self.sizes.global_batch,
        )
        module = models.ForTraining(self.network, args, images).train()
        # LambdaLR multiplies the rate of 1 by the schedule's value for each weight update.
        self.optimizer = optimizers.make(args, module, learning_rate=1.0)
        self.scheduler = LambdaLR(self.optimizer, self._rate)
        self.model = poptorch.trainingModel(module, options, self.optimizer, self.scheduler)
        self.step = 0
        self.accuracy: float | None = None
        self.meter, self.clock = _Meter(), _Clock()

    def carry_out(self, run: log.Run, found: checkpoints.Newest | None) -> Result:
        """Train to the end, or until a stop request.

        Args:
            run: The log of the training.
            found: The checkpoint to resume from; None to start from the beginning.
        """
        self.run = run
        self.checkpoints = checkpoints.Checkpoints(run, self.model, self.loader, self.args)
        if found is not None:
            self.meter = _Meter(**self.checkpoints.resume(found))
            self.scheduler.last_epoch = self.step = found.done.total
            # If --epochs has changed, the schedule differs from the schedule in the checkpoint.
            optimizers.set_rate(self.optimizer, self._rate(self.step))
        self._say_what_runs()
        self.clock.go_on()
        with instances.stop_requests() as stop_is_asked, self._bar() as bar:
            stopped = self._go_through(stop_is_asked, bar)
        if self.args.weight_avg and not stopped:
            self.close()  # --select-ipus gives the average the same device as the validation
            weight_avg.average(run.folder, self.args, run.line)
        run.line(self._last_line(stopped=stopped))
        rate = self.clock.images_per_second
        return Result(run.folder, self.step, self.accuracy, rate, stopped)

    def close(self) -> None:
        """Detach from the devices, and end the processes that load images."""
        self.loader.terminate()
        self.model.destroy()
        if self.validation:
            self.validation.close()

    def _go_through(self, stop_is_asked: Callable[[], bool], bar: tqdm) -> bool:
        """Train epoch by epoch, and return whether a stop request ended the training."""
        while self.step < self.steps:
            for batch in self.checkpoints.batches():
                self._call(batch)
                bar.update(self.at_once)
                if self.step >= self.steps:
                    break
                if stop_is_asked():
                    self._save(own=vars(self.meter))
                    return True
        return False

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    def _rate(self, done: int) -> float:
        """Return the learning rate of the weight update that follows ``done`` updates.

        The schedule is read at the middle of the update, so a warm-up does not begin with 0.
        """
        return self.schedule.rate((done + 0.5) / self.steps_per_epoch)

    def _call(self, batch: tuple[torch.Tensor, torch.Tensor]) -> None:
        """Call the device once, and log, validate and save if they are due after this call."""
        right, loss = self.model(*batch)
        images = len(batch[1])
        self.meter.add(loss, right, images // self.sizes.micro_batch, images)
        self.clock.counted += images * self.sizes.instances
        self.step += self.at_once
        saves = self._is_due(self.args.ckpts_per_epoch)
        if saves or self._is_due(self.args.logs_per_epoch):
            self._log()
        if saves:
            self._validate()
            self._save()
            self.clock.go_on()

    def _is_due(self, times_per_epoch: float) -> bool:
        """Return whether an event with this frequency happened during the last call."""
        before = self.step - self.at_once
        reached, was = (
            math.floor(step * times_per_epoch / self.steps_per_epoch + 1e-9)
            for step in (self.step, before)
        )
        return reached > was or self.step >= self.steps

    def _log(self) -> None:
        meter, self.meter = self.meter, _Meter()
        speed = self.clock.lap()
        found = self.run.training(
            self.step,
            self.epoch,
            meter.loss / meter.micro_batches,
            100 * meter.right / meter.images,
            self._rate(self.step - 1),
            speed,
        )
        self.run.memory(self.step, self.model)
        self.clock.go_on()
        if not math.isfinite(found["loss"]):
            raise NotFinite(
                f"the loss is {found['loss']} at step {self.step}: lower "
                "--base-learning-rate-exponent or --loss-scaling, or take --precision 16.32; "
                f"{self.run.folder} keeps the checkpoints before"
            )

    def _validate(self) -> None:
        if self.validation:
            try:
                self.accuracy = self.validation.accuracy(self.network.state_dict())
            except ValueError:
                self._save()  # A damaged validation image must not lose the training's progress.
                raise
            self.run.validation(self.step, self.epoch, self.accuracy)

    def _save(self, own: dict | None = None) -> None:
        self.checkpoints.save(self.step, self.epoch, own=own)

    def _bar(self) -> tqdm:
        """Return the progress bar, which only instance 0 shows on a terminal."""
        shown = sys.stderr.isatty() and popdist_py.getInstanceIndex() == 0
        return tqdm(total=self.steps, initial=self.step, unit="step", disable=not shown)

    def _say_what_runs(self) -> None:
        for line in idle_options.lines_of_training(self.args):
            self.run.line(line)
        args, found = self.args, self.sizes
        is_random = args.generated_data or args.synthetic_data
        images = f"random images ({args.dataset})" if is_random else args.dataset
        self.run.line(
            f"{models.label(args)} on {images}: {_counted(self.steps, 'step')} of "
            f"{found.global_batch:,} images, micro-batch {found.micro_batch} x accumulation "
            f"{found.accumulation} x {_counted(found.replicas, 'replica')} of "
            f"{_counted(found.instances, 'instance')}"
        )

    def _last_line(self, *, stopped: bool) -> str:
        if stopped:
            return f"stopped after step {self.step}; go on with: {self._command_to_go_on()}"
        if not self.clock.images:
            return (
                f"nothing is left to train after step {self.step}: give more --epochs or "
                f"--iterations; log in {self.run.folder}"
            )
        parts = [f"{self.clock.images_per_second:.0f} img/s", f"log in {self.run.folder}"]
        if self.accuracy is not None:
            parts.insert(0, f"validation accuracy {self.accuracy:.2f} %")
        return ", ".join(parts)

    def _command_to_go_on(self) -> str:
        words = ["python"]
        if popdist_py.isPopdistEnvSet():
            words = ["poprun-py", "--num-instances", str(self.sizes.instances)]
            words += ["--num-replicas", str(self.sizes.replicas)]
            if self.args.shards > 1:
                words += ["--ipus-per-replica", str(self.args.shards)]
        program = Path(__file__).with_name("restore.py")
        return shlex.join([*words, str(program), "--restore-path", str(self.run.folder)])


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
