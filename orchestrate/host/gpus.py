"""GPUs of a machine, from `nvidia-smi`: which ones a job can use, and why none are available."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrate.dataclass import dataclass, replace
from orchestrate.errors import ResourceError
from orchestrate.host import claims
from orchestrate.host.cores import PCI, near

if TYPE_CHECKING:  # otherwise only where it is used: it takes time to import
    from xml.etree.ElementTree import Element

BUSY = 0.05  # fraction of its memory above which a GPU counts as in use; the driver alone takes less
# Additional bytes for a desktop on the same GPU, whose processes a container does not see.
DESKTOP_MEMORY = 2 << 30
MAX_GPUS_READ = 1024  # GPUs read from a listing, which may come from a container
LIST, DETAILS = ("nvidia-smi", "-L"), ("nvidia-smi", "-q", "-x")  # only the first lists UUIDs of MIG instances
UTILIZATION = ("nvidia-smi", "--query-gpu=uuid,utilization.gpu,memory.used", "--format=csv,noheader,nounits")
NVIDIA_SMI_TIMEOUT = 60.0  # seconds for each; without persistence mode, each loads the driver
VENDORS = {"0x10de": "NVIDIA", "0x1002": "AMD", "0x8086": "Intel"}  # PCI vendor ids
DISPLAY = ("0x03", "0x12")  # PCI classes: display controllers, processing accelerators
LINE = re.compile(
    r"^(?:GPU (\d{1,4}): ([^\n]{0,100}?)|[ \t]+MIG [^\n]{0,100}?) ?\(UUID: ((?:GPU|MIG)-[\w/-]{1,90})\)", re.M
)
TROUBLE = re.compile(r"(Failed to initialize NVML: |NVIDIA-SMI has failed |Unable to determine )[^\n]{0,200}")
HIDDEN = ("", "-1", "NoDevFiles")  # values of CUDA_VISIBLE_DEVICES that hide all GPUs


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU, or a MIG instance of one; facts that `nvidia-smi` does not report are empty or 0."""

    id: str  # UUID, as CUDA_VISIBLE_DEVICES takes it
    index: int  # number of the GPU on its machine; MIG instances have that of their GPU
    name: str = ""
    bus: str = ""  # PCI address, such as 00000000:07:00.0
    used: int = 0  # bytes
    total: int = 0  # bytes
    display: bool = False  # whether it drives a display
    persistent: bool = True  # whether the driver stays loaded while no program uses the GPU
    driver: str = ""  # its version
    job: str = ""  # the other job that uses it, for display

    @property
    def busy(self) -> bool:
        """Whether other programs use this GPU."""
        return bool(self.job) or self.used > BUSY * self.total + DESKTOP_MEMORY * self.display

    def __str__(self) -> str:
        if self.job:
            return f"{self.id}, in use by {self.job}"
        share = f", {100 * self.used / self.total:.0f}% of its memory in use" if self.total and self.busy else ""
        return f"{self.id}{share}"


@dataclass(frozen=True, kw_only=True)
class Offer:
    """GPUs that a job can use."""

    gpus: tuple[Gpu, ...] = ()  # in the order of assignment to workers
    why: str = ""  # why `gpus` is empty
    note: str = ""  # about GPUs that other programs use


def _users(gpus: Iterable[Gpu]) -> tuple[str, ...]:
    """Return the jobs that use some of these GPUs, and `other programs` if others do."""
    return tuple(dict.fromkeys(gpu.job or "other programs" for gpu in gpus if gpu.busy))


class Busy(ResourceError):
    """Too few GPUs are free for a job that waits for some."""

    def __init__(self, gpus: tuple[Gpu, ...], count: int) -> None:
        """The job waits for `count` of these."""
        self.among, self.count = tuple(gpu.id for gpu in gpus), count
        self.users = _users(gpus)
        what = f"{claims.wanted(self.among, count)} must be free, in use by {', '.join(self.users)}"
        super().__init__(what, "wait for them, or use --gpus all without --queue")


def fields(offer: Offer, pin: bool) -> dict[str, Any]:
    """An offer as fields of an `Inventory`; `pin` adds the cores near each GPU."""
    return {
        "gpus": tuple(gpu.id for gpu in offer.gpus),
        "no_gpus": offer.why,
        "gpu_note": offer.note,
        "gpu_cores": tuple(near(gpu.bus) for gpu in offer.gpus) if pin else (),
    }


def look() -> tuple[Gpu, ...]:
    """GPUs that `nvidia-smi` lists on this machine; empty if it is not installed or fails."""
    listing = _output(LIST)
    return read(listing, _output(DETAILS)) if LINE.search(listing) else ()


def utilization() -> dict[str, tuple[float, int]]:
    """Share of the time in which each GPU of this machine computes, from 0 to 1, and bytes in use, by UUID."""
    found = {}
    for line in _output(UTILIZATION).splitlines()[:MAX_GPUS_READ]:
        if match := re.fullmatch(r"(GPU-[\w-]{1,90}), ([0-9]{1,3}), ([0-9]{1,9})", line.strip()):
            found[match[1]] = int(match[2]) / 100, int(match[3]) << 20
    return found


def read(listing: str, details: str) -> tuple[Gpu, ...]:
    """Parse the output of `LIST` and `DETAILS`; MIG instances replace their GPU.

    Both may come from a container and are untrusted; unexpected details are skipped.
    """
    from xml.etree.ElementTree import Element

    elements, driver = _elements(details)
    found: dict[str, list[Gpu]] = {}  # by UUID: a GPU, followed by its instances
    whole, element = Gpu(id="", index=0), Element("gpu")
    for number, name, uuid in islice(LINE.findall(listing), MAX_GPUS_READ):
        if uuid.startswith("GPU-"):
            element = elements.get(uuid, Element("gpu"))
            whole = _with_memory(_whole(uuid, int(number), name, element, driver), element)
            found.setdefault(uuid, [whole])
        elif whole.id and uuid not in {gpu.id for gpu in found[whole.id]}:
            place, parts = len(found[whole.id]) - 1, element.findall("mig_devices/mig_device")
            part = parts[place] if place < len(parts) else Element("mig_device")
            found[whole.id].append(_with_memory(replace(whole, id=uuid), part))
    for uuid, gpus in found.items():  # in MIG mode, only the instances of a GPU can be used
        mode = elements[uuid].findtext("mig_mode/current_mig") if uuid in elements else ""
        found[uuid] = gpus[1:] if mode == "Enabled" else gpus[1:] or gpus
    return tuple(gpu for gpus in found.values() for gpu in gpus)


def _whole(uuid: str, number: int, name: str, element: Element, driver: str) -> Gpu:
    bus = element.get("id", "")
    return Gpu(
        id=uuid,
        index=number,
        name=re.sub(r"[^\w .()-]", "", name)[:60].strip(),
        bus=bus if re.fullmatch(r"[0-9A-Fa-f:.]{1,20}", bus) else "",
        persistent=element.findtext("persistence_mode") != "Disabled",
        display="Enabled" in (element.findtext("display_active"), element.findtext("display_mode")),
        driver=driver,
    )


def claimed(found: tuple[Gpu, ...], job: str) -> tuple[Gpu, ...]:
    """Add the other jobs that use them to GPUs that a job may get."""
    used = claims.users(job) if found else {}
    return tuple(replace(gpu, job=str(used[gpu.id])) if gpu.id in used else gpu for gpu in found)


def offer(
    found: tuple[Gpu, ...], asked: str | int, environ: Mapping[str, str] = os.environ, queue: int | None = None
) -> Offer:
    """Select the GPUs of a job; `asked` is `auto`, `all` or a number.

    The caller's CUDA_VISIBLE_DEVICES is respected. `auto` skips GPUs that other programs use; a number takes those
    last. With `queue`, the least number that the job needs, it raises Busy if too few are free.
    """
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    seen = found if visible is None else tuple(_visible(found, visible))
    if found and not seen:
        return Offer(why=f"CUDA_VISIBLE_DEVICES={visible} matches none of the {_counted(found)}")
    free, busy = [gpu for gpu in seen if not gpu.busy], [gpu for gpu in seen if gpu.busy]
    if queue is not None and seen:
        count = min(len(seen), asked if isinstance(asked, int) else queue if asked == "auto" else len(seen))
        if len(free) < count:
            raise Busy(seen, count)
    if asked == "auto":
        left = f"{_counted(busy)} in use by {', '.join(_users(busy))}" if busy else ""
        ways = f"--gpus all to include {'it' if len(busy) == 1 else 'them'}, or --queue to wait"
        why = f"{left}; use {ways}" if busy and not free else ""
        return Offer(gpus=tuple(free), why=why, note=f"{left}, skipped" if free and busy else "")
    gpus = tuple(free + busy)[:asked] if isinstance(asked, int) and asked <= len(seen) else seen
    return Offer(gpus=gpus, note="; ".join(str(gpu) for gpu in gpus if gpu.busy))


def why_none() -> str:
    """Why `look` finds no GPU on this machine."""
    if trouble := TROUBLE.search(_output(LIST)):
        return trouble_of(trouble[0])
    vendors = {vendor for vendor in map(_vendor, PCI.glob("*")) if vendor}
    if "NVIDIA" in vendors:
        return "nvidia-smi does not list this machine's NVIDIA GPU: install the NVIDIA driver"
    others = " and ".join(sorted(vendors))
    return f"this machine has no NVIDIA GPU{others and f' ({others} GPUs are not supported)'}"


def trouble_of(output: str) -> str:
    """Error message in the output of `nvidia-smi`, with a fix if one is known; empty if there is none."""
    found = TROUBLE.search(output)
    if not found:
        return ""
    text = re.sub(r"[^ -~]", "", found[0]).strip().rstrip(".")
    mismatch = "version mismatch" in text  # the kernel module is older than the libraries, after an update
    return f"nvidia-smi: {text}{' (restart the machine to load the new driver)' if mismatch else ''}"


def _output(command: tuple[str, ...]) -> str:
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=NVIDIA_SMI_TIMEOUT)
    except subprocess.TimeoutExpired:
        return f"NVIDIA-SMI has failed to respond within {NVIDIA_SMI_TIMEOUT:g} s"
    except OSError:
        return ""
    return (done.stdout + done.stderr).decode(errors="replace")


def _elements(details: str) -> tuple[dict[str, Element], str]:
    """XML elements of the GPUs by UUID, and the driver version."""
    from xml.etree.ElementTree import ParseError, fromstring

    text = details[details.find("<nvidia_smi_log") :]  # without the document type, which could define entities
    try:
        root = fromstring(text[: text.rfind(">") + 1] or "<nothing/>")
    except ParseError:
        return {}, ""
    driver = root.findtext("driver_version", "")
    named = {gpu.findtext("uuid", ""): gpu for gpu in root.findall("gpu")}
    return named, driver if re.fullmatch(r"[\d.]{1,20}", driver) else ""


def _with_memory(gpu: Gpu, element: Element) -> Gpu:
    used, total = (_bytes(element, f"fb_memory_usage/{name}") for name in ("used", "total"))
    return replace(gpu, used=used, total=total)


def _bytes(element: Element, path: str) -> int:
    """An amount of memory in bytes; 0 if it is `N/A`."""
    match = re.fullmatch(r"\s*(\d{1,9}) MiB\s*", element.findtext(path, ""))
    return int(match[1]) << 20 if match else 0


def _visible(found: tuple[Gpu, ...], names: str) -> Iterator[Gpu]:
    """GPUs listed in CUDA_VISIBLE_DEVICES by index, UUID or UUID prefix; as in CUDA, up to the first invalid entry.

    Indices are those of `nvidia-smi`, whose order is CUDA's among GPUs of one model.
    """
    taken: set[str] = set()
    for name in names.split(",") if names.strip() not in HIDDEN else ():
        entry = name.strip()
        matches = [gpu for gpu in found if (str(gpu.index) == entry if entry.isdecimal() else gpu.id.startswith(entry))]
        if not entry or not matches or taken & {gpu.id for gpu in matches}:
            return
        taken |= {gpu.id for gpu in matches}
        yield from matches


def _vendor(device: Path) -> str:
    """Vendor of a GPU on the PCI bus; empty for other devices."""
    try:
        display = (device / "class").read_text().startswith(DISPLAY)
        return VENDORS.get((device / "vendor").read_text().strip(), "") if display else ""
    except OSError:
        return ""


def _counted(gpus: Iterable[Gpu]) -> str:
    number = len(list(gpus))
    return f"{number} GPU{'s' if number > 1 else ''}"
