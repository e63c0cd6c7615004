"""The image of nodes in the data folder of another engine, without copying it."""

import json
import subprocess
from pathlib import Path

IMAGE = "orchestrate-node:0.1"


def command(*arguments: str) -> str:
    return subprocess.run(arguments, check=True, capture_output=True, text=True).stdout


def share_image(target: Path) -> None:
    """Create an engine's data folder that holds only the image, from hard links to our own layers.

    `docker save | docker load` would write 6 GB for each host.
    """
    root = Path(command("docker", "info", "--format", "{{.DockerRootDir}}").strip())
    image = command("docker", "image", "inspect", "--format", "{{.Id}}", IMAGE).strip().removeprefix("sha256:")
    store, layers = root / "image" / "overlay2", []
    wanted = [store / "imagedb" / "content" / "sha256" / image]
    config = json.loads(wanted[0].read_text())
    for layer in (store / "layerdb" / "sha256").iterdir():
        if (layer / "diff").read_text() in config["rootfs"]["diff_ids"]:
            layers.append(root / "overlay2" / (layer / "cache-id").read_text())
            wanted += [layer, layers[-1]]
    links = target / "overlay2" / "l"
    links.mkdir(parents=True)
    for layer in layers:
        links.joinpath((layer / "link").read_text()).symlink_to(f"../{layer.name}/diff")
    share(root, wanted, target)
    names = {"Repositories": {IMAGE.partition(":")[0]: {IMAGE: f"sha256:{image}"}}}
    (target / "image" / "overlay2" / "repositories.json").write_text(json.dumps(names))


def share(root: Path, wanted: list[Path], target: Path) -> None:
    """Hard-link paths below `root` into another folder; copy them if that is on another disk."""
    copy = ["cp", "--archive", "--parents", *(str(path.relative_to(root)) for path in wanted), str(target)]
    # A running engine has its data folder mounted on itself, and hard links cannot cross that mount.
    look_below = f'umount --lazy {root}; cd {root} && exec "$@"'
    linked = ["unshare", "--mount", "--propagation", "private", "sh", "-c", look_below, "sh", *copy, "--link"]
    if subprocess.run(linked, capture_output=True).returncode:
        subprocess.run(copy, cwd=root, check=True)
