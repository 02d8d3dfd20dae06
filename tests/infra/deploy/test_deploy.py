"""What infra/deploy holds is valid, by the validators of those who read it.

A validator that is not installed skips its tests. The dev extra has all but SkyPilot, which wants other versions of our
dependencies: with it a task is checked by SkyPilot too.
"""

import importlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from infra.cli.flags import parse_flags
from infra.cli.main import COMMANDS

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "infra" / "deploy"
KUBERAY = DEPLOY / "kuberay"
SKYPILOT = DEPLOY / "skypilot" / "a100.yaml"
NOTEBOOK = DEPLOY / "notebook" / "a100.ipynb"
KUBERNETES = "1.32"
"""The oldest version of Kubernetes that the manifests are checked against."""

JOBS = ("tokenize", "run", "search")
SHELL = ("slurm/throughline.sbatch", "compose/secrets.sh")
PLAIN = [
    path.relative_to(KUBERAY).as_posix()
    for path in (*sorted(KUBERAY.glob("platform/[!k]*.yaml")), KUBERAY / "cluster/raycluster.yaml")
]


def tool(name: str) -> str:
    """The path of a program, beside this Python or on PATH; skips the test where there is none."""
    found = shutil.which(name, path=os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]))
    return found or pytest.skip(f"{name} is not installed")


def output(*command: str | Path) -> tuple[int, str]:
    """The exit code of a command, and all that it printed."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return done.returncode, done.stdout + done.stderr


def spoil(file: Path, right: str, wrong: str, folder: Path) -> Path:
    """A copy of a file in ``folder``, with ``right`` replaced by ``wrong`` once."""
    text = file.read_text()
    assert right in text, f"{file} does not contain {right}"
    copy = folder / file.name
    copy.write_text(text.replace(right, wrong, 1))
    return copy


# ---- Kubernetes -----------------------------------------------------------------------------------------------------


def documents(text: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(text) if document]


def pod_templates(document: Any) -> Iterator[dict[str, Any]]:
    """The pod templates anywhere in a document."""
    if isinstance(document, dict):
        for name, value in document.items():
            if name in ("template", "submitterPodTemplate"):
                yield value
            yield from pod_templates(value)
    elif isinstance(document, list):
        for value in document:
            yield from pod_templates(value)


def misspelt(document: Any, name: str, kind: str = "") -> str:
    """Why the schema of the fields that are used here would refuse a document; empty when it would not."""
    schema = json.loads((Path(__file__).parent / f"{name}.schema.json").read_text())
    if kind:
        schema["$ref"] = f"#/$defs/{kind}"
    return " ".join(error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document))


def refused(document: dict[str, Any]) -> str:
    """Why Kubernetes, or KubeRay, would refuse a document; empty when it would not."""
    kubernetes_validate = pytest.importorskip("kubernetes_validate")
    checked, reason = [document], ""
    if document["apiVersion"] == "ray.io/v1":
        reason = misspelt(document, "kuberay", document["kind"])
        pod = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "pod"}}
        checked = [pod | {"template": template} for template in pod_templates(document)]
    try:
        for one in checked:
            kubernetes_validate.validate(one, KUBERNETES, strict=True)
    except jsonschema.ValidationError as error:
        return f"{reason} {error.message}"
    return reason


def built(folder: Path) -> list[dict[str, Any]]:
    """What ``kubectl apply -k`` would send for a folder."""
    code, text = output(tool("kubectl"), "kustomize", folder)
    assert code == 0, text
    return documents(text)


def test_the_manifests_are_what_kubernetes_and_kuberay_read(tmp_path: Path) -> None:
    for name in PLAIN:
        for document in documents((KUBERAY / name).read_text()):
            assert refused(document) == "", name
    (spoilt,) = documents(
        spoil(KUBERAY / "cluster/raycluster.yaml", "maxReplicas: 8", "maxReplica: 8", tmp_path).read_text()
    )
    assert "'maxReplica' was unexpected" in refused(spoilt), "the schema of KubeRay's documents is ours"


@pytest.mark.parametrize("size", ["small", "large"])
@pytest.mark.parametrize("folder", [".", *(f"jobs/{job}" for job in JOBS)])
def test_what_kustomize_builds_is_valid_for_both_sizes(folder: str, size: str, tmp_path: Path) -> None:
    copy = shutil.copytree(KUBERAY, tmp_path / "kuberay")
    for file in (copy / "kustomization.yaml", copy / "jobs/base/kustomization.yaml"):
        file.write_text(file.read_text().replace("sizes/small", f"sizes/{size}"))
    sent = built(copy / folder)
    assert [refused(document) for document in sent] == [""] * len(sent)
    assert {document["metadata"].get("namespace", "throughline") for document in sent} == {"throughline"}
    clusters = [
        document["spec"].get("rayClusterSpec", document["spec"])
        for document in sent
        if document["apiVersion"] == "ray.io/v1"
    ]
    assert len(clusters) == 1
    most = [group["maxReplicas"] for group in clusters[0]["workerGroupSpecs"]]
    assert most == {"small": [2, 1], "large": [32, 8]}[size]


def test_pods_have_limits_no_root_and_no_privileges() -> None:
    for name in PLAIN:
        for template in pod_templates(documents((KUBERAY / name).read_text())):
            assert template["spec"]["securityContext"]["runAsNonRoot"], name
            for container in template["spec"]["containers"]:
                assert container["resources"]["limits"]["memory"], name
                assert not container["securityContext"]["allowPrivilegeEscalation"], name
                assert container["securityContext"]["capabilities"]["drop"] == ["ALL"], name


def test_a_pod_is_reached_only_by_those_that_a_rule_names() -> None:
    rules = {
        rule["metadata"]["name"]: rule["spec"] for rule in documents((KUBERAY / "platform/network.yaml").read_text())
    }
    assert rules.pop("deny-all") == {"podSelector": {}, "policyTypes": ["Ingress"]}
    reached = {
        name: [
            (port["port"], *source.get("podSelector", source.get("namespaceSelector"))["matchLabels"].values())
            for ingress in rule["ingress"]
            for source in ingress["from"]
            for port in ingress.get("ports", [{"port": "all"}])
        ]
        for name, rule in rules.items()
    }
    assert reached == {
        "ray": [("all", "yes"), (8265, "submitter"), (8265, "kuberay")],
        "mlflow": [(5000, "yes")],
        "postgres": [(5432, "mlflow")],
    }
    assert rules["postgres"]["policyTypes"] == ["Ingress", "Egress"]


def test_a_job_brings_its_own_cluster_and_gives_the_gpu_back() -> None:
    for name in JOBS:
        (job,) = built(KUBERAY / "jobs" / name)
        assert job["metadata"]["name"] == name
        spec = job["spec"]
        assert spec["shutdownAfterJobFinishes"]
        assert spec["ttlSecondsAfterFinished"] == 60
        assert spec["rayClusterSpec"]["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
        groups = {group["groupName"]: group["minReplicas"] for group in spec["rayClusterSpec"]["workerGroupSpecs"]}
        assert groups == {"cpu": 2, "a100": 0} if name == "tokenize" else groups == {"cpu": 0, "a100": 1}


# ---- Ray's cluster launcher -----------------------------------------------------------------------------------------


def launcher_refuses(file: Path) -> str:
    """Why ``ray up`` would refuse a file, by the schema and the checks in Ray's wheel; empty when it would not."""
    from ray.autoscaler._private.util import prepare_config, validate_config

    try:
        validate_config(prepare_config(yaml.safe_load(file.read_text())))
    except (jsonschema.ValidationError, ValueError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize("name", ["gcp", "aws"])
def test_the_launcher_reads_its_files(name: str) -> None:
    file = DEPLOY / "ray" / f"{name}.yaml"
    assert launcher_refuses(file) == ""
    config = yaml.safe_load(file.read_text())
    assert config["available_node_types"]["head"]["resources"] == {"CPU": 0}
    assert not any("dashboard-host" in line for line in config["head_start_ray_commands"])


# ---- SkyPilot -------------------------------------------------------------------------------------------------------


def skypilot_refuses(file: Path) -> list[str]:
    """Why the validators of SkyPilot's tasks that are installed here would refuse one: one text for each of them."""
    task = yaml.safe_load(file.read_text())
    answers = [misspelt(task, "skypilot")]
    try:
        import sky  # pyright: ignore[reportMissingImports]
    except ImportError:
        return answers
    try:
        sky.Task.from_yaml_config(task)
    except ValueError as error:
        return [*answers, str(error)]
    return [*answers, ""]


def test_skypilot_reads_its_task(tmp_path: Path) -> None:
    assert not any(skypilot_refuses(SKYPILOT))
    reasons = skypilot_refuses(spoil(SKYPILOT, "idle_minutes: ", "idle_minute: ", tmp_path))
    assert all("idle_minute" in reason for reason in reasons), "the schema of tasks is ours"


def test_a_skypilot_machine_is_deleted_and_its_secrets_come_from_outside(tmp_path: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task["resources"]["autostop"]["down"] is True
    assert set(task["secrets"].values()) == {None}
    (kept,) = task["file_mounts"]
    assert task["envs"]["MLFLOW_TRACKING_URI"].startswith(f"sqlite:///{kept}/"), "the evidence outlives the machine"
    shellcheck = tool("shellcheck")
    for part in ("setup", "run"):
        script = tmp_path / part
        script.write_text(task[part])
        assert output(shellcheck, "--shell", "bash", script) == (0, ""), part


# ---- Shell, Dockerfile, Compose -------------------------------------------------------------------------------------


def test_shellcheck_and_hadolint_find_nothing() -> None:
    for name in SHELL:
        assert output(tool("shellcheck"), DEPLOY / name) == (0, "")
    assert output(tool("hadolint"), DEPLOY / "compose" / "Dockerfile") == (0, "")


def test_images_do_not_run_as_root() -> None:
    text = (DEPLOY / "compose" / "Dockerfile").read_text()
    targets = re.split(r"(?m)^FROM ", text)[1:]
    assert [target.split()[2] for target in targets] == ["base", "wheel", "cpu", "cuda", "mlflow"]
    assert all("\nUSER 1000\n" in target for target in targets[2:])
    assert "latest" not in text


def compose_refuses(file: Path) -> list[str]:
    """Why the validators of Compose files that are installed here would refuse one: one text for each of them."""
    pytest.importorskip("check_jsonschema")
    checks: list[list[str | Path]] = [
        [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", file]
    ]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    if compose := shutil.which("docker-compose", path=path):
        checks.append([compose, "--file", file, "config", "--quiet"])
    answers = [output(*check) for check in checks]
    return [text if code else "" for code, text in answers]


def test_compose_reads_its_file() -> None:
    assert not any(compose_refuses(DEPLOY / "compose" / "compose.yaml"))


def test_compose_publishes_loopback_only_and_has_no_password() -> None:
    file = DEPLOY / "compose" / "compose.yaml"
    services = yaml.safe_load(file.read_text())["services"]
    for name, service in services.items():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", [])), name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert "latest" not in service["image"], name
        for variable, value in service.get("environment", {}).items():
            assert "/run/secrets/" in value or not re.search("PASSWORD|SECRET|TOKEN", variable), (name, variable)
    serving = {"head", "mlflow", "postgres", "store"}
    assert {name for name, service in services.items() if "healthcheck" in service} == serving


def test_passwords_are_made_once_and_for_this_user_alone(tmp_path: Path) -> None:
    script = Path(shutil.copy(DEPLOY / "compose" / "secrets.sh", tmp_path))
    assert output("bash", script)[0] == 0
    named = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())["secrets"]
    made = {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()}
    assert {f"secrets/{name}" for name in made} == {secret["file"] for secret in named.values()}
    assert all(made.values())
    assert (tmp_path / "secrets").stat().st_mode & 0o077 == 0
    (identity,) = json.loads(made["s3_identities"])["identities"]
    assert identity["credentials"][0]["secretKey"] in made["aws_credentials"].decode()
    assert output("bash", script)[0] == 0
    assert {path.name: path.read_bytes() for path in (tmp_path / "secrets").iterdir()} == made
    assert "secrets/" in (DEPLOY / "compose" / ".gitignore").read_text().split()


# ---- What they have in common ---------------------------------------------------------------------------------------


def test_a_lost_machine_is_noticed_in_seconds_and_joining_needs_a_token() -> None:
    for name in (
        "kuberay/cluster/raycluster.yaml", "ray/gcp.yaml", "ray/aws.yaml", "slurm/throughline.sbatch",
        "compose/compose.yaml",
    ):  # fmt: skip
        text = (DEPLOY / name).read_text()
        found = dict(re.findall(r"RAY_health_check_(\w+?)(?:=|: \"|, value: \")(\d+)", text))
        assert found == {"period_ms": "500", "timeout_ms": "1000", "failure_threshold": "3"}, name
        assert re.search(r"RAY_AUTH_MODE(=|: )token|mode: token", text), name
        if "slurm" not in name:  # there no job is submitted to Ray
            assert re.search(r"RAY_JOB_STOP_WAIT_TIME_S(=|: \"|, value: \")60\b", text), "a stopped job can save"


def commands() -> set[str]:
    """Every command of ours in the files and in the notebook's cells, without the text around it.

    A command that the notebook makes of its form's values, in its first cell with code, is made of them here.
    """
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.suffix in (".md", ".yaml", ".sbatch")]
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    names: dict[str, Any] = dict.fromkeys(("display", "Image"), lambda *arguments, **named: None) | {
        "run": texts.append
    }
    exec("".join(next(cell for cell in cells if cell["cell_type"] == "code")["source"]), names)  # noqa: S102
    for text in ("".join(cell["source"]) for cell in cells):
        if 'run(f"python' in text:
            exec(text, names)  # noqa: S102
        else:
            texts.append(text)
    found = set()
    for rest in re.findall(r"python -m (?:pipeline|train|tune|infra)\.\w+[^`\n]*", "\n".join(texts)):
        for quote in ('"', "'"):
            if rest.count(quote) % 2:  # the second one of what the command is in
                rest = rest[: rest.rindex(quote)]
        found.add(rest.removesuffix(" ..."))
    return found


@pytest.mark.parametrize("command", sorted(commands()))
def test_a_command_takes_its_flags(command: str, command_line: Callable[..., AbstractContextManager[None]]) -> None:
    _, _, module, *words = shlex.split(command)
    ((name, kind),) = [entry for entry in COMMANDS.values() if entry[0].removesuffix(".__main__") == module]
    with command_line(*words):
        assert parse_flags(getattr(importlib.import_module(name), kind), command)
