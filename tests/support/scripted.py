"""A job on a scripted engine: the supervisor's decisions, without any node."""

from concurrent.futures import Future

from orchestrate.plan.plan import Plan
from orchestrate.record.events import to_line
from orchestrate.record.outcomes import JobResult, WorkerExit
from orchestrate.record.paths import JobPaths
from orchestrate.record.recorder import Recorder
from orchestrate.spec.redact import Mask
from orchestrate.spec.spec import JobSpec
from orchestrate.supervise.context import JobContext, UsageSink
from orchestrate.supervise.job_files import JobFiles
from orchestrate.supervise.open_stores import NoCopies
from orchestrate.supervise.supervisor import Supervisor
from support.plans import HERE, plan

ALL_WELL = [WorkerExit(0, 0), WorkerExit(1, 0), WorkerExit(2, 0)]
KILLED = [WorkerExit(1, 137)]


class Clock:
    """A clock that advances only while the supervisor sleeps or waits for its engine."""

    def __init__(self) -> None:
        self.now = 1_000_000.0
        self.end = self.now + 10_000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        assert self.now < self.end, "the job does not end"


class AtOnce:
    """A pool that runs work when it is submitted, so that no time passes meanwhile."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, action, *arguments) -> Future:
        done = Future()
        try:
            done.set_result(action(*arguments))
        except Exception as error:
            done.set_exception(error)
        return done


class WhenAsked:
    """A pool that runs work only when its result is awaited."""

    def __init__(self, threads: int) -> None:
        pass

    def submit(self, action, *arguments) -> Future:
        class Later(Future):
            def exception(self, timeout=None) -> BaseException | None:
                if not self.done():
                    try:
                        self.set_result(action(*arguments))
                    except Exception as error:
                        self.set_exception(error)
                return super().exception(timeout)

        return Later()


class Job:
    """A job on a scripted engine, with its own files and clock."""

    def __init__(self, folder) -> None:
        self.clock = Clock()
        self.paths = JobPaths(folder / "run")
        self.paths.create()
        self.stops = lambda: 0
        self.events: list[dict] = []

    def run(self, engine, spec=None, plan_=None, copies=None, usage=None) -> JobResult:
        wait = engine.wait
        engine.wait = lambda timeout: (self.clock.sleep(timeout), wait(timeout))[1]
        spec = spec or JobSpec(trainers=2, grace=0.01)
        first = plan_ or plan(spec, HERE, "j", 29500)
        emit = Recorder(self.paths.events, clock=self.clock)
        job = JobContext(
            spec=spec,
            stored_plan=first,
            run=self.paths.shared,
            engine=engine,
            emit=emit,
            stops=lambda: self.stops(),
            files=JobFiles(self.paths),
            copies=copies or NoCopies(),
            usage=usage or UsageSink(),
        )
        self.supervisor = Supervisor(job, self.write_plan)
        try:
            return self.supervisor.supervise()
        finally:
            self.events = [to_line(event) for event in emit.events]
            emit.close()

    def write_plan(self, plan: Plan) -> None:
        self.paths.plan.write_text(plan.to_json(Mask({})))

    def causes(self) -> list[tuple[int, str]]:
        return [(end.cause.rank, end.cause.cause) for end in self.supervisor.history.ended if end.cause]

    def names(self) -> list[str]:
        return [event["event"] for event in self.events]

    def noted(self, name: str) -> list[dict]:
        """The events of a name, without their times."""
        found = [event for event in self.events if event["event"] == name]
        return [{key: event[key] for key in event if key not in ("event", "time", "seconds")} for event in found]

    def when(self, name: str) -> list[float]:
        """The seconds since the start of the job at which events of a name happened."""
        return [event["seconds"] for event in self.events if event["event"] == name]
