"""What is in deploy/: judged by the tools of those who read it, and by what the server and the repository really have."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.http,
    pytest.mark.skipif(not (find_spec("yaml") and find_spec("msgspec")), reason="needs the extra server"),
]
ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILES = sorted((DEPLOY / "docker").iterdir())
UNIT = DEPLOY / "systemd" / "trivium.service"
MANIFESTS = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
FOREIGN = {"kustomization.yaml", "servicemonitor.yaml"}
"""Kinds that Kubernetes itself does not have."""


def tool(name):
    """A tool of this environment or of the system; the test is skipped without it."""
    found = shutil.which(name, path=str(Path(sys.executable).parent)) or shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed; .ci/run installs those that come from PyPI")
    return found


def passes(*command, cwd=ROOT):
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def manifests():
    import yaml

    return {path.stem: yaml.safe_load(path.read_text()) for path in MANIFESTS}


def settings(argv):
    """What the server makes of a command line."""
    from trivium.cli.main import build_parser
    from trivium_server.config import settled

    args = build_parser("serve").parse_args(["serve", *argv])
    return settled(args.flags, args.defaults, vars(args), {}, args.closed)


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles_satisfy_hadolint(path):
    passes(tool("hadolint"), path)


def test_yaml_satisfies_yamllint():
    passes(tool("yamllint"), "--strict", "-c", DEPLOY / ".yamllint", DEPLOY)


@pytest.mark.parametrize("path", [p for p in MANIFESTS if p.name not in FOREIGN], ids=lambda path: path.name)
def test_manifests_are_what_kubernetes_knows(path):
    assert "passed" in passes(tool("kubernetes-validate"), "--strict", path)


def test_the_unit_is_what_systemd_knows_and_is_locked_in(tmp_path):
    analyze = tool("systemd-analyze")
    unit = tmp_path / "trivium.service"
    unit.write_text(UNIT.read_text().replace("/opt/trivium/bin/trivium", "/bin/true"))  # it must be there to be verified
    assert passes(analyze, "verify", unit) == ""
    passes(analyze, "security", "--offline=yes", "--threshold=20", unit)


def test_the_unit_runs_a_command_line_that_the_server_takes():
    line = re.search(r"^ExecStart=(.*)$", UNIT.read_text(), re.MULTILINE)[1]
    words = shlex.split(line.replace("/etc/trivium/serve.yaml", str(DEPLOY / "systemd" / "serve.yaml")))
    assert words[:2] == ["/opt/trivium/bin/trivium", "serve"]
    found = settings(words[2:])
    stop = int(re.search(r"^TimeoutStopSec=(\d+)$", UNIT.read_text(), re.MULTILINE)[1])
    assert found["model"] and stop > found["shutdown_timeout"] and str(found["api_key_file"]).endswith("/api-keys")


def test_the_pods_run_what_the_server_takes_and_end_in_time(tmp_path):
    found = manifests()
    pod = found["statefulset"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
    for name, text in found["configmap"]["data"].items():
        (tmp_path / name).write_text(text)
    made = settings([arg.replace("/etc/trivium/config", str(tmp_path)) for arg in container["args"]])
    assert (made["host"], made["port"]) == ("0.0.0.0", container["ports"][0]["containerPort"])
    assert str(made["api_key_file"].parent) in mounts and "/etc/trivium/config" in mounts
    pause = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod["terminationGracePeriodSeconds"] > made["shutdown_timeout"] + pause
    assert pod["enableServiceLinks"] is False
    volumes = {volume["name"] for volume in pod["volumes"]} | {
        claim["metadata"]["name"] for claim in found["statefulset"]["spec"]["volumeClaimTemplates"]
    }
    assert set(mounts.values()) == volumes


def test_probes_and_scrapes_ask_for_what_there_is():
    from trivium_server.app import ROUTES

    found = manifests()
    routes = {route.path: route for route in ROUTES if route.method == "GET"}
    [container] = found["statefulset"]["spec"]["template"]["spec"]["containers"]
    probes = {name: container[f"{name}Probe"]["httpGet"] for name in ("startup", "readiness", "liveness")}
    assert all(routes[probe["path"]].public and probe["port"] == container["ports"][0]["name"] for probe in probes.values())
    assert probes["readiness"]["path"] == "/health" and probes["liveness"]["path"] == "/live"  # a draining pod is alive
    [scrape] = found["servicemonitor"]["spec"]["endpoints"]
    assert scrape["path"] in routes and scrape["port"] == found["service"]["spec"]["ports"][0]["name"]
    secrets = [
        volume["secret"]["secretName"]
        for volume in found["statefulset"]["spec"]["template"]["spec"]["volumes"]
        if "secret" in volume
    ]
    assert secrets == [scrape["authorization"]["credentials"]["name"]]
    labels = found["statefulset"]["spec"]["template"]["metadata"]["labels"]
    chosen = [found[name]["spec"]["selector"] for name in ("statefulset", "poddisruptionbudget", "servicemonitor")]
    assert [one["matchLabels"] for one in chosen] == [labels] * 3 == [found["service"]["spec"]["selector"]] * 3
    assert set(found["kustomization"]["resources"]) == {path.name for path in MANIFESTS} - FOREIGN


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_images_hold_what_the_wheel_is_made_of_and_run_as_nobody(path):
    text = path.read_text()
    sources = [source for line in re.findall(r"^COPY (?!--from)(.*)$", text, re.MULTILINE) for source in line.split()[:-1]]
    kept = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    assert all((ROOT / source).exists() for source in sources) and sorted(sources) == sorted(kept)
    build = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["scikit-build"]
    needed = [*build["wheel"]["packages"], build["cmake"]["source-dir"], *build["wheel"]["force-include"]]
    assert all(any(Path(name).is_relative_to(source) for source in sources) for name in needed)
    users = re.findall(r"^USER (\d+)$", text, re.MULTILINE)
    pod = manifests()["statefulset"]["spec"]["template"]["spec"]["securityContext"]
    assert users == [str(pod["runAsUser"])] and "HEALTHCHECK" in text and f"--uid {pod['runAsUser']}" in text
    for command in re.findall(r"^CMD (\[.*\])$", text, re.MULTILINE):
        assert settings(re.findall(r'"([^"]+)"', command))["model"]
    from trivium.cli.main import build_parser

    known = {f"TRIVIUM_{flag.dest.upper()}" for flag in build_parser("serve").parse_args(["serve"]).flags}
    assert set(re.findall(r"\bTRIVIUM_\w+", text)) <= known
