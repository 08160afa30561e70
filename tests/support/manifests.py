"""Render the manifests of cluster/kubernetes with kubectl, and derive the pods that a cluster would create from them.

This needs no cluster. What Kubernetes and Kubeflow Trainer add is reproduced here from their documentation.
"""

import copy
import functools
import re
import shutil
import subprocess
from typing import Any

import pytest
import yaml

from gearbox import ROOT

KUBERNETES = ROOT / "cluster" / "kubernetes"
JOB_NAME = "batch.kubernetes.io/job-name"  # labels that the Job controller adds to its pods
JOB_INDEX = "batch.kubernetes.io/job-completion-index"
JOBSET_NAME = "jobset.sigs.k8s.io/jobset-name"  # added by the JobSet controller
Manifest = dict[str, Any]

needs_kubectl = pytest.mark.skipif(
    shutil.which("kubectl") is None, reason="kubectl is missing, which renders the manifests"
)


@functools.cache
def _rendered(folder: str) -> str:
    command = ["kubectl", "kustomize", folder]
    return subprocess.run(command, cwd=KUBERNETES, text=True, capture_output=True, check=True).stdout


def render(*folders: str) -> list[Manifest]:
    """Return the output of `kubectl kustomize` for folders of cluster/kubernetes, such as jobs/two_nodes."""
    return [manifest for folder in folders for manifest in yaml.safe_load_all(_rendered(folder))]


def of_kind(rendered: list[Manifest], kind: str) -> Manifest:
    """Return the only manifest of a kind."""
    (found,) = [manifest for manifest in rendered if manifest["kind"] == kind]
    return found


def job_of(rendered: list[Manifest]) -> Manifest:
    """Return the Job, or the one that the controllers create from a TrainJob and its TrainingRuntime."""
    if any(manifest["kind"] == "Job" for manifest in rendered):
        return of_kind(rendered, "Job")
    train_job, runtime = of_kind(rendered, "TrainJob"), of_kind(rendered, "TrainingRuntime")
    (replicated,) = copy.deepcopy(runtime["spec"]["template"]["spec"]["replicatedJobs"])
    name, trainer, spec = train_job["metadata"]["name"], train_job["spec"]["trainer"], replicated["template"]["spec"]
    spec["parallelism"] = spec["completions"] = trainer["numNodes"]
    template = spec["template"]
    template["metadata"] = {"labels": {JOBSET_NAME: name}}
    template["spec"]["subdomain"] = name
    (container,) = [found for found in template["spec"]["containers"] if found["name"] == "node"]
    container |= {key: trainer[key] for key in ("image", "command", "args") if key in trainer}
    container["resources"] = trainer["resourcesPerNode"]
    container["ports"] = [{"containerPort": 29500}]
    container["env"] += [
        *trainer.get("env", []),
        {"name": "PET_NNODES", "value": str(trainer["numNodes"])},
        {"name": "PET_NPROC_PER_NODE", "value": str(trainer["numProcPerNode"])},
        {"name": "PET_NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": f"metadata.annotations['{JOB_INDEX}']"}}},
        {"name": "PET_MASTER_ADDR", "value": f"{name}-{replicated['name']}-0-0.{name}"},
        {"name": "PET_MASTER_PORT", "value": "29500"},
    ]
    metadata = {"name": f"{name}-{replicated['name']}-0"}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": metadata, "spec": spec}


def container_of(job: Manifest) -> Manifest:
    (container,) = job["spec"]["template"]["spec"]["containers"]
    return container


def pod_metadata(job: Manifest, index: int) -> dict[str, dict[str, str]]:
    """Return the labels and annotations of a pod, including those that the Job controller adds."""
    labels = job["spec"]["template"].get("metadata", {}).get("labels", {})
    return {
        "labels": labels | {JOB_NAME: job["metadata"]["name"], JOB_INDEX: str(index)},
        "annotations": {JOB_INDEX: str(index)},
    }


def indexed_pod(rendered: list[Manifest], index: int) -> tuple[list[str], dict[str, str], str]:
    """Return (argv, environment, hostname) of a pod of the rendered job.

    argv excludes the image's ENTRYPOINT, and the environment excludes the image's variables. Secrets are absent.
    """
    job = job_of(rendered)
    assert 0 <= index < job["spec"]["completions"] and job["spec"]["completionMode"] == "Indexed"
    container, metadata = container_of(job), pod_metadata(job, index)
    hostname = f"{job['metadata']['name']}-{index}"
    environment = {"HOSTNAME": hostname}
    for variable in [*container["env"], {"name": "JOB_COMPLETION_INDEX", "value": str(index)}]:
        source = variable.get("valueFrom", {})
        if "secretKeyRef" in source:
            assert source["secretKeyRef"]["optional"], "without its Secret the pod would not start"
        elif "fieldRef" in source:
            group, key = re.fullmatch(r"metadata\.(\w+)\['(.+)'\]", source["fieldRef"]["fieldPath"]).groups()
            environment[variable["name"]] = metadata[group][key]
        else:
            environment[variable["name"]] = _expanded(variable["value"], environment)
    argv = [_expanded(part, environment) for part in container.get("command", []) + container.get("args", [])]
    return argv, environment, hostname


def _expanded(text: str, environment: dict[str, str]) -> str:
    """Expand $(NAME) like the kubelet: from variables set earlier. $$ is a dollar sign; unknown names stay."""

    def value(found: re.Match[str]) -> str:
        return "$" if found[0] == "$$" else environment.get(found[1], found[0])

    return re.sub(r"\$\$|\$\(([^)]+)\)", value, text)


def after_exit(job: Manifest, code: int, *conditions: str) -> str:
    """Return the Job's action after a pod's exit code: the first matching rule of its podFailurePolicy."""
    for rule in job["spec"]["podFailurePolicy"]["rules"]:
        codes, wanted = rule.get("onExitCodes"), rule.get("onPodConditions", [])
        if codes is not None and codes["containerName"] == container_of(job)["name"]:
            if code and (code in codes["values"]) == (codes["operator"] == "In"):
                return rule["action"]
        elif any(pattern["type"] in conditions and pattern["status"] == "True" for pattern in wanted):
            return rule["action"]
    return "Count"


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a podSelector selects a pod with these labels; {} selects every pod."""
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= labels.items()


def admits(
    policy: Manifest, direction: str, peer: dict[str, str] | None, protocol: str, port: int, is_near: bool = True
) -> bool:
    """Return whether a NetworkPolicy allows traffic from (ingress) or to (egress) a peer at a port.

    `peer` holds the labels of a pod in the same namespace, or in another one unless `is_near`; None is any other
    address.
    """
    side = {"ingress": "from", "egress": "to"}[direction]
    for rule in policy["spec"].get(direction, []):
        ports = [(found["protocol"], found["port"]) for found in rule.get("ports", [])]
        peers = rule.get(side, [])
        assert all(set(found) == {"podSelector"} or found.get("namespaceSelector") == {} for found in peers)
        within_reach = [found for found in peers if is_near or "namespaceSelector" in found]
        is_peer = not peers or (peer is not None and any(selects(found["podSelector"], peer) for found in within_reach))
        if is_peer and (not ports or (protocol, port) in ports):
            return True
    return False
