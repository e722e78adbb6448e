"""Trains a small CNN on handwritten digits and shows where the time of an iteration went.

    torchrun --standalone --nproc-per-node 2 examples/digits.py
    python examples/digits.py                                       # one rank, the same code

The digits are scikit-learn's: 1,797 images of 8 x 8 that come with the package, nothing is downloaded. One in five is
held out. Needs `pip install dear-pytorch[demo]`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

import dear

try:
    from measure import measure
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split
    from tqdm import tqdm
except ImportError as error:
    sys.exit(f"this example needs {error.name}: pip install 'dear-pytorch[demo]'")


class Images(NamedTuple):
    images: torch.Tensor  # [n, 1, side, side], standardised
    labels: torch.Tensor  # [n]


def main() -> None:
    args = parse_arguments()
    dear.init()
    torch.manual_seed(args.seed + dear.rank())  # ranks drop out differently; weights are rank 0's on all of them
    train, held_out = load_mnist(args.mnist) if args.mnist else load_sklearn_digits()
    model = make_model().to(dear.device())
    optimizer = dear.DistributedOptimizer(make_optimizer(model, args), model, fusion=args.fusion)

    steps_per_epoch = len(train.labels) // (args.batch_size * dear.size())
    peak_lr = optimizer.param_groups[0]["lr"]
    warm_up_and_decay = OneCycleLR(optimizer, peak_lr, epochs=args.epochs, steps_per_epoch=steps_per_epoch)

    for epoch in range(args.epochs):
        batches = list(shard_of_epoch(train, args.batch_size, args.seed + epoch))
        for images, labels in tqdm(batches, f"epoch {epoch + 1:2d}", leave=False, disable=dear.rank() > 0):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            loss.backward()
            optimizer.step()
            warm_up_and_decay.step()

    accuracy = held_out_accuracy(model, held_out)
    batches = list(shard_of_epoch(train, args.batch_size, args.seed))
    measurement = measure(model, lambda copy: make_optimizer(copy, args), args.fusion, batches, args.out)
    if dear.rank() == 0:
        print(f"\naccuracy {accuracy:.3f}")  # a line of its own, also where the progress bar shares the stream
        print(measurement)
    optimizer.close()
    dear.shutdown()


def make_model() -> nn.Module:
    """263,498 parameters; at 0.2 MiB a bucket they make 7 buckets."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 64, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(4),
        nn.Conv2d(64, 128, 3, padding=1),
        nn.ReLU(),
        nn.AdaptiveMaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 256),
        nn.ReLU(),
        nn.Dropout(0.5),
        nn.Linear(256, 10),
    )


def make_optimizer(model: nn.Module, args: argparse.Namespace) -> torch.optim.Optimizer:
    if args.optimizer == "sgd":
        return torch.optim.SGD(model.parameters(), lr=args.lr or 0.1, momentum=0.9, weight_decay=5e-4)
    return torch.optim.AdamW(model.parameters(), lr=args.lr or 2e-3)


def shard_of_epoch(train: Images, batch_size: int, seed: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """This rank's batches: all ranks shuffle alike and take turns. A remainder too small for all ranks is left out."""
    order = torch.randperm(len(train.labels), generator=torch.Generator().manual_seed(seed))
    num_batches = len(order) // (batch_size * dear.size())
    for batch in order[: num_batches * batch_size * dear.size()].view(num_batches, batch_size, dear.size()):
        mine = batch[:, dear.rank()]
        yield train.images[mine], train.labels[mine]


@torch.no_grad()
def held_out_accuracy(model: nn.Module, held_out: Images) -> float:
    """Each rank judges its part; the counts are added, so that every image counts once whatever the number of ranks."""
    model.eval()
    images, labels = held_out.images[dear.rank() :: dear.size()], held_out.labels[dear.rank() :: dear.size()]
    pairs = zip(images.split(1000), labels.split(1000), strict=True)
    right = sum(int((model(i).argmax(1) == wanted).sum()) for i, wanted in pairs)
    model.train()
    right, seen = dear.allreduce(torch.tensor([right, len(labels)]), dear.Sum).tolist()
    return right / seen


def load_sklearn_digits() -> tuple[Images, Images]:
    images, labels = load_digits(return_X_y=True)
    parts = train_test_split(images.reshape(-1, 1, 8, 8), labels, test_size=0.2, random_state=0, stratify=labels)
    train_images, held_out_images, train_labels, held_out_labels = (torch.from_numpy(part) for part in parts)
    return _standardised(train_images, train_labels, held_out_images, held_out_labels)


def load_mnist(folder: Path) -> tuple[Images, Images]:
    """MNIST as torchvision stores it: `folder`/MNIST/raw/train-images-idx3-ubyte and so on."""
    try:
        from torchvision.datasets import MNIST
    except ImportError:
        sys.exit("--mnist needs torchvision: pip install torchvision")
    try:
        train, held_out = (MNIST(folder, train=train) for train in (True, False))
    except RuntimeError:
        sys.exit(
            f"--mnist {folder}: no MNIST there. Fetch it once with "
            f"`python -c \"from torchvision.datasets import MNIST; MNIST('{folder}', download=True)\"`."
        )
    return _standardised(train.data.unsqueeze(1), train.targets, held_out.data.unsqueeze(1), held_out.targets)


def _standardised(
    train_images: torch.Tensor, train_labels: torch.Tensor, held_out_images: torch.Tensor, held_out_labels: torch.Tensor
) -> tuple[Images, Images]:
    mean, deviation = train_images.float().mean(), train_images.float().std()
    train, held_out = (((i.float() - mean) / deviation).to(dear.device()) for i in (train_images, held_out_images))
    return Images(train, train_labels.to(dear.device())), Images(held_out, held_out_labels.to(dear.device()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=25)
    parser.add_argument("--batch-size", type=int, default=64, help="images a rank and step (default: %(default)s)")
    parser.add_argument("--optimizer", choices=("sgd", "adamw"), default="sgd")
    parser.add_argument("--lr", type=float, help="learning rate (default: 0.1 for sgd, 0.002 for adamw)")
    parser.add_argument("--fusion", type=float, default=0.2, help="MiB a bucket (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--mnist", type=Path, metavar="DIR", help="train on MNIST from this folder instead")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", default=Path(), help="folder for timeline.json and timeline.png"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
