//! Leader election over a Lease, as client-go does it: whoever holds the lease leads, and renews it; whoever does not
//! watches it, and takes it over when it was not renewed for as long as it says. Clocks of other machines are not
//! trusted: what counts is for how long a lease did not change as seen from here.

use std::time::{Duration, Instant};

use k8s_openapi::{
    api::coordination::v1::{Lease, LeaseSpec},
    apimachinery::pkg::apis::meta::v1::MicroTime,
    jiff::Timestamp,
};
use kube::{
    Api, Client,
    api::{ObjectMeta, PostParams},
};
use tokio::{
    sync::watch,
    time::{sleep, timeout},
};
use tracing::{debug, info, warn};

use crate::service::in_time;

/// A candidate for the lead.
pub struct Candidate {
    leases: Api<Lease>,
    name: String,
    identity: String,
    duration: Duration,
    /// The lease as last seen with someone else, and when it first looked so.
    seen: Option<(Option<String>, Instant)>,
}

/// What an attempt to hold the lease led to.
enum Attempt {
    Held,
    /// By this replica.
    HeldBy(String),
}

impl Candidate {
    /// A candidate for the lease `name`, valid for `duration` at a time. `identity` must be no other replica's.
    pub fn new(client: Client, namespace: &str, name: &str, identity: String, duration: Duration) -> Self {
        Self { leases: Api::namespaced(client, namespace), name: name.into(), identity, duration, seen: None }
    }

    /// For how long after a renewal this replica leads: it stops well before another may start, and with it every
    /// request that it sent.
    fn reign(&self) -> Duration {
        self.duration / 2
    }

    fn pause(&self) -> Duration {
        self.duration / 8
    }

    /// Waits for the lease.
    pub async fn acquire(&mut self, until: &watch::Sender<Option<Instant>>) {
        loop {
            let asked = Instant::now();
            match self.attempt().await {
                Ok(Attempt::Held) => {
                    info!(lease = self.name, identity = self.identity, "leads");
                    until.send_replace(Some(asked + self.reign()));
                    return;
                }
                Ok(Attempt::HeldBy(other)) => debug!(lease = self.name, "is held by {other}"),
                Err(error) => warn!(lease = self.name, "cannot be had, and is tried again: {error}"),
            }
            sleep(self.pause()).await;
        }
    }

    /// Renews the lease for as long as it can. Returns when another replica may lead.
    pub async fn hold(&mut self, until: &watch::Sender<Option<Instant>>) -> String {
        loop {
            sleep(self.pause()).await;
            let asked = Instant::now();
            let reason = match self.attempt().await {
                Ok(Attempt::Held) => {
                    until.send_replace(Some(asked + self.reign()));
                    continue;
                }
                Ok(Attempt::HeldBy(other)) => {
                    until.send_replace(None);
                    return format!("it is held by {other}");
                }
                Err(error) => error,
            };
            warn!(lease = self.name, "was not renewed: {reason}");
            if until.borrow().is_none_or(|until| Instant::now() >= until) {
                return format!("it could not be renewed in time: {reason}");
            }
        }
    }

    /// Gives the lease up, so that another replica need not wait.
    pub async fn release(&mut self) {
        match in_time(self.pause(), self.give_up()).await {
            Ok(true) => info!(lease = self.name, "was given up"),
            Ok(false) => {}
            Err(reason) => warn!(lease = self.name, "was not given up, and runs out by itself: {reason}"),
        }
    }

    /// False where it is another's by now. A renewal that was under way when this replica was told to end may be carried
    /// out between the two requests, so what changed meanwhile is read again.
    async fn give_up(&self) -> Result<bool, kube::Error> {
        loop {
            let lease = self.leases.get(&self.name).await?;
            let mine = |spec: &LeaseSpec| spec.holder_identity.as_ref() == Some(&self.identity);
            let Some(spec) = lease.spec.clone().filter(mine) else { return Ok(false) };
            let spec = LeaseSpec { holder_identity: None, lease_duration_seconds: Some(1), ..spec };
            let lease = Lease { spec: Some(spec), ..lease };
            match self.leases.replace(&self.name, &PostParams::default(), &lease).await {
                Ok(_) => return Ok(true),
                Err(kube::Error::Api(status)) if status.code == 409 => {}
                Err(error) => return Err(error),
            }
        }
    }

    async fn attempt(&mut self) -> Result<Attempt, String> {
        match timeout(self.pause(), self.try_to_hold()).await {
            Ok(Ok(attempt)) => Ok(attempt),
            // Another replica was faster; the next attempt sees whose it is.
            Ok(Err(kube::Error::Api(status))) if status.code == 409 => {
                Err("another replica was faster".into())
            }
            Ok(Err(error)) => Err(error.to_string()),
            Err(_) => Err(format!("no answer within {:?}", self.pause())),
        }
    }

    async fn try_to_hold(&mut self) -> Result<Attempt, kube::Error> {
        let now = MicroTime(Timestamp::now());
        let mine = |transitions: i32, since: MicroTime| LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: Some(i32::try_from(self.duration.as_secs()).unwrap_or(i32::MAX)),
            acquire_time: Some(since),
            renew_time: Some(now.clone()),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        };
        let Some(lease) = self.leases.get_opt(&self.name).await? else {
            let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
            let lease = Lease { metadata, spec: Some(mine(0, now.clone())) };
            self.leases.create(&PostParams::default(), &lease).await?;
            return Ok(Attempt::Held);
        };
        let spec = lease.spec.clone().unwrap_or_default();
        let transitions = spec.lease_transitions.unwrap_or(0);
        let spec = match spec.holder_identity.filter(|holder| !holder.is_empty()) {
            Some(holder) if holder == self.identity => {
                mine(transitions, spec.acquire_time.unwrap_or_else(|| now.clone()))
            }
            holder => {
                if let Some(holder) = holder {
                    let version = lease.metadata.resource_version.clone();
                    let since = match &self.seen {
                        Some((seen, since)) if *seen == version => *since,
                        _ => Instant::now(),
                    };
                    self.seen = Some((version, since));
                    let seconds = spec.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
                    let theirs = seconds.map_or(self.duration, Duration::from_secs);
                    if since.elapsed() < theirs {
                        return Ok(Attempt::HeldBy(holder));
                    }
                }
                mine(transitions.saturating_add(1), now.clone())
            }
        };
        // Its resource version makes this fail where another replica was faster.
        let lease = Lease { spec: Some(spec), ..lease };
        self.leases.replace(&self.name, &PostParams::default(), &lease).await?;
        Ok(Attempt::Held)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex};

    use axum::{Router, extract::State, http::StatusCode, routing::get};
    use serde_json::{Value, json};
    use tokio::net::TcpListener;

    use super::*;
    use crate::testing;

    /// An API server with one lease, into which a renewal comes after it was first read.
    type Server = Arc<Mutex<(u32, Value)>>;

    async fn read(State(server): State<Server>) -> String {
        let mut server = server.lock().unwrap();
        let answer = server.1.to_string();
        server.0 += 1;
        if server.0 == 1 {
            server.1["metadata"]["resourceVersion"] = "2".into();
        }
        answer
    }

    async fn replace(State(server): State<Server>, body: String) -> (StatusCode, String) {
        let mut server = server.lock().unwrap();
        let lease: Value = serde_json::from_str(&body).unwrap();
        if lease["metadata"]["resourceVersion"] != server.1["metadata"]["resourceVersion"] {
            let status =
                json!({ "kind": "Status", "status": "Failure", "code": 409, "message": "it was modified" });
            return (StatusCode::CONFLICT, status.to_string());
        }
        server.1 = lease;
        (StatusCode::OK, body)
    }

    #[tokio::test]
    async fn a_renewal_that_is_carried_out_meanwhile_keeps_no_lease_from_being_given_up() {
        let lease = json!({
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": { "name": "lead", "namespace": "default", "resourceVersion": "1" },
            "spec": { "holderIdentity": "me", "leaseDurationSeconds": 15 },
        });
        let server: Server = Arc::new(Mutex::new((0, lease)));
        let path = "/apis/coordination.k8s.io/v1/namespaces/default/leases/lead";
        let app = Router::new().route(path, get(read).put(replace)).with_state(server.clone());
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move { axum::serve(listener, app).await });
        let client = testing::client(port);
        let duration = Duration::from_secs(240);
        Candidate::new(client.clone(), "default", "lead", "another".into(), duration).release().await;
        assert_eq!(
            server.lock().unwrap().1["spec"]["holderIdentity"],
            "me",
            "it is not another's to give up"
        );
        server.lock().unwrap().0 = 0;
        Candidate::new(client, "default", "lead", "me".into(), duration).release().await;
        assert_eq!(server.lock().unwrap().1["spec"].get("holderIdentity"), None);
    }
}
