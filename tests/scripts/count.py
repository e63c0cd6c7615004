"""A training loop without torch that counts steps, saves and resumes: `count.py STEPS [SECONDS_PER_STEP]`.

With `until-asked` instead of STEPS, it ends at the next multiple of ten after a file `finish` appears in the
job folder; with `until-restarted`, at the fifth multiple of ten after a restart.
"""

import json
import os
import pathlib
import signal
import sys
import time

end, pause = sys.argv[1], float(sys.argv[2]) if len(sys.argv) > 2 else 0.02
steps = int(end) if end.isdecimal() else sys.maxsize
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
job_dir = pathlib.Path(os.environ["JOB_DIR"])
saved = job_dir / "checkpoints" / f"rank-{rank}"
done = int(saved.read_text()) if saved.exists() else 0
asked: list[int] = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if end == "until-restarted" and generation != "0":
    steps = done // 10 * 10 + 50
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
        steps = done if end == "until-asked" and (job_dir / "finish").exists() else steps
    if rank == "0":
        with (job_dir / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"step": done}) + "\n")
save()
sys.exit(143 if asked else 0)
