"""Images that are built for a job: from the user's Dockerfile, and with the packages of `pip` and `requirements`.

Compose builds them. An image with packages is named after a hash of its base image and its list of packages, so it is
built once; remove these images with `docker image prune --all --filter label=orchestrate.packages=$(id -u)`.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from orchestrate.console import print_message
from orchestrate.engines.docker.client import Daemon
from orchestrate.engines.docker.compose_override import literal
from orchestrate.errors import EngineError, EngineLost, ResourceError, UsageError
from orchestrate.host import records, writable
from orchestrate.plan.plan import pluralize
from orchestrate.spec import requirements
from orchestrate.spec.spec import JobSpec

PACKAGES, BUILT = "orchestrate-packages", "orchestrate-build"  # names of the images
LABEL = "orchestrate.packages"
FILE = "requirements.txt"
# Variables of pip that select where packages come from. They may contain passwords, so they are passed as secrets.
SOURCES = ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST")
USER = re.compile(r"[\w.-]+(:[\w.-]+)?", re.ASCII)
SCRIPT = r"""
set -e
for secret in /run/secrets/*; do
    case "$secret" in */ca) ;; *) [ ! -f "$secret" ] || export "${secret##*/}=$(cat "$secret")" ;; esac
done
[ ! -s /run/secrets/ca ] || export PIP_CERT=/run/secrets/ca
export PIP_BREAK_SYSTEM_PACKAGES=1 PIP_ROOT_USER_ACTION=ignore PIP_DISABLE_PIP_VERSION_CHECK=1
"$PYTHON" -m pip --version > /dev/null 2>&1 || "$PYTHON" -m ensurepip
exec "$PYTHON" -m pip install --requirement "$1"
"""


def base(spec: JobSpec) -> str:
    """Return the name of a job's image without its packages."""
    if not spec.dockerfile:
        return spec.image
    return f"{BUILT}:{_own(os.path.realpath(spec.dockerfile))}"


def _own(path: str) -> str:
    """Return a name for what belongs to a folder, which no Dockerfile or package can know."""
    return hmac.digest(records.account_key(), os.fsencode(path), "sha256").hex()[:16]


def with_packages(daemon: Daemon, spec: JobSpec) -> str:
    """Return the name of a job's image; raises EngineError if that depends on a base image that does not exist."""
    if not spec.pip:
        return base(spec)
    key = json.dumps([image_id(daemon, base(spec)), spec.pip, _own(os.getcwd())])  # an installer could change both
    return f"{PACKAGES}:{hashlib.sha256(key.encode()).hexdigest()[:16]}"


def image_id(daemon: Daemon, name: str) -> str:
    """Return the id of an image; raises EngineError if it does not exist."""
    return str(_inspected(daemon, name)["Id"])


def _inspected(daemon: Daemon, name: str) -> dict[str, Any]:
    if found := daemon.image(name):
        return found
    raise EngineError(f"the engine has no image {name}")


def build(daemon: Daemon, spec: JobSpec) -> None:
    """Build the image of the job's Dockerfile; only what has changed is built. Raises ResourceError."""
    folder = writable.resolved(spec.dockerfile)
    folder, name = (folder.parent, folder.name) if folder.is_file() else (folder, "Dockerfile")
    if not (folder / name).is_file():
        raise UsageError(f"no Dockerfile in {spec.dockerfile}", "dockerfile is a folder with a Dockerfile, or its path")
    writable.resolved(str(folder), fixed=True)  # Docker reads it by its path
    print_message(f"building {folder / name}")
    _compose(daemon, base(spec), {"context": str(folder), "dockerfile": name}, {})


def install(daemon: Daemon, spec: JobSpec, python: str) -> None:
    """Build the image with the job's packages; `python` is the interpreter of its base image. Raises ResourceError."""
    image, secrets = with_packages(daemon, spec), _secrets(spec)
    print_message(f"installing {pluralize(len(spec.pip), 'package')} in {base(spec)} (once)")
    config = _inspected(daemon, base(spec))["Config"]
    if config.get("OnBuild"):  # they would run in our build, with its secrets
        why = f"{base(spec)} has ONBUILD instructions, which would run when packages are installed"
        raise ResourceError(why, "build an image FROM it, and use that")
    user = config.get("User") or ""
    with tempfile.TemporaryDirectory(prefix="orchestrate-") as folder:
        Path(folder, FILE).write_text("\n".join(spec.pip) + "\n")
        Path(folder, "install.sh").write_text(SCRIPT)
        text = _dockerfile(base(spec), python, user, ["ca", *secrets])
        _compose(daemon, image, {"context": folder, "dockerfile_inline": text}, secrets, requirements.mask(spec.pip))


def _secrets(spec: JobSpec) -> dict[str, Any]:
    """Return the build's secrets, in the form of a Compose file; raises UsageError if a variable is not set."""
    names = [*requirements.variables(spec.pip), *(name for name in SOURCES if name in os.environ)]
    return {name: {"environment": name} for name in names}


def _dockerfile(image: str, python: str, user: str, secrets: list[str]) -> str:
    # Not shared with other projects: installers run as root, and could replace what is in the cache.
    cache = f"orchestrate-{_own(os.getcwd())}"
    mounts = [
        *(f"--mount=type=secret,id={name},required=false" for name in secrets),
        "--mount=type=bind,target=/tmp/orchestrate-packages",
        f"--mount=type=cache,id={cache},target=/root/.cache/pip",
    ]
    place = "/tmp/orchestrate-packages"
    # With the cache's name, since the builder takes steps of the same text for equal, whatever their caches are.
    run = f"CACHE={cache} PYTHON={python} sh {place}/install.sh {place}/{FILE}"
    user = user if USER.fullmatch(user) else "0:0"  # an image could add other instructions
    return f"FROM {image}\nUSER 0:0\nRUN {' '.join(mounts)} {run}\nUSER {user}\n"


def _compose(
    daemon: Daemon, image: str, build: dict[str, Any], secrets: dict[str, Any], hide: Callable[[str], str] = str
) -> None:
    ca = {"ca": {"file": os.environ.get("CA_BUNDLE") or os.devnull}}
    build |= {"network": os.environ.get("BUILD_NETWORK") or "default", "secrets": ["ca", *secrets]}
    build["labels"] = {LABEL: str(os.geteuid())}  # to find those of an account
    file = {"services": {"node": {"image": image, "build": build}}, "secrets": ca | secrets}
    try:
        daemon.compose("--file", "-", "build", given=literal(yaml.safe_dump(file)), hide=hide)
    except EngineLost:
        raise
    except EngineError as error:
        what = "install the packages" if "dockerfile_inline" in build else "build the image of the Dockerfile"
        hint = error.hint or "check the names and versions in the output above"
        raise ResourceError(f"could not {what}: see the output above", hint) from None
