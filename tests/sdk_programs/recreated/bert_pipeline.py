"""Re-creates, from memory and small, how Graphcore's BERT is pipelined in PopTorch.

A tied embedding, encoder layers on two IPUs by ``BeginBlock``, recomputation checkpoints, half
weights with loss scaling, on-host optimiser state, the loss of masked words by ``identity_loss``.
"""

import torch
import torch.nn as nn
import torch.nn.functional as F

import poptorch

torch.manual_seed(0)
VOCABULARY, HIDDEN, LENGTH = 64, 32, 16


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.query, self.key, self.value = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))
        self.out, self.up, self.down = nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)
        self.norm1, self.norm2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)

    def forward(self, x, mask):
        def heads(y):
            return y.view(y.shape[0], LENGTH, 4, HIDDEN // 4).transpose(1, 2)

        scores = heads(self.query(x)) @ heads(self.key(x)).transpose(2, 3) / (HIDDEN // 4) ** 0.5
        attention = F.softmax(scores + mask, dim=-1) @ heads(self.value(x))
        x = self.norm1(x + self.out(attention.transpose(1, 2).reshape(x.shape)))
        return self.norm2(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.position = nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList([Encoder() for _ in range(2)])
        self.head = nn.Linear(HIDDEN, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight  # tied

    def parallelize(self):
        self.embedding = poptorch.BeginBlock(self.embedding, "Embedding", ipu_id=0)
        for index, layer in enumerate(self.layers):
            layer.register_forward_hook(lambda module, inputs, out: poptorch.recomputationCheckpoint(out))
            self.layers[index] = poptorch.BeginBlock(layer, f"Encoder{index}", ipu_id=index)
        self.head = poptorch.BeginBlock(self.head, "Head", ipu_id=0)
        return self

    def forward(self, input_ids, attention_mask, labels=None):
        mask = (1.0 - attention_mask[:, None, None, :].to(self.position.weight.dtype)) * -10000.0
        x = self.embedding(input_ids) + self.position.weight
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.head(x)
        if labels is None:
            return logits
        loss = F.cross_entropy(logits.view(-1, VOCABULARY).float(), labels.view(-1).long(), ignore_index=0)
        return logits.argmax(-1), poptorch.identity_loss(loss, reduction="none")


class Words(torch.utils.data.Dataset):
    """Sequences that count upwards; a word out of four is masked."""

    def __len__(self):
        return 512

    def __getitem__(self, index):
        words = (torch.arange(LENGTH) + index) % (VOCABULARY - 2) + 2
        hidden = torch.arange(LENGTH) % 4 == index % 4
        return torch.where(hidden, 1, words), torch.ones(LENGTH, dtype=torch.long), torch.where(hidden, words, 0)


if __name__ == "__main__":
    opts = poptorch.Options()
    opts.deviceIterations(2)
    opts.Training.gradientAccumulation(8)
    opts.Training.setMeanAccumulationAndReplicationReductionStrategy(poptorch.MeanReductionStrategy.Running)
    opts.setExecutionStrategy(poptorch.PipelinedExecution(poptorch.AutoStage.SameAsIpu))
    opts.setAvailableMemoryProportion({"IPU0": 0.2, "IPU1": 0.2})
    opts.TensorLocations.setOptimizerLocation(poptorch.TensorLocationSettings().useOnChipStorage(False))
    opts.outputMode(poptorch.OutputMode.Final)
    opts.randomSeed(42)
    opts.Precision.enableStochasticRounding(True)
    opts._Popart.set("disableGradAccumulationTensorStreams", True)
    opts._Popart.set("outlineThreshold", 10.0)

    model = Bert().parallelize().half()
    no_decay = [p for n, p in model.named_parameters() if "norm" in n or n.endswith("bias")]
    decay = [p for n, p in model.named_parameters() if not ("norm" in n or n.endswith("bias"))]
    optimizer = poptorch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.01}, {"params": no_decay, "weight_decay": 0.0}],
        lr=0.005, loss_scaling=128.0, accum_type=torch.float16,
        first_order_momentum_accum_type=torch.float32, second_order_momentum_accum_type=torch.float32,
    )
    loader = poptorch.DataLoader(opts, Words(), batch_size=2, shuffle=True, mode=poptorch.DataLoaderMode.Async)
    training = poptorch.trainingModel(model, opts, optimizer)
    losses = []
    for epoch in range(2):
        for batch in loader:
            predictions, loss = training(*batch)
            losses.append(float(loss.mean()))
    print("steps:", len(losses), "predictions:", tuple(predictions.shape), predictions.dtype)
    print("learns:", losses[-1] < losses[0])
    loader.terminate()
