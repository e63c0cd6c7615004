"""A dataset as shards of unequal size; each worker reads only its own.

    python -m app.shards DIR --dataset digits --count 7

writes `train-00000.safetensors` …, `test-00000.safetensors` … (tensors `images` and `labels`) and `index.json` with
the number of samples in each.
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from app import data, order


def write(folder: Path, tensors: list[Tensor], count: int, seed: int = 0) -> None:
    """Write training and test images and labels as `count` shards each, of deliberately different sizes."""
    folder.mkdir(parents=True)
    index = {}
    for part, images, labels in (("train", *tensors[:2]), ("test", *tensors[2:])):
        cuts = order.permutation(len(images) - 1, seed)[: count - 1].sort().values + 1
        for i, (x, y) in enumerate(zip(images.tensor_split(cuts), labels.tensor_split(cuts))):
            name = f"{part}-{i:05}.safetensors"
            save_file({"images": x.contiguous(), "labels": y.contiguous()}, folder / name)
            index[name] = len(x)
    (folder / "index.json").write_text(json.dumps(index, indent=2))


def assigned(sizes: dict[str, int], workers: int) -> list[list[str]]:
    """The shards of each worker, by rank: largest first, each to the worker with the fewest samples so far."""
    loads, shares = [0] * workers, [[] for _ in range(workers)]  # type: tuple[list[int], list[list[str]]]
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        shares[rank].append(name)
    return shares


class Shards:
    """One worker's shards in a folder."""

    def __init__(self, folder: Path, part: str, rank: int, workers: int) -> None:
        """Read this worker's shards of `part`; raises SystemExit with the file name if one is missing or damaged."""
        try:
            index = json.loads((folder / "index.json").read_text())
            sizes = {str(name): int(count) for name, count in index.items() if name.startswith(f"{part}-")}
            if any("/" in name for name in sizes):
                raise ValueError("a shard is outside the folder")
        except (OSError, ValueError, AttributeError) as error:
            hint = "create shards with python -m app.shards"
            raise SystemExit(f"error: {folder}/index.json: {error}\nhint: {hint}") from None
        if len(sizes) < workers:
            hint = f"create more shards (--count {workers}), or use fewer workers"
            raise SystemExit(f"error: {len(sizes)} {part} shards in {folder} for {workers} workers\nhint: {hint}")
        shares = assigned(sizes, workers)
        self.counts = [sum(sizes[name] for name in share) for share in shares]
        first = dict(zip(sizes, [0, *torch.tensor(list(sizes.values())).cumsum(0).tolist()]))
        self.ids = torch.cat([torch.arange(first[name], first[name] + sizes[name]) for name in shares[rank]])
        images, labels = [], []
        for name in shares[rank]:
            try:
                tensors = load_file(folder / name)  # a format that cannot contain code
                images.append(tensors["images"])
                labels.append(tensors["labels"])
                if not len(images[-1]) == len(labels[-1]) == sizes[name]:
                    raise ValueError(f"{len(images[-1])} images, but {sizes[name]} in the index")
            except Exception as error:
                raise SystemExit(f"error: shard {folder / name} on rank {rank}: {error}") from None
        self.images, self.labels = torch.cat(images), torch.cat(labels)


def main() -> None:
    """Write shards of a dataset."""
    parser = argparse.ArgumentParser(prog="python -m app.shards", description="Write a dataset as shards.")
    parser.add_argument("folder", type=Path, metavar="DIR", help="output folder, which must not exist")
    parser.add_argument("--dataset", choices=data.NAMES, default="digits", help="dataset (default %(default)s)")
    parser.add_argument("--data", type=Path, default=data.HOME, help="folder of the dataset (default %(default)s)")
    parser.add_argument("--count", type=int, default=8, help="number of shards (default %(default)s)")
    args = parser.parse_args()
    if args.folder.exists():
        parser.error(f"{args.folder} already exists")
    write(args.folder, data.load(args.dataset, args.data, download=False), args.count)
    print(f"{args.count} training and {args.count} test shards in {args.folder}")


if __name__ == "__main__":
    main()
