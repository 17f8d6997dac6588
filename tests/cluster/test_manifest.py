"""cluster/kubernetes/rayservice.yaml: names and types of KubeRay's RayService v1 and of the pods in it, and that its
numbers go together. KubeRay's own schema, which the API server applies, is asked where there is one."""

from __future__ import annotations

import os
from dataclasses import fields
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from api.config import ServeConfig
from cluster.app import ClusterConfig
from cluster.front.ingress import PROXY_CALLBACK, PROXY_SETTING
from engine.config import EngineConfig

ROOT = Path(__file__).resolve().parents[2]
_SERVE_NAMES = {"proxy_location", "http_options", "logging_config", "applications"}


def _closed(required: dict[str, Any], **optional: Any) -> dict[str, Any]:
    """An object that has the required names and no others than these."""
    properties = {**required, **optional}
    return {"type": "object", "required": [*required], "properties": properties, "additionalProperties": False}


def _several(of: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": of, "minItems": 1}


_TEXT = {"type": "string", "minLength": 1}
_LABEL = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"}
_SERVICE = {"type": "string", "pattern": "^[a-z]([-a-z0-9]{0,45}[a-z0-9])?$"}  # KubeRay names clusters after it
_COUNT = {"type": "integer", "minimum": 0}
_STRINGS = {"type": "object", "additionalProperties": {"type": "string"}}
_AMOUNTS = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^[0-9]+(m|Ki|Mi|Gi|Ti)?$"}}
_PORT_NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]{0,13}[a-z0-9])?$"}
_PORT = _closed({"containerPort": {"type": "integer", "minimum": 1, "maximum": 65535}}, name=_PORT_NAME)
_MOUNT = _closed({"name": _LABEL, "mountPath": {"type": "string", "pattern": "^/"}}, readOnly={"type": "boolean"})
_ENVIRONMENT = {"const": [{"name": PROXY_SETTING, "value": PROXY_CALLBACK}]}  # Serve's proxies find it on each node
_RESOURCES = _closed({"limits": _AMOUNTS, "requests": _AMOUNTS})
_CONTAINER = _closed(
    {"name": _LABEL, "image": _TEXT, "env": _ENVIRONMENT, "resources": _RESOURCES},
    ports=_several(_PORT),
    volumeMounts=_several(_MOUNT),
)
_VOLUME = _closed({"name": _LABEL, "persistentVolumeClaim": _closed({"claimName": _LABEL})})
_TEMPLATE = _closed({"spec": _closed({"containers": _several(_CONTAINER)}, volumes=_several(_VOLUME))})
_POD = {"rayStartParams": _STRINGS, "template": _TEMPLATE}
_WORKERS = _closed({"groupName": _LABEL, "minReplicas": _COUNT, "maxReplicas": _COUNT, **_POD}, replicas=_COUNT)
_CLUSTER = _closed(
    {"headGroupSpec": _closed(_POD), "workerGroupSpecs": _several(_WORKERS), "rayVersion": _TEXT},
    enableInTreeAutoscaling={"type": "boolean"},
)
_RAY_SERVICE = _closed(
    {
        "apiVersion": {"const": "ray.io/v1"},
        "kind": {"const": "RayService"},
        "metadata": _closed({"name": _SERVICE}),
        "spec": _closed({"serveConfigV2": _TEXT, "rayClusterConfig": _CLUSTER}),
    }
)


def _strict(schema: dict[str, Any], root: bool = False) -> dict[str, Any]:
    """A structural schema of a CRD as the API server applies it with strict validation: names that it does not list are
    faults. What stands under anyOf, allOf and not names nothing by itself."""
    made = dict(schema)
    if "properties" in schema:
        made["properties"] = {name: _strict(each) for name, each in schema["properties"].items()}
    for inner in ("items", "additionalProperties"):
        if isinstance(schema.get(inner), dict):
            made[inner] = _strict(schema[inner])
    if schema.get("nullable"):
        made["type"] = [schema["type"], "null"]
    lists_names = schema.get("type") == "object" and "additionalProperties" not in schema
    if lists_names and not schema.get("x-kubernetes-preserve-unknown-fields"):
        made["additionalProperties"] = False
    if root:  # the API server knows ObjectMeta by itself
        made["properties"]["metadata"] = {"type": "object"}
    return made


@pytest.fixture(scope="module")
def manifest() -> Any:
    return yaml.safe_load((ROOT / "cluster" / "kubernetes" / "rayservice.yaml").read_text())


def test_names_and_types_are_those_of_a_ray_service(manifest: Any) -> None:
    jsonschema.Draft202012Validator(_RAY_SERVICE).validate(manifest)


@pytest.mark.skipif(not os.environ.get("KTSERVE_RAYSERVICE_CRD"), reason="path of KubeRay's ray.io_rayservices.yaml")
def test_kuberays_own_schema_takes_it(manifest: Any) -> None:
    crd = yaml.load(Path(os.environ["KTSERVE_RAYSERVICE_CRD"]).read_text(), yaml.CSafeLoader)
    (version,) = (each for each in crd["spec"]["versions"] if each["name"] == "v1" and each["served"])
    validator = jsonschema.Draft202012Validator(_strict(version["schema"]["openAPIV3Schema"], root=True))
    validator.validate(manifest)
    cluster = manifest["spec"]["rayClusterConfig"]
    container = cluster["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]
    for place in (manifest["spec"], cluster, cluster["headGroupSpec"], container, container["resources"]):
        place["novel"] = "x"
        assert not validator.is_valid(manifest), "a name that it does not list"
        del place["novel"]


def test_the_application_is_ours(manifest: Any) -> None:
    serve = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    assert serve.keys() <= _SERVE_NAMES and serve["proxy_location"] == "EveryNode"
    (application,) = serve["applications"]
    assert application["import_path"] == "cluster.app:build"
    config = ClusterConfig.of(application["args"])
    known = {field.name for settings in (EngineConfig, ServeConfig) for field in fields(settings)}
    assert config.serve.keys() <= known
    assert manifest["spec"]["rayClusterConfig"]["rayVersion"] in (ROOT / "constraints.txt").read_text()


def test_pods_have_room_for_the_replicas_and_what_they_read(manifest: Any) -> None:
    config = ClusterConfig.of(yaml.safe_load(manifest["spec"]["serveConfigV2"])["applications"][0]["args"])
    cluster = manifest["spec"]["rayClusterConfig"]
    (workers,), scaling = cluster["workerGroupSpecs"], config.autoscaling
    assert scaling is not None
    assert (workers["minReplicas"], workers["maxReplicas"]) == (scaling["min_replicas"], scaling["max_replicas"])
    assert workers["minReplicas"] <= workers["replicas"] <= workers["maxReplicas"]
    assert cluster["enableInTreeAutoscaling"] or workers["replicas"] == workers["maxReplicas"], "none adds pods"
    for group in (cluster["headGroupSpec"], workers):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == container["resources"]["requests"], "Ray counts what is the pod's"
        assert len({port["name"] for port in container.get("ports", ())}) == len(container.get("ports", ()))
        volumes = {volume["name"] for volume in pod.get("volumes", ())}
        assert {mount["name"] for mount in container.get("volumeMounts", ())} == volumes
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0", "no replica beside Ray's own processes"
    (container,) = workers["template"]["spec"]["containers"]
    assert config.num_cpus <= int(container["resources"]["limits"]["cpu"]) < 2 * config.num_cpus, "one in a pod"
    paths = [config.serve["model"], *(entry.partition("=")[2] for entry in config.serve["adapters"])]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in paths)


@pytest.mark.skipif(not os.environ.get("KTSERVE_TEST_RAY"), reason="for make test-ray")
def test_serve_takes_the_application(manifest: Any) -> None:
    pytest.importorskip("ray")
    from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

    from cluster.app import build

    said = yaml.safe_load(manifest["spec"]["serveConfigV2"])
    (application,) = ServeDeploySchema.model_validate(said).applications  # which takes names that it does not know
    assert said.keys() <= ServeDeploySchema.model_fields.keys()
    assert said["applications"][0].keys() <= ServeApplicationSchema.model_fields.keys()
    assert build(application.args) is not None
