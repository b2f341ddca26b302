"""IPU hands-on session, day 3: utils.py, the functions and classes that main.py uses.
"""

# %% typed by the reader: imports, the statistics of ImageNet, the arguments that the commands name
import argparse

import torch
from torchvision import transforms

IMAGENET_STATISTICS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}


def parse_arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--async-dataloader", action="store_true")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--device-iterations", type=int, default=1)
    parser.add_argument("--eight-bit-io", action="store_true")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--gradient-accumulation", type=int, default=1)
    parser.add_argument("--precision", default="16.16", choices=["16.16", "16.32", "32.16", "32.32"])
    parser.add_argument("--replicas", type=int, default=1)
    return parser.parse_args()

# %% from the text, without the empty lines of the page break
def get_transform(precision='16.16', eight_bit_io=False):
    preprocssing_steps = [
        transforms.RandomHorizontalFlip(),
        transforms.Resize((64, 64)),
        transforms.PILToTensor()
    ]

    if not eight_bit_io:
        dtype = torch.float16 if precision[:2] == '16' else torch.float32
        preprocssing_steps.extend([
            transforms.ConvertImageDtype(dtype),
            transforms.Normalize(**IMAGENET_STATISTICS)
        ])
    return transforms.Compose(preprocssing_steps)

# %% from the text
class ModelWithNormalization(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.normalize = transforms.Normalize(**IMAGENET_STATISTICS)

    def forward(self, img):
        # One-liner in Poplar SDK >= 2.6:
        # return self.model(self.normalize(img.to(self.dtype)))
        if self.dtype == torch.float32:
            img = img.float()
        elif self.dtype == torch.float16:
            img = img.half()
        else:
            raise Exception(f'Normalization dtype must be one of torch.float16 or torch.float32,'
                             f' but {self.dtype} is given')
        return self.model(self.normalize(img))

# %% typed by the reader: the loss beside the outputs, and the accuracy in per cent
class ModelWithLoss(torch.nn.Module):
    def __init__(self, model, criterion):
        super().__init__()
        self.model = model
        self.criterion = criterion

    def forward(self, img, labels=None):
        out = self.model(img)
        if labels is None:
            return out
        return out, self.criterion(out, labels)


def accuracy(outputs, labels):
    return (outputs.argmax(1) == labels[-len(outputs):]).float().mean().item() * 100
