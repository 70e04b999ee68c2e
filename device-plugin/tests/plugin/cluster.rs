//! The real program and an API server that does not know its node, or does not want it; its answers are those of
//! kube-apiserver 1.36.

use std::{fs, future, net::TcpListener, thread};

use axum::{Router, extract::Request, http::StatusCode};
use serde_json::{Value, json};
use tokio::runtime;

use crate::daemon::{Daemon, Node};

/// The program as node `vm`, and an API server that gives this answer to every list. Its watches stay open and silent.
fn with_answer(node: &Node, status: StatusCode, answer: &Value) -> Daemon {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.set_nonblocking(true).unwrap();
    let address = listener.local_addr().unwrap();
    let answer = answer.to_string();
    let app = Router::new().fallback(async move |request: Request| {
        if request.uri().query().unwrap_or_default().contains("watch=true") {
            future::pending::<()>().await;
        }
        (status, answer)
    });
    thread::spawn(move || {
        let runtime = runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let listener = tokio::net::TcpListener::from_std(listener).unwrap();
            axum::serve(listener, app).await.unwrap();
        });
    });
    let kubeconfig = json!({
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{ "name": "c", "cluster": { "server": format!("http://{address}") } }],
        "users": [{ "name": "u", "user": {} }],
        "contexts": [{ "name": "x", "context": { "cluster": "c", "user": "u" } }],
        "current-context": "x",
    });
    let file = node.path("kubeconfig");
    fs::write(&file, kubeconfig.to_string()).unwrap();
    node.start_with(&["--kubeconfig", file.to_str().unwrap(), "--node-name", "vm"])
}

#[test]
fn a_node_that_is_not_in_the_cluster_is_named_with_the_option_that_names_another() {
    let node = Node::new();
    let none = json!({
        "kind": "List", "apiVersion": "v1", "metadata": { "resourceVersion": "7" }, "items": [],
    });
    let mut daemon = with_answer(&node, StatusCode::OK, &none);
    daemon.says("node \"vm\" is not in the cluster");
    daemon.says("set NODE_NAME or --node-name");
    assert!(daemon.stop().success());
}

#[test]
fn what_the_api_server_refuses_is_one_line_in_its_words_with_the_remedy() {
    let node = Node::new();
    let said = "nodes \"vm\" is forbidden: User \"system:node:worker\" cannot list resource \"nodes\" in API group \"\" \
                at the cluster scope: node 'worker' cannot read 'vm', only its own Node object";
    let refusal = json!({
        "kind": "Status", "apiVersion": "v1", "metadata": {}, "status": "Failure", "message": said,
        "reason": "Forbidden", "details": { "name": "vm", "kind": "nodes" }, "code": 403,
    });
    let mut daemon = with_answer(&node, StatusCode::FORBIDDEN, &refusal);
    daemon.says("set NODE_NAME or --node-name");
    let log = daemon.log();
    assert_eq!(log.matches(said).count(), 1, "{log}");
    assert!(!log.contains("Status {") && !log.contains("kube_runtime"), "{log}");
    assert!(daemon.stop().success());
}
