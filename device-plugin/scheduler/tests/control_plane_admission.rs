//! The admission policies, as they are deployed, evaluated by a real API server.

#[expect(dead_code, reason = "policies need no scheduler")]
mod support;

use anyhow::{Context, Result};
use k8s_openapi::api::core::v1::Pod;
use kube::{
    Api, Client,
    api::{Patch, PatchParams},
};
use serde_json::{Value, json};
use support::{ControlPlane, container, create, create_pod, delete_pod, manifests, wait};
use vcuda_config::annotation;

/// What the API server says to a pod with these containers; none when it takes it.
async fn refusal(client: &Client, name: &str, init: Value, containers: Value) -> Result<Option<String>> {
    refusal_with(client, name, json!({}), init, containers).await
}

/// The same of a pod with these annotations.
async fn refusal_with(
    client: &Client,
    name: &str,
    annotations: Value,
    init: Value,
    containers: Value,
) -> Result<Option<String>> {
    let pod = json!({
        "metadata": { "name": name, "namespace": "default", "annotations": annotations },
        "spec": { "schedulerName": "nobody", "initContainers": init, "containers": containers },
    });
    match create_pod(client, pod).await {
        Ok(_) => {
            delete_pod(client, name).await?;
            Ok(None)
        }
        Err(error) => match error.downcast::<kube::Error>()? {
            kube::Error::Api(status) => Ok(Some(status.message)),
            other => Err(other.into()),
        },
    }
}

/// Applies the manifests, and waits until the API server evaluates them.
async fn with_policies() -> Result<(std::sync::Arc<ControlPlane>, Client)> {
    let plane = ControlPlane::shared().await?;
    let client = plane.client("admin").await?;
    for object in manifests("admission.yaml")? {
        create(&client, &object).await?;
    }
    let refused = async |containers: Value| {
        let said = refusal(&client, "try", json!([]), containers).await;
        said.is_ok_and(|said| said.is_some())
    };
    wait("requests are checked", async || refused(json!([container("main", 150, 1)])).await).await?;
    wait("sizes are checked", async || refused(json!([container("main", 1700, 0)])).await).await?;
    Ok((plane, client))
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs Kubernetes: run with KUBE_BIN_DIR, and -- --ignored"]
async fn what_can_never_run_is_refused_with_field_and_remedy() -> Result<()> {
    let (plane, client) = with_policies().await?;

    let no_limit = json!([{ "name": "main", "image": "none" }]);
    let other = json!([{ "name": "main", "image": "none", "resources": { "limits": { "cpu": "1500m" } } }]);
    let fine = [
        no_limit.clone(),
        other,
        json!([container("main", 20, 32)]),
        json!([container("main", 99, 1)]),
        json!([container("main", 100, 0), container("side", 1, 1)]),
        json!([container("main", 1600, 0)]),
        json!([container("main", 100, 5000)]),
        json!([container("main", 20, 1152)]),
    ];
    for containers in fine {
        assert_eq!(refusal(&client, "fine", json!([]), containers.clone()).await?, None, "{containers}");
    }

    let refused = [
        (150, 8, "container main: resources.limits[tencent.com/vcuda-core] is 150", "whole GPUs (100, 200"),
        (101, 0, "is 101", "a part of one GPU (1 to 99)"),
        (0, 8, "container main: resources.limits[tencent.com/vcuda-core] is missing", "at least 1 core"),
        (20, 0, "container main: resources.limits[tencent.com/vcuda-memory] is missing", "at least 1 unit"),
        (20, 1153, "container main: resources.limits[tencent.com/vcuda-memory] is 1153", "1152 units"),
        (1700, 0, "container main: resources.limits[tencent.com/vcuda-core] is 1700", "at most 1600"),
    ];
    for (core, memory, field, remedy) in refused {
        let containers = json!([no_limit[0], container("main", core, memory)]);
        let mut containers = containers;
        containers[0]["name"] = "first".into();
        let said = refusal(&client, "refused", json!([]), containers).await?;
        let said = said.with_context(|| format!("{core} core, {memory} units were taken"))?;
        assert!(said.contains(field) && said.contains(remedy), "{core} core, {memory} units: {said}");
    }

    // A size, as other resources have it, is a number of units here.
    let mut sized = container("main", 20, 1);
    sized["resources"]["limits"]["tencent.com/vcuda-memory"] = "8Gi".into();
    let said = refusal(&client, "refused", json!([]), json!([sized])).await?.context("8Gi was taken")?;
    assert!(said.contains("is 8589934592") && said.contains("units of 256 MiB, 32 is 8 GiB"), "{said}");

    // Init containers and sidecars are looked at, too.
    let mut sidecar = container("sidecar", 150, 1);
    sidecar["restartPolicy"] = "Always".into();
    for (init, name) in [(container("setup", 150, 1), "setup"), (sidecar, "sidecar")] {
        let said = refusal(&client, "refused", json!([init]), no_limit.clone()).await?;
        let said = said.context("it was taken")?;
        assert!(said.contains(&format!("container {name}: ")), "{said}");
    }

    // These the API server refuses by itself, for every extended resource.
    let limit = |limit: &str, request: &str| {
        let both = |core: &str| json!({ "tencent.com/vcuda-core": core, "tencent.com/vcuda-memory": "8" });
        let resources = json!({ "limits": both(limit), "requests": both(request) });
        json!([{ "name": "main", "image": "none", "resources": resources }])
    };
    for (containers, field) in [
        (limit("10", "20"), "tencent.com/vcuda-core"),
        (limit("20", "10"), "tencent.com/vcuda-core"),
        (limit("500m", "500m"), "must be an integer"),
        (limit("-1", "-1"), "tencent.com/vcuda-core"),
    ] {
        let said = refusal(&client, "refused", json!([]), containers.clone()).await?;
        let said = said.with_context(|| format!("it was taken: {containers}"))?;
        assert!(said.contains(field), "{said}");
    }

    // As many containers as anyone has.
    let many: Vec<_> = (0..60).map(|n| container(&format!("c{n}"), 20, 4)).collect();
    assert_eq!(refusal(&client, "many", json!([]), json!(many)).await?, None);

    what_a_pod_says_about_idle_time_is_checked(&client).await?;
    the_placement_of_a_bound_pod_stays(&client).await?;
    vcuda_scheduler_writes_its_annotation_and_what_kube_scheduler_has_to(&plane, &client).await
}

async fn what_a_pod_says_about_idle_time_is_checked(client: &Client) -> Result<()> {
    let said = async |annotations: Value, core: u32| {
        let containers = json!([container("side", 5, 1), container("main", core, 4)]);
        refusal_with(client, "idle-time", annotations, json!([]), containers).await
    };
    for (annotations, core) in [
        (json!({ annotation::CORE_LIMIT: "50", annotation::PRIORITY: "low" }), 20),
        (json!({ annotation::CORE_LIMIT: "20", annotation::PRIORITY: "normal" }), 20),
        (json!({ annotation::CORE_LIMIT: "100" }), 200),
        (json!({ annotation::POLICY: "pack" }), 20),
        (json!({ annotation::POLICY: "spread" }), 200),
    ] {
        assert_eq!(said(annotations.clone(), core).await?, None, "{annotations}");
    }
    for (key, value, core, remedy) in [
        (annotation::CORE_LIMIT, "19", 20, "above the 19"),
        (annotation::CORE_LIMIT, "50", 200, "above the 50"),
        (annotation::CORE_LIMIT, "101", 20, "no percentage of one GPU"),
        (annotation::CORE_LIMIT, "half", 20, "no percentage of one GPU"),
        (annotation::CORE_LIMIT, "", 20, "no percentage of one GPU"),
        (annotation::PRIORITY, "high", 20, "set it to low or normal"),
        (annotation::POLICY, "binpack", 20, "set it to pack or spread"),
        (annotation::POLICY, "", 20, "set it to pack or spread"),
    ] {
        let said = said(json!({ key: value }), core).await?;
        let said = said.with_context(|| format!("{key}: {value} was taken"))?;
        assert!(said.contains(key) && said.contains(remedy), "{key}: {value}: {said}");
    }
    Ok(())
}

/// Part of the one test: policies are the cluster's, and there is one cluster.
async fn the_placement_of_a_bound_pod_stays(client: &Client) -> Result<()> {
    let pods: Api<Pod> = Api::default_namespaced(client.clone());
    let set = async |name: &str, value: Value| {
        let patch = json!({ "metadata": { "annotations": value } });
        pods.patch(name, &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    };
    let placement = |value: &str| json!({ annotation::PLACEMENT: value });

    for (name, node) in [("waiting", None), ("bound", Some("some-node"))] {
        let pod = json!({
            "metadata": { "name": name, "namespace": "default", "annotations": placement("1;1") },
            "spec": { "schedulerName": "nobody", "nodeName": node, "containers": [container("main", 20, 4)] },
        });
        create_pod(client, pod).await?;
    }
    // What waits is written over when it is bound.
    set("waiting", placement("1;2")).await?;
    set("bound", json!({ "other": "annotation" })).await?;
    let error = set("bound", placement("1;2")).await.expect_err("a bound pod was moved");
    assert!(error.to_string().contains("delete the pod to have it placed anew"), "{error}");
    let removed = set("bound", json!({ annotation::PLACEMENT: null })).await;
    assert!(removed.is_err(), "a placement was removed");
    // The node says where it put a pod.
    let patch = json!({ "metadata": { "annotations": placement("1;3") } });
    pods.patch_status("bound", &PatchParams::default(), &Patch::Merge(patch)).await?;
    assert_eq!(
        support::get_pod(client, "bound").await?.metadata.annotations.context("no annotations")?
            [annotation::PLACEMENT],
        "1;3"
    );
    for name in ["waiting", "bound"] {
        delete_pod(client, name).await?;
    }
    Ok(())
}

/// Part of the one test, too. kube-scheduler has the same account.
async fn vcuda_scheduler_writes_its_annotation_and_what_kube_scheduler_has_to(
    plane: &ControlPlane,
    admin: &Client,
) -> Result<()> {
    let own = plane.client("scheduler").await?;
    let pod = json!({
        "metadata": { "name": "held", "namespace": "default", "annotations": { "a": "1" }, "labels": { "a": "1" } },
        "spec": { "schedulerName": "nobody", "containers": [container("main", 20, 4)] },
    });
    create_pod(admin, pod).await?;
    let set = async |client: &Client, patch: &Value| {
        let pods: Api<Pod> = Api::default_namespaced(client.clone());
        pods.patch_status("held", &PatchParams::default(), &Patch::Merge(patch)).await.map(drop)
    };
    let running = json!({ "status": {
        "phase": "Running", "podIP": "10.9.9.9", "podIPs": [{ "ip": "10.9.9.9" }],
    } });
    let refused = [
        (json!({ "metadata": { "annotations": { annotation::PLACEMENT: "1;1" } } }), "no metadata"),
        (json!({ "metadata": { "annotations": { "a": "2" } } }), "no metadata"),
        (json!({ "metadata": { "annotations": { "a": null, annotation::ROOM: "now" } } }), "no metadata"),
        (json!({ "metadata": { "annotations": null } }), "no metadata"),
        (json!({ "metadata": { "labels": { "a": "2" } } }), "no metadata"),
        (json!({ "metadata": { "finalizers": ["example.com/held"] } }), "no metadata"),
        (json!({ "status": { "phase": "Failed" } }), "kubelet's to say"),
        (running.clone(), "kubelet's to say"),
    ];
    let is_refused = async || set(&own, &refused[0].0).await.is_err();
    wait("what vcuda-scheduler writes is checked", is_refused).await?;
    for (patch, why) in &refused {
        let error = set(&own, patch).await.err().with_context(|| format!("{patch} was taken"))?;
        assert!(error.to_string().contains(why), "{patch}: {error}");
    }
    let condition = json!({ "type": "PodScheduled", "status": "False", "reason": "Unschedulable" });
    for patch in [
        json!({ "metadata": { "annotations": { annotation::ROOM: "now node-1" } } }),
        json!({ "metadata": { "annotations": { annotation::ROOM: "later node-2" } } }),
        json!({ "metadata": { "annotations": { annotation::ROOM: null } } }),
        json!({ "status": { "conditions": [condition], "nominatedNodeName": "node-1" } }),
    ] {
        set(&own, &patch).await.with_context(|| patch.to_string())?;
    }
    // Others are not held to it.
    for patch in [running, json!({ "metadata": { "annotations": { "a": "2" }, "labels": { "a": "2" } } })] {
        set(admin, &patch).await.with_context(|| patch.to_string())?;
    }
    delete_pod(admin, "held").await
}
