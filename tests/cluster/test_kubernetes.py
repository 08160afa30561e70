"""Check that the manifests of cluster/kubernetes match the official schemas, each other and the code."""

import os
import re
import shlex
import shutil
import subprocess
import tomllib
import types
import typing
from itertools import pairwise
from pathlib import Path

import pytest
import yaml

import launch
from gearbox import ROOT
from gearbox.config.gear import load_gear
from gearbox.config.recipe import Run
from gearbox.launch import outcome, supervisor
from gearbox.launch.topology import Node
from support.manifests import (
    JOB_NAME,
    JOBSET_NAME,
    KUBERNETES,
    admits,
    after_exit,
    container_of,
    indexed_pod,
    job_of,
    needs_kubectl,
    of_kind,
    pod_metadata,
    render,
    selects,
)

pytestmark = needs_kubectl
DOCUMENT = (ROOT / "docs" / "kubernetes.md").read_text()
JOBS = {
    "two_nodes": ["jobs/two_nodes"],
    "without_gpus": ["jobs/without_gpus"],
    "trainjob": ["jobs/trainjob", "setup/runtime"],
}
FOLDERS = [
    str(path.parent.relative_to(KUBERNETES))
    for top in ("jobs", "setup")
    for path in sorted((KUBERNETES / top).glob("*/kustomization.yaml"))
]
OLDEST = "1.31"  # the oldest Kubernetes with every field on by default, as the document states


@pytest.fixture(params=JOBS)
def rendered(request):
    return render(*JOBS[request.param])


@pytest.fixture
def job(rendered):
    return job_of(rendered)


# ---------------------------------------------------------------------------- what the API accepts


def test_every_folder_is_checked():
    assert {"setup/claims", *(folder for folders in JOBS.values() for folder in folders)} == set(FOLDERS)


@pytest.mark.parametrize("version", [OLDEST, "newest"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_kubernetes_accepts_it(folder, version):
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    version = validate.latest_version().removesuffix(".0") if version == "newest" else version
    manifests = [found for found in render(folder) if "kubeflow.org" not in found["apiVersion"]]
    if folder == "jobs/trainjob":
        manifests.append(job_of(render(*JOBS["trainjob"])))
    for manifest in manifests:
        assert validate.validate(manifest, version, strict=True) == version
    assert f"Kubernetes {OLDEST} or newer" in DOCUMENT


@pytest.mark.parametrize("folder", ["jobs/trainjob", "setup/runtime"])
def test_kubeflow_trainer_accepts_it(folder):
    accept_kubeflow(next(found for found in render(folder) if "kubeflow.org" in found["apiVersion"]))


def test_keys_unknown_to_kubeflow_trainer_are_refused():
    train_job = of_kind(render("jobs/trainjob"), "TrainJob")
    train_job["spec"]["trainer"]["numNods"] = 2
    with pytest.raises(AssertionError, match=r"spec\.trainer\.numNods"):
        accept_kubeflow(train_job)
    runtime = of_kind(render("setup/runtime"), "TrainingRuntime")
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    replicated["template"]["spec"]["template"]["spec"]["containers"][0]["securityContext"]["readOnlyRoot"] = True
    with pytest.raises(AssertionError, match=r"replicatedJobs.*containers.*readOnlyRoot"):
        accept_kubeflow(runtime)


def accept_kubeflow(manifest):
    """Validate a manifest with the models of Kubeflow Trainer's API. They ignore unknown keys, so check keys first."""
    models = pytest.importorskip("kubeflow_trainer_api.models", reason="kubeflow_trainer_api is not installed")
    group, version = manifest["apiVersion"].split("/")
    assert group == "trainer.kubeflow.org"
    model = getattr(models, f"Trainer{version.capitalize()}{manifest['kind']}")
    assert unknown(manifest, model) == []
    model.from_dict(manifest)


def unknown(value, annotation, path=""):
    """Return the paths of keys in value for which a pydantic model, or a nested one, has no field."""
    arguments = typing.get_args(annotation)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        return unknown(value, next(found for found in arguments if found is not type(None)), path)
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in unknown(item, arguments[0], f"{path}[{i}]")]
    fields = getattr(annotation, "model_fields", None)
    if not isinstance(value, dict) or (fields is None and not arguments):
        return []
    if fields is None:
        known = dict.fromkeys(value, arguments[1])
    else:
        known = {field.alias or name: field.annotation for name, field in fields.items()}
    return [
        found
        for key, item in value.items()
        for found in (unknown(item, known[key], f"{path}.{key}") if key in known else [f"{path}.{key}"])
    ]


# ---------------------------------------------------------------------------- what a pod is and may do


def test_every_image_has_the_version_of_the_project():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    images = re.findall(r"^\s*(?:- )?image: (.+)$", "".join(yaml.dump(render(folder)) for folder in FOLDERS), re.M)
    assert set(images) == {f"registry.example.com/gearbox:{version}"} and len(images) == len(JOBS)
    tags = re.findall(r"image: gearbox:(\S+)", "".join(path.read_text() for path in KUBERNETES.rglob("*.yaml")))
    assert tags == [version, version]


def test_a_pod_fits_the_restricted_security_standard(job):
    pod, container = job["spec"]["template"]["spec"], container_of(job)
    assert pod["securityContext"] == {
        "runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001,
        "fsGroupChangePolicy": "OnRootMismatch", "seccompProfile": {"type": "RuntimeDefault"},
    }  # fmt: skip
    assert str(pod["securityContext"]["runAsUser"]) in (ROOT / "Dockerfile").read_text()
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False, "readOnlyRootFilesystem": True, "capabilities": {"drop": ["ALL"]},
    }  # fmt: skip
    assert (pod["automountServiceAccountToken"], pod["enableServiceLinks"]) == (False, False)
    assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)


def test_every_written_path_has_a_volume(job):
    pod, container = job["spec"]["template"]["spec"], container_of(job)
    volumes = {volume.pop("name"): volume for volume in map(dict, pod["volumes"])}
    places = {mount["mountPath"]: volumes.pop(mount["name"]) for mount in container["volumeMounts"]}
    assert volumes == {}, "a volume is not mounted"
    dockerfile = (ROOT / "Dockerfile").read_text()
    workdir = re.search(r"^WORKDIR (\S+)$", dockerfile, re.M)[1]
    assert re.search(r"^ENV .*?\bHF_HOME=(\S+)", dockerfile, re.M | re.S)[1] == "/cache/huggingface"
    claims = {claim["metadata"]["name"]: claim["spec"] for claim in render("setup/claims")}
    claimed = {path: volume.get("persistentVolumeClaim", {}).get("claimName") for path, volume in places.items()}
    assert set(claims) == set(filter(None, claimed.values()))
    assert claimed[f"{workdir}/{Run().dir}"] == "gearbox-runs" and claimed["/cache/huggingface"] == "gearbox-cache"
    assert all(claim["accessModes"] == ["ReadWriteMany"] for claim in claims.values())
    assert places["/tmp"] == places["/cache"] == {"emptyDir": {}}
    shared, memory = places["/dev/shm"]["emptyDir"], container["resources"]["limits"]["memory"]
    assert shared["medium"] == "Memory" and gib(shared["sizeLimit"]) < gib(memory), "/dev/shm counts as memory"
    assert container["resources"]["requests"]["memory"] == memory, "a save could get the pod evicted"


def gib(quantity):
    return int(quantity.removesuffix("Gi"))


def test_the_kubelet_waits_longer_than_a_save(job):
    grace = job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace > supervisor.SHUTDOWN_SECONDS
    measured = re.search(r"complete after \d+ to (\d+) s", (ROOT / "benchmarks" / "saving.md").read_text())
    assert grace > 2 * int(measured[1]), "a save in progress, and the last one"
    assert f"{grace} s" in DOCUMENT and f"{supervisor.SHUTDOWN_SECONDS} s" in DOCUMENT


def test_a_trainjob_runs_the_pods_of_a_job():
    """Compare the two pods, except for names and values that the controllers of Kubeflow set."""
    plain, kubeflow = (job_of(render(*JOBS[name]))["spec"] for name in ("two_nodes", "trainjob"))
    for spec in (plain, kubeflow):
        (container,) = spec["template"]["spec"]["containers"]
        container["env"] = [{"name": v["name"]} for v in container["env"] if not v["name"].startswith("PET_")]
        container["ports"] = [{"containerPort": port["containerPort"]} for port in container["ports"]]
        container.pop("image")
        spec["template"].pop("metadata", None)
    assert plain == kubeflow


# ---------------------------------------------------------------------------- how the pods meet


def test_pods_are_named_by_the_service():
    for name in ("two_nodes", "without_gpus"):
        rendered = render(*JOBS[name])
        job, service = job_of(rendered), of_kind(rendered, "Service")
        assert service["metadata"]["name"] == job["spec"]["template"]["spec"]["subdomain"]
        assert (service["spec"]["clusterIP"], service["spec"]["publishNotReadyAddresses"]) == ("None", True)
        assert selects({"matchLabels": service["spec"]["selector"]}, pod_metadata(job, 0)["labels"])
        assert not selects({"matchLabels": service["spec"]["selector"]}, {JOB_NAME: "another"})
        _, environment, hostname = indexed_pod(rendered, 0)
        assert environment["PET_MASTER_ADDR"] == f"{hostname}.{service['metadata']['name']}"
        ports = [port["containerPort"] for port in container_of(job)["ports"]]
        assert [environment["PET_MASTER_PORT"]] == [str(port["port"]) for port in service["spec"]["ports"]]
        assert [environment["PET_MASTER_PORT"]] == [str(port) for port in ports]


def test_a_trainjob_names_its_runtime():
    rendered = render(*JOBS["trainjob"])
    reference, runtime = of_kind(rendered, "TrainJob")["spec"]["runtimeRef"], of_kind(rendered, "TrainingRuntime")
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    assert runtime["apiVersion"].startswith(reference["apiGroup"])
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert replicated["name"] == "node", "Kubeflow Trainer finds it by this name"
    assert replicated["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}


def test_nobody_else_reaches_the_rendezvous(rendered, job):
    policy, mine = of_kind(rendered, "NetworkPolicy"), pod_metadata(job, 0)["labels"]
    others = [{}, {"app": "other"}, {JOB_NAME: "another"}, {JOBSET_NAME: "another"}]
    spec = policy["spec"]
    assert selects(spec["podSelector"], mine) and sorted(spec["policyTypes"]) == ["Egress", "Ingress"]
    assert not any(selects(spec["podSelector"], labels) for labels in others)
    peer = pod_metadata(job, 1)["labels"]
    for port in (29500, 40123, 22):  # the store, gloo and NCCL: any
        assert admits(policy, "ingress", peer, "TCP", port) and admits(policy, "egress", peer, "TCP", port)
        for other in (*others, None):
            assert not admits(policy, "ingress", other, "TCP", port)
            assert not admits(policy, "egress", other, "TCP", port)
    assert admits(policy, "egress", None, "UDP", 53) and admits(policy, "egress", None, "TCP", 53)
    assert admits(policy, "egress", None, "TCP", 443) and not admits(policy, "egress", None, "TCP", 80)


def test_a_trainjob_reaches_the_server_of_its_status():
    """The labels and the port are those of Kubeflow Trainer's manifests, and of its Helm chart."""
    manager = {
        "app.kubernetes.io/name": "trainer", "app.kubernetes.io/component": "manager",
        "app.kubernetes.io/part-of": "kubeflow",
    }  # fmt: skip
    policy = of_kind(render("jobs/trainjob"), "NetworkPolicy")
    assert admits(policy, "egress", manager, "TCP", 10443, is_near=False)
    assert not admits(policy, "egress", manager, "TCP", 9443, is_near=False)
    assert not admits(policy, "egress", {"app": "other"}, "TCP", 10443, is_near=False)
    assert not admits(policy, "ingress", manager, "TCP", 10443, is_near=False)
    own = pod_metadata(job_of(render(*JOBS["trainjob"])), 1)["labels"]
    assert not admits(policy, "egress", own, "TCP", 29500, is_near=False), "a job of this name in another namespace"


# ---------------------------------------------------------------------------- the command, and how it ends


def test_launch_accepts_the_command(rendered, job, monkeypatch):
    """Run its own checks as pod 1, and record the command without starting it."""
    argv, environment, _ = indexed_pod(rendered, 1)
    assert argv[:2] == ["python", "src/launch.py"] and "--doctor" in argv
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    started = []
    monkeypatch.setattr(supervisor, "supervise", lambda *given, **named: started.append((*given, named["node"])) or 0)
    assert launch.main(argv[2:]) == 0
    (_, _, script, _), (flags, arguments, place) = started
    assert script == supervisor.DOCTOR, "the doctor runs first"
    machines, name = job["spec"]["parallelism"], job["metadata"]["name"]
    domain = job["spec"]["template"]["spec"]["subdomain"]
    assert place == Node(machines, 1, f"{name}-0.{domain}", 29500) and machines == job["spec"]["completions"]
    assert arguments[-1] == f"run.name={domain}", "the job's name is the run's name"
    given = dict(flag.removeprefix("--").split("=", 1) for flag in flags)
    gear = load_gear(Path(given["config_file"]), given)
    gpus = container_of(job)["resources"]["limits"].get("nvidia.com/gpu")
    usual = load_gear(gear.path).num_processes
    assert gear.num_processes == (machines * int(gpus) if gpus else usual), "one rank per GPU"
    assert (gear.name, gear.degree("dp_replicate")) == ("hsdp", machines), "one replica per machine"


def test_each_pod_knows_its_place():
    _, first, hostname = indexed_pod(render(*JOBS["two_nodes"]), 0)
    assert hostname == "qwen-7b-0"
    argv, second, hostname = indexed_pod(render(*JOBS["two_nodes"]), 1)
    line = "python src/launch.py hsdp --doctor recipes/fsdp_2gpu.yaml run.name=qwen-7b"
    assert (argv, hostname) == (line.split(), "qwen-7b-1")
    assert second == {
        "HOSTNAME": "qwen-7b-1", "JOB_NAME": "qwen-7b", "JOB_COMPLETION_INDEX": "1", "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "8", "PET_MASTER_ADDR": "qwen-7b-0.qwen-7b", "PET_MASTER_PORT": "29500",
    }  # fmt: skip
    assert {key for key in first if first[key] != second[key]} == {"HOSTNAME", "JOB_COMPLETION_INDEX"}
    argv, by_kubeflow, hostname = indexed_pod(render(*JOBS["trainjob"]), 1)
    assert (argv, hostname) == (line.split(), "qwen-7b-node-0-1")
    assert by_kubeflow["PET_MASTER_ADDR"] == "qwen-7b-node-0-0.qwen-7b" and by_kubeflow["PET_NODE_RANK"] == "1"


def test_exit_codes_match_the_document(job):
    saved, failed, refused = (outcome.EXIT_CODES[name] for name in ("saved", "failed", "refused"))
    assert after_exit(job, saved) == "Ignore" and after_exit(job, saved, "DisruptionTarget") == "Ignore"
    assert after_exit(job, failed) == after_exit(job, refused) == "FailJob"
    assert after_exit(job, failed, "DisruptionTarget") == "FailJob"
    assert after_exit(job, 137) == after_exit(job, outcome.EXIT_CRASHED) == "Count"
    assert after_exit(job, 137, "DisruptionTarget") == "Ignore"
    documented = dict(re.findall(r"^\| (\d+) \|.*\| (\w+)[^|]* \|$", DOCUMENT, re.M))
    assert {int(code): after_exit(job, int(code)) for code in documented if code != "0"} == {
        int(code): action for code, action in documented.items() if code != "0"
    }
    assert set(map(int, documented)) >= {*outcome.EXIT_CODES.values(), outcome.EXIT_CRASHED, 137}
    rules = job["spec"]["podFailurePolicy"]["rules"]
    values = [rule["onExitCodes"]["values"] for rule in rules if "onExitCodes" in rule]
    assert all(codes == sorted(set(codes)) for codes in values), "the API requires sorted codes"


def test_a_lost_pod_is_retried_as_often_as_a_lost_rank(job):
    spec = job["spec"]
    assert spec["backoffLimitPerIndex"] == supervisor.MAX_RESTARTS and spec["maxFailedIndexes"] == 0
    assert spec["successPolicy"] == {"rules": [{"succeededIndexes": "0"}]}, "rank 0 exits last"
    assert spec["template"]["spec"]["restartPolicy"] == "Never", "podFailurePolicy requires it"
    assert "backoffLimit" not in spec and "podReplacementPolicy" not in spec


# ---------------------------------------------------------------------------- the document


def kubectl_lines():
    texts = [DOCUMENT, *(path.read_text() for path in sorted(KUBERNETES.rglob("*.yaml")))]
    lines = [line for text in texts for line in re.findall(r"^(?:kubectl| *#? .*: kubectl| *# kubectl) .*", text, re.M)]
    return list(dict.fromkeys(line[line.index("kubectl") :] for line in lines))


@pytest.mark.parametrize("line", kubectl_lines())
def test_kubectl_accepts_the_line(line, tmp_path):
    """It parses each line, renders the folder after `-k`, and stops where it would contact a server."""
    words = shlex.split(line)
    for word, after in pairwise(words):
        if word == "-k":
            assert render(str((ROOT / after).relative_to(KUBERNETES)))
    server = [] if words[1] == "kustomize" else ["--server=http://127.0.0.1:1"]
    environment = os.environ | {"KUBECONFIG": str(tmp_path / "none"), "HOME": str(tmp_path)}
    ended = subprocess.run([*words, *server], cwd=ROOT, env=environment, text=True, capture_output=True, check=False)
    if words[1] == "kustomize":
        assert ended.returncode == 0
    else:
        assert "connection refused" in ended.stderr or "was refused" in ended.stderr, ended.stderr


def test_additions_to_a_job_are_kept(tmp_path):
    """Apply the document's addition to job.yaml in a copy of jobs/two_nodes."""
    added = yaml.safe_load(re.search(r"```yaml\n(spec:.*?)```", DOCUMENT, re.S)[1])
    shutil.copytree(KUBERNETES, tmp_path / "kubernetes")
    file = tmp_path / "kubernetes" / "jobs" / "two_nodes" / "job.yaml"
    written = yaml.safe_load(file.read_text())
    file.write_text(yaml.dump(joined(written, added)))
    rendered = render(str(file.parent))
    job = job_of(rendered)
    assert {"mountPath": "/data", "name": "data", "readOnly": True} in container_of(job)["volumeMounts"]
    assert len(container_of(job)["volumeMounts"]) == len(job["spec"]["template"]["spec"]["volumes"]) == 6
    validate = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    validate.validate(job, OLDEST, strict=True)


def joined(one, other):
    if isinstance(one, dict):
        return one | {key: joined(one[key], item) if key in one else item for key, item in other.items()}
    if isinstance(one, list):
        return [joined(one[0], other[0])]  # the only container
    assert one == other
    return one


def test_paths_of_the_document_exist():
    named = re.findall(r"(?<![\w/])(?:cluster/kubernetes|jobs|setup|parts)/[\w./-]+", DOCUMENT)
    own = {"cluster/kubernetes/jobs/mine", "cluster/kubernetes/jobs/mine/job.yaml"}
    assert [
        name for name in named if not ({name} <= own or (ROOT / name).exists() or (KUBERNETES / name).exists())
    ] == []
    assert len(named) > 5
