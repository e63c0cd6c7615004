"""A training without torch: counts steps, saves, resumes, and shows what was done when; `count.py STEPS [SECONDS]`."""

import json
import os
import pathlib
import signal
import sys
import time

steps, pause = int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
home = pathlib.Path(os.environ["JOB_DIR"])
saved = home / "checkpoints" / f"rank-{rank}"
done = int(saved.read_text()) if saved.exists() else 0
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
print("pid", os.getpid(), "of", os.environ["WORLD_SIZE"], flush=True)


def save() -> None:
    half = saved.with_name(f".{saved.name}.{os.getpid()}")
    half.write_text(str(done))
    half.replace(saved)


while done < steps and not asked:
    time.sleep(pause)
    done += 1
    print(f"step {done} in {generation}", flush=True)
    if done % 10 == 0:
        save()
    if rank == "0":
        with (home / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": done}) + "\n")
save()
sys.exit(143 if asked else 0)
