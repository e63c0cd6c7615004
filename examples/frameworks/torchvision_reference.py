"""Image classification, as in torchvision's references.

`orchestrate run torchvision_reference.py --dummy --output-dir '$JOB_DIR' --resume '$JOB_DIR/checkpoint.pth'`
"""

import argparse
import builtins
import os

import torch
import torch.distributed as dist
from data import digest
from torch.utils.data import DataLoader, DistributedSampler, RandomSampler
from torchvision import datasets, models, transforms


def setup_for_distributed(is_master):
    """Replace `print`: only the master prints, except with `force=True`."""
    builtin_print = print

    def master_print(*values, force=False):
        if is_master or force:
            builtin_print(*values, flush=True)

    builtins.print = master_print


def init_distributed_mode(args):
    """Join the process group of torchrun's variables, or train in a single process without them."""
    args.distributed = "RANK" in os.environ and "WORLD_SIZE" in os.environ
    args.rank, args.world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    if args.distributed:
        dist.init_process_group("nccl" if args.device == "cuda" else "gloo", init_method=args.dist_url)
        dist.barrier()
    setup_for_distributed(args.rank == 0)


def save_on_master(args, state, path):
    """Write a checkpoint on rank 0."""
    if args.rank == 0:
        torch.save(state, f"{path}.new")
        os.replace(f"{path}.new", path)  # a reader finds the old or the new checkpoint, never half of one


def load_data(args):
    """Return the images and the number of their classes."""
    if args.dummy:
        return datasets.FakeData(64, (3, 32, 32), num_classes=10, transform=transforms.ToTensor()), 10
    augment = transforms.Compose([transforms.RandomResizedCrop(224), transforms.ToTensor()])
    dataset = datasets.ImageFolder(args.data_path, augment)
    return dataset, len(dataset.classes)


def main(args):
    """Train, and save a checkpoint after each epoch."""
    init_distributed_mode(args)
    dataset, num_classes = load_data(args)
    sampler = DistributedSampler(dataset) if args.distributed else RandomSampler(dataset)
    loader = DataLoader(dataset, args.batch_size, sampler=sampler, num_workers=args.workers)
    model = models.get_model(args.model, num_classes=num_classes).to(args.device)
    if args.distributed and args.sync_bn:
        model = torch.nn.SyncBatchNorm.convert_sync_batchnorm(model)
    model_without_ddp = model
    if args.distributed:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
    epoch = 0
    if os.path.exists(args.resume):
        checkpoint = torch.load(args.resume, map_location="cpu")
        model_without_ddp.load_state_dict(checkpoint["model"])
        optimizer.load_state_dict(checkpoint["optimizer"])
        epoch = checkpoint["epoch"]
        print(f"resumed after epoch {epoch}")
    while epoch < args.epochs:
        if args.distributed:
            sampler.set_epoch(epoch)
        for image, target in loader:
            loss = torch.nn.functional.cross_entropy(model(image.to(args.device)), target.to(args.device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        epoch += 1
        print(f"Epoch: [{epoch}] loss: {loss.item():.4f}")
        state = {"model": model_without_ddp.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}
        save_on_master(args, state, os.path.join(args.output_dir, "checkpoint.pth"))
    weights = digest(dict(model_without_ddp.named_parameters()))  # without the statistics of BatchNorm, one per rank
    print(f"rank {args.rank} of {args.world_size}: {epoch * len(loader)} steps, weights {weights}", force=True)
    if args.distributed:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--dummy", action="store_true", help="train on random images")
    parser.add_argument("--data-path", default="imagenet/train", help="folder with a folder of images for each class")
    parser.add_argument("--model", default="resnet18")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch-size", type=int, default=16, help="images per process")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=1, help="processes that load data, per process")
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--output-dir", default=".", help="folder for the checkpoint")
    parser.add_argument("--resume", default="", help="checkpoint to resume from, if it exists")
    parser.add_argument("--sync-bn", action="store_true", help="synchronize BatchNorm between GPUs")
    parser.add_argument("--dist-url", default="env://")
    main(parser.parse_args())
