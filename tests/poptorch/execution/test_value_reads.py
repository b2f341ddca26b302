"""Parts of torch that read values by themselves: distributions, and attention's fast path."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from support.models import assert_equal_weights, quiet_options
from torch import distributions, nn

import popdist_py.poptorch as poptorch


class Variational(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Linear(3, 4)

    def forward(self, x):
        mean, scale = self.encoder(x).chunk(2, 1)
        latent = distributions.Normal(mean, F.softplus(scale))
        prior = distributions.Normal(torch.zeros_like(mean), torch.ones_like(mean))
        likelihood = distributions.Bernoulli(logits=mean).log_prob((x[:, :2] > 0).float())
        loss = distributions.kl_divergence(latent, prior) - likelihood
        classes = distributions.Categorical(logits=mean)
        return latent.rsample(), classes.entropy(), poptorch.identity_loss(loss, "mean")


@pytest.mark.parametrize("replicas", [pytest.param(1, marks=pytest.mark.sweep), 2])
def test_distributions_train_without_checking_their_arguments(replicas, monkeypatch):
    # torch's default, which importing torch.compile's parts turns off for the whole process.
    monkeypatch.setattr(distributions.Distribution, "_validate_args", True)
    torch.manual_seed(0)
    x, model = torch.randn(6, 3), Variational()
    reference = copy.deepcopy(model)
    reference(x)[2].backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    options = quiet_options().replicationFactor(replicas).outputMode(poptorch.OutputMode.All)
    training = poptorch.trainingModel(model, options, torch.optim.SGD(model.parameters(), lr=0.1))
    sample, entropy, _ = training(x)
    assert sample.shape == (6, 2)
    assert len(sample.unique()) == 12, "every sample is drawn"
    assert entropy.shape == (6,)
    assert_equal_weights(model, reference)
    with pytest.raises(ValueError, match="satisfy the constraint"):
        distributions.Normal(torch.zeros(1), -torch.ones(1))


def test_a_check_that_a_program_asks_for_says_that_it_needs_values():
    def forward(x):
        return distributions.Exponential(x, validate_args=True).mean

    with pytest.raises(poptorch.Error, match="needs the value of a tensor"):
        poptorch.inferenceModel(nn.Sequential(Calls(forward)), quiet_options())(torch.ones(2))


class Calls(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function

    def forward(self, *args):
        return self.function(*args)


class Masked(nn.Module):
    """Encoder layers with a padding mask and a causal one."""

    def __init__(self, dropout):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2)

    def forward(self, x, padding):
        causal = torch.ones(5, 5, dtype=torch.bool).triu(1)
        out = self.encoder(x, mask=causal, src_key_padding_mask=padding)
        # The mean of what a layer norm returns, or of its squares, has no gradient but rounding.
        return out, poptorch.identity_loss((out - x) ** 2, "mean")


class Translator(nn.Module):
    """Encoder and decoder layers."""

    def __init__(self, dropout):
        super().__init__()
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=dropout, batch_first=True)

    def forward(self, x, padding):
        causal = self.transformer.generate_square_subsequent_mask(5)
        out = self.transformer(x, x.flip(1), tgt_mask=causal)
        loss = poptorch.identity_loss((out - x) ** 2, "mean")
        return out.masked_fill(padding[:, :, None], 0), loss


@pytest.fixture
def padded():
    torch.manual_seed(0)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[1, 3:] = padding[2, 4:] = True
    return torch.randn(4, 5, 8), padding


@pytest.mark.parametrize("make", [Masked, Translator])
@pytest.mark.parametrize("execution", [pytest.param("loop", marks=pytest.mark.sweep), "fused"])
def test_transformers_infer_what_they_do_on_the_host(make, execution, padded):
    x, padding = padded
    model = make(0.1).eval()
    expected = model(x, padding)[0].detach()
    options = quiet_options().replicationFactor(2)
    options.Emulator.replicaExecution(execution)
    got = poptorch.inferenceModel(model, options)(x, padding)[0]
    # What stands in padded places is of no use: the host's fast path leaves zeros there.
    torch.testing.assert_close(got[~padding], expected[~padding], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("make", [Masked, Translator])
@pytest.mark.parametrize("dropout", [0.0, pytest.param(0.2, marks=pytest.mark.sweep)])
def test_transformers_train(make, dropout, padded):
    model = make(dropout)
    before, reference = copy.deepcopy(model), copy.deepcopy(model)
    reference(*padded)[1].backward()
    torch.optim.SGD(reference.parameters(), lr=0.1).step()
    training = poptorch.trainingModel(
        model,
        quiet_options().replicationFactor(2),
        torch.optim.SGD(model.parameters(), lr=0.1),
    )
    assert training(*padded)[1].isfinite().all()
    if dropout:
        assert not torch.equal(next(model.parameters()), next(before.parameters()))
    else:
        assert_equal_weights(model, reference, rtol=1e-4, atol=1e-6)
