"""From before compiling to detached: the states of a wrapped model, its device and its hooks."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
from support.models import Mlp, classified, quiet_options, trained
from torch import nn

import popdist_py.poptorch as poptorch


class TestLifeCycle:
    def test_before_compiling(self):
        _, training = trained()
        for act in (
            training.copyWeightsToHost,
            training.copyWeightsToDevice,
            training.detachFromDevice,
            training.attachToDevice,
            lambda: training.save("file"),
            lambda: training.rng_state,
        ):
            with pytest.raises(poptorch.Error, match="not been compiled or has been destroyed"):
                act()
        assert not training.isAttachedToDevice()
        training.destroy()

    @pytest.mark.parametrize("execution", ["auto", "loop"])
    def test_nothing_of_a_batch_stays_after_destroying(self, execution):
        model = Mlp()
        options = quiet_options()
        options.Emulator.replicaExecution(execution)
        training = poptorch.trainingModel(model, options)
        kept = []
        for step in range(3):
            batch = classified(4, seed=step)
            kept += map(weakref.ref, batch)
            training(*batch)
        kept.append(weakref.ref(training._compiled.program))
        del batch
        training.destroy()
        gc.collect()
        assert not [one for one in kept if one() is not None]

    def test_nothing_of_a_batch_stays_after_compiling_failed(self):
        training = poptorch.trainingModel(nn.Linear(6, 2), quiet_options())  # without a loss
        batch, _ = classified(4)
        kept = weakref.ref(batch)
        with pytest.raises(poptorch.Error, match="Couldn't find a loss"):
            training(batch)
        del batch
        gc.collect()
        assert kept() is None

    def test_compiling_twice_is_ignored(self, caplog):
        _, training = trained()
        training.compile(*classified(4))
        assert training.isCompiled()
        training.compile(*classified(4))
        assert "already compiled" in caplog.text

    def test_detach_and_attach(self):
        model, training = trained()
        training(*classified(4))
        with pytest.raises(poptorch.Error, match="already attached"):
            training.attachToDevice()
        training.detachFromDevice()
        with pytest.raises(poptorch.Error, match="The model is not attached to a device"):
            training.detachFromDevice()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        training(*classified(4))
        assert training.isAttachedToDevice()
        assert model.layers[0].weight.abs().max() < 0.1

    def test_processes_that_nothing_connects_are_announced(self, caplog):
        options = quiet_options()
        options.Distributed.configureProcessId(1, 2)
        model = Mlp()
        poptorch.inferenceModel(model, options)(classified(2)[0])
        assert not caplog.records
        poptorch.trainingModel(model, options)(*classified(2))
        assert (
            "Options.Distributed has 2 processes, but these processes are not connected"
            in caplog.text
        )

    def test_one_device_for_two_models(self):
        first = poptorch.inferenceModel(Mlp(), quiet_options().useIpuId(3))
        second = poptorch.inferenceModel(Mlp(), quiet_options().useIpuId(3))
        x, _ = classified(2)
        first(x)
        with pytest.raises(poptorch.Error, match="Failed to acquire"):
            second(x)
        first.detachFromDevice()
        second(x)
        second.detachFromDevice()

    def test_no_device(self):
        options = quiet_options().useOfflineIpuTarget()
        inference = poptorch.inferenceModel(Mlp(), options)
        inference.compile(classified(2)[0])
        assert inference.isCompiled()
        for act in (lambda: inference(classified(2)[0]), inference.attachToDevice):
            with pytest.raises(AssertionError, match="offline device"):
                act()

    def test_compilation_hooks(self):
        calls = []
        before = poptorch.registerPreCompileHook(lambda: calls.append("before"))
        after = poptorch.registerPostCompileHook(lambda: calls.append("after"))
        poptorch.inferenceModel(Mlp(), quiet_options())(classified(2)[0])
        before.remove()
        after.remove()
        poptorch.inferenceModel(Mlp(), quiet_options())(classified(2)[0])
        assert calls == ["before", "after"]
        with pytest.raises(RuntimeError, match="must be callable"):
            poptorch.registerPreCompileHook(3)

    def test_random_state_can_be_taken_back(self):
        inference = poptorch.inferenceModel(nn.Dropout(), quiet_options().randomSeed(5))
        x = torch.ones(128)
        inference.compile(x)
        state = inference.rng_state
        assert state[0] == 5
        host = torch.get_rng_state()
        first, second = inference(x), inference(x)
        assert torch.equal(torch.get_rng_state(), host)
        inference.rng_state = state
        assert torch.equal(inference(x), first)
        assert not torch.equal(first, second)

    def test_progress_bar_and_compilation_time(self, capsys):
        inference = poptorch.inferenceModel(Mlp())
        with pytest.raises(poptorch.Error, match="not been compiled"):
            inference.compilationTime()
        inference.compile(classified(2)[0])
        shown = capsys.readouterr().err
        assert "Graph compilation: 100%" in shown
        assert "%/s" not in shown
        assert inference.compilationTime().total_seconds() > 0
        with pytest.raises(poptorch.Error, match="showCompilationProgressBar"):
            poptorch.inferenceModel(Mlp(), quiet_options()).compilationTime()

    def test_ipus(self, caplog):
        def forward(x):
            for index, ipu in enumerate((0, 1, 2)):
                with poptorch.Block(str(index), ipu_id=ipu):
                    x = x + 1
            return x

        def options():
            return quiet_options().deviceIterations(3)

        x = torch.ones(3)
        with pytest.raises(poptorch.Error, match="autoRoundNumIPUs"):
            poptorch.inferenceModel(forward, options())(x)
        poptorch.inferenceModel(forward, options().autoRoundNumIPUs())(x)
        assert "rounded up from 3 to 4" in caplog.text
        with pytest.raises(poptorch.Error, match="deviceIterations is 1"):
            poptorch.inferenceModel(forward, quiet_options().autoRoundNumIPUs())(x)
        many = options().autoRoundNumIPUs().replicationFactor(17)
        with pytest.raises(poptorch.Error, match=r"Too many IPUs requested \(68\)"):
            poptorch.inferenceModel(forward, many)(torch.ones(51))
        assert poptorch.ipuHardwareIsAvailable()
        assert not poptorch.ipuHardwareIsAvailable(65)
        assert poptorch.ipuHardwareVersion() == 2
