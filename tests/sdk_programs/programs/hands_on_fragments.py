"""IPU hands-on session, day 3: the blocks that main.py does not hold.
"""

# %% typed by the reader: imports, and the names that the blocks use
import poptorch
import torch
from poptorch.optim import Optimizer
from torchvision import transforms

IMAGENET_STATISTICS = {"mean": [0.485, 0.456, 0.406], "std": [0.229, 0.224, 0.225]}

# %% from the text
class ModelWithNormalization(torch.nn.Module):
    def __init__(self, model: torch.nn.Module, dtype: torch.dtype):
        super().__init__()
        self.model = model
        self.dtype = dtype
        self.normalize = transforms.Normalize(**IMAGENET_STATISTICS)

    def forward(self, img):
        return self.model(self.normalize(img.to(self.dtype)))

# %% from the text, the class statement of PopTorch as far as the slide shows it
class AdamW(Optimizer, torch.optim.AdamW):
    """ Adam optimizer with true weight decay.

    This optimizer matches PyTorch's implementation
    (torch.optim.AdamW https://pytorch.org/docs/1.10.0/optim.html#torch.optim.AdamW)
    with optional loss scaling.

    AMSGrad is currently not supported."""

    # Variables which don't exist in the parent optimizer class and are
    # global (Cannot be set per group).
    _child_vars = ["loss_scaling"]
    # All the attributes and variables which don't exist in the parent optimizer class.
    _child_only = _child_vars + [
        "bias_correction",
        "accum_type",
        "first_order_momentum_accum_type",
        "second_order_momentum_accum_type",
        "max_grad_norm",
    ]

# %% typed by the reader: a model, used as the slide says
model = ModelWithNormalization(torch.nn.Conv2d(3, 2, 3), torch.float16)

# %% from the text, out of its list
model = model.to(torch.float16)

# %% from the text, out of its list
model = model.half()

# %% typed by the reader: what came of it
image = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
print(poptorch.inferenceModel(model)(image).dtype)
print(issubclass(AdamW, torch.optim.AdamW), AdamW._child_only == poptorch.optim.AdamW._child_only)
