"""IPU hands-on session, day 3: main.py, joined from the blocks of its slides.
"""

# %% typed by the reader: imports and the arguments, which the slides show as they are printed
import poptorch
import torch
import torchvision
from tqdm import tqdm

from utils import ModelWithLoss, ModelWithNormalization, accuracy, get_transform, parse_arguments


def main():
    args = parse_arguments()
    print(args)
    transform = get_transform(args.precision, args.eight_bit_io)

# %% from the text, with its line break mended
    train_dataset = torchvision.datasets.CIFAR10(root='../datasets', \
        train=True, download=True, transform=transform)

# %% from the text
    model = torchvision.models.resnet101()  
    model.layer3[8] = poptorch.BeginBlock(model.layer3[8], ipu_id=1)

# %% typed by the reader: the loss
    criterion = torch.nn.CrossEntropyLoss()

# %% from the text
    input_dtype = torch.float16 if args.precision[:2] == '16' else torch.float32
    model_dtype = torch.float16 if args.precision[-2:] == '16' else torch.float32

    if args.eight_bit_io:
        model = ModelWithNormalization(model, dtype=input_dtype)
    model = ModelWithLoss(model, criterion).to(model_dtype)

# %% typed by the reader: an optimiser where the next block makes none
    optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.001)

# %% from the text
    if args.precision[-3:] == '.16':
        optimizer = poptorch.optim.AdamW(model.parameters(), lr=0.001,
                                         loss_scaling=1000,
                                         accum_type=torch.float16,
                                         first_order_momentum_accum_type=torch.float16,
                                         second_order_momentum_accum_type=torch.float32)

# %% from the text
    opts = poptorch.Options()  
    opts.Training.gradientAccumulation(args.gradient_accumulation)

# %% from the text
    opts.deviceIterations(args.device_iterations)

# %% typed by the reader: the replicas of the printed arguments
    opts.replicationFactor(args.replicas)

# %% from the text, with its line breaks mended
    mode = poptorch.DataLoaderMode.Async if args.async_dataloader \
        else poptorch.DataLoaderMode.Sync

    train_dataloader = poptorch.DataLoader(opts,
                                         train_dataset,
                                         batch_size=args.batch_size,
                                         shuffle=True,
                                         mode=mode)

# %% typed by the reader: the training, with the lines that the slides show
    training_model = poptorch.trainingModel(model, opts, optimizer)
    for epoch in range(1, args.epochs + 1):
        losses, accuracies = [], []
        bar = tqdm(train_dataloader, desc=f"[Epoch {epoch:02d}]")
        for images, labels in bar:
            outputs, loss = training_model(images, labels)
            losses.append(loss.mean().item())
            accuracies.append(accuracy(outputs, labels))
            bar.set_postfix(loss=f"{losses[-1]:.3g}", acc=f"{accuracies[-1]:.3g}")
        mean = sum(losses) / len(losses), sum(accuracies) / len(accuracies)
        print(f"[Epoch {epoch:02d}] loss: {mean[0]:.3f}, acc: {mean[1]:.1f}")


if __name__ == "__main__":
    main()
