"""Re-creates, from memory, how Graphcore's BERT for PopTorch uses popdist beside Horovod.

The seed is chosen by one instance and broadcast, the weights too; losses are averaged over the
instances, and instance 0 alone prints and saves.
"""

import horovod.torch as hvd
import popdist
import popdist.poptorch
import torch
import torch.nn as nn

import poptorch


def init_popdist(args):
    hvd.init()
    popdist.init()
    if popdist.getNumTotalReplicas() != args["replicas"]:
        print(f"The number of replicas is overridden by PopRun. The new value is {popdist.getNumTotalReplicas()}.")
    args["replicas"] = popdist.getNumLocalReplicas()
    args["use_popdist"] = True


def sync_metrics(outputs, factor=1):
    if popdist.isPopdistEnvSet():
        if isinstance(outputs, float):
            return float(hvd.allreduce(torch.tensor(outputs)).item())
        return [hvd.allreduce(output.div(factor), average=True).mean().item() for output in outputs]
    return outputs


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x, y):
        return poptorch.identity_loss((self.layers(x) - y).square().mean(), reduction="none")


def main():
    args = {"replicas": 2, "use_popdist": False, "seed": None}
    if popdist.isPopdistEnvSet():
        init_popdist(args)
        # Same seed on every instance
        seed = torch.randint(0, 2**31 - 1, (1,))
        args["seed"] = int(hvd.broadcast(seed, root_rank=0).item())
        opts = popdist.poptorch.Options(ipus_per_replica=1)
    else:
        args["seed"] = 0
        opts = poptorch.Options()
        opts.replicationFactor(args["replicas"])
    opts.randomSeed(args["seed"])
    opts.Training.gradientAccumulation(2)
    opts.outputMode(poptorch.OutputMode.All)

    model = Model()
    if args["use_popdist"]:
        hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(256, 8, generator=generator)
    dataset = torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True).sin())
    loader = poptorch.DataLoader(opts, dataset, batch_size=4, shuffle=True)
    training = poptorch.trainingModel(model, opts, poptorch.optim.AdamW(model.parameters(), lr=0.01))
    means = []
    for epoch in range(3):
        losses = [training(*batch) for batch in loader]
        means.append(sync_metrics(float(torch.cat(losses).mean())))
    equal = True
    if args["use_popdist"]:
        weight = model.layers[0].weight.detach()
        equal = bool((hvd.allgather(weight[None]) == weight).all())
    if popdist.getInstanceIndex() == 0:
        print(f"losses {[round(mean, 4) for mean in means]}")
        print("learns:", means[-1] < means[0], "equal weights:", equal)


def save():
    print(f"instance {popdist.getInstanceIndex()} saves")


if __name__ == "__main__":
    main()
    popdist.execute_on_instances({0}, save)
