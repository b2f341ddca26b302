"""The group ``Options.Training``, with options that affect only training models."""

from __future__ import annotations

from typing import Any, Final, Literal, get_args

from popdist_py.poptorch import enums, old_spellings
from popdist_py.poptorch.options.session import _PopartOptions, _SessionGroup
from popdist_py.poptorch.options.store import check_count

__all__ = ["_TrainingOptions"]

Compression = Literal["none", "fp16", "bf16", "powersgd"]
# The settings of ``gradientCompression("powersgd")``. The defaults of the settings of ``powersgd``
# are those of torch's ``powerSGD_hook``.
_POWER_SGD: Final = {"rank": 1, "start_step": 1000, "warm_start": True}


class _TrainingOptions(_SessionGroup):
    """Options that affect only training models."""

    _place = "Options.Training"

    def __init__(self, popart: _PopartOptions) -> None:
        super().__init__(
            popart,
            gradient_accumulation=1,
            accumulation_and_replication_reduction_type=enums.ReductionType.Mean,
            meanAccumulationAndReplicationReductionStrategy=enums.MeanReductionStrategy.Post,
        )

    def _check(self) -> None:
        check_count("gradientAccumulation", self.gradient_accumulation)

    def gradientAccumulation(self, gradient_accumulation: int) -> _TrainingOptions:
        """Set the gradient accumulation (GA): the number of micro-batches per weight update."""
        self.set(gradient_accumulation=gradient_accumulation)
        return self

    def accumulationAndReplicationReductionType(
        self, reduction_type: enums.ReductionType
    ) -> _TrainingOptions:
        """Choose whether a weight update uses the mean or the sum of the gradients.

        A weight update uses the gradients of all accumulated micro-batches from the replicas of all
        instances.

        Args:
            reduction_type: The type Mean divides the sum of the gradients by GA (the number of
                accumulated micro-batches) times the number of replicas. The type Sum does not
                divide the sum of the gradients.

        Raises:
            ValueError: ``reduction_type`` is neither Sum nor Mean.
        """
        if reduction_type not in (enums.ReductionType.Sum, enums.ReductionType.Mean):
            raise ValueError(
                f"accumulationAndReplicationReductionType({reduction_type!r}) is not supported: "
                "expected ReductionType.Sum or ReductionType.Mean"
            )
        self.set(accumulation_and_replication_reduction_type=reduction_type)
        return self

    def setMeanAccumulationAndReplicationReductionStrategy(
        self, mean_reduction_strategy: enums.MeanReductionStrategy
    ) -> _TrainingOptions:
        """Choose how the mean of the micro-batches' gradients is computed.

        Args:
            mean_reduction_strategy: The strategy Running updates a running mean with each
                micro-batch's gradients. The strategy Post adds the gradients of all micro-batches,
                and divides the sum once at the end.

        Raises:
            ValueError: ``mean_reduction_strategy`` is not a member of MeanReductionStrategy.
        """
        if not isinstance(mean_reduction_strategy, enums.MeanReductionStrategy):
            raise ValueError(
                f"The mean reduction strategy {mean_reduction_strategy!r} is not supported: "
                "expected a poptorch.MeanReductionStrategy"
            )
        if mean_reduction_strategy == enums.MeanReductionStrategy.PostAndLoss:
            old_spellings.say("MeanReductionStrategy", "PostAndLoss")
        self.set(meanAccumulationAndReplicationReductionStrategy=mean_reduction_strategy)
        return self

    def setAutomaticLossScaling(self, enabled: bool) -> _TrainingOptions:
        """Adapt the loss scaling during training, and mark ``loss_scaling`` as variable."""
        self.checkIsFrozen()
        self._popart.set("automaticLossScalingSettings.enabled", bool(enabled))
        return self

    @property
    def automatic_loss_scaling(self) -> bool:
        """Whether the loss scaling adapts during training."""
        return bool(self._popart.session_value("automaticLossScalingSettings.enabled"))

    @property
    def automatic_loss_scaling_settings(self) -> dict[str, Any]:
        """The settings of automatic loss scaling that a program has set.

        The keys of the returned dictionary are the attribute names of the class
        ``AutomaticLossScaling``.
        """
        popart = self._popart
        values = {
            "bin_edge_location": popart.session_value(
                "automaticLossScalingSettings.binEdgeLocation"
            ),
            "threshold_upper_count_proportion": popart.session_value(
                "automaticLossScalingSettings.thresholdUpperCountProportion"
            ),
            "update_period": popart.session_value("automaticLossScalingSettings.updatePeriod"),
        }
        return {
            name: int(value) if name == "update_period" else float(value)
            for name, value in values.items()
            if value is not None
        }

    def gradientCompression(
        self,
        method: Compression,
        rank: int | None = None,
        start_step: int | None = None,
        warm_start: bool | None = None,
    ) -> _TrainingOptions:
        """Choose how gradients are compressed between hosts; PopTorch does not have this option.

        Within a host, gradients are summed without compression. If compression loses a part of the
        gradients in one training step, the lost part is added to the gradients of the next step.

        Args:
            method: The compression of the gradients. The compression method ``none`` is the
                default. The methods ``fp16`` and ``bf16`` send gradients in 16 bits. The method
                ``powersgd`` sends each gradient matrix as two matrix factors of low rank.
            rank: The number of columns of the matrix factors that ``powersgd`` sends; 1 by default.
            start_step: The number of training steps before ``powersgd`` begins to compress
                gradients; 1000 by default.
            warm_start: Whether ``powersgd`` computes the matrix factors of each training step from
                those of the previous step; True by default. If ``warm_start`` is False,
                ``powersgd`` starts from random numbers in each training step.

        Raises:
            ValueError: The compression method is unknown, the method does not have one of the given
                settings, or the value of a setting is out of range.
        """
        self.checkIsFrozen()
        if method not in get_args(Compression):
            raise ValueError(
                f"gradientCompression({method!r}) names an unknown method: expected 'none', "
                "'fp16', 'bf16' or 'powersgd'"
            )
        given = {"rank": rank, "start_step": start_step, "warm_start": warm_start}
        settings = {name: value for name, value in given.items() if value is not None}
        if settings and method != "powersgd":
            raise ValueError(
                f"gradientCompression({method!r}, {next(iter(settings))}=...) is not valid: only "
                f"'powersgd' has the settings {', '.join(_POWER_SGD)}. Remove "
                f"{next(iter(settings))}, or choose 'powersgd'"
            )
        for name, value in settings.items():
            _check_power_sgd(name, value)
        self.deleteIfExists("gradient_compression")
        if method != "none":
            more = {**_POWER_SGD, **settings} if method == "powersgd" else {}
            self.createOrSet(gradient_compression={"method": method, **more})
        return self

    @property
    def gradient_compression_settings(self) -> dict[str, Any]:
        """The compression method for gradients between hosts, and the method's settings."""
        return dict(self._values.get("gradient_compression", {"method": "none"}))

    def distributedBatchNormReplicaGroupSize(self, n: int) -> _TrainingOptions:
        """Set the number of replicas (n) that share the statistics of batch norms; 1 by default.

        PopTorch does not have the option ``distributedBatchNormReplicaGroupSize``. TensorFlow's
        IPUConfig has the same option under the name
        ``norms.experimental.distributed_batch_norm_replica_group_size``.

        In forward and backward passes of a training model, batch norms normalise over the
        micro-batches of n replicas with consecutive global indices. The n replicas that share
        statistics may belong to several instances (processes).
        ``distributedBatchNormReplicaGroupSize`` affects the batch norms of torch.nn and calls of
        torch.nn.functional.batch_norm. Lower-level functions such as torch.batch_norm use the
        statistics of one replica.

        Batch norms of an inference model never use the statistics of other replicas. In evaluation
        mode, a batch norm of an inference model uses its running statistics. In training mode, a
        batch norm of an inference model uses the statistics of the replica's own samples.

        Args:
            n: The number of replicas that share statistics. ``n`` must divide the number of
                replicas of all instances.

        Raises:
            ValueError: ``n`` is not a whole number, or is below 1.
        """
        self.checkIsFrozen()
        if isinstance(n, bool) or not isinstance(n, int) or n < 1:
            raise ValueError(
                f"distributedBatchNormReplicaGroupSize({n!r}) is not valid: expected a whole "
                "number, 1 or more"
            )
        self.deleteIfExists("norm_group_size")
        if n > 1:
            self.createOrSet(norm_group_size=n)
        return self

    @property
    def norm_group_size(self) -> int:
        """The number of replicas that share the statistics of batch norms."""
        return int(self._values.get("norm_group_size", 1))

    def setConvolutionDithering(self, enabled: bool) -> _TrainingOptions:
        """Spread the work of convolutions more evenly over the tiles (cores) of an IPU.

        The option ``setConvolutionDithering`` affects only real IPUs.
        """
        assert isinstance(enabled, bool), (
            f"setConvolutionDithering({enabled!r}) is not valid: expected a bool"
        )
        self.checkIsFrozen()
        self._popart.update("convolutionOptions", {"enableConvDithering": str(enabled).lower()})
        return self


def _check_power_sgd(name: str, value: object) -> None:
    """Check the value of one setting of ``gradientCompression("powersgd")``.

    Raises:
        ValueError: The value of the ``powersgd`` setting has the wrong type or is too small.
    """
    call = f"gradientCompression('powersgd', {name}={value!r})"
    if name == "warm_start":
        if not isinstance(value, bool):
            raise ValueError(f"{call} is not valid: expected a bool")
        return
    least = 1 if name == "rank" else 0
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{call} is not valid: expected a whole number, {least} or more")
