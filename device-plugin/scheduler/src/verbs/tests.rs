//! What becomes of a bind whose caller has hung up.

use std::{
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use axum::{Router, routing::post};
use serde_json::json;
use tokio::{
    io::AsyncWriteExt,
    net::{TcpListener, TcpStream},
    sync::Notify,
};

use super::*;
use crate::testing;

fn service(api_server: u16) -> Arc<Service> {
    let service = testing::service(api_server);
    service.standing().nodes_read();
    service.standing().pods_read();
    Arc::new(service)
}

/// Whoever gives up the lease must know that nothing which it sent can still be carried out.
#[tokio::test]
async fn a_bind_whose_caller_has_hung_up_is_waited_for_at_the_end() {
    let (asked, answer, answered) =
        (Arc::new(Notify::new()), Arc::new(Notify::new()), Arc::new(AtomicBool::new(false)));
    let api_server = {
        let (asked, answer, answered) = (asked.clone(), answer.clone(), answered.clone());
        post(async move || {
            asked.notify_one();
            answer.notified().await;
            answered.store(true, Ordering::SeqCst);
            (StatusCode::CREATED, json!({ "kind": "Status", "status": "Success" }).to_string())
        })
    };
    let router = Router::new().route("/api/v1/namespaces/default/pods/train/binding", api_server);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let service = service(listener.local_addr().unwrap().port());
    tokio::spawn(axum::serve(listener, router).into_future());
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(axum::serve(listener, verbs(service.clone())).into_future());

    service.binds_end().await;
    let mut caller = TcpStream::connect(address).await.unwrap();
    service.remember("uid", &Arc::default());
    let order =
        json!({ "PodName": "train", "PodNamespace": "default", "PodUID": "uid", "Node": "node" }).to_string();
    let request = format!("POST /bind HTTP/1.1\r\nHost: x\r\nContent-Length: {}\r\n\r\n{order}", order.len());
    caller.write_all(request.as_bytes()).await.unwrap();
    asked.notified().await;
    drop(caller);
    let (ends, waits) = (service.binds_end(), tokio::time::sleep(Duration::from_millis(300)));
    tokio::pin!(ends);
    tokio::select! {
        () = &mut ends => panic!("the API server was yet to answer"),
        () = waits => {}
    }
    answer.notify_one();
    ends.await;
    assert!(answered.load(Ordering::SeqCst));
}
