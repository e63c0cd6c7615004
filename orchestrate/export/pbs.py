"""Export a job to PBS: a script for qsub that starts a node on each machine and restarts all if one fails."""

from __future__ import annotations

import math

from orchestrate.export.batch_text import filled, unattended
from orchestrate.spec.sizes import parse_size
from orchestrate.spec.spec import JobSpec

# pbsdsh (OpenPBS 23.06) starts a task for a line of PBS_NODEFILE, with the variables of qsub only, and always exits
# with 0; on SIGTERM it ends before its task does. So tasks end each other by a file, and their ends are files, too.
SCRIPT = """\
{head}
{options}

set -u
{secrets}export JOB_DIR="$PBS_O_WORKDIR/runs/{name}"
{functions}TASK='  # runs a node, and ends it once another one has failed
    trap : TERM  # PBS sends it to all processes of a job
    cd "$1" && shift || set -- exit 2
    "$@" &
    while kill -0 $! 2>/dev/null; do
        [ ! -e "$NODE_FAILED" ] || kill $!
        sleep 1
    done
    wait $!
    code=$?
    [ $code = 0 ] || (set -C; echo $code > "$NODE_FAILED") 2>/dev/null
    : > "$NODE_ENDED"
    exit $code'
failed() {{ (set -C; echo "$1" > "$NODE_FAILED") 2>/dev/null; }}  # only the first one counts
run() {{  # a node, as a task on a machine of the job
    case $(pbsdsh -v -n "$1" -- /usr/bin/env PATH="$PATH" {env}JOB_DIR="$JOB_DIR" NODE_PATIENT=1 NODE_RANK="$1" \\
        NODE_FAILED="$NODE_FAILED" NODE_ENDED="$JOB_DIR/.ended-$attempt-$1" \\
        MASTER_ADDR="$MASTER_ADDR" MASTER_PORT=$((20000 + (${{PBS_JOBID%%[!0-9]*}} * 97 + attempt) % 20000)) \\
        TORCHELASTIC_RESTART_COUNT="$attempt" /bin/bash -c "$TASK" node {folder} \\
        {launch}) in *"exit status 0"*) ;; *) failed 1; return 1 ;; esac
}}
ended() {{  # whether all nodes have
    for rank in $(seq 0 {last}); do [ -e "$JOB_DIR/.ended-$attempt-$rank" ] || return; done
}}
if [ "$(grep -c . "$PBS_NODEFILE")" != {nodes} ]; then
    echo "error: PBS_NODEFILE does not have {nodes} lines, one for each node: keep select and place as they are" >&2
    exit 2
fi
MASTER_ADDR=$(head -n 1 "$PBS_NODEFILE")

stop='' NODE_FAILED=''
trap 'stop=1; failed 143' TERM
for attempt in $(seq 0 {max_restarts}); do
    own "$PBS_O_WORKDIR/runs"
    own "$JOB_DIR"
    rm -f "$JOB_DIR"/.failed-* "$JOB_DIR"/.ended-*
    NODE_FAILED="$JOB_DIR/.failed-$PBS_JOBID-$attempt"  # a new name: other machines may still see the last file
    tasks=() bad=''
    for rank in $(seq 0 {last}); do run "$rank" & tasks+=($!); done
    for task in "${{tasks[@]}}"; do
        while kill -0 "$task" 2>/dev/null; do wait "$task"; done  # a signal interrupts a wait
        wait "$task" || bad=1
    done
    [ -n "$bad" ] || [ -e "$NODE_FAILED" ] || exit 0
    code=$(first_failure || echo 1)
    case $code in {no_restart}) exit "$code" ;; esac
    if [ -n "$stop" ]; then  # PBS kills the tasks when this script ends
        until ended; do sleep 1; done
        exit "$code"
    fi
    echo "generation $attempt ended with exit code $code" >&2
done
exit "$code"
"""


def pbs(spec: JobSpec, name: str, form: str) -> str:
    """Return the qsub script of a job; `form` is venv or apptainer.

    Raises UsageError for settings that cannot be exported.
    """
    job = unattended(spec, name, "PBS")
    cpus = math.ceil(spec.cpus or job.nproc)
    threads = {"OMP_NUM_THREADS": str(max(1, cpus // job.nproc))}  # PBS sets it to all cores of a machine
    memory = f":mem={math.ceil(parse_size(job.memory) / 1024)}kb" if job.memory else ""
    gpus = f":ngpus={job.gpus}" if job.gpus else ""
    options = [
        f"-N {name}",
        f"-l select={job.nodes}:ncpus={cpus}:mpiprocs=1{gpus}{memory}",
        "-l place=scatter",
        *([f"-l walltime={math.ceil(spec.max_run)}"] if spec.max_run else []),
        "-j oe",
        "-r y",
        "-S /bin/bash",
        "-V",
    ]
    lines = "\n".join(f"#PBS {option}" for option in options)
    return filled(SCRIPT, spec, job, form, "qsub", threads | job.env, options=lines, last=job.nodes - 1)
