from orchestrate.api.job import Cluster
from orchestrate.api.job import Job as Job
from orchestrate.api.job import JobFailed as JobFailed
from orchestrate.api.job import Result as Result
from orchestrate.api.job import run as run
from orchestrate.api.job import submit as submit
from orchestrate.errors import OrchestrateError as OrchestrateError

__version__: str
cluster = Cluster
