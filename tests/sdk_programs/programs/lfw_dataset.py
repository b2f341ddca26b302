"""MLOps course, "Distributed data loading": the exercise on labelled faces.
"""

# %% typed by the reader: the file that the course provides, from memory, with its blanks filled in
import argparse
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision import transforms


class LFWDataset(Dataset):
    def __init__(self, path_to_folder, transform):
        self.files = sorted(Path(path_to_folder).rglob("*.jpg"))
        self.transform = transform

    def __len__(self):
        return len(self.files)

    def __getitem__(self, index):
        return self.transform(Image.open(self.files[index]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("-path_to_folder", default="", type=str)
    parser.add_argument("-batch_size", default=512, type=int)
    parser.add_argument("-num_workers", default=0, type=int)
    parser.add_argument("-visualize_batch", action="store_true")
    parser.add_argument("-get_timing", action="store_true")
    parser.add_argument("-batches_to_check", default=100, type=int)
    args = parser.parse_args()

# %% from the text
    lfw_trans = transforms.Compose([
        transforms.RandomAffine(5, (0.1, 0.1), (0.5, 2.0)),
        # add more transforms here
        transforms.ToTensor()
    ])

# %% typed by the reader: the rest of the file
    dataset = LFWDataset(args.path_to_folder, lfw_trans)
    dataloader = DataLoader(dataset, batch_size=args.batch_size, num_workers=args.num_workers)
    print(len(dataset), "pictures")

    if args.visualize_batch:
        from torchvision.utils import make_grid, save_image

        grid = make_grid(next(iter(dataloader))[:16], nrow=4)
        save_image(grid, "batch.png")
        print("batch.png:", tuple(grid.shape))

    if args.get_timing:
        res = []
        for _ in range(5):
            start = time.time()
            for batch_idx, _batch in enumerate(dataloader):
                if batch_idx > args.batches_to_check:
                    break
            end = time.time()
            res.append(end - start)
        res = np.array(res)
        print(f"Timing: {np.mean(res)}+-{np.std(res)}")
