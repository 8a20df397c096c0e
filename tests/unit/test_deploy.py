"""Files in docs/deploy: KubeRay, Docker and our own options, read by their readers."""

import json
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import jsonschema
import kubernetes_validate
import pytest
import yaml

from valora_serve import cli

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "docs" / "deploy"
INSTRUCTIONS = {
    "ARG", "CMD", "COPY", "ENV", "EXPOSE", "FROM", "RUN", "USER", "WORKDIR",
}  # fmt: skip


MAP, NUMBER = {"type": "object"}, {"type": "integer", "minimum": 0}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _closed(properties, required=()):
    """Schema of an object that has no other fields."""
    return {
        "type": "object", "properties": properties, "required": list(required),
        "additionalProperties": False,
    }  # fmt: skip


GROUP = {"rayStartParams": TEXTS, "template": _closed({"metadata": MAP, "spec": MAP}, ["spec"])}
RAY_CLUSTER = _closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayCluster"},
        "metadata": _closed({
            "name": {"type": "string", "pattern": "^[a-z][a-z0-9-]{0,46}$"}, "annotations": TEXTS,
        }),
        "spec": _closed(
            {
                "rayVersion": {"type": "string"},
                "enableInTreeAutoscaling": {"type": "boolean"},
                "headGroupSpec": _closed(
                    GROUP | {"serviceType": {"type": "string"}}, ["template"]
                ),
                "workerGroupSpecs": {
                    "type": "array",
                    "items": _closed(
                        GROUP
                        | {
                            "groupName": {"type": "string"}, "numOfHosts": NUMBER,
                            "replicas": NUMBER, "minReplicas": NUMBER,
                            "maxReplicas": NUMBER, "idleTimeoutSeconds": NUMBER,
                        },
                        [*GROUP, "groupName", "minReplicas", "maxReplicas"],
                    ),
                },
            },
            ["headGroupSpec"],
        ),
    },
    ["apiVersion", "kind", "metadata", "spec"],
)  # fmt: skip
"""The fields of KubeRay's API that a manifest of ours may use (its reference of ray.io/v1)."""


def read(name):
    return yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))


def test_our_own_options():
    bundles, server, _, replicas = cli.read(["--config", str(DEPLOY / "valora-serve.yaml")])
    assert bundles == ["/bundles/detection"]
    assert server.host == "0.0.0.0"
    assert (replicas.replicas, replicas.max_replicas) == (4, 8)


def test_the_manifest_of_kuberay_starts_a_server_that_fits_it():
    cluster = read("kuberay.yaml")["spec"]
    (gpus,) = cluster["workerGroupSpecs"]
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    started = head["args"][0].partition("exec valora-serve ")[2]
    bundles, server, engine, replicas = cli.read(shlex.split(started))
    assert gpus["minReplicas"] >= replicas.replicas
    assert gpus["maxReplicas"] == replicas.max_replicas
    assert replicas.ray_address == "auto"
    pins = (ROOT / "constraints.txt").read_text()
    assert f"\nray=={cluster['rayVersion']}\n" in pins
    images = set()
    for group in (cluster["headGroupSpec"], gpus):
        pod = group["template"]["spec"]
        assert pod["enableServiceLinks"] is False  # variables of its service are no options
        volumes = {volume["name"] for volume in pod["volumes"]}
        (container,) = pod["containers"]
        images.add(container["image"])
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        assert {"name": "RAY_USAGE_STATS_ENABLED", "value": "0"} in container["env"]
        assert container["resources"]["requests"] == container["resources"]["limits"]
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert images == {f"valora:{project['version']}"}
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    for path in (*bundles, server.keys_file, engine.base):
        assert any(path.startswith(f"{mount}/") for mount in mounts)


def test_the_manifest_fits_the_schemas_of_kuberay_and_kubernetes():
    manifest = read("kuberay.yaml")
    jsonschema.validate(manifest, RAY_CLUSTER)
    cluster = manifest["spec"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "x"}}
        pod["spec"] = group["template"]["spec"]
        kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)
        pod["spec"]["containers"][0]["volumeMount"] = []
        with pytest.raises(kubernetes_validate.ValidationError, match="volumeMount"):
            kubernetes_validate.validate(pod, kubernetes_validate.latest_version(), strict=True)


def test_the_dockerfile_is_linted():
    linter = Path(sys.executable).parent / "hadolint"
    done = subprocess.run(
        [linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")


def instructions():
    """(instruction, rest) of each step of the Dockerfile."""
    text = (DEPLOY / "Dockerfile").read_text()
    lines = re.sub(r"\\\n", " ", re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE)).splitlines()
    return [(*line.split(None, 1),) for line in lines if line.strip()]


def test_the_dockerfile():
    steps = instructions()
    assert steps[0][0] == "FROM"
    stages = [rest.split() for name, rest in steps if name == "FROM"]
    assert stages[1:] == [["base", "AS", "cpu"], ["base", "AS", "gpu"]]
    assert {name for name, _ in steps} <= INSTRUCTIONS
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [
        set(rest.removeprefix("EXTRAS=").split(","))
        for name, rest in steps
        if name == "ARG" and rest.startswith("EXTRAS=")
    ]
    assert len(extras) == 2
    for named in extras:
        assert named <= set(project["optional-dependencies"])
    python = re.match(r"python:(3\.\d+)-", stages[0][0])[1]
    assert f"Programming Language :: Python :: {python}" in project["classifiers"]
    copied = {
        Path(word).name for name, rest in steps if name == "COPY" for word in rest.split()[:-1]
    }
    for name in copied:
        assert (ROOT / name).exists(), name
    # What the wheel is made of, and nothing that is not in the build's context.
    wheel = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]
    sources = {path.split("/")[0] for path in wheel["targets"]["wheel"]["only-include"]}
    assert sources <= copied
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert {line[1:] for line in ignored if line.startswith("!")} == copied
    starts = [json.loads(rest) for name, rest in steps if name == "CMD"]
    assert {start[0] for start in starts} <= set(project["scripts"])
    assert [rest for name, rest in steps if name == "USER"] == ["1000", "1000"]


def test_compose_mounts_what_is_there_and_prometheus_asks_the_server():
    services = read("compose.yaml")["services"]
    stages = {rest.split()[-1] for name, rest in instructions() if name == "FROM"}
    assert services["valora"]["build"]["target"] in stages
    more = read("compose.gpu.yaml")["services"]
    assert set(more) <= set(services)
    assert more["valora"]["build"]["target"] in stages
    for name, service in services.items():
        for mount in service["volumes"]:
            place = (DEPLOY / mount.split(":")[0]).resolve()
            assert place.exists() or place == ROOT / "bundles", name
        if "build" not in service:
            assert re.fullmatch(r"[\w/-]+:v?\d+\.\d+\.\d+", service["image"]), "a version is pinned"
    _, *arguments = services["valora"]["command"]
    bundles, server, *_ = cli.read(arguments)
    assert bundles == ["/bundles"]
    (job,) = read("monitoring/prometheus.yml")["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]
    host, port = target.split(":")
    assert host in server.allowed_hosts
    assert int(port) == server.port
    assert not server.protect_metrics
    (source,) = read("monitoring/grafana-datasource.yml")["datasources"]
    assert source["url"].startswith("http://prometheus:")


def test_the_workflow_runs_what_contributors_run():
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8")
    (job,) = yaml.safe_load(text)["jobs"].values()
    assert job["steps"][-1] == {"run": ".ci/run"}
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o100
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pythons = job["strategy"]["matrix"]["python"]
    minors = [int(python.removeprefix("3.")) for python in pythons]
    assert project["requires-python"] == f">=3.{min(minors)},<3.{max(minors) + 1}"
    assert minors == list(range(min(minors), max(minors) + 1))
    named = {f"Programming Language :: Python :: {python}" for python in pythons}
    assert named <= set(project["classifiers"])
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert f"(3, {min(minors)}) <= sys.version_info[:2] <= (3, {max(minors)})" in makefile


def test_a_release_publishes_what_the_repository_builds():
    text = (ROOT / ".github" / "workflows" / "release.yml").read_text(encoding="utf-8")
    jobs = yaml.safe_load(text)["jobs"]
    assert {"run": "make wheel"} in jobs["wheel"]["steps"]
    assert jobs["index"]["permissions"] == {"id-token": "write"}
    assert not re.search(r"secrets\.|password: (?!\${{ github\.token }})", text)
    images = jobs["images"]["strategy"]["matrix"]["include"]
    stages = {rest.split()[-1] for name, rest in instructions() if name == "FROM"}
    assert {image["target"] for image in images} == stages - {"base"}
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    notes = re.search(r"awk .*notes\.md$", text, re.MULTILINE)[0].replace("notes.md", "/dev/stdout")
    notes = notes.replace("${GITHUB_REF_NAME#v}", version)
    said = subprocess.run(
        ["bash", "-c", notes], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert said.stdout.startswith(f"## {version}")
    assert said.stdout.count("\n## ") == 0


@pytest.mark.parametrize(
    ("target", "installs"),
    [("fuse", "train,yolo"), ("ui", "train,yolo"), ("serve", "serve"), ("test-fast", "all")],
)
def test_a_target_installs_what_it_runs(target, installs, tmp_path):
    command = ["make", "-n", f"VENV={tmp_path}", f"PYTHON={sys.executable}", "GPU=", target]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert re.findall(r"--editable '\.\[(.*)\]'", said) == [installs]
    (tmp_path / ".ready").touch()  # has all
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert "pip" not in said


def test_the_citation_is_of_this_version():
    content = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert content["cff-version"] == "1.2.0"
    assert content["version"] == project["version"]
    assert re.fullmatch(r"\d+\.\d+\.\d+", project["version"]), "a semantic version"
    notes = (ROOT / "docs" / "changelog.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(project['version'])}\b", notes, re.MULTILINE)
    assert content["license"] == project["license"]
    assert {"message", "title", "authors"} <= set(content)
