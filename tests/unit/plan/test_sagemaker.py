"""A script for SageMaker must find the variables that it reads there."""

import json

from support.plans import HERE, plan

from orchestrate.spec.spec import JobSpec

SPEC = JobSpec(
    trainers=1,
    nproc_per_node=2,
    sagemaker=True,
    command=("code/train.py", "--x", "1"),
    hyperparameters={"lr": 0.1, "batch-size": 64, "name": "a b", "amp": True, "sizes": [1, 2]},
    env={"SM_LOG_LEVEL": "10"},
)
SITE = HERE.but(data={"training": "/data/training", "test": "/data/test"}, original="/code")


def test_each_worker_must_have_the_variables_of_its_node():
    first, _, third, _ = (worker.env for worker in plan(SPEC, SITE, "digits-1", 29600).workers)
    assert json.loads(third["SM_HOSTS"]) == ["master", "trainer-1"] and third["SM_HOST_COUNT"] == "2"
    for env, host, rank in ((first, "master", "0"), (third, "trainer-1", "1")):
        assert (env["SM_CURRENT_HOST"], env["SM_CURRENT_HOST_RANK"]) == (host, rank)
        assert (env["SM_MASTER_ADDR"], env["SM_MASTER_PORT"]) == (env["MASTER_ADDR"], env["MASTER_PORT"])
        assert (env["SM_NUM_GPUS"], env["SM_NUM_CPUS"], env["SM_NETWORK_INTERFACE_NAME"]) == ("0", "8", "eth0")


def test_data_hyperparameters_and_folders_must_be_named():
    env = plan(SPEC, SITE, "digits-1", 29600).workers[0].env
    assert (env["SM_CHANNELS"], env["SM_CHANNEL_TRAINING"]) == ('["test", "training"]', "/data/training")
    assert json.loads(env["SM_HPS"]) == SPEC.hyperparameters
    assert (env["SM_HP_LR"], env["SM_HP_BATCH_SIZE"], env["SM_HP_NAME"]) == ("0.1", "64", "a b")
    assert json.loads(env["SM_USER_ARGS"])[:4] == ["--x", "1", "--lr", "0.1"]
    assert (env["SM_MODEL_DIR"], env["SM_OUTPUT_DATA_DIR"]) == ("/job/model", "/job/output/data")
    assert (env["SM_ENTRY_SCRIPT"], env["SM_MODULE_NAME"], env["SM_SOURCE_DIR"]) == ("train.py", "train", "/job/work")
    assert env["SM_LOG_LEVEL"] == "10"  # env takes precedence
    training = json.loads(env["SM_TRAINING_ENV"])
    assert (training["channel_input_dirs"], training["is_master"]) == (SITE.data, True)
    assert training["resource_config"]["current_host"] == training["current_host"] == "master"


def test_without_the_setting_nothing_must_be_added():
    (worker, *_) = plan(JobSpec(trainers=0), SITE, "digits-1", 29600).workers
    assert not [name for name in worker.env if name.startswith("SM_")]
